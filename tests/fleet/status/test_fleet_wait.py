"""How a run is followed, and why its fleet launches nothing."""

from __future__ import annotations

import io
import re
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from fleet_desk import BUCKET, Desk, HandClock, desk, moto_clients, wheels

from spotheal.agent.protocol.errors import ExitCode, WaitTimedOut
from spotheal.agent.protocol.names import LAYOUT, Phase, StoreUrl
from spotheal.fleet.ending import stopping
from spotheal.fleet.run.engine import FleetEvent
from spotheal.fleet.run.runs import open_run
from spotheal.fleet.run.session import Session
from spotheal.fleet.status import screen, unheard, wait
from spotheal.fleet.status.live import Lines, line
from spotheal.fleet.status.shortage import Shortage, shortage
from spotheal.fleet.verbs import ssh, status

__all__ = ["desk", "moto_clients", "wheels"]
NOW = datetime(2026, 11, 21, 12, 0, tzinfo=timezone.utc)


def event(minutes: float, kind: str, what: str, description: str = "") -> FleetEvent:
    return FleetEvent(NOW - timedelta(minutes=minutes), kind, what, description, "")


def refused(minutes: float) -> tuple[FleetEvent, ...]:
    """For want of capacity, as AWS writes it: one event a pool, then one that names nothing."""
    pools = [(kind, f"us-west-2{zone}") for kind in ("g5.xlarge", "g4dn.xlarge") for zone in "abc"]
    said, aside = "Error message: There is no Spot capacity available.", "launchSpecTemporarilyBlacklisted"
    return (
        *(event(minutes, "information", aside, f"{kind}, ami-1, Linux/UNIX, {zone}: {said}") for kind, zone in pools),
        event(minutes, "error", "allLaunchSpecsTemporarilyBlacklisted", "Several attempts have failed."),
    )  # fmt: skip


def why(*events: FleetEvent, **request: Any) -> Shortage:
    found = shortage(events, **request)
    assert found is not None
    return found


# ---------------------------------------------------------------------------------------------------- why nothing comes
def test_no_capacity_is_said_with_its_age_zones_and_what_to_try() -> None:
    found = why(
        event(30, "instanceChange", "launched"),
        *refused(12),
        *refused(1),
    )
    assert "no spot capacity since 12 min in 3 zones (us-west-2a, us-west-2b, us-west-2c)" == found.says(NOW)
    assert "--replace" in found.next_step
    assert ("g5.xlarge", "g4dn.xlarge") == found.types


def test_a_launch_ends_a_shortage() -> None:
    assert None is shortage((*refused(12), event(1, "instanceChange", "launched")))
    assert None is shortage(())


@pytest.mark.parametrize(
    ("kind", "what", "said", "cause", "step"),
    [
        ("information", "launchSpecUnusable",
         "g5.xlarge at 0.1, Linux/UNIX: Spot bid price is less than Spot market price", "price", "SpotPrice"),
        ("error", "spotInstanceCountLimitExceeded", "", "quota", "L-3819A6DF"),
        ("service-error", "spot-instance-count-limit-exceeded", "", "quota", "quota"),
        ("error", "iamFleetRoleInvalid", "The role cannot be assumed", "permission", "IamFleetRole"),
        ("information", "launchSpecTemporarilyBlacklisted",
         "g5.xlarge, ami-1, Linux/UNIX: The image id '[ami-1]' does not exist", "configuration", "ImageId"),
        ("error", "spotFleetRequestConfigurationInvalid", "subnet-1 does not exist", "configuration", "subnets"),
        ("information", "fleetProgressHalted", "", "configuration", "--replace"),
    ],
)  # fmt: skip
def test_each_cause_is_told_from_the_others_and_has_its_cure(
    kind: str, what: str, said: str, cause: str, step: str
) -> None:
    kind = {"service-error": "error"}.get(kind, kind)  # as `engine` translates it
    found = why(event(3, kind, what, said), types=("g5.xlarge",))
    assert cause == found.cause
    assert step in found.next_step
    assert found.says(NOW)


