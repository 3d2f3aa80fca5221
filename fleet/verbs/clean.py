"""`fleetctl clean`: what finished jobs have left, with dollars a month."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from spotheal.agent.protocol.errors import ConfigError
from spotheal.fleet.terminal.console import ask, is_json, open_session, say, verb
from spotheal.fleet.terminal.options import JobFile, Output, Profile, Region, Yes

if TYPE_CHECKING:
    from spotheal.agent.protocol.errors import SpothealError
    from spotheal.fleet.ending.clean import CleanPlan, Thing, Verdict

EXAMPLE = "fleetctl clean resnet50"
_TEMPLATE = "launch template"


@verb
def clean(
    job: Annotated[str, typer.Argument(metavar="JOB", help="Only of this job; else of all jobs.")] = "",
    unfinished: Annotated[
        bool, typer.Option("--unfinished", help="Give up runs that ended without being done, checkpoints and all.")
    ] = False,
    store: Annotated[
        bool, typer.Option("--store", help="With JOB: its prefix in the store too, logs and results included.")
    ] = False,
    everything: Annotated[
        bool, typer.Option("--all", help="If no job is left: the security group of fleetctl, too.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show it and delete nothing.")] = False,
    yes: Yes = False,
    job_file: JobFile = None,
    region: Region = "",
    profile: Profile = "",
    output: Output = "",
) -> None:
    """Delete what finished jobs have left, on one yes.

    Volumes, snapshots and launch templates, with dollars a month; of a run that is done only when its results are in
    the store. A job at work is never touched, nor what this store does not know. Says what remains.
    """
    from spotheal.agent.protocol.clock import SystemClock
    from spotheal.fleet.ending import cleaning, leftovers
    from spotheal.fleet.run import runs
    from spotheal.fleet.verbs import show
    from spotheal.fleet.verbs.target import find_root

    as_json = is_json(output)
    if store and not job:
        raise ConfigError("--store deletes results: it needs the job's name", next_step="fleetctl clean JOB --store")
    if job:
        runs.check_job_name(job)
    session, root = find_root(open_session(region, profile), job_file)
    request = cleaning.CleanRequest(root, job, unfinished, store)
    plan = cleaning.make_plan(session, request)
    if job and not plan.verdicts:
        cleaning.check_known(session, root, job)
    extra = leftovers.find(session) if everything else ()
    if not as_json or not yes:
        say(_text(plan, [leftover.says() for leftover in extra]))
    doing = bool(plan.deletes or extra) and not dry_run
    deleted: list[Thing] = []
    failed: list[tuple[Thing, SpothealError]] = []
    if doing:
        count = len(plan.deletes) + len(extra)
        ask(f"Delete these {count}? It cannot be undone." if count > 1 else "Delete it? It cannot be undone.", yes)
        deleted, failed = cleaning.carry_out(session, request, plan, SystemClock(), say)
        leftovers.delete(session, extra, say)
    if as_json:
        print(show.as_json(cleaning.document(plan, deleted, failed) | {"also": [leftover.id for leftover in extra]}))
    elif doing:
        freed = sum(float(thing.month) for thing in deleted)
        remains = f"${float(plan.kept_month):.2f} a month remains"
        print(f"deleted {len(deleted) + len(extra)}: ${freed:.2f} a month less; {remains}")
        say(f"{root} stays" + (", with the files of other jobs" if store else
                               ": results and logs; `fleetctl clean JOB --store` deletes a job's"))  # fmt: skip
    if failed:
        kind = type(failed[0][1])
        raise kind(f"{len(failed)} of {len(plan.deletes)} could not be deleted", next_step="the same command again")


def _text(plan: CleanPlan, extra: list[str]) -> str:
    from spotheal.fleet.run.table import table

    parts = []
    if plan.deletes:
        rows = _rows([verdict for verdict in plan.verdicts if verdict.deletes])
        parts.append("to delete:\n" + table(("KIND", "ID", "JOB", "SIZE", "$/MONTH", "WHY"), rows))
    if extra:
        parts.append("to delete:\n" + "\n".join(f"  {line}" for line in extra))
    if plan.keeps:
        rows = _rows(plan.keeps)
        parts.append("remains:\n" + table(("KIND", "ID", "JOB", "SIZE", "$/MONTH", "WHY"), rows))
    if not plan.deletes and not extra:
        parts.append("nothing to delete")
    else:
        at_most = any(thing.kind == "snapshot" for thing in plan.deletes)
        limit_note = " at most (a snapshot costs what it holds)" if at_most else ""
        parts.append(
            f"saves ${float(plan.month):.2f} a month{limit_note}; ${float(plan.kept_month):.2f} a month remains"
        )
    return "\n\n".join(parts)


def _rows(verdicts: Sequence[Verdict]) -> list[tuple[str | None, ...]]:
    """A row for each thing; launch templates, a dozen a run and free, are counted by job and reason."""
    templates = Counter(
        (verdict.thing.owner[0], verdict.reason) for verdict in verdicts if verdict.thing.kind == _TEMPLATE
    )
    rows = [_cells(verdict) for verdict in verdicts if verdict.thing.kind != _TEMPLATE]
    rows += [(_TEMPLATE, f"{count} of them", job, None, None, reason) for (job, reason), count in templates.items()]
    return rows


def _cells(verdict: Verdict) -> tuple[str | None, ...]:
    thing = verdict.thing
    size = f"{thing.size_gib} GiB" if thing.size_gib else None
    month = f"{float(thing.month):.2f}" if thing.month else None
    return thing.kind, thing.id, thing.owner[0], size, month, verdict.reason
