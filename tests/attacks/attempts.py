"""The attacker: tries to get out of the cage, and writes what came of each attempt to outcomes.json.

`attempts.py TARGETS` runs inside the cage, with the machine's own Python and nothing of ours. TARGETS is a JSON
document about what lies outside (siege.py). An outcome is the name of an errno, or what came back. EXPECTED holds for
each attempt the outcomes that are allowed.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import mmap
import os
import platform
import resource
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

EXPECTED: dict[str, tuple[str, ...]] = {}
ATTEMPTS: dict[str, Callable[[dict[str, Any]], Any]] = {}
LIBC = ctypes.CDLL(None, use_errno=True)
X86 = platform.machine() == "x86_64"
SECONDS_MAX = 2.0
HAS_SCOPES = int(LIBC.syscall(444, None, 0, 1)) >= 6  # Landlock of Linux 6.12; before, abstract sockets are open
IMDS, IMDS6, TASK_ROLE, NFS = "169.254.169.254", "fd00:ec2::254", "169.254.170.2", "127.0.0.9"
TOKEN = b"PUT /latest/api/token HTTP/1.0\r\nX-aws-ec2-metadata-token-ttl-seconds: 60\r\n\r\n"
ROLE = b"GET /latest/meta-data/iam/security-credentials/ HTTP/1.0\r\n\r\n"
FAMILIES = {1, 2, 10, 16}
REFUSED_CALLS = (
    "mount", "umount2", "pivot_root", "chroot", "open_tree", "move_mount", "fsopen", "fsconfig", "fsmount", "fspick",
    "mount_setattr", "swapon", "swapoff", "quotactl", "quotactl_fd", "open_by_handle_at", "fanotify_init", "nfsservctl",
    "setns", "init_module", "finit_module", "delete_module", "kexec_load", "kexec_file_load", "reboot", "syslog",
    "acct", "bpf", "perf_event_open", "userfaultfd", "lookup_dcookie", "settimeofday", "clock_settime", "sethostname",
    "setdomainname", "vhangup", "add_key", "request_key", "keyctl",
)  # fmt: skip
NAMESPACES = {"mount": 0x20000, "cgroup": 0x2000000, "uts": 0x4000000, "ipc": 0x8000000, "user": 0x10000000,
              "pid": 0x20000000, "net": 0x40000000}  # fmt: skip
FORBIDDEN_FILES = (
    "/etc/passwd", "/etc/ld.so.preload", "/etc/cron.d/x", "/usr/bin/python3", "/usr/lib/x",
    "/root/.ssh/authorized_keys", "/run/x", "/var/lib/x", "/boot/x", "/x", "/proc/sys/kernel/core_pattern",
    "/proc/sys/kernel/modprobe",
    "/proc/sys/vm/overcommit_memory", "/proc/sys/net/ipv4/ip_forward", "/proc/sysrq-trigger", "/proc/1/oom_score_adj",
    "/sys/kernel/uevent_helper", "/sys/power/state", "/sys/fs/cgroup/cgroup.procs", "/sys/fs/cgroup/release_agent",
    "/dev/mem", "/dev/kmem", "/dev/port", "/dev/kmsg", "/dev/loop-control", "/dev/mapper/control", "/dev/console",
    "/dev/vda", "/dev/nvme0", "/dev/nvme0n1", "/dev/sda", "/dev/xvda", "/dev/cpu/0/msr",
)  # fmt: skip
CLOSED = ("EACCES", "EPERM", "EROFS", "ENOENT", "ENXIO", "ENODEV", "ELOOP", "EISDIR", "ENOTDIR")


def attempt(*expected: str, name: str = "") -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        title = name or function.__name__.replace("_", " ")
        ATTEMPTS[title], EXPECTED[title] = function, expected
        return function

    return register


def call(number: int, *arguments: Any) -> int:
    """A system call as it is; OSError with its errno."""
    words = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    result = int(LIBC.syscall(ctypes.c_long(number), *words))
    if result == -1:
        raise OSError(ctypes.get_errno(), "")
    return result


def libc(name: str, *arguments: Any) -> int:
    result = int(getattr(LIBC, name)(*arguments))
    if result == -1:
        raise OSError(ctypes.get_errno(), "")
    return result


def outcome(function: Callable[[], Any]) -> str:
    try:
        return str(function())
    except TimeoutError:
        return "no answer"
    except (OSError, subprocess.SubprocessError) as error:
        number = getattr(error, "errno", None)
        return errno.errorcode.get(number or 0, repr(error))


def in_child(function: Callable[[], Any]) -> str:
    """Where it may end the process that tries: its outcome, or the signal."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, outcome(function).encode())
        os._exit(0)
    os.close(writing)
    with open(reading) as file:
        said = file.read()
    _, status = os.waitpid(child, 0)
    return said or (f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"exit {os.WEXITSTATUS(status)}")


