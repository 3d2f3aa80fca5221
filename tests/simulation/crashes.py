"""The life of a run, with a crash before or after each of its calls and host actions, and with each pair of crashes.

`python tests/simulation/crashes.py` does all of it and prints figures; `singles 10` each tenth single crash, `pairs 1
"notice, other zone" "limit"` those of two stories, and `"notice, other zone" agent 31:after,57:after` tells one. A
crash takes the agent's process or the whole machine.
"""

from __future__ import annotations

import contextlib
import io
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from multiprocessing import Pool
from pathlib import Path

if __name__ == "__main__":
    root = Path(__file__).resolve().parents[2]
    sys.path[:0] = [str(root / ".ci/import_path"), str(root / "tests/simulation")]

from histories import leaves_nothing_behind
from simulated_life import LifeRegion, asking
from simulated_world import BOOT_SECONDS, Broken, Machine

from spotheal.agent.protocol.ends import LAUNCHES_WITHOUT_PROGRESS_MAX

A, B, D = "us-west-2a", "us-west-2b", "us-west-2d"
END_SECONDS_MAX = 2 * 3600.0
KINDS = ("agent", "machine")
# After all other calls the world is as it was before them, so a crash there is the crash after the one before.
READS = ("get_object", "list_objects_v2", "describe_volumes", "describe_snapshots", "describe_instances")
Crash = dict[int, str]
Case = tuple[str, str, Crash]


def first_run(region: LifeRegion, zone: str) -> None:
    region.request(A, launch_in=[zone, A])


def adoption(region: LifeRegion, zone: str) -> None:
    region.request(A, launch_in=[zone, A], filesystem="xfs", steps=(1, 2))


def succession(region: LifeRegion, zone: str, befalls: str) -> None:
    region.at_step[3] = getattr(region, befalls)
    region.request(A, launch_in=[A, zone, A])


def withdrawn(region: LifeRegion) -> None:
    region.at_step[3] = region.interrupt
    region.at_step[4] = region.withdraw  # what is saved at the notice
    region.request(A, launch_in=[A, B, A])


def stopped(region: LifeRegion) -> None:
    region.at_step[3] = partial(region.interrupt, action="stop")
    region.request(A, launch_in=[A, B, A])


def busy(region: LifeRegion) -> None:
    def notice(machine: object) -> None:
        machine.shell = "stuck"  # type: ignore[attr-defined]
        region.interrupt(machine)  # type: ignore[arg-type]

    region.at_step[3] = notice
    region.request(A, launch_in=[A, B, A])


def fruitless(region: LifeRegion) -> None:
    """Five machines break down before they gain a checkpoint; the next one parks the run."""

    def doom(machine: Machine) -> None:
        if len(region.machines) <= LAUNCHES_WITHOUT_PROGRESS_MAX:
            region.time.at(BOOT_SECONDS + 5.0, lambda: region.break_down(machine) if machine.alive else None)

    region.on_machine = doom
    region.request(A, launch_in=[A] * 9)


def barred(region: LifeRegion) -> None:
    """The fleet has nothing but a type whose GPU is too small."""
    region.config, region.types = asking(24), {"g4dn.xlarge": (A, B)}
    region.request(A, launch_in=[A, B] * 9)


STORIES: dict[str, tuple[Callable[[LifeRegion], None], tuple[str, int]]] = {
    "first run, same zone": (partial(first_run, zone=A), ("done", 3)),
    "first run, other zone": (partial(first_run, zone=B), ("done", 3)),
    "adoption, same zone": (partial(adoption, zone=A), ("done", 5)),
    "adoption, other zone": (partial(adoption, zone=B), ("done", 5)),
    "notice, same zone": (partial(succession, zone=A, befalls="interrupt"), ("done", 7)),
    "notice, other zone": (partial(succession, zone=B, befalls="interrupt"), ("done", 7)),
    "kill, same zone": (partial(succession, zone=A, befalls="kill"), ("done", 6)),
    "kill, other zone": (partial(succession, zone=B, befalls="kill"), ("done", 6)),
    "notice withdrawn": (withdrawn, ("done", 8)),
    "notice to stop": (stopped, ("done", 7)),
    "notice, mount stays busy": (busy, ("done", 7)),
    "failed": (partial(first_run, zone=A), ("failed", 3)),
    "limit": (partial(first_run, zone=A), ("limit", 3)),
    "set-up failed": (partial(first_run, zone=A), ("set-up failed", 0)),
    "parked, five launches": (fruitless, ("done", 3)),  # done, where a crash kept one of them from being counted
    "parked, barred types": (barred, ("done", 10**6)),
}