def test_what_only_informs_is_no_shortage() -> None:
    changes = (event(2, "fleetRequestChange", "active"), event(1, "instanceChange", "termination_notified"),
               event(1, "information", "registerWithLoadBalancersFailed"))  # fmt: skip
    assert None is shortage(changes)


def test_the_requests_zones_stand_in_where_the_event_names_none() -> None:
    found = why(event(3, "error", "x", "InsufficientInstanceCapacity"), zones=("us-west-2b",), types=("p5.48xlarge",))
    assert "no spot capacity since 3 min in 1 zone (us-west-2b)" == found.says(NOW)


# ------------------------------------------------------------------------------------------------------------- the line
def document(**changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "job": "cifar", "run": "R", "phase": "training", "reason": "", "ended": False, "store": "s3://b/cifar/R",
        "fleet": {"id": "sfr-1", "state": "active", "live": True}, "silent": False,
        "instance": {"id": "i-0a", "type": "g5.xlarge", "zone": "us-west-2a", "attempt": 1},
        "heartbeat_age_seconds": 3.0, "notice": None, "no_capacity": None, "space": None, "lost": [],
        "interruptions": 1, "zone_moves": 0,
        "progress": {"step": 120, "steps_total": 400, "epoch": 1, "loss": 0.31, "samples_per_second": 812.0,
                     "steps_per_second": 2.0, "seconds_left": 140.0},
        "checkpoint": {"step": 100, "time": None, "age_seconds": 61.0},
        "cost": {"dollars": 1.2, "dollars_per_hour": 0.42, "on_demand_dollars": 3.0, "saved_percent": 60.0,
                 "instances_without_price": 0},
        "launches": [{"instance": f"i-0{n:016x}", "time": "2026-11-21T11:01:00Z", "type": "g4dn.12xlarge",
                      "zone": "ap-southeast-2c", "state": None, "alive": False, "outcome": "interrupted",
                      "reason": "notice: terminate", "seconds": 7300.0, "saved_step": 123456} for n in range(3)],
        "volumes": [{"id": "vol-0123456789abcdef0", "zone": "ap-southeast-2c", "state": "available", "size_gib": 1000,
                     "role": "current", "term": "12"}],
        "lineage": [{"id": "vol-0123456789abcdef0", "zone": "ap-southeast-2c", "exists": True, "role": "current",
                     "terms": [12], "copied_from": "vol-1", "snapshot": "snap-1"},
                    {"id": "vol-1", "zone": "us-west-2a", "exists": False, "role": None, "terms": [1, 2],
                     "copied_from": None, "snapshot": None}],
    }  # fmt: skip
    return {**base, **changes}


def test_a_line_has_step_loss_rate_time_left_cost_instance_and_zone() -> None:
    said = "training on i-0a (us-west-2a), step 120 of 400, loss 0.31, 2 steps/s, 2 min left, about $1.20 so far"
    assert said == line(document())


def test_a_machine_that_is_gone_is_said_with_the_one_that_takes_over() -> None:
    gone = {"id": "i-0a", "type": "g5.xlarge", "zone": "us-west-2a", "attempt": 1, "alive": False}
    coming = {**document()["launches"][0], "instance": "i-0b", "zone": "us-west-2b", "alive": True, "outcome": None}
    said = document(instance=gone, launches=[coming])
    assert line(said).startswith("training, i-0a is gone, i-0b (us-west-2b) is starting, step 120 of 400")
    assert "i-0a  g5.xlarge us-west-2a, gone: the fleet replaces it" in screen.render(said, NOW)
    assert line({**said, "launches": []}).startswith("training, i-0a is gone, no instance yet")


def test_a_line_without_capacity_says_the_cause_in_the_place_of_an_instance() -> None:
    short = why(*refused(12)).to_document(NOW)
    said = line(document(phase="interrupted", no_capacity=short, progress=None, cost=None))
    assert said.startswith("interrupted, no spot capacity since 12 min in 3 zones")
    assert "try: wait, or add instance types" in said


