"""The system calls and sockets that the cage refuses: one seccomp filter for x86_64, one for arm64.

Sockets are an allow-list of families and protocols. Of the system calls those are refused that no trainer needs and
that reach far into the kernel, and all that are newer than the list. A refusal is an errno, never a kill: programs
that try a call and have another way take the other way. ptrace, pidfd_getfd and process_vm_readv stay, for CUDA IPC and
profilers (the kernel allows them towards processes of the same user alone).

The filter is built here and installed by `cage_exec`; `cage_refusals` answers the calls that it refuses. libseccomp is
not used: its Python package is on no plain image, and the agent installs nothing that is not pure Python.
Source: seccomp(2); linux/seccomp.h, linux/filter.h, linux/audit.h; the kernel's tables of system calls.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

# code, jump if true, jump if false, constant: struct sock_filter of linux/filter.h
Instruction = tuple[int, int, int, int]
Program = tuple[Instruction, ...]

ALLOW = 0x7FFF0000
NOTIFY = 0x7FC00000  # the call waits for an answer of the agent's; where there is no agent any more it is ENOSYS
_ERRNO = 0x00050000
_LOAD, _AND, _EQUALS, _AT_LEAST, _HAS_BIT, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data; arguments have 8 bytes each

_UNIX, _INET, _INET6, _NETLINK = 1, 2, 10, 16
_STREAM, _DATAGRAM, _KIND_MASK = 1, 2, 0xF  # above the mask are SOCK_NONBLOCK and SOCK_CLOEXEC
# 0 is the family's own. No MPTCP (262) and no SMC (256): their inner sockets belong to nobody, and rules by user do not
# meet them. An AF_SMC socket (43) reached the instance's credentials in that way.
_PROTOCOLS = (0, 6, 17)
# Addresses and routes (getaddrinfo, getifaddrs), devices that come and go (libudev), cluster network cards (libibverbs)
_NETLINK_PROTOCOLS = (0, 15, 20)
_TCP, _TCP_ULP = 6, 31  # setsockopt(TCP_ULP, "smc") makes an SMC socket of a TCP socket
# CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET; NEWTIME is a flag of unshare alone.
_NAMESPACES, _TIME_NAMESPACE = 0x7E020000, 0x80

# Name: number on x86_64, on arm64; from 424 on they are the same. None: the machine has no such call.
_REFUSED: dict[str, tuple[int | None, int | None]] = {
    # mounts
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "open_tree": (428, 428),
    "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432),
    "fspick": (433, 433), "mount_setattr": (442, 442), "swapon": (167, 224), "swapoff": (168, 225),
    "quotactl": (179, 60), "quotactl_fd": (443, 443), "open_by_handle_at": (304, 265), "fanotify_init": (300, 262),
    "nfsservctl": (180, 42),
    # namespaces
    "setns": (308, 268),
    # the kernel and the machine
    "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106), "kexec_load": (246, 104),
    "kexec_file_load": (320, 294), "reboot": (169, 142), "syslog": (103, 116), "acct": (163, 89), "bpf": (321, 280),
    "perf_event_open": (298, 241), "userfaultfd": (323, 282), "iopl": (172, None), "ioperm": (173, None),
    "modify_ldt": (154, None), "uselib": (134, None), "_sysctl": (156, None), "lookup_dcookie": (212, 18),
    "settimeofday": (164, 170), "clock_settime": (227, 112), "sethostname": (170, 161), "setdomainname": (171, 162),
    "vhangup": (153, 58),
    # keyrings
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
}  # fmt: skip
# They open sockets and files where no filter sees it. ENOSYS: as on a kernel without them, which programs provide for.
_ABSENT = {"io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427}
# Its flags are in memory, which a filter cannot read: on ENOSYS libc takes clone. At each start of a thread: not told.
_CLONE3 = 435
_NEWEST = 462  # mseal, Linux 6.10


@dataclass(frozen=True)
class Machine:
    """`column` in `_REFUSED`; `architecture` is AUDIT_ARCH_*; the numbers of calls whose arguments are looked at."""

    column: int
    architecture: int
    socket: int
    socketpair: int
    setsockopt: int
    clone: int
    unshare: int


MACHINES = {
    "x86_64": Machine(0, 0xC000003E, socket=41, socketpair=53, setsockopt=54, clone=56, unshare=272),
    "aarch64": Machine(1, 0xC00000B7, socket=198, socketpair=199, setsockopt=208, clone=220, unshare=97),
}


def refused_calls(machine: Machine) -> dict[str, int]:
    """Name and number of each call that is refused whatever its arguments are."""
    numbers = ((name, columns[machine.column]) for name, columns in _REFUSED.items())
    return {name: number for name, number in numbers if number is not None} | _ABSENT


@cache
def build(machine: Machine, *, notify: bool = False) -> Program:
    """The filter. With `notify` refused calls wait for the agent's answer; `evaluate` the other one for the errno."""
    refuse = (lambda number: (_RETURN, 0, 0, NOTIFY)) if notify else _errno
    return tuple(_instructions(machine, refuse))