def opened(kinds: Iterable[tuple[int, int, int]]) -> str:
    """The protocols of those that the kernel opened."""
    found = []
    for family, kind, protocol in kinds:
        try:
            socket.socket(family, kind, protocol).close()
            found.append(protocol)
        except OSError:
            continue
    return " ".join(map(str, sorted(set(found)))) or "none"


# First, before we open any ourselves.
@attempt("0 /dev/null 1 pipe 2 pipe")
def descriptors_that_were_left_open(targets: dict[str, Any]) -> Any:
    places = {int(number): os.readlink(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")
              if os.path.lexists(f"/proc/self/fd/{number}")}  # fmt: skip
    return " ".join(f"{number} {place.partition(':')[0]}" for number, place in sorted(places.items()))


# -------------------------------------------------------------------------------------------------------------- sockets
for _family in sorted({*range(3, 48), 255} - FAMILIES):
    attempt("EAFNOSUPPORT", name=f"a socket of family {_family}")(lambda t, f=_family: socket.socket(f, 1, 0))
    if _family in (17, 21, 30, 38, 40, 43):
        for _kind in (2, 3, 5):
            attempt("EAFNOSUPPORT", name=f"a socket of family {_family}, type {_kind}")(
                lambda t, f=_family, k=_kind: socket.socket(f, k, 0)
            )


@attempt("EAFNOSUPPORT")
def a_family_hidden_in_the_upper_half_of_its_argument(targets: dict[str, Any]) -> Any:
    return call(targets["calls"]["socket"], 1 << 32 | 43, 1, 0)


@attempt("EPROTONOSUPPORT")
def multipath_tcp(targets: dict[str, Any]) -> Any:
    return socket.socket(socket.AF_INET, socket.SOCK_STREAM, 262)


@attempt("EPROTONOSUPPORT")
def smc_by_protocol(targets: dict[str, Any]) -> Any:
    return socket.socket(socket.AF_INET, socket.SOCK_STREAM, 256)


@attempt("ENOPROTOOPT")
def smc_made_of_a_tcp_socket(targets: dict[str, Any]) -> Any:
    return socket.socket().setsockopt(6, 31, b"smc")


@attempt("EPERM")
def a_source_route(targets: dict[str, Any]) -> Any:
    route = bytes([131, 11, 4]) + socket.inet_aton("127.0.0.1") + socket.inet_aton(IMDS) + b"\0"
    with socket.socket() as client:
        client.setsockopt(socket.IPPROTO_IP, 4, route)
        return http(client, "127.0.0.1")


@attempt("EPERM", "EINVAL")
def an_ipv6_routing_header(targets: dict[str, Any]) -> Any:
    header = struct.pack("BBBBI", 0, 2, 2, 1, 0) + socket.inet_pton(socket.AF_INET6, IMDS6)
    return socket.socket(socket.AF_INET6).setsockopt(41, 57, header)


@attempt("EAFNOSUPPORT")
def a_pair_of_tipc_sockets(targets: dict[str, Any]) -> Any:
    return call(targets["calls"]["socketpair"], 30, 1, 0, (ctypes.c_int * 2)())


@attempt("EPERM")
def an_address_for_the_loopback_device(targets: dict[str, Any]) -> Any:
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as route:
        address = struct.pack("=HH4s", 8, 2, socket.inet_aton("169.254.169.253"))
        body = struct.pack("=BBBBi", 2, 32, 0, 0, 1) + address
        route.send(struct.pack("=IHHII", 16 + len(body), 20, 0x605, 1, 0) + body)
        raise OSError(-struct.unpack_from("=i", route.recv(4096), 16)[0], "")


@attempt("EPERM")
def a_network_interface_switched_off(targets: dict[str, Any]) -> Any:
    return fcntl.ioctl(socket.socket(), 0x8914, struct.pack("16sH14x", b"lo", 0))


@attempt("EPERM")
def packets_with_a_mark(targets: dict[str, Any]) -> Any:
    return socket.socket().setsockopt(socket.SOL_SOCKET, 36, 1)


@attempt("EPERM", "ENOENT", "EACCES")
def a_tun_device(targets: dict[str, Any]) -> Any:
    with open("/dev/net/tun", "r+b", buffering=0) as device:
        return fcntl.ioctl(device, 0x400454CA, struct.pack("16sH22x", b"x", 1))


@attempt("EPERM", *([] if HAS_SCOPES else ["REAL SERVICE"]))
def an_abstract_socket_of_root(targets: dict[str, Any]) -> Any:
    return heard_from("\0" + targets["abstract"])


@attempt("ENOENT")
def a_service_below_run(targets: dict[str, Any]) -> Any:
    return heard_from(targets["service"])


@attempt("ENOENT")
def a_service_below_run_that_started_after_us(targets: dict[str, Any]) -> Any:
    return heard_from(targets["late_service"])


@attempt("ENOENT", "EACCES")
def the_container_engines_and_the_message_bus(targets: dict[str, Any]) -> Any:
    places = ("/run/docker.sock", "/var/run/docker.sock", "/run/dbus/system_bus_socket", "/run/systemd/private",
              "/run/containerd/containerd.sock", "/run/snapd.socket", "/run/systemd/journal/dev-log",
              "/run/systemd/notify", "/run/udev/control", "/run/user/0/bus")  # fmt: skip
    return " ".join(sorted({outcome(lambda place=place: heard_from(place)) for place in places}))


@attempt("only what the cage keeps")
def the_list_of_what_is_below_run(targets: dict[str, Any]) -> Any:
    kept = {"systemd", "resolvconf", "nscd", "nvidia-persistenced", "nvidia-fabricmanager", "nvidia-topologyd",
            "spotheal", "NetworkManager"}  # fmt: skip
    return " ".join(sorted(set(os.listdir("/run")) - kept)) or "only what the cage keeps"


def heard_from(address: str) -> str:
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(SECONDS_MAX)
        client.connect(address)
        return client.recv(100).decode()


# ---------------------------------------------------------------------------------------------------- metadata service
def http(client: socket.socket, address: str, request: bytes = TOKEN, port: int = 80) -> str:
    client.settimeout(SECONDS_MAX)
    client.connect((address, port))
    client.sendall(request)
    answer = client.recv(4096).decode()
    return answer if "REAL" in answer else answer.split(" ")[1]


def at(address: str, request: bytes = ROLE, port: int = 80) -> str:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as client:
        return http(client, address, request, port)


for _address in (IMDS, "2852039166", "0xA9FEA9FE", "0251.0376.0251.0376", "169.254.43518", "::ffff:" + IMDS, IMDS6,
                 "fd00:0ec2:0:0:0:0:0:254"):  # fmt: skip
    attempt("401", name=f"credentials at {_address}")(lambda t, a=_address: at(a))
for _address, _port in ((TASK_ROLE, 80), ("169.254.170.23", 80), ("fd00:ec2::23", 80), (NFS, 2049)):
    attempt("ECONNREFUSED", "EACCES", "EPERM", name=f"{_address} port {_port}")(
        lambda t, a=_address, p=_port: at(a, port=p)
    )


@attempt("403")
def credentials_with_a_token_of_the_relay(targets: dict[str, Any]) -> Any:
    with socket.socket() as client:
        client.settimeout(SECONDS_MAX)
        client.connect((IMDS, 80))
        client.sendall(TOKEN)
        token = client.makefile().read().split("\n")[-1].encode()
    return at(IMDS, ROLE.replace(b"\r\n\r\n", b"\r\nX-aws-ec2-metadata-token: " + token + b"\r\n\r\n"))


@attempt("400", "401", "403", "404", "405", "501")
def the_relay_as_a_proxy(targets: dict[str, Any]) -> Any:
    return at("127.0.0.1", b"GET http://169.254.169.254/latest/user-data HTTP/1.0\r\n\r\n", targets["relay"])


@attempt("400", "401", "403", "404", "405", "501")
def a_tunnel_through_the_relay(targets: dict[str, Any]) -> Any:
    return at("127.0.0.1", b"CONNECT 169.254.169.254:80 HTTP/1.0\r\n\r\n", targets["relay"])


@attempt("EACCES", "EPERM", "ECONNREFUSED", "no answer")
def the_metadata_service_by_udp(targets: dict[str, Any]) -> Any:
    with socket.socket(type=socket.SOCK_DGRAM) as client:
        client.settimeout(SECONDS_MAX / 4)
        client.connect((IMDS, 80))
        client.send(TOKEN)
        return client.recv(100)


@attempt("EACCES", "EPERM", "ECONNREFUSED")
def the_metadata_service_at_another_port(targets: dict[str, Any]) -> Any:
    return at(IMDS, port=8080)


@attempt("200", "EOPNOTSUPP")
def the_first_packet_with_data(targets: dict[str, Any]) -> Any:
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", int(SECONDS_MAX), 0))
        client.sendto(TOKEN, 0x20000000, (IMDS, 80))
        answer = client.recv(4096).decode()
        return answer if "REAL" in answer else answer.split(" ")[1]


@attempt("200")
def from_an_address_that_is_the_services_own(targets: dict[str, Any]) -> Any:
    with socket.socket() as client:
        client.bind((IMDS, 0))
        return http(client, IMDS)


# ------------------------------------------------------------------------------------------------------- system calls
for _call in REFUSED_CALLS:
    attempt("EPERM", name=f"system call {_call}")(lambda t, c=_call: call(t["calls"][c], 0, 0, 0, 0, 0))
for _call in ("io_uring_setup", "io_uring_enter", "io_uring_register"):
    attempt("ENOSYS", name=f"system call {_call}")(lambda t, c=_call: call(t["calls"][c], 1, 0, 0, 0, 0))
for _word, _flag in NAMESPACES.items():
    attempt("EPERM", name=f"a {_word} namespace by unshare")(
        lambda t, flag=_flag: in_child(lambda: call(t["calls"]["unshare"], flag))
    )
    attempt("EPERM", name=f"a {_word} namespace by clone")(
        lambda t, flag=_flag: cloned(t["calls"]["clone"], flag | signal.SIGCHLD)
    )


def cloned(number: int, flags: int) -> str:
    child = call(number, flags, 0, 0, 0, 0)
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    return "a process"


@attempt("EPERM")
def a_time_namespace(targets: dict[str, Any]) -> Any:
    return in_child(lambda: call(targets["calls"]["unshare"], 0x80))


@attempt("ENOSYS")
def a_namespace_by_clone3(targets: dict[str, Any]) -> Any:
    arguments = struct.pack("=11Q", 0x10000000, 0, 0, 0, signal.SIGCHLD, 0, 0, 0, 0, 0, 0)
    child = call(435, ctypes.create_string_buffer(arguments), len(arguments))
    if child == 0:
        os._exit(0)
    return f"process {child}"


@attempt("EPERM")
def the_namespaces_of_the_agent(targets: dict[str, Any]) -> Any:
    return call(targets["calls"]["setns"], os.pidfd_open(targets["agent"]), 0x20000)


@attempt("ENOSYS")
def calls_that_are_newer_than_the_list(targets: dict[str, Any]) -> Any:
    return " ".join(sorted({outcome(lambda n=n: call(n, 0, 0, 0, 0, 0)) for n in (463, 467, 470, 500, 600, 2000)}))


@attempt("ENOSYS")
def calls_with_the_bit_of_x32(targets: dict[str, Any]) -> Any:
    return " ".join(sorted({outcome(lambda n=n: call(0x40000000 | n, 43, 1, 0)) for n in (39, 41, 165, 425, 512)}))


if X86:

    @attempt("ENOSYS", "signal 11")
    def a_socket_by_int_0x80(targets: dict[str, Any]) -> Any:
        """push rbx; mov eax, edi; mov ebx, esi; mov ecx, edx; xor edx, edx; int 0x80; pop rbx; ret"""
        page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
        page.write(bytes.fromhex("53 89f8 89f3 89d1 31d2 cd80 5b c3"))
        address = ctypes.addressof(ctypes.c_char.from_buffer(page))
        function = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int)(address)

        def by_interrupt() -> Any:
            result = function(359, 43, 1)  # socket
            if result < 0:
                raise OSError(-result, "")
            return result

        return in_child(by_interrupt)

    @attempt("signal 11", "ENOEXEC")
    def a_32_bit_program(targets: dict[str, Any]) -> Any:
        """It ends with 42 where its system calls are made: mov eax, 1; mov ebx, 42; int 0x80; hlt."""
        code = bytes.fromhex("b801000000 bb2a000000 cd80 f4")
        size = 52 + 32 + len(code)
        header = b"\x7fELF\1\1\1" + bytes(9)
        header += struct.pack("=HHIIIIIHHHHHH", 2, 3, 1, 0x8048054, 52, 0, 0, 52, 32, 1, 0, 0, 0)
        segment = struct.pack("=8I", 1, 0, 0x8048000, 0x8048000, size, size, 5, 4096)
        program = Path("program32")
        program.write_bytes(header + segment + code)
        program.chmod(0o755)
        code_of = subprocess.run([str(program.resolve())], timeout=SECONDS_MAX).returncode
        return f"signal {-code_of}" if code_of < 0 else f"exit {code_of}"


