"""lsblk, blkid, findmnt, mount, umount, mkfs, fsfreeze, sync, nvidia-smi, snap and the power switch of a
rehearsed machine.

    stand_in.py NAME ARGUMENTS…

A device is a sparse file that stands for the raw disk (`image`) with the filesystem's content in a folder beside it
(`files`); a mount makes the mount point a link to that folder. Messages and exit codes are util-linux's. Only options
that are known are taken: an option that is silently ignored would prove nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import struct
import sys
import uuid
from collections.abc import Iterator
from typing import Any, NoReturn

FOLDER = os.environ.get("SPOTHEAL_REHEARSAL_INSTANCE_DIR", "")
MOUNT_FAILED = 32
Record = dict[str, Any]


def fail(message: str, code: int = 1) -> NoReturn:
    sys.stderr.write(f"{PROGRAM}: {message}\n")
    sys.exit(code)


# ------------------------------------------------------------------------------------------------------------ options
def options(arguments: list[str], flags: str, valued: str) -> tuple[dict[str, str], list[str]]:
    """Options and operands; `flags` and `valued` are words such as `-J=--json`, the first spelling is the key."""
    kinds = {spelling: (word.split("=")[0], False) for word in flags.split() for spelling in word.split("=")}
    kinds |= {spelling: (word.split("=")[0], True) for word in valued.split() for spelling in word.split("=")}
    values: dict[str, str] = {}
    operands: list[str] = []
    queue = list(arguments)
    while queue:
        word = queue.pop(0)
        if word == "--":
            operands += queue
            break
        if not word.startswith("-") or word == "-":
            operands.append(word)
            continue
        name, equals, value = word.partition("=") if word.startswith("--") else (word[:2], word[2:], word[2:])
        if name not in kinds:
            fail(f"unrecognized option '{word}' (the rehearsal's stand-in knows {flags} {valued})")
        key, takes = kinds[name]
        if not takes:
            values[key] = "yes"
            if equals and not word.startswith("--"):
                queue.insert(0, f"-{value}")  # -Jb is -J -b
        else:
            if not equals and not queue:
                fail(f"option '{word}' requires an argument")
            option_value = value if equals else queue.pop(0)
            values[key] = f"{values[key]},{option_value}" if key in values else option_value
    return values, operands


# ----------------------------------------------------------------------------------------------------- devices, mounts
def devices() -> list[Record]:
    with open(os.path.join(FOLDER, "devices.json"), encoding="utf-8") as file:
        records: list[Record] = json.load(file)["devices"]
    return records


def device_at(path: str) -> Record | None:
    real = os.path.realpath(path)
    return next((device for device in devices() if path == device["path"] or real == device["image"]), None)


@contextlib.contextmanager
def mounts(write: bool = False) -> Iterator[list[Record]]:
    """The machine's mount table, locked; kept where `write`."""
    path = os.path.join(FOLDER, "mounts.json")
    with open(os.path.join(FOLDER, "mounts.lock"), "w", encoding="ascii") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        table: list[Record] = []
        if os.path.exists(path):
            with open(path, encoding="utf-8") as file:
                table = json.load(file)
        yield table
        if write:
            with open(f"{path}.tmp", "w", encoding="utf-8") as file:
                json.dump(table, file, indent=1)
            os.replace(f"{path}.tmp", path)


def signature(image: str) -> tuple[str, str]:
    """Filesystem and UUID in the image's superblock, as blkid finds them; two empty strings where there is none."""
    with open(image, "rb") as file:
        head = file.read(2048)
    if head[:4] == b"XFSB":
        return "xfs", str(uuid.UUID(bytes=head[32:48]))
    if len(head) >= 1144 and head[1080:1082] == b"\x53\xef":
        return "ext4", str(uuid.UUID(bytes=head[1128:1144]))
    return "", ""


def same(path: str, other_path: str) -> bool:
    return os.path.abspath(path) == os.path.abspath(other_path) or os.path.realpath(path) == os.path.realpath(
        other_path
    )


