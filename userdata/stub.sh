#!/bin/sh
# spotheal: user data of an instance. Fixed text: no value is ever written into this shell program.
#
# For the renderer: each of the words between @ below stands once, in single quotes, and is replaced by digits of
# base85 only, which no shell interprets there (userdata/__init__.py, fill; nothing else is replaced):
#   REPORT           base85 of the gzipped report.py, which bootstrap.py imports
#   BOOTSTRAP        base85 of the gzipped bootstrap.py
#   CONFIG           base85 of the gzipped configuration (JSON)
#   MANIFEST_SHA256  hex digest of agent/manifest.json in the run's store
#
# Finds a Python, unpacks the files below $SPOTHEAL_ROOT/opt/spotheal and runs bootstrap.py. Running it again is
# harmless.
REPORT='@REPORT@'
BOOTSTRAP='@BOOTSTRAP@'
CONFIG='@CONFIG@'
MANIFEST_SHA256='@MANIFEST_SHA256@'

root=${SPOTHEAL_ROOT:-}
root=${root%/}
home=$root/opt/spotheal
logs=$root/var/log/spotheal

# One line on the console, in cloud-init's log and in ours.
say() {
    line="spotheal: $*"
    printf '%s\n' "$line" >&2
    if [ -d "$logs" ]; then printf '%s\n' "$line" >>"$logs/user-data.log"; fi
    if [ -z "$root" ] && [ -w /dev/console ]; then { printf '%s\r\n' "$line" >/dev/console; } 2>/dev/null; fi
    return 0
}

# What no program here can count. A machine that switched itself off would be replaced, and so on without end: this one
# stays up, and `fleetctl status` shows these lines.
fail() {
    say "this machine cannot start the job: $*"
    say "it stays up, since nothing here can count that failure; next: fleetctl cancel"
    exit 1
}

# runs PROGRAM MINOR: whether it is a Python 3.MINOR or newer with what the bootstrap needs.
runs() {
    [ -n "$1" ] && "$1" -I -c "import ssl, sys, zlib; sys.exit(sys.version_info < (3, $2))" >/dev/null 2>&1
}

# Sets $python to the first that is at least 3.MINOR: of the PATH, then where machine images keep theirs.
find_python() {
    for name in python3 python3.14 python3.13 python3.12 python3.11 python3.10; do
        python=$(command -v "$name") && runs "$python" "$1" && return 0
    done
    for python in /usr/bin/python3 /usr/local/bin/python3 /opt/pytorch/bin/python3 /opt/conda/bin/python3 \
        /opt/conda/envs/*/bin/python3 /opt/miniconda*/bin/python3 /opt/anaconda*/bin/python3 \
        /opt/tensorflow/bin/python3 /home/*/*conda3/bin/python3 /usr/libexec/platform-python; do
        runs "$python" "$1" && return 0
    done
    return 1
}

# unpack FILE: base85 of gzip from standard input; the file is there whole or not at all.
unpack() {
    "$python" -I -c 'import base64, gzip, sys
sys.stdout.buffer.write(gzip.decompress(base64.b85decode(sys.stdin.read())))' >"$1.new.$$" &&
        mv -f "$1.new.$$" "$1"
}

put() {
    mkdir -p "$1" && printf '%s' "$REPORT" | unpack "$1/report.py" &&
        printf '%s' "$BOOTSTRAP" | unpack "$1/bootstrap.py" && printf '%s' "$CONFIG" | unpack "$1/config.json"
}

umask 022
mkdir -p "$home" "$logs"
if find_python 10; then
    say "using $python, the first Python 3.10 or newer"
else
    # One that is too old for the agent can still report that, and count this launch.
    find_python 7 || fail "no Python 3.10 or newer on this image; choose one that has it (Debian 12, Ubuntu 22.04, a PyTorch DLAMI)"
fi
umask 077
place=$home
stuck=
if ! put "$home"; then
    # To report that, and to count this launch, memory will do.
    stuck="$home cannot be written: the disk is full or read-only"
    place=$root/run/spotheal
    put "$place" || fail "$stuck"
fi
umask 022
# In processes of their own, so that the end of each is seen: 3 is a failure that it has reported.
"$python" -EsB "$place/bootstrap.py" "$MANIFEST_SHA256" "$stuck"
case $? in
    0) exit 0 ;;
    3) exit 1 ;;
esac
why="bootstrap.py died in $python; its last lines on the console say why"
"$python" -EsB "$place/report.py" "$why"
[ $? -eq 3 ] || fail "$why"
exit 1
