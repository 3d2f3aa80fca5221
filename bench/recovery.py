"""How long a run stands still: `python bench/recovery.py [--output json]`. The real healing on a virtual clock.

A machine trains and is taken away, with AWS's notice or without; the fleet replaces it, in the same zone or another.
For each case, each time that a snapshot takes and several moments of the notice, the time from the start of user data
to the start of the trainer, against
  needed   what AWS itself needs for it: operations that no design can do without, in a row (`needed_seconds`)
  article  the user data script of the article, its commands one by one on the same rules (bench/article_way.py)
What is not AWS's (installing the agent, the clone, loading a model) takes no time here, each call a tenth of a second.
Exit 1 where a figure is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import statistics
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / part) for part in (".ci/import_path", "tests/simulation", "bench")]

import noticed_world  # noqa: E402 - what they are is found by the path above
from article_way import ArticleRegion  # noqa: E402
from noticed_world import NoticedRegion  # noqa: E402
from simulated_world import Machine, Region  # noqa: E402

from spotheal.fleet.rehearsal.ec2.rulebook import Latencies  # noqa: E402

A, B = "us-west-2a", "us-west-2b"
LATENCIES = Latencies(create_volume=5.0, attach=3.0, device_node=0.0, detach=3.0, replacement=60.0, notice=120.0)
SNAPSHOT_SECONDS = (0.0, 90.0, 600.0)
LAG_SECONDS = 30.0
OVER_SECONDS_MAX = 5.0
HANDOVER_SECONDS_MAX = 10.0
MARGIN_SECONDS_MIN = 20.0
CALLS_MAX = 15
POLL_SECONDS_MIN = 5.0
LOOKS_BESIDE_POLLS = 5  # before the wait and after it
SOME_TIME = 4 * 3600.0


@dataclass(frozen=True)
class Case:
    zone: str  # same, other
    end: str  # notice, kill
    snapshot_seconds: float

    def __str__(self) -> str:
        return f"{self.zone} zone, {self.end}, snapshot {self.snapshot_seconds:.0f} s"


@dataclass
class Run:
    """One history. Moments are seconds since the notice or the kill."""

    user_data: float = 0.0
    trainer: float = 0.0
    needed: float = 0.0
    lost_steps: int = 0
    handover: float | None = None  # from the notice to the request for the handover
    after_trainer_end: float | None = None
    margin: float | None = None  # from that request to AWS's time
    calls: list[str] = field(default_factory=list)

    @property
    def took(self) -> float:
        return self.trainer - self.user_data

    @property
    def over(self) -> float:
        return self.took - self.needed


def needed_seconds(case: Case, user_data: float, snapshot_at: float | None) -> tuple[float, list[str]]:
    """The critical path of AWS's operations from the start of user data, and its reasons.

    `snapshot_at`: when a writer could first ask for the handover: when its trainer had ended, after a notice.
    Not on the path: detaching (the old machine is gone, or has let go, before the new one boots: replacement and boot
    take 150 s of which AWS's notice is 120); tags, claims and describes, which take no time of AWS's in the list.
    """
    reasons = [f"attach {LATENCIES.attach:.0f} s: a disk must be there before it can be mounted"]
    seconds = LATENCIES.attach
    if case.zone == "other":
        seconds += LATENCIES.create_volume
        reasons.append(f"create volume {LATENCIES.create_volume:.0f} s: volumes do not leave their zone")
        begun = user_data if snapshot_at is None else snapshot_at
        left = max(0.0, begun + case.snapshot_seconds - user_data)
        seconds += left
        why = (
            "from the trainer's end, before that it still writes"
            if snapshot_at is not None
            else ("from the start of user data: nobody was there to take it earlier")
        )
        reasons.append(f"snapshot, {left:.0f} s of its {case.snapshot_seconds:.0f} left: {why}")
    return seconds, reasons


# ----------------------------------------------------------------------------------------------------------- histories
def ours(case: Case, phase: float = 0.0, lag: float = 0.0, seed: int = 0, others: int = 0, trainer: str = "") -> Run:
    """One history of the agent. `phase` shifts the notice against everything that is polled."""
    with NoticedRegion(seed=seed, snapshot_seconds=case.snapshot_seconds, latencies=LATENCIES) as region:
        region.trainer = trainer or noticed_world.IGNORES
        _foreign_volumes(region, others)
        region.make_volume(A)
        first = _trains(region, region.launch(A))
        region.faults.stale_seconds_max = lag
        run = Run()
        began = _end(region, first, case, phase)
        second = _replaced(region, case, began)
        _trains(region, second)
        run.trainer = region.time.seconds - began
        run.user_data = region.booted[second.id] - began
        run.lost_steps = region.acknowledged - second.trained_from[-1]
        host = ("mount", "umount", "mkfs")
        run.calls = [name for _, who, name in region.timed if who == second.id and name not in host]
        ended = region.ended.get(first.id)
        run.needed, _ = needed_seconds(case, run.user_data, None if ended is None else ended - began)
        if ended is not None:
            asked = next(m for m, who, name in region.timed if who == first.id and name == "create_snapshot")
            run.handover, run.after_trainer_end = asked - began, asked - ended
            run.margin = began + LATENCIES.notice - asked
        return run


def article(case: Case, phase: float = 0.0) -> dict[str, Any]:
    """The same history by the article's script."""
    with ArticleRegion(snapshot_seconds=case.snapshot_seconds, latencies=LATENCIES) as region:
        region.make_volume(A, filesystem="xfs", steps=(0,))
        tag = [{"Key": "Name", "Value": "DL-datasets-checkpoints"}]
        region.rules.call("CreateTags", {"Resources": [volume.id for volume in region.rules.volumes()], "Tags": tag})
        region.time.run(region.time.seconds + LATENCIES.create_volume)
        first = _trains(region, region.launch(A))
        began = _end(region, first, case, phase)
        second = _replaced(region, case, began)
        _trains(region, second)
        outcome = region.outcomes[second.id]
        assert outcome.trainer_at is not None
        return {
            "seconds": outcome.trainer_at - outcome.user_data_at,
            "calls": outcome.calls,
            "failed": outcome.failed,
            "lost_steps": region.acknowledged - (outcome.resumed_step or 0),
            "from_nothing": outcome.resumed_step is None,
        }


def _foreign_volumes(region: Region, count: int) -> None:
    for number in range(count):
        tags = [{"Key": "spotheal:run", "Value": f"OTHER{number}"}, {"Key": "Name", "Value": f"other-{number}"}]
        specification = [{"ResourceType": "volume", "Tags": tags}]
        request = {"AvailabilityZone": A, "Size": 1, "VolumeType": "gp3", "TagSpecifications": specification}
        region.rules.call("CreateVolume", request)


def _trains(region: Region, machine: Machine) -> Machine:
    if not region.time.run(region.time.seconds + SOME_TIME, lambda: bool(machine.trained_from)):
        raise AssertionError(f"{machine.id} does not train")
    return machine


def _end(region: Region, machine: Machine, case: Case, phase: float) -> float:
    """The notice or the kill, after a while of training; the moment."""
    region.time.run(region.time.seconds + 60.0 + phase)
    (region.interrupt if case.end == "notice" else region.kill)(machine)
    return region.time.seconds


def _replaced(region: Region, case: Case, began: float) -> Machine:
    """The fleet's next instance: begun at the notice or the kill, for at either the spot request is closed."""
    launched: list[Machine] = []
    zone = A if case.zone == "same" else B
    region.time.at(LATENCIES.replacement, lambda: launched.append(region.launch(zone)))
    region.time.run(began + LATENCIES.replacement, lambda: bool(launched))
    return launched[0]


# -------------------------------------------------------------------------------------------------------------- figures
def cases() -> Iterator[Case]:
    for zone in ("same", "other"):
        for end in ("notice", "kill"):
            for seconds in SNAPSHOT_SECONDS:
                yield Case(zone, end, seconds)


PHASES = (0.0, 0.9, 1.8, 2.7, 3.6, 4.5)


def stale_looks(case: Case) -> int:
    """How often a describe has to show something new: the term on the volume, read back before the mount; in another
    zone (where the copy is made with its term) the completed snapshot, and the copy that can be attached."""
    return 1 if case.zone == "same" else 2


def measure(case: Case) -> dict[str, Any]:
    runs = [ours(case, phase) for phase in PHASES]
    worst = max(runs, key=lambda run: run.over)
    stale = [ours(case, phase=seed * 0.37, lag=LAG_SECONDS, seed=seed) for seed in range(10)]
    theirs = article(case)
    faults = []
    if worst.over > OVER_SECONDS_MAX:
        faults.append(f"{worst.over:.1f} s over what AWS needs")
    over_stale = max(run.over for run in stale)
    if over_stale > OVER_SECONDS_MAX + LAG_SECONDS * stale_looks(case):
        faults.append(f"{over_stale:.1f} s over what AWS needs where describes are stale")
    if any(run.calls.count("describe_snapshots") > run.took / POLL_SECONDS_MIN + LOOKS_BESIDE_POLLS for run in runs):
        faults.append("polled more often than every 5 s")
    if any(run.lost_steps for run in (*runs, *stale)):
        faults.append("steps were lost")
    return {
        "case": str(case),
        **asdict(case),
        "user_data_after": worst.user_data,
        "needed": worst.needed,
        "why": needed_seconds(case, worst.user_data, None)[1],
        "ours": worst.took,
        "over": worst.over,
        "over_median": statistics.median(run.over for run in runs),
        "over_stale_median": statistics.median(run.over for run in stale),
        "over_stale_max": over_stale,
        "over_stale_limit": OVER_SECONDS_MAX + LAG_SECONDS * stale_looks(case),
        "calls": len(worst.calls),
        "looks_at_snapshots": worst.calls.count("describe_snapshots"),
        "article": theirs,
        "faults": faults,
    }


def measure_handover() -> list[dict[str, Any]]:
    found = []
    case = Case("same", "notice", 90.0)
    for trainer in noticed_world.TRAINERS:
        runs = [ours(case, phase, trainer=trainer) for phase in PHASES]
        after = max(run.after_trainer_end or 0.0 for run in runs)
        margin = min(run.margin or 0.0 for run in runs)
        faults = []
        if after > HANDOVER_SECONDS_MAX:
            faults.append(f"{after:.1f} s after the trainer's end")
        if margin < MARGIN_SECONDS_MIN:
            faults.append(f"only {margin:.1f} s before AWS's time")
        asked = max(run.handover or 0.0 for run in runs)
        found.append({"trainer": trainer, "asked": asked, "after_end": after, "margin": margin, "faults": faults})
    return found


def measure_calls() -> dict[str, Any]:
    found: dict[str, Any] = {"faults": []}
    for end in ("notice", "kill"):
        case = Case("same", end, 90.0)
        few, many = ours(case), ours(case, others=2000)
        ec2 = [name for name in few.calls if not name.endswith("_object") and name != "list_objects_v2"]
        if len(few.calls) > CALLS_MAX:
            found["faults"].append(f"{case}: {len(few.calls)} calls: {few.calls}")
        if few.calls != many.calls:
            found["faults"].append(f"{case}: {len(many.calls)} calls beside 2,000 volumes, else {len(few.calls)}")
        found[end] = {"calls": len(few.calls), "of_ec2": len(ec2), "with_2000_volumes": len(many.calls)}
    return found


def report(results: list[dict[str, Any]], handovers: list[dict[str, Any]], calls: dict[str, Any]) -> None:
    print("From the start of user data to the trainer's start, seconds; the worst of the notice's moments")
    head = f"{'case':<35}{'needed':>8}{'ours':>8}{'over':>6}{'stale: over':>13}{'article':>9}{'ratio':>7}"
    print(f"{head}  calls  the article loses")
    for one in results:
        theirs = one["article"]
        lost = "all: it trains from nothing" if theirs["from_nothing"] else f"{theirs['lost_steps']} steps"
        stale = f"{one['over_stale_median']:.0f}, {one['over_stale_max']:.0f} < {one['over_stale_limit']:.0f}"
        print(
            f"{one['case']:<35}{one['needed']:>8.1f}{one['ours']:>8.1f}{one['over']:>6.1f}{stale:>13}"
            f"{theirs['seconds']:>9.1f}{theirs['seconds'] / one['ours']:>7.2f}{one['calls']:>7}  {lost}"
        )
    print("stale: describes up to 30 s old; median and maximum over 10 seeds, and the limit: 5 s and 30 s for each")
    print("describe that has to show something new (1 in the same zone, 2 in another). calls: with all polls.")
    print("\nFrom AWS's notice to the handover's request, seconds (the article takes no handover)")
    print(f"{'trainer':<46}{'after notice':>14}{'after its end':>15}{'before AWS ends it':>20}")
    for each in handovers:
        print(f"{each['trainer']:<46}{each['asked']:>14.1f}{each['after_end']:>15.1f}{each['margin']:>20.1f}")
    print()
    for end in ("notice", "kill"):
        one = calls[end]
        print(
            f"Calls of healing in the same zone after a {end}: {one['calls']}, {one['of_ec2']} of them EC2's;"
            f" beside 2,000 volumes of other runs: {one['with_2000_volumes']}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", choices=["table", "json"], default="table")
    options = parser.parse_args()
    with contextlib.redirect_stdout(io.StringIO()):
        results = [measure(case) for case in cases()]
        handovers, calls = measure_handover(), measure_calls()
    faults = [f"{one['case']}: {fault}" for one in results for fault in one["faults"]]
    faults += [f"{one['trainer']}: {fault}" for one in handovers for fault in one["faults"]] + calls["faults"]
    if options.output == "json":
        print(json.dumps({"cases": results, "handovers": handovers, "calls": calls, "missed": faults}, indent=1))
    else:
        report(results, handovers, calls)
        for fault in faults:
            print(f"missed: {fault}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