@attempt("EAFNOSUPPORT")
def a_filter_of_our_own_that_allows_all(targets: dict[str, Any]) -> Any:
    return in_child(lambda: (allow_all(0), socket.socket(43, 1, 0)))


@attempt("EBUSY")
def answers_to_our_own_refused_calls(targets: dict[str, Any]) -> Any:
    return in_child(lambda: allow_all(8))


def allow_all(flags: int) -> int:
    code = ctypes.create_string_buffer(struct.pack("=HBBI", 6, 0, 0, 0x7FFF0000))
    program = struct.pack("@HxxxxxxP", 1, ctypes.addressof(code))
    return call(317 if X86 else 277, 1, flags, ctypes.create_string_buffer(program))


# --------------------------------------------------------------------------------------------------------------- rights
@attempt("EPERM", "EINVAL")
def becoming_root(targets: dict[str, Any]) -> Any:
    ways = (lambda: os.setuid(0), lambda: os.setgid(0), lambda: os.setgroups([0]), lambda: os.setresuid(0, 0, 0),
            lambda: os.setreuid(-1, 0))  # fmt: skip
    return " ".join(sorted({outcome(way) for way in ways}))


@attempt("no rights")
def set_user_id_programs(targets: dict[str, Any]) -> Any:
    copies = [targets["set_user_id"], targets["set_user_id_on_the_volume"]]
    said = {subprocess.run([copy, "-u"], capture_output=True, text=True).stdout.strip() for copy in copies}
    return "no rights" if said <= {str(os.getuid()), ""} else f"user {said}"