# ----------------------------------------------------------------------------------------------------------- programs
def lsblk(arguments: list[str]) -> None:
    values, operands = options(
        arguments, "-J=--json -b=--bytes -p=--paths -d=--nodeps -a=--all -O=--output-all -n=--noheadings", "-o=--output"
    )
    if "-J" not in values:
        fail("the rehearsal's stand-in prints only --json")
    default_columns = "name path serial size fstype uuid mountpoint mountpoints type model ro"
    columns = (
        default_columns if "-O" in values else values.get("-o", default_columns).lower().replace(",", " ")
    ).split()
    with mounts() as table:
        rows = [row(device, columns, table, values) for device in devices() if wanted(device, operands)]
    if operands and not rows:
        fail(f"{operands[0]}: not a block device", 32)
    print(json.dumps({"blockdevices": rows}, indent=3))


def wanted(device: Record, operands: list[str]) -> bool:
    return not operands or any(device is not None and device_at(path) == device for path in operands)


def row(device: Record, columns: list[str], table: list[Record], arguments: dict[str, str]) -> Record:
    fstype, identity = signature(device["image"])
    mounted = [entry["target"] for entry in table if entry["device"] == device["path"]]
    root = device.get("root", False)
    size = device["size_bytes"]
    values: Record = {
        "name": device["path"] if "-p" in arguments else os.path.basename(device["path"]),
        "kname": os.path.basename(device["path"]),
        "path": device["path"],
        "serial": device["serial"],
        "size": size if "-b" in arguments else f"{size / 2**30:g}G",
        "fstype": fstype or None,
        "uuid": identity or None,
        "mountpoint": mounted[0] if mounted else None,
        "mountpoints": mounted or [None],
        "type": "disk",
        "model": device["model"],
        "ro": False,
        "label": None,
        "parttype": None,
        "pkname": None,
    }
    unknown = [column for column in columns if column not in values]
    if unknown:
        fail(f"unknown column: {unknown[0].upper()}")
    result = {column: values[column] for column in columns}
    if root and "-d" not in arguments:
        part = dict(values, name=f"{values['name']}p1", kname=f"{values['kname']}p1", path=f"{device['path']}p1")
        part |= {"type": "part", "fstype": "ext4", "mountpoint": "/", "mountpoints": ["/"], "serial": None}
        result["children"] = [{column: part[column] for column in columns}]
    return result


def blkid(arguments: list[str]) -> None:
    values, operands = options(arguments, "-p=--probe -i", "-o=--output -s=--match-tag -c=--cache-file")
    has_tags = False
    for path in operands or [device["path"] for device in devices()]:
        device = device_at(path)
        if device is None:
            fail(f"error: {path}: No such file or directory", 2)
        fstype, identity = signature(device["image"])
        tags = {"UUID": identity, "TYPE": fstype} if fstype else {}
        if values.get("-s"):
            tags = {name: value for name, value in tags.items() if name in values["-s"].split(",")}
        has_tags = has_tags or bool(tags)
        form = values.get("-o", "full")
        if form == "value":
            print("".join(f"{value}\n" for value in tags.values()), end="")
        elif form == "export" and tags:
            print("\n".join([f"DEVNAME={path}", *(f"{name}={value}" for name, value in tags.items())]))
        elif tags:
            print(f"{path}: " + " ".join(f'{name}="{value}"' for name, value in tags.items()))
    if not has_tags:
        sys.exit(2)


def findmnt(arguments: list[str]) -> None:
    values, operands = options(
        arguments,
        "-J=--json -n=--noheadings -l=--list -f=--first-only -r=--raw -b=--bytes -e=--evaluate -k=--kernel",
        "-o=--output -M=--mountpoint -T=--target -S=--source -t=--types",
    )
    columns = values.get("-o", "target,source,fstype,options").lower().split(",")
    root = {"target": "/", "device": next((d["path"] + "p1" for d in devices() if d.get("root")), ""), "fstype": "ext4"}
    with mounts() as table:
        entries = [root, *table]
    if "-M" in values:
        entries = [entry for entry in entries if same(entry["target"], values["-M"])]
    if "-S" in values:
        entries = [entry for entry in entries if same(entry["device"], values["-S"])]
    if "-T" in values:
        real = os.path.realpath(values["-T"])
        below = [e for e in entries if (real + "/").startswith(os.path.realpath(e["target"]).rstrip("/") + "/")]
        entries = sorted(below, key=lambda entry: len(os.path.realpath(entry["target"])))[-1:]
    for operand in operands:
        entries = [entry for entry in entries if same(entry["target"], operand) or same(entry["device"], operand)]
    if not entries:
        sys.exit(1)
    rows = [{column: shown_as(entry, column) for column in columns} for entry in entries]
    if "-J" in values:
        print(json.dumps({"filesystems": rows}, indent=3))
    else:
        if "-n" not in values:
            print(" ".join(columns).upper())
        print("\n".join(" ".join(str(value) for value in entry.values()) for entry in rows))


