"""The cage's filter of system calls, for both machines, as the kernel would compute it: what is refused, what is not.

That the kernel computes it so is shown by tests/attacks, from inside a cage, on this machine's kind.
"""

from __future__ import annotations

import errno
import itertools
import re
from pathlib import Path

import pytest

from spotheal.agent.processes.system_calls import (
    ALLOW,
    MACHINES,
    NOTIFY,
    Call,
    Machine,
    build,
    describe,
    evaluate,
    refused_calls,
)

HEADERS = {"x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
           "aarch64": Path("/usr/include/asm-generic/unistd.h")}  # fmt: skip
I386, ARM = 0x40000003, 0x40000028
UNIX, INET, INET6, NETLINK = 1, 2, 10, 16
STREAM, DATAGRAM, RAW, CLOEXEC = 1, 2, 3, 0o2000000
every_machine = pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)


def refusal(machine: Machine, number: int, *arguments: int) -> int:
    return evaluate(build(machine), Call(number, machine.architecture, (*arguments, *[0] * (6 - len(arguments)))))


@pytest.mark.parametrize("name", MACHINES)
def test_the_numbers_are_those_of_the_kernels_headers(name: str) -> None:
    if not HEADERS[name].exists():
        pytest.skip("needs linux-libc-dev")
    numbers = {word: int(number) for word, number in re.findall(r"#define __NR_(\w+) (\d+)", HEADERS[name].read_text())}
    machine = MACHINES[name]
    looked_at = {word: getattr(machine, word) for word in ("socket", "socketpair", "setsockopt", "clone", "unshare")}
    for call, number in {**refused_calls(machine), **looked_at, "clone3": 435}.items():
        assert numbers.get(call, number) == number, call
    assert len(numbers.keys() & refused_calls(machine).keys()) > 30


@every_machine
def test_a_program_is_one_that_the_kernel_takes(machine: Machine) -> None:
    """BPF_MAXINSNS, jumps inside of the program, a return at its end."""
    for program in (build(machine), build(machine, notify=True)):
        assert len(program) <= 4096
        assert program[-1][0] == 0x06
        for at, (_, if_true, if_false, _) in enumerate(program):
            assert at + 1 + max(if_true, if_false) < len(program) or program[at][0] == 0x06
            assert max(if_true, if_false) < 256


@every_machine
def test_only_sockets_that_a_trainer_needs_can_be_made(machine: Machine) -> None:
    allowed = set()
    for family, kind in itertools.product(range(64), range(1, 7)):
        for protocol in (*range(23), 33, 41, 58, 132, 136, 255, 256, 262, 263, 0xFFFFFFFF):
            if refusal(machine, machine.socket, family, kind | CLOEXEC, protocol) == 0 and family != UNIX:
                allowed.add((family, kind, protocol))
    internet = {(f, k, p) for f in (INET, INET6) for k in (STREAM, DATAGRAM) for p in (0, 6, 17)}
    assert allowed == internet | {(NETLINK, kind, protocol) for kind in range(1, 7) for protocol in (0, 15, 20)}
    assert refusal(machine, machine.socket, UNIX, RAW, 0) == 0


@every_machine
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((43, STREAM, 0), errno.EAFNOSUPPORT),  # AF_SMC
        ((INET, STREAM, 256), errno.EPROTONOSUPPORT),  # IPPROTO_SMC
        ((INET6, STREAM, 262), errno.EPROTONOSUPPORT),  # IPPROTO_MPTCP
        ((INET, RAW, 0), errno.EPERM),
        ((NETLINK, RAW, 12), errno.EPROTONOSUPPORT),  # NETLINK_NETFILTER
        (((1 << 32) | 43, STREAM, 0), errno.EAFNOSUPPORT),  # the kernel takes the lower half
        (((1 << 32) | INET, STREAM, 0), 0),
    ],
)
def test_the_errno_is_that_of_a_kernel_without_it(machine: Machine, arguments: tuple[int, ...], expected: int) -> None:
    assert refusal(machine, machine.socket, *arguments) == expected
    assert refusal(machine, machine.socketpair, *arguments) == expected


@every_machine
def test_namespaces_are_refused_and_threads_and_processes_are_not(machine: Machine) -> None:
    thread, process = 0x3D0F00, 17  # pthread_create; fork: SIGCHLD
    for flags in (thread, process, 0x4111):  # vfork
        assert refusal(machine, machine.clone, flags) == 0
    for bit in (17, 25, 26, 27, 28, 29, 30):
        assert refusal(machine, machine.clone, 1 << bit | process) == errno.EPERM
        assert refusal(machine, machine.unshare, 1 << bit) == errno.EPERM
    assert refusal(machine, machine.unshare, 0x80) == errno.EPERM  # CLONE_NEWTIME; a signal number for clone
    assert refusal(machine, machine.unshare, 0x600) == 0  # CLONE_FS, CLONE_FILES


@every_machine
def test_a_tcp_socket_is_not_made_one_of_another_family(machine: Machine) -> None:
    assert refusal(machine, machine.setsockopt, 3, 6, 31) == errno.ENOPROTOOPT  # TCP_ULP
    for level, option in ((6, 1), (1, 31), (0, 31), (41, 26)):
        assert refusal(machine, machine.setsockopt, 3, level, option) == 0


@every_machine
def test_calls_of_another_kind_of_program_and_calls_newer_than_the_list_are_not_there(machine: Machine) -> None:
    for architecture in (I386, ARM, 0):
        assert evaluate(build(machine), Call(1, architecture, (0,) * 6)) == errno.ENOSYS
    for number in (463, 512, 547, 0x40000000 | 41, -1):
        assert refusal(machine, number) == errno.ENOSYS
    for name in ("io_uring_setup", "io_uring_enter", "io_uring_register"):
        assert refusal(machine, refused_calls(machine)[name]) == errno.ENOSYS
    assert refusal(machine, 435) == errno.ENOSYS  # clone3: libc takes clone


@every_machine
def test_all_other_calls_of_the_kernel_are_allowed(machine: Machine) -> None:
    refused = {number for number in range(463) if refusal(machine, number) != 0}
    looked_at = {machine.socket, machine.socketpair}  # all arguments are 0 here: AF_UNSPEC
    assert refused == set(refused_calls(machine).values()) | {435} | looked_at


@every_machine
def test_all_refusals_wait_for_the_agent_but_the_one_at_the_start_of_each_thread(machine: Machine) -> None:
    told, plain = build(machine, notify=True), build(machine)
    returns = {(a[3], b[3]) for a, b in zip(told, plain, strict=True) if a[0] == 0x06}
    assert {(ALLOW, ALLOW), (0x50000 | errno.ENOSYS,) * 2} <= returns
    assert {a for a, _ in returns} == {ALLOW, NOTIFY, 0x50000 | errno.ENOSYS}


@every_machine
def test_a_refused_call_has_words_of_its_kind(machine: Machine) -> None:
    def words(number: int, *arguments: int, architecture: int = machine.architecture) -> str:
        return describe(machine, Call(number, architecture, (*arguments, *[0] * (6 - len(arguments)))))

    assert words(machine.socket, 43, STREAM | CLOEXEC, 0) == "socket(family 43, type 1, protocol 0)"
    assert words(refused_calls(machine)["bpf"], 5) == "bpf"
    assert words(machine.clone, 1 << 28) == words(machine.unshare, 1 << 30) == "a new namespace"
    assert words(1, architecture=I386) == "a system call of a 32-bit program"
    assert words(470) == "system call 470"