@attempt("no rights")
def programs_that_give_rights(targets: dict[str, Any]) -> Any:
    said = []
    for argv in (["su", "-c", "id -u"], ["sudo", "-n", "id", "-u"], ["pkexec", "id", "-u"], ["newgrp", "root"]):
        try:
            done = subprocess.run(argv, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=10)
        except OSError:
            continue
        said.append(done.stdout.strip())
    return "no rights" if not any(said) else str(said)


@attempt("EPERM")
def capabilities(targets: dict[str, Any]) -> Any:
    header, full = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)(*[0xFFFFFFFF] * 6)
    return libc("capset", header, full)


@attempt("EPERM", "EINVAL")
def an_ambient_capability(targets: dict[str, Any]) -> Any:
    return libc("prctl", 47, 2, 21, 0, 0)


@attempt("EINVAL")
def new_privileges_allowed_again(targets: dict[str, Any]) -> Any:
    return libc("prctl", 38, 0, 0, 0, 0)


@attempt("EPERM")
def a_higher_limit_for_cores(targets: dict[str, Any]) -> Any:
    try:
        return resource.setrlimit(resource.RLIMIT_CORE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    except ValueError:
        raise OSError(errno.EPERM, "") from None


@attempt("no core")
def a_core_dump(targets: dict[str, Any]) -> Any:
    child = os.fork()
    if child == 0:
        os.kill(os.getpid(), signal.SIGSEGV)
    _, status = os.waitpid(child, 0)
    return "a core" if os.WCOREDUMP(status) else "no core"


@attempt("EACCES", "EPERM")
def the_kernels_last_victim(targets: dict[str, Any]) -> Any:
    return Path("/proc/self/oom_score_adj").write_text("-1000")


@attempt("EPERM", "EACCES")
def real_time_priority(targets: dict[str, Any]) -> Any:
    return os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))