def shown_as(entry: Record, column: str) -> str:
    values = {
        "target": entry["target"],
        "source": entry["device"],
        "fstype": entry["fstype"],
        "options": entry.get("options", "rw,relatime"),
    }
    if column not in values:
        fail(f"unknown column: {column.upper()}")
    return str(values[column])


def mount(arguments: list[str]) -> None:
    values, operands = options(arguments, "-v=--verbose -w=--rw", "-t=--types -o=--options")
    if len(operands) != 2:
        fail("bad usage", 1)
    source, target = operands
    if values.get("-t") == "nfs4":
        return mount_nfs(source, target, values.get("-o", ""))
    device = device_at(source)
    if device is None:
        fail(f"{target}: special device {source} does not exist.", MOUNT_FAILED)
    fstype, identity = signature(device["image"])
    if not fstype or values.get("-t", fstype) not in (fstype, "auto"):
        fail(f"{target}: wrong fs type, bad option, bad superblock on {source}.", MOUNT_FAILED)
    with mounts(write=True) as table:
        if any(entry["device"] == device["path"] or same(entry["target"], target) for entry in table):
            fail(f"{target}: {source} already mounted or mount point busy.", MOUNT_FAILED)
        twin = any(entry.get("uuid") == identity for entry in table)
        if fstype == "xfs" and twin and "nouuid" not in values.get("-o", ""):
            fail(f"{target}: wrong fs type, bad option, bad superblock on {source} (duplicate UUID).", MOUNT_FAILED)
        if not os.path.isdir(target):
            fail(f"{target}: mount point does not exist.", MOUNT_FAILED)
        target = os.path.abspath(target)
        covered = f"{target}.covered" if os.listdir(target) else ""
        if covered:
            os.rename(target, covered)
        else:
            os.rmdir(target)
        os.symlink(device["files"], target)
        entry = {"device": device["path"], "volume": device["volume"], "target": target, "fstype": fstype}
        entry |= {"uuid": identity, "covered": covered, "frozen": False, "files": device["files"]}
        entry["options"] = ",".join(["rw", "relatime", *filter(None, [values.get("-o", "")])])
        table.append(entry)


def mount_nfs(source: str, target: str, mount_options: str) -> None:
    """A file system of the rehearsal's EFS. A port that is closed answers nothing: mount waits, as a real one does."""
    host, _, path = source.partition(":")
    server = nfs_at(host)
    if not server["address"] or path != "/":
        message = "Name or service not known" if not server["address"] else f"No such file or directory: {path}"
        print(f"mount.nfs4: Failed to resolve server {host}: {message}", file=sys.stderr)
        sys.exit(MOUNT_FAILED)
    if not server["open"]:
        signal.pause()
    with mounts(write=True) as table:
        if any(same(entry["target"], target) for entry in table):
            fail(f"{target}: {source} already mounted or mount point busy.", MOUNT_FAILED)
        if not os.path.isdir(target) or os.listdir(target):
            fail(f"{target}: mount point does not exist.", MOUNT_FAILED)
        os.rmdir(target)
        os.symlink(server["folder"], target)
        entry: Record = {"device": source, "volume": "", "fstype": "nfs4", "uuid": "", "covered": "", "frozen": False}
        entry |= {
            "target": os.path.abspath(target),
            "files": server["folder"],
            "options": f"rw,relatime,{mount_options}",
        }
        table.append(entry)


