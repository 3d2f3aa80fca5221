"""The last step before foreign code runs: `sandbox_exec.py ORDERS ERRORS PROGRAM [ARGUMENT …]`, started by the agent.

Resets signals, where ordered builds the sandbox (mount and IPC namespace, read-only system, private /tmp, /var/tmp and
/dev/shm, of /run only what is kept, no new privileges, no capabilities, a filter of system calls), becomes the other
user and executes the program. ORDERS is a descriptor to read JSON from: no secret stands in an argv or in our own
environment. ERRORS is a socket that closes at the exec: text there says why there was none, and a descriptor there is
where the agent answers refused calls.

Standard library only, and nothing of ours: it runs without site-packages, as root, for some 30 ms. The pid stays the
same, so that whoever started it still holds the program.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import resource
import signal
import socket
import stat
import struct
import sys
from typing import Any

_CLONE_NEWNS, _CLONE_NEWIPC = 0x00020000, 0x08000000
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC = 1, 2, 4, 8
_MS_REMOUNT, _MS_BIND, _MS_REC, _MS_SLAVE = 32, 4096, 16384, 1 << 19
_MS_NOATIME, _MS_NODIRATIME, _MS_RELATIME = 1024, 2048, 1 << 21
_PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 24, 38
_SECCOMP = {"x86_64": 317, "aarch64": 277}
# Without SPEC_ALLOW kernels before 5.16 turn the mitigations against Spectre on for a program with a filter: slower.
_SECCOMP_SET_MODE_FILTER, _SPEC_ALLOW, _NEW_LISTENER = 1, 4, 8
# The same on both machines. The struct: file rights handled, network rights handled, scopes.
_LANDLOCK_CREATE_RULESET, _LANDLOCK_RESTRICT_SELF = 444, 446
_ONLY_ABSTRACT_SOCKETS = struct.pack("=QQQ", 0, 0, 1)
_CAPABILITY_VERSION_3 = 0x20080522
# Not 0: the kernel hands a core to a program of the machine (systemd-coredump, apport) whatever the limit, but at 1.
# It writes the core, with the trainer's secrets, where the cage does not reach. Source: fs/coredump.c.
_CORE_BYTES = 1
_OOM_SCORE = "500"  # as if it had half of the machine's memory more
_KEPT_FLAGS = {
    "ro": _MS_RDONLY, "nosuid": _MS_NOSUID, "nodev": _MS_NODEV, "noexec": _MS_NOEXEC, "noatime": _MS_NOATIME,
    "nodiratime": _MS_NODIRATIME, "relatime": _MS_RELATIME,
}  # fmt: skip
_KERNELS_OWN = ("/proc", "/dev")  # rights decide there, and a trainer needs its own part of both
_QUEUES = "/dev/mqueue"  # its files are the message queues of the IPC namespace in which it was mounted
_GONE = (errno.ENOENT, errno.EINVAL, errno.ESTALE, errno.EACCES)  # mounts that went meanwhile, or were hidden


class _Refused(Exception):
    """The sandbox could not be made: then nothing runs."""


def main() -> None:
    orders_from, errors_to = int(sys.argv[1]), int(sys.argv[2])
    os.set_inheritable(errors_to, False)
    with open(orders_from, encoding="utf-8") as file:
        orders = json.load(file)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_DFL)
    program = sys.argv[3]
    try:
        user = orders["user"]
        if orders["sandbox"]:
            _be_first_to_run_out_of_memory()
            _enclose(orders["sandbox"])
            _drop_capabilities()
        if user:
            os.setgroups(user["extra_groups"])
            os.setgid(user["group"])
            os.setuid(user["user"])
        _enter(orders["directory"])
        if orders["sandbox"]:
            _prctl(_PR_SET_NO_NEW_PRIVS, 1)
            _clear_capability_sets()
            resource.setrlimit(resource.RLIMIT_CORE, (_CORE_BYTES, _CORE_BYTES))
            _keep_from_abstract_sockets()
            if orders["sandbox"]["filters"]:
                _limit_calls(orders["sandbox"]["filters"], errors_to)
        _execute(program, sys.argv[3:], orders["environment"])
    except _Refused as refused:
        fault = {"errno": 0, "text": refused.args[0]}
    except OSError as error:
        fault = {"errno": error.errno or 0, "text": error.strerror or str(error)}
    os.write(errors_to, json.dumps(fault).encode()[:4000])
    os._exit(127)


def _be_first_to_run_out_of_memory() -> None:
    """Where memory ends the kernel kills foreign programs, and neither the agent nor sshd."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write(_OOM_SCORE)