@attempt("ENOTTY", "ENXIO", "EIO")
def typing_for_another(targets: dict[str, Any]) -> Any:
    return " ".join(sorted({outcome(lambda fd=fd: fcntl.ioctl(fd, 0x5412, b"x")) for fd in (0, 1, 2)}))


@attempt("ENXIO", "ENOENT")
def a_terminal_of_our_own(targets: dict[str, Any]) -> Any:
    return os.open("/dev/tty", os.O_RDWR)


# ---------------------------------------------------------------------------------------------------------------- files
for _path in FORBIDDEN_FILES:
    attempt(*CLOSED, name=f"{_path} written")(lambda t, p=_path: os.open(p, os.O_WRONLY | os.O_CREAT, 0o600))
for _path in ("/etc/shadow", "/proc/kcore", "/proc/1/environ", "/proc/1/mem", "/proc/1/root/etc/shadow"):
    attempt(*CLOSED, name=f"{_path} read")(lambda t, p=_path: os.open(p, os.O_RDONLY))
for _name in ("environ", "mem", "root/etc/passwd", "cwd/x", "fd/0", "maps", "stack", "syscall", "auxv", "map_files"):
    attempt(*CLOSED, name=f"the agent's {_name}")(lambda t, n=_name: os.open(f"/proc/{t['agent']}/{n}", os.O_RDONLY))