def nfs_at(host: str) -> Record:
    """What the rehearsal's network has under a name or an address."""
    import urllib.parse
    import urllib.request

    url = os.environ.get("AWS_ENDPOINT_URL", "").rstrip("/")
    query = urllib.parse.urlencode({"host": host, "instance": os.path.basename(FOLDER)})
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    # What only this machine knows: the last part of its metadata service's address.
    key = os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT", "").rpartition("/")[2]
    try:
        request = urllib.request.Request(f"{url}/_cloud/nfs?{query}", headers={"X-Machine-Key": key})
        with direct.open(request, timeout=10) as answer:
            record: Record = json.load(answer)
            return record
    except (OSError, ValueError):
        return {"address": "", "open": False, "folder": ""}


def mount_nfs4(arguments: list[str]) -> None:
    fail("the rehearsal's stand-in is called as `mount -t nfs4`")


def getent(arguments: list[str]) -> None:
    """Names of EFS are the rehearsal's; every other the machine's own."""
    if len(arguments) == 2 and ".efs." in arguments[1]:
        if not (address := nfs_at(arguments[1])["address"]):
            sys.exit(2)
        print(f"{address}  STREAM {arguments[1]}")
        return
    os.execv("/usr/bin/getent", ["getent", *arguments])


def umount(arguments: list[str]) -> None:
    _, operands = options(arguments, "-v=--verbose", "")
    if len(operands) != 1:
        fail("bad usage", 1)
    target = operands[0]
    with mounts(write=True) as table:
        entry = next((e for e in table if same(e["target"], target) or same(e["device"], target)), None)
        if entry is None:
            fail(f"{target}: not mounted.", MOUNT_FAILED)
        if holders(entry["files"]):
            fail(f"{target}: target is busy.", MOUNT_FAILED)
        os.unlink(entry["target"])
        if entry["covered"]:
            os.rename(entry["covered"], entry["target"])
        else:
            os.mkdir(entry["target"])
        table.remove(entry)


def holders(folder: str) -> list[int]:
    """Processes of this machine with a file, folder, program or mapping below `folder`."""
    prefix = os.path.realpath(folder)
    return [pid for pid in processes() if any(inside(path, prefix) for path in open_paths(pid))]


def inside(path: str, prefix: str) -> bool:
    return path == prefix or path.startswith(prefix + "/")


def open_paths(pid: int) -> Iterator[str]:
    links = [f"/proc/{pid}/{name}" for name in ("cwd", "root", "exe")]
    with contextlib.suppress(OSError):
        links += [f"/proc/{pid}/fd/{name}" for name in os.listdir(f"/proc/{pid}/fd")]
    for link in links:
        with contextlib.suppress(OSError):
            yield os.readlink(link)
    with contextlib.suppress(OSError), open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as file:
        for line in file:
            words = line.rstrip("\n").split(None, 5)
            if len(words) == 6:
                yield words[5]


def processes() -> list[int]:
    """All below the machine's first process, this one left out."""
    parents: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
                parents[int(name)] = int(file.read().rpartition(")")[2].split()[1])
    try:
        with open(os.path.join(FOLDER, "init.pid"), encoding="ascii") as file:
            first = int(file.read())
    except OSError:  # programs tried by hand: every process counts
        return [pid for pid in parents if pid != os.getpid()]
    mine = []
    for pid in parents:
        up = pid
        while up > 1 and up != first:
            up = parents.get(up, 0)
        if up == first and pid not in (os.getpid(), first):
            mine.append(pid)
    return mine


def mkfs_xfs(arguments: list[str]) -> None:
    values, operands = options(arguments, "-f -q -K", "-L -m")
    make_filesystem("xfs", operands, "-f" in values)


def mkfs_ext4(arguments: list[str]) -> None:
    values, operands = options(arguments, "-F -q -v", "-L -m -E -U")
    make_filesystem("ext4", operands, "-F" in values)