def _enter(directory: str) -> None:
    """As the other user: a link in the trainer's folders must not lead root, for instance by /proc/PID/root, to a
    folder outside of the sandbox. A red team stood in the machine's own mount namespace that way."""
    try:
        os.chdir(directory)
    except OSError as error:
        raise OSError(error.errno, f"its folder {directory}: {error.strerror}") from error


def _execute(program: str, argv: list[str], environment: dict[str, str]) -> None:
    """As os.execvpe, which imports a module at this moment: the other user may not be allowed to read our library."""
    folders = environment.get("PATH", "/bin:/usr/bin").split(":")
    places = [""] if "/" in program else [folder + "/" for folder in folders]
    fault = OSError(errno.ENOENT, os.strerror(errno.ENOENT))
    for place in places:
        try:
            os.execve(place + program, argv, environment)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR):
                fault = error
    raise fault


# ------------------------------------------------------------------------------------------------------- the sandbox
def _enclose(sandbox: dict[str, Any]) -> None:
    """`writable` folders, `temporary` ([place, where it really lies] pairs), `memory` (tmpfs), `hidden` paths,
    `emptied` folders of which only `kept` paths are seen.

    Mounts and unmounts of the machine still arrive here (slave): a sandbox never keeps a volume busy.
    """
    _check(_libc().unshare(_CLONE_NEWNS | _CLONE_NEWIPC), "unshare")
    _mount("none", "/", "", _MS_REC | _MS_SLAVE)
    writable = [path for path in sandbox["writable"] if os.path.isdir(path) and not _leads_by_foreign_link(path)]
    writable = list(dict.fromkeys(map(os.path.realpath, writable)))
    mounted = {place for place, _ in _mounts()}
    for path in writable:
        # A volume is a mount of its own already, and is left as it is, also in part: with a mount on it here,
        # unmounting outside would seem to succeed while it is mounted here.
        if path not in mounted and not _within(path, tuple(other for other in writable if other != path)):
            _mount(path, path, "", _MS_BIND | _MS_REC)
    open_here = list(writable)
    for place, real in sandbox["temporary"]:
        if os.path.isdir(place) and not os.path.islink(place):
            _mount(real, place, "", _MS_BIND)
            open_here.append(place)
    for place in sandbox["memory"]:
        if os.path.isdir(place) and not os.path.islink(place):
            _mount("tmpfs", place, "tmpfs", _MS_NOSUID | _MS_NODEV, "mode=1777")
            open_here.append(place)
    if _QUEUES in mounted:
        _mount("mqueue", _QUEUES, "mqueue", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
    for path in sandbox["hidden"]:
        _hide(path)
    for place in dict.fromkeys(os.path.realpath(place) for place in sandbox["emptied"]):
        if os.path.isdir(place):
            _empty(place, sandbox["kept"] + writable)
    for place, flags in _mounts():
        if not _within(place, (*open_here, *_KERNELS_OWN)):
            _make_read_only(place, flags)
    for path in writable:
        if os.statvfs(path).f_flag & os.ST_RDONLY and not _is_read_only_filesystem(path):
            raise _Refused(f"{path} is not writable in the sandbox", errno.EROFS)


def _leads_by_foreign_link(path: str) -> bool:
    """Whether a link on the way is not root's: a trainer's, in place of its folder below a volume's top that all may
    write, would open the folder that it names."""
    parts = path.split("/")
    links = (part for part in map("/".join, (parts[: end + 1] for end in range(1, len(parts)))) if os.path.islink(part))
    return any(os.lstat(link).st_uid != 0 for link in links)


def _hide(path: str) -> None:
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return
    if stat.S_ISDIR(mode):
        _mount("tmpfs", path, "tmpfs", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, "mode=000,size=4k")
    elif not stat.S_ISLNK(mode):
        _mount("/dev/null", path, "", _MS_BIND)


def _empty(folder: str, names: list[str]) -> None:
    """A filesystem of our own in its place, with those of `kept` that lie below it and exist now."""
    below = [
        path for path in dict.fromkeys(map(os.path.realpath, names)) if _within(path, (folder,)) and path != folder
    ]
    below = [path for path in below if os.path.exists(path) and not _within(path, tuple(set(below) - {path}))]
    sources = [(os.open(path, os.O_PATH), path, os.path.isdir(path)) for path in below]
    _mount("tmpfs", folder, "tmpfs", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, "mode=755,size=1m")
    for source, path, is_folder in sources:
        os.makedirs(path if is_folder else os.path.dirname(path), exist_ok=True)
        if not is_folder:
            os.close(os.open(path, os.O_CREAT | os.O_WRONLY))
        _mount(f"/proc/self/fd/{source}", path, "", _MS_BIND | _MS_REC)
        os.close(source)


def _make_read_only(place: str, flags: int) -> None:
    try:
        _mount("none", place, "", _MS_REMOUNT | _MS_BIND | _MS_RDONLY | flags)
    except _Refused as refused:
        if place == "/" or refused.args[1] not in _GONE:
            raise


def _mounts() -> list[tuple[str, int]]:
    """(place, the flags that a remount must repeat) of each mount, the outer ones first."""
    mounts = []
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            fields = line.split(" ")
            place = fields[4].encode("utf-8", "surrogateescape").decode("unicode_escape", "surrogateescape")
            place = place.encode("latin-1", "ignore").decode("utf-8", "surrogateescape")
            mounts.append((place, sum(_KEPT_FLAGS.get(option, 0) for option in fields[5].split(","))))
    return mounts


def _is_read_only_filesystem(path: str) -> bool:
    """Whether the filesystem itself is (an EBS volume after an I/O error): that is for the trainer to see."""
    best = ("", False)
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            fields = line.rstrip("\n").split(" ")
            if _within(path, (fields[4],)) and len(fields[4]) >= len(best[0]):
                best = (fields[4], "ro" in fields[-1].split(","))
    return best[1]


def _within(path: str, folders: tuple[str, ...]) -> bool:
    return any(path == folder or path.startswith(folder.rstrip("/") + "/") for folder in folders)


def _drop_capabilities() -> None:
    """From the bounding set, as long as we may: with no_new_privs no program gives any back."""
    for number in range(64):
        if _libc().prctl(_PR_CAPBSET_DROP, number, 0, 0, 0) != 0:
            if ctypes.get_errno() != errno.EINVAL:
                _check(-1, "prctl(PR_CAPBSET_DROP)")
            return


def _clear_capability_sets() -> None:
    """No change of user and no empty bounding set clears the inheritable one, which systemd 262 passed on full.

    capabilities(7), "Effect of user ID changes on capabilities".
    """
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    _check(_libc().capset(header, (ctypes.c_uint32 * 6)()), "capset")


# -------------------------------------------------------------------------------------------------------- system calls
class _Filter(ctypes.Structure):
    """struct sock_fprog of linux/filter.h."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p))


def _limit_calls(filters: list[list[list[int]]], agent: int) -> None:
    """With the first the agent answers refused calls; the second is for kernels before 5.0, and for where somebody
    answers those of another filter already."""
    reporting, plain = filters
    listener = _seccomp(reporting, _SPEC_ALLOW | _NEW_LISTENER)
    if listener < 0:
        _check(min(0, _seccomp(plain, _SPEC_ALLOW)), "seccomp")
        return
    with socket.socket(fileno=os.dup(agent)) as to_agent:
        socket.send_fds(to_agent, [b" "], [listener])
    os.close(listener)


def _keep_from_abstract_sockets() -> None:
    """Of processes outside: their names are in no filesystem, so no mount hides them. Kernels before 6.12 cannot."""
    size = ctypes.c_long(len(_ONLY_ABSTRACT_SOCKETS))
    ruleset = _libc().syscall(ctypes.c_long(_LANDLOCK_CREATE_RULESET), _ONLY_ABSTRACT_SOCKETS, size, ctypes.c_long(0))
    if ruleset >= 0:
        _check(_libc().syscall(ctypes.c_long(_LANDLOCK_RESTRICT_SELF), ruleset, 0), "landlock_restrict_self")
        os.close(ruleset)


def _seccomp(program: list[list[int]], flags: int) -> int:
    code = b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
    filters = _Filter(len(program), ctypes.cast(ctypes.c_char_p(code), ctypes.c_void_p))
    number = ctypes.c_long(_SECCOMP[os.uname().machine])
    operation = ctypes.c_long(_SECCOMP_SET_MODE_FILTER)
    return int(_libc().syscall(number, operation, ctypes.c_long(flags), ctypes.byref(filters)))


# --------------------------------------------------------------------------------------------------------------- libc
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, value: int) -> None:
    _check(_libc().prctl(option, value, 0, 0, 0), "prctl")


def _mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    words = [os.fsencode(word) if word else None for word in (source, target, kind)]
    result = _libc().mount(*words, ctypes.c_ulong(flags), os.fsencode(data) if data else None)
    _check(result, f"mount {target}")


def _check(result: int, task: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise _Refused(f"{task}: {os.strerror(number)}", number)


if __name__ == "__main__":
    main()