@attempt("EACCES")
def a_file_of_root(targets: dict[str, Any]) -> Any:
    return Path(targets["secret"]).read_text()


@attempt("EACCES", "EROFS")
def a_folder_of_another_that_is_open_to_all(targets: dict[str, Any]) -> Any:
    return Path(targets["open_folder"], "x").touch()


@attempt("EPERM", "EXDEV", "EROFS", "EACCES")
def a_hard_link_to_a_file_of_root(targets: dict[str, Any]) -> Any:
    return os.link(targets["secret"], "link")


@attempt("EACCES")
def a_link_to_a_file_of_root(targets: dict[str, Any]) -> Any:
    os.symlink(targets["secret"], "soft")
    return Path("soft").read_text()


@attempt("EPERM")
def a_file_given_to_root(targets: dict[str, Any]) -> Any:
    Path("mine").touch()
    return os.chown("mine", 0, 0)


@attempt("EPERM", "ENOTSUP", "EOPNOTSUPP")
def a_file_with_capabilities(targets: dict[str, Any]) -> Any:
    Path("capable").touch()
    return os.setxattr("capable", "security.capability", struct.pack("=5I", 0x2000001, 1 << 21, 0, 0, 0))


for _word, _mode, _device in (("disk", 0o60666, (7, 0)), ("memory", 0o20666, (1, 1))):
    attempt("EPERM", name=f"a device node of a {_word}")(
        lambda t, m=_mode, d=_device, w=_word: os.mknod(f"node-{w}", m, os.makedev(*d))
    )


@attempt("empty")
def files_of_others_in_tmp(targets: dict[str, Any]) -> Any:
    seen = {*os.listdir("/tmp"), *os.listdir("/var/tmp"), *os.listdir("/dev/shm")} - {"program32"}
    return " ".join(seen & set(targets["temporary"])) or "empty"


@attempt("ENOENT")
def shared_memory_of_another(targets: dict[str, Any]) -> Any:
    return libc("shmget", targets["shared_memory"], 0, 0)


@attempt("ENOENT", "EACCES")
def a_message_queue_of_another(targets: dict[str, Any]) -> Any:
    return libc("mq_open", targets["queue"].encode(), os.O_RDWR)


@attempt("ENOENT")
def a_message_queue_of_another_by_its_file(targets: dict[str, Any]) -> Any:
    return os.open("/dev/mqueue" + targets["queue"], os.O_RDONLY)


# ------------------------------------------------------------------------------------------------------ other processes
@attempt("EPERM")
def ptrace_of_the_agent(targets: dict[str, Any]) -> Any:
    return " ".join(sorted({outcome(lambda r=r: libc("ptrace", r, targets["agent"], 0, 0)) for r in (16, 0x4206)}))


@attempt("EPERM")
def the_agents_memory(targets: dict[str, Any]) -> Any:
    buffer = ctypes.create_string_buffer(8)
    vector = struct.pack("=QQ", ctypes.addressof(buffer), 8)
    vectors = (ctypes.create_string_buffer(vector), 1, ctypes.create_string_buffer(struct.pack("=QQ", 4096, 8)), 1, 0)
    ways = ("process_vm_readv", "process_vm_writev")
    return " ".join(sorted({outcome(lambda way=way: libc(way, targets["agent"], *vectors)) for way in ways}))