def tell(name: str, kind: str = "agent", crash: Crash | None = None) -> list[str]:
    """Run the story to its end; the names of its calls. What breaks is raised."""
    return [call for _, call in tell_in(LifeRegion, name, kind, crash).calls]


def tell_in(world: type[LifeRegion], name: str, kind: str = "agent", crash: Crash | None = None) -> LifeRegion:
    story, ending = STORIES[name]
    with world(zones=(A, B, D), crash=crash, crash_kind=kind, snapshot_seconds=90.0, ending=ending) as region:
        region.add_another_job(D)
        story(region)
        if not region.time.run(END_SECONDS_MAX, region.is_over):
            raise Broken(f"the run has not come to its end in {END_SECONDS_MAX / 3600:.0f} hours")
        leaves_nothing_behind(region)
        return region


def singles(name: str, kind: str) -> Iterator[Case]:
    for number in range(len(tell(name))):
        yield name, kind, {number: "before"}
        yield name, kind, {number: "after"}


def pairs(name: str, kind: str) -> Iterator[Case]:
    """Two crashes, after calls that change something; the second in the life that the first has made."""
    for first, call in enumerate(tell(name)):
        if call not in READS:
            after_first = tell(name, kind, {first: "after"})
            for second in range(first + 1, len(after_first)):
                if after_first[second] not in READS:
                    yield name, kind, {first: "after", second: "after"}


def some_pairs(name: str, kind: str, count: int, seed: int) -> Iterator[Case]:
    dice = random.Random(f"{name} {kind} {seed}")
    calls = tell(name)
    for _ in range(count):
        first = dice.choice([number for number, call in enumerate(calls) if call not in READS])
        after = [n for n, call in enumerate(tell(name, kind, {first: "after"})) if call not in READS and n > first]
        if after:
            yield name, kind, {first: "after", dice.choice(after): "after"}


def fault_of(case: Case) -> str:
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            tell(*case)
    except Exception as fault:  # noqa: BLE001 - whatever broke, the others are told
        return f"{type(fault).__name__}: {fault}"
    return ""


def main(arguments: Sequence[str]) -> int:
    if arguments and arguments[0] in STORIES:
        name, kind, text = arguments
        crash = {int(number): fate for number, fate in (each.split(":") for each in text.split(","))}
        print(len(tell(name, kind, crash)), "calls")
        return 0
    what = {"singles": singles, "pairs": pairs}
    kinds = [arguments[0]] if arguments else list(what)
    every = int(arguments[1]) if len(arguments) > 1 else 1
    stories = arguments[2:] or list(STORIES)
    broken = 0
    with Pool(2) as pool:
        for count in kinds:
            began = time.monotonic()
            told: Counter[str] = Counter()
            for name in stories:
                for kind in KINDS:
                    cases = list(what[count](name, kind))[::every]
                    for case, fault in zip(cases, pool.imap(fault_of, cases, chunksize=8), strict=True):
                        told["cases"] += 1
                        if fault:
                            told["broken"] += 1
                            crash = ",".join(f"{number}:{fate}" for number, fate in case[2].items())
                            print(f'"{name}" {kind} {crash}: {fault}', flush=True)
                    so_far = f"{told['cases']} so far, {told['broken']} broken, {time.monotonic() - began:.0f} s"
                    print(f"{count} of {name}, {kind}: {len(cases)}; {so_far}", file=sys.stderr, flush=True)
            took = time.monotonic() - began
            print(
                f"{count}: {told['cases']} in {len(stories)} stories, agent and machine; {told['broken']} broken;"
                f" {took:.0f} s"
            )
            broken += told["broken"]
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