def make_filesystem(fstype: str, operands: list[str], force: bool) -> None:
    device = device_at(operands[0]) if len(operands) == 1 else None
    if device is None:
        fail(f"{' '.join(operands)}: no such device")
    with mounts() as table:
        if any(entry["device"] == device["path"] for entry in table):
            fail(f"{device['path']} contains a mounted filesystem")
    old, _ = signature(device["image"])
    if old and not force:
        fail(f"{device['path']} appears to contain an existing filesystem ({old}).")
    with open(device["image"], "r+b") as file:
        file.write(bytes(4096))
        if fstype == "xfs":
            file.seek(0)
            file.write(b"XFSB" + struct.pack(">IQQQ", 4096, device["size_bytes"] // 4096, 0, 0) + uuid.uuid4().bytes)
        else:
            file.seek(1080)
            file.write(b"\x53\xef")
            file.seek(1128)
            file.write(uuid.uuid4().bytes)
    shutil.rmtree(device["files"], ignore_errors=True)
    os.makedirs(device["files"])
    if fstype == "ext4":
        os.mkdir(os.path.join(device["files"], "lost+found"))


def fsfreeze(arguments: list[str]) -> None:
    values, operands = options(arguments, "-f=--freeze -u=--unfreeze", "")
    if len(operands) != 1 or ("-f" in values) == ("-u" in values):
        fail("bad usage")
    with mounts(write=True) as table:
        entry = next((entry for entry in table if same(entry["target"], operands[0])), None)
        if entry is None:
            fail(f"{operands[0]}: is not a mountpoint")
        if entry["frozen"] == ("-f" in values):
            fail(f"{operands[0]}: freeze failed: Device or resource busy")
        entry["frozen"] = "-f" in values


def sync(arguments: list[str]) -> None:
    """Nothing to do: a snapshot is copied through the same page cache that the machine writes to."""
    options(arguments, "-f=--file-system -d=--data", "")


def nvidia_smi(arguments: list[str]) -> None:
    """As many GPUs as the rehearsed instance is said to have; processes are hidden, as in a container."""
    gpus = int(os.environ.get("SPOTHEAL_REHEARSAL_GPUS") or 0)
    if not gpus:
        print("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.")
        sys.exit(9)
    columns = {
        "--query-gpu=index": [str(index) for index in range(gpus)],
        "--query-gpu=memory.total": [f"{os.environ.get('SPOTHEAL_REHEARSAL_GPU_MIB') or 81559} MiB"] * gpus,
        "--query-compute-apps=gpu_uuid,pid": [],
    }
    if len(arguments) != 2 or arguments[0] not in columns or arguments[1] != "--format=csv,noheader":
        fail(f"unrecognized options {arguments} (the rehearsal's stand-in knows {', '.join(columns)})")
    print("".join(f"{line}\n" for line in columns[arguments[0]]), end="")


def snap(arguments: list[str]) -> None:
    """Nothing is installed on the machine that a rehearsal runs on."""
    fail("a rehearsed machine installs nothing: install the program on your own machine", code=64)


def power_off(arguments: list[str]) -> None:
    """`shutdown -h now`, `systemctl poweroff`, `poweroff`: the machine's first process ends all others."""
    if PROGRAM == "systemctl" and "poweroff" not in arguments:
        fail("System has not been booted with systemd as init system (PID 1). Can't operate.")
    if PROGRAM == "shutdown" and not {"-h", "-P", "--poweroff", "now"} & set(arguments):
        fail("the rehearsal's stand-in only powers off")
    with open(os.path.join(FOLDER, "powered-off"), "w", encoding="ascii") as file:
        file.write(" ".join([PROGRAM, *arguments]))
    with open(os.path.join(FOLDER, "init.pid"), encoding="ascii") as file:
        os.kill(int(file.read()), signal.SIGPWR)


PROGRAMS = {
    "lsblk": lsblk,
    "blkid": blkid,
    "findmnt": findmnt,
    "mount": mount,
    "umount": umount,
    "mount.nfs4": mount_nfs4,
    "getent": getent,
    "mkfs.xfs": mkfs_xfs,
    "mkfs.ext4": mkfs_ext4,
    "fsfreeze": fsfreeze,
    "sync": sync,
    "shutdown": power_off,
    "poweroff": power_off,
    "systemctl": power_off,
    "nvidia-smi": nvidia_smi,
    "snap": snap,
}
PROGRAM = sys.argv[1] if len(sys.argv) > 1 else ""

if __name__ == "__main__":
    if PROGRAM not in PROGRAMS or not FOLDER:
        sys.exit(f"usage: SPOTHEAL_REHEARSAL_INSTANCE_DIR=FOLDER stand_in.py {'|'.join(PROGRAMS)} …")
    PROGRAMS[PROGRAM](sys.argv[2:])