def _instructions(machine: Machine, refuse: Callable[[int], Instruction]) -> Iterator[Instruction]:
    yield (_LOAD, 0, 0, _ARCHITECTURE)
    yield from _unless(machine.architecture, [refuse(errno.ENOSYS)])  # 32-bit programs, int 0x80
    yield (_LOAD, 0, 0, _NUMBER)
    yield (_AT_LEAST, 0, 1, _NEWEST + 1)  # calls of x32 too, which have bit 30
    yield refuse(errno.ENOSYS)
    yield from _if(_CLONE3, [_errno(errno.ENOSYS)])
    for number in (machine.socket, machine.socketpair):
        yield from _if(number, _socket(refuse))
    yield from _if(machine.setsockopt, _setsockopt(refuse))
    yield from _if(machine.clone, _without(_NAMESPACES, refuse))
    yield from _if(machine.unshare, _without(_NAMESPACES | _TIME_NAMESPACE, refuse))
    for name, number in refused_calls(machine).items():
        yield from _if(number, [refuse(errno.ENOSYS if name in _ABSENT else errno.EPERM)])
    yield (_RETURN, 0, 0, ALLOW)


def _socket(refuse: Callable[[int], Instruction]) -> list[Instruction]:
    """The errnos are those of a kernel without the family or protocol."""
    allow = (_RETURN, 0, 0, ALLOW)
    netlink = [_argument(2), *_unless_in(_NETLINK_PROTOCOLS, refuse(errno.EPROTONOSUPPORT)), allow]
    return [
        _argument(0),
        *_if(_UNIX, [allow]),
        *_if(_NETLINK, netlink),
        *_unless_in((_INET, _INET6), refuse(errno.EAFNOSUPPORT)),
        _argument(1),
        (_AND, 0, 0, _KIND_MASK),
        *_unless_in((_STREAM, _DATAGRAM), refuse(errno.EPERM)),
        _argument(2),
        *_unless_in(_PROTOCOLS, refuse(errno.EPROTONOSUPPORT)),
        allow,
    ]


def _setsockopt(refuse: Callable[[int], Instruction]) -> list[Instruction]:
    allow = (_RETURN, 0, 0, ALLOW)
    return [_argument(1), *_if(_TCP, [_argument(2), *_if(_TCP_ULP, [refuse(errno.ENOPROTOOPT)]), allow]), allow]


def _without(flags: int, refuse: Callable[[int], Instruction]) -> list[Instruction]:
    return [_argument(0), (_HAS_BIT, 0, 1, flags), refuse(errno.EPERM), (_RETURN, 0, 0, ALLOW)]


def _errno(number: int) -> Instruction:
    return (_RETURN, 0, 0, _ERRNO | number)


def _argument(index: int) -> Instruction:
    """Its lower half, on little-endian machines: the kernel takes all arguments that we look at for an int."""
    return (_LOAD, 0, 0, _ARGUMENTS + 8 * index)


def _if(value: int, block: Sequence[Instruction]) -> list[Instruction]:
    """`block`, which ends in a return, where the value that was loaded last is `value`."""
    return [(_EQUALS, 0, len(block), value), *block]


def _unless(value: int, block: Sequence[Instruction]) -> list[Instruction]:
    return [(_EQUALS, len(block), 0, value), *block]


def _unless_in(values: Sequence[int], refusal: Instruction) -> list[Instruction]:
    return [*((_EQUALS, len(values) - at, 0, value) for at, value in enumerate(values)), refusal]


# ------------------------------------------------------------------------------------------------------------- answers
@dataclass(frozen=True)
class Call:
    """struct seccomp_data without the instruction pointer."""

    number: int
    architecture: int
    arguments: tuple[int, ...]


def evaluate(program: Program, call: Call) -> int:
    """The errno that `program` gives the call, 0 where it is allowed; as the kernel computes it."""
    at, value = 0, 0
    while True:
        code, if_true, if_false, constant = program[at]
        at += 1
        if code == _RETURN:
            return 0 if constant == ALLOW else constant & 0xFFFF
        if code == _LOAD:
            value = _word(call, constant)
        elif code == _AND:
            value &= constant
        else:
            holds = {_EQUALS: value == constant, _AT_LEAST: value >= constant, _HAS_BIT: bool(value & constant)}[code]
            at += if_true if holds else if_false


def _word(call: Call, offset: int) -> int:
    if offset == _NUMBER:
        return call.number & 0xFFFFFFFF
    if offset == _ARCHITECTURE:
        return call.architecture
    return call.arguments[(offset - _ARGUMENTS) // 8] & 0xFFFFFFFF


def describe(machine: Machine, call: Call) -> str:
    """The call in words, for a log line; the same words for calls that are refused for the same reason."""
    number, arguments = call.number, call.arguments
    if call.architecture != machine.architecture:
        return "a system call of a 32-bit program"
    for name, refused in refused_calls(machine).items():
        if number == refused:
            return name
    if number in (machine.socket, machine.socketpair):
        family, protocol = (arguments[at] & 0xFFFFFFFF for at in (0, 2))
        kind = arguments[1] & _KIND_MASK
        return f"socket(family {family}, type {kind}, protocol {protocol})"
    if number == machine.setsockopt:
        return "setsockopt(TCP_ULP)"
    if number in (machine.clone, machine.unshare):
        return "a new namespace"
    return f"system call {number & 0xFFFFFFFF}"