def test_a_line_is_said_where_something_changes_and_every_half_minute() -> None:
    class Clock:
        seconds = 0.0

        def monotonic(self) -> float:
            return self.seconds

    clock, said = Clock(), list[str]()
    lines = Lines(said.append, clock)  # type: ignore[arg-type]
    for second in range(0, 60, 5):
        clock.seconds = float(second)
        lines.show(document(phase="healing" if second < 10 else "training"), NOW)
    assert ["healing", "training", "training"] == [one.split(" ")[0] for one in said]


# ----------------------------------------------------------------------------------------------------------- the screen
@pytest.mark.parametrize("width", [80, 100, 120])
def test_no_row_of_the_screen_is_wider_than_the_terminal(width: int) -> None:
    short = why(*refused(12)).to_document(NOW)
    text = screen.render(document(no_capacity=short), NOW, width=width)
    assert max(map(len, text.splitlines())) <= width
    assert all(part in text for part in ("vol-0123456789abcdef0", "i-00000000000000000", "123456", "2 h 01 min"))


def test_a_wide_screen_says_why_instances_ended_and_where_volumes_came_from() -> None:
    text = screen.render(document(), NOW, width=130)
    assert "notice: terminate" in text and "g4dn.12xlarge" in text
    (current,) = [row for row in text.splitlines() if row.startswith("vol-0123")]
    assert current.endswith("vol-1")
    (gone,) = [row for row in text.splitlines() if row.startswith("vol-1 ")]
    assert "deleted" in gone and "1,2" in gone


def test_without_colour_there_is_no_escape_and_with_it_there_is() -> None:
    assert "\x1b" not in screen.render(document(), NOW)
    assert "\x1b[" in screen.render(document(), NOW, colour=True)


def test_what_a_run_says_is_neither_markup_nor_an_escape() -> None:
    hostile = document(phase="[red]x[/red]\x1b[2J", reason="[link=http://x]\x1b]0;t\x07")
    for colour in (True, False):
        text = screen.render(hostile, NOW, colour=colour)
        assert "[red]x[/red]" in text
        assert "\x1b[2J" not in text and "\x1b]" not in text


def test_a_bar_for_a_terminal_without_utf_8_is_ascii() -> None:
    bar = next(row for row in screen.render(document(), NOW, ascii=True).splitlines() if "step 120" in row)
    assert bar.isascii() and "#########-" in bar


def test_the_cost_is_shown_beside_on_demand() -> None:
    assert "about $1.20 so far, $0.42 an hour now; 60 % below on-demand" in screen.render(document(), NOW)


def test_no_color_and_a_pipe_take_the_colours_away(monkeypatch: pytest.MonkeyPatch) -> None:
    from spotheal.fleet.terminal import console

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert console.colours(Terminal())
    assert not console.colours(io.StringIO())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not console.colours(Terminal())
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert not console.colours(Terminal())


# ------------------------------------------------------------------------------------------------------------ the verbs
def test_watch_ends_with_the_run_in_0_or_7(desk: Desk) -> None:
    done = desk.request()
    desk.end(done["run"], Phase.DONE)
    assert 0 == desk.run("status", "--watch").exit_code
    store = desk.store(done["run"])
    store.write_status({**(store.read_status() or {}), "phase": "failed", "reason": "no luck\x1b[2J\n  | the tail"})
    result = desk.run("status", "--watch")
    assert ExitCode.JOB_FAILED == result.exit_code
    assert "the run ended: failed: no luck\n  | the tail" in result.stderr  # it steers no terminal