@attempt("EPERM")
def a_descriptor_of_the_agent(targets: dict[str, Any]) -> Any:
    return call(438, os.pidfd_open(targets["agent"]), 0, 0)


@attempt("EPERM")
def signals_for_the_agent_and_for_pid_1(targets: dict[str, Any]) -> Any:
    pids = (targets["agent"], 1)
    ways = [lambda p=p: os.kill(p, signal.SIGCONT) for p in pids]
    ways += [lambda p=p: signal.pidfd_send_signal(os.pidfd_open(p), signal.SIGCONT) for p in pids]
    return " ".join(sorted({outcome(way) for way in ways}))


@attempt("EPERM", "EACCES EPERM")
def limits_and_priorities_of_the_agent(targets: dict[str, Any]) -> Any:
    pid = targets["agent"]
    ways = (
        lambda: resource.prlimit(pid, resource.RLIMIT_NOFILE, (8, 8)),
        lambda: os.sched_setaffinity(pid, {0}),
        lambda: os.setpriority(os.PRIO_PROCESS, pid, 19),
        lambda: os.sched_setscheduler(pid, 3, os.sched_param(0)),
    )
    return " ".join(sorted({outcome(way) for way in ways}))


@attempt("EPERM", "EACCES")
def the_agents_pages_moved(targets: dict[str, Any]) -> Any:
    mask = (ctypes.c_ulong * 1)(1)
    return call(256 if X86 else 238, targets["agent"], 64, mask, mask)


# ----------------------------------------------------------------------------------------------------- what must stay
@attempt("works")
def memory_and_descriptors_of_a_child(targets: dict[str, Any]) -> Any:
    """As py-spy and CUDA's IPC use them."""
    buffer = ctypes.create_string_buffer(b"before", 6)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(reading, 1)
        os._exit(0)
    seen = ctypes.create_string_buffer(6)
    local = ctypes.create_string_buffer(struct.pack("=QQ", ctypes.addressof(seen), 6))
    remote = ctypes.create_string_buffer(struct.pack("=QQ", ctypes.addressof(buffer), 6))
    assert libc("process_vm_readv", child, local, 1, remote, 1, 0) == 6 and seen.raw == b"before"
    os.close(call(438, os.pidfd_open(child), writing, 0))
    assert libc("ptrace", 16, child, 0, 0) == 0
    os.waitpid(child, 0)
    assert libc("ptrace", 17, child, 0, 0) == 0
    os.write(writing, b"x")
    os.waitpid(child, 0)
    return "works"


@attempt("works")
def threads_pairs_shared_memory_and_passed_descriptors(targets: dict[str, Any]) -> Any:
    import threading

    thread = threading.Thread(target=lambda: None)
    thread.start()
    thread.join()
    left, right = socket.socketpair()
    socket.send_fds(left, [b"x"], [0])
    assert socket.recv_fds(right, 1, 1)[1]
    memory = os.memfd_create("x")
    os.ftruncate(memory, 4096)
    assert mmap.mmap(memory, 4096)[:1] == b"\0"
    assert libc("shmget", 0, 4096, 0o600) >= 0
    assert socket.getaddrinfo("127.0.0.1", 80) and socket.if_nameindex()
    return "works"


# ------------------------------------------------------------------------------------- more calls than are answered
@attempt("0 15", "0 15 20")
def netlink_of_every_protocol(targets: dict[str, Any]) -> Any:
    return opened((socket.AF_NETLINK, socket.SOCK_RAW, number) for number in range(32))


for _family, _word in ((2, "IPv4"), (10, "IPv6")):
    for _kind, _expected in ((1, "0 6"), (2, "0 17"), (3, "none"), (4, "none"), (5, "none"), (6, "none"), (10, "none")):
        attempt(_expected, name=f"{_word} sockets of type {_kind} and every protocol")(
            lambda t, f=_family, k=_kind: opened((f, k, number) for number in range(300))
        )


@attempt("ENOSYS")
def a_refused_call_after_a_thousand(targets: dict[str, Any]) -> Any:
    return socket.socket(43, 1, 0)


def main() -> None:
    targets = json.loads(sys.argv[1])
    outcomes = {title: outcome(lambda f=function: f(targets)) for title, function in ATTEMPTS.items()}
    Path("outcomes.json").write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main()