def test_ctrl_c_leaves_the_run_going_on_and_says_so(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    desk.request()

    def interrupted(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("spotheal.fleet.status.wait.wait", interrupted)
    for arguments in (["status", "--watch"], ["request", "--yes", "--wait"]):
        result = desk.run(*arguments)
        assert ExitCode.INTERRUPTED == result.exit_code
        assert "job cifar goes on" in result.stderr
    assert 1 == len(desk.live_fleets())


def test_a_fleet_without_capacity_says_so_in_status_and_its_json(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spotheal.agent.protocol.clock.SystemClock", lambda: desk.account.clock)
    desk.account.rules.no_capacity((), 3600)
    desk.request()
    desk.pass_time(120)
    shortage = desk.good("status")["no_capacity"]
    assert ("capacity", ["us-west-2a", "us-west-2b"]) == (shortage["cause"], shortage["zones"])
    assert "no spot capacity since" in desk.run("status").stdout


def test_before_an_instance_tells_anything_the_wait_says_which_one_starts(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unheard, "UNHEARD_SECONDS", float("inf"))  # the desk's clock is not this machine's
    desk.request()
    assert line(desk.good("status")) == "requested, no instance yet"
    desk.pass_time(60)
    assert re.fullmatch(r"requested, i-\w+ \(us-west-2[ab]\) is starting", line(desk.good("status")))


def test_a_machine_whose_agent_never_starts_is_named_with_its_consoles_reason(desk: Desk) -> None:
    """Healthy to AWS, it is never replaced: status promised just that, and nothing said why for as long as it cost."""
    desk.request()
    desk.pass_time(60)
    (instance,) = desk.account.rules.instances()
    desk.account.rules.consoles[instance.id] = lambda: CONSOLE
    document = desk.good("status")
    assert document["unheard"]["says"] == "bootstrap.py died (SyntaxError: invalid syntax)"
    assert "console says: bootstrap.py died (SyntaxError: invalid syntax), `fleetctl cancel cifar`" in line(document)
    assert "`fleetctl cancel cifar` ends it" in desk.run("status").output
    desk.store(document["run"]).count_launch(instance.id, {"outcome": "booting", "starts": 1})
    assert desk.good("status")["unheard"] is None


CONSOLE = "SyntaxError: invalid syntax\nspotheal: this machine cannot start the job: bootstrap.py died\n"


def test_all_jobs_are_listed_with_a_number_of_calls_that_does_not_grow(desk: Desk) -> None:
    desk.request()
    desk.pass_time(60)
    (first,) = desk.good("status", "--all")["jobs"]
    assert ("cifar", "requested", 1) == (first["job"], first["phase"], len(first["instances"]))
    for number in range(30):
        key = f"job-{number:02d}/01J8Z3T2QK5V9W7X6Y5Z4A3B2C/{LAYOUT.status}"
        desk.s3.put_object(Bucket=BUCKET, Key=key, Body=b'{"phase": "done"}')
    counted = []
    for more in (0, 40):
        for number in range(more):
            key = f"more-{number:03d}/01J8Z3T2QK5V9W7X6Y5Z4A3B2C/{LAYOUT.status}"
            desk.s3.put_object(Bucket=BUCKET, Key=key, Body=b"{}")
        desk.account.calls = 0
        found = desk.good("status", "--all")
        counted.append(desk.account.calls)
        assert "cifar" == found["jobs"][0]["job"]  # those at work come first
    assert counted[0] == counted[1]
    assert found["jobs_left_out"] == 71 - len(found["jobs"])
    assert status.EXAMPLE


def test_all_is_about_no_single_job(desk: Desk) -> None:
    assert ExitCode.USAGE == desk.run("status", "cifar", "--all").exit_code


@pytest.mark.parametrize("waits", ["run", "ssh", "gone"])
def test_a_wait_ends_at_its_timeout_and_no_look_later(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, waits: str
) -> None:
    """The next look was 5 s away, and the wait ended only then."""
    run = open_run(desk.s3, StoreUrl(BUCKET, ""), "cifar", desk.request()["run"])
    clock, session = HandClock(), Session("us-west-2")
    monkeypatch.setattr("spotheal.agent.protocol.clock.SystemClock", lambda: clock)
    if waits == "gone":
        desk.pass_time(60)
    with pytest.raises(WaitTimedOut):
        match waits:
            case "run":
                wait.wait(session, run, clock, Lines(lambda _: None, clock), 7.0)
            case "ssh":
                ssh._await_host(session, run, 7.0)
            case "gone":
                stopping.await_gone(session, run, clock, lambda _: None, 7.0)
    assert 7.0 == clock.seconds
