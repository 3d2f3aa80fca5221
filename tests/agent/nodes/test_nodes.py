"""Several machines of one run: where they meet next, who says the end, and what is refused before anything costs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from nodes_world import NOW, Run

from spotheal.agent.life.boot import RunOver
from spotheal.agent.nodes.plan import ClaimTerm, End, Join, Machine, Place, Seen, Wait, decide
from spotheal.agent.nodes.storage import device_of
from spotheal.agent.protocol.contract import EXIT_RANKS_LOST
from spotheal.agent.protocol.documents import Claim
from spotheal.agent.protocol.ends import End as RunEnd
from spotheal.agent.protocol.errors import ConfigError, SetupFailed
from spotheal.agent.protocol.job import parse_job
from spotheal.agent.protocol.names import LAYOUT, Phase
from spotheal.agent.trainer.attempts import RANKS_LOST_MAX, AttemptEnd, GiveUp, StartAgain, Tally
from spotheal.agent.trainer.attempts import decide as what_follows
from spotheal.agent.trainer.ranks import world_of
from spotheal.fleet.account import between
from spotheal.fleet.run import machines

ME = Machine("i-me", None, False, 0.0)
A = Machine("i-a", 3, False, 5.0, "running")
PLACE = Place(3, "i-a", "10.0.0.1", 4000)
MET = Seen("i-me", (ME, A), 2, 3, "i-a", 400.0, PLACE)  # a rendezvous that goes on


# ----------------------------------------------------------------------------------------------------- what comes next
def test_a_machine_joins_the_rendezvous_that_there_is() -> None:
    assert decide(MET) == Join(PLACE)


def test_the_first_ones_wait_until_they_are_enough_and_then_one_claims() -> None:
    alone = Seen("i-me", (ME,), 2)
    assert decide(alone) == Wait("1 of at least 2 machines here", few=True)
    assert decide(replace(alone, machines=(ME, replace(A, term=None)))) == ClaimTerm(1)


def test_no_rendezvous_begins_while_a_living_machine_has_not_left_the_one_before() -> None:
    """Two worlds would write into one checkpoint folder."""
    gone = replace(A, state="terminated")
    still = Machine("i-b", 3, False, 5.0, "running")
    ready = Machine("i-c", None, False, 5.0)
    seen = replace(MET, machines=(ME, gone, still, ready))
    assert decide(seen) == Wait("i-b has not left rendezvous 3 yet")
    assert decide(replace(seen, machines=(ME, gone, replace(still, state="shutting-down"), ready))) == ClaimTerm(4)
    assert decide(replace(seen, machines=(ME, gone, replace(still, term=None), ready))) == ClaimTerm(4)


def test_the_host_that_leaves_or_was_started_again_hosts_nothing_any_more() -> None:
    other = Machine("i-b", None, False, 5.0)
    assert decide(replace(MET, machines=(ME, other, replace(A, leaving=True, term=None)))) == ClaimTerm(4)
    assert decide(replace(MET, machines=(ME, other, replace(A, term=None)))) == ClaimTerm(4)


def test_a_claim_without_a_place_yet_is_waited_for_and_not_for_ever() -> None:
    claimed = replace(MET, machines=(ME, replace(A, term=None)), place=None, claim_age=3.0)
    assert isinstance(decide(claimed), Wait)
    assert decide(replace(claimed, claim_age=500.0)) == ClaimTerm(4)


def test_a_silent_machine_that_still_runs_is_ended_before_others_go_on() -> None:
    silent = replace(A, age=700.0)
    assert decide(replace(MET, machines=(ME, silent))) == End("i-a")
    assert decide(replace(MET, machines=(ME, replace(silent, age=300.0)))) == Wait("i-a has not left rendezvous 3 yet")


def test_one_that_ec2_does_not_show_is_gone_only_when_it_says_nothing_either() -> None:
    """Describes are stale: a machine that was heard a moment ago is there."""
    assert not replace(A, state="", age=10.0).is_gone
    assert replace(A, state="", age=200.0).is_gone


def test_machines_that_leave_or_are_silent_are_not_counted_as_here() -> None:
    leaving, silent = Machine("i-b", None, True, 1.0), Machine("i-c", None, False, 100.0)
    others = (leaving, silent, Machine("i-d", None, False, 1.0, "terminated"))
    assert decide(Seen("i-me", (ME, *others), 2)) == Wait("1 of at least 2 machines here", few=True)


# -------------------------------------------------------------------------------------------------------- they meet


def test_one_hosts_and_the_others_join_it() -> None:
    run = Run()
    first, second = run.machine("i-1"), run.machine("i-2")
    hosted, joined = first.meet(run.stop), second.meet(run.stop)
    assert hosted is not None and joined is not None
    assert (hosted.hosts, joined.hosts) == (True, False)
    assert hosted.place == joined.place
    assert (first.leads, second.leads, run.terms) == (True, False, [1])
    assert f"--rdzv_endpoint=127.0.0.1:{hosted.place.port}" in joined.options()
    assert {"--nnodes=2:3", "--rdzv_backend=c10d", "--rdzv_id=r-1", "--local_addr=127.0.0.1"} <= set(joined.options())


def test_when_the_host_is_gone_the_others_meet_anew_under_the_next_term() -> None:
    run = Run()
    first, second, third = (run.machine(f"i-{number}") for number in (1, 2, 3))
    for one in (first, second, third):
        assert one.meet(run.stop) is not None
    run.cloud.states["i-1"] = "terminated"
    third.note("its ranks have ended")
    third._say(term=None)
    hosted = second.meet(run.stop)
    assert hosted is not None and hosted.hosts and hosted.place.term == 2
    joined = third.meet(run.stop)
    assert joined is not None and joined.place == hosted.place


def test_too_few_machines_park_the_run_after_nodes_wait_and_say_how_many_came() -> None:
    run = Run()
    with pytest.raises(RunOver) as over:
        run.machine("i-1").meet(run.stop)
    assert over.value.end.phase is Phase.PARKED
    assert over.value.end.reason.startswith("1 of at least 2 machines here, and no more came within 15 min")
    assert 900 <= run.clock.seconds < 1000


def test_a_machine_that_comes_to_a_run_that_has_ended_hears_of_it() -> None:
    run = Run()
    run.store.write_status({"phase": "done", "reason": "the trainer exited with 0"})
    with pytest.raises(RunOver) as over:
        run.machine("i-1").meet(run.stop)
    assert over.value.end == RunEnd(Phase.DONE, "the trainer exited with 0")


def test_a_machine_that_is_told_to_stop_meets_nobody() -> None:
    run = Run()
    run.stop.set()
    assert run.machine("i-1").meet(run.stop) is None


def test_one_of_all_records_the_end_and_another_only_where_that_one_is_gone() -> None:
    run = Run()
    first, second = run.machine("i-1"), run.machine("i-2")
    assert first.recorded_end(10, run.stop) is None
    run.store.write_status({"phase": "done", "reason": "by the first"})
    assert second.recorded_end(10, run.stop) == RunEnd(Phase.DONE, "by the first")
    run.store.write_status({"phase": "training"})
    run.cloud.states["i-1"] = "terminated"
    assert second.recorded_end(10, run.stop) is None
    assert run.clock.seconds < 5


def test_a_trainer_whose_number_is_another_on_another_machine_is_refused() -> None:
    """Of two images: each machine would take the other's files on EFS."""
    run = Run()
    first, second = run.machine("i-1"), run.machine("i-2")
    first.note("mounting EFS", uid=998)
    second.check_user(998)
    with pytest.raises(SetupFailed, match="998 on i-1"):
        second.check_user(1001)
    run.clock.seconds += 600
    second.check_user(1001)


@pytest.mark.parametrize("off", [-3600.0, -120.0, 3600.0])
def test_a_machine_whose_clock_is_off_is_counted_and_joined_and_never_ended(off: float) -> None:
    """It says that it is there all the time: only what it says the time is, is wrong."""
    run = Run()
    second = run.machine("i-2", off=off)
    run.clock.at_sleep.append(second.beat)
    hosted = run.machine("i-1").meet(run.stop)
    assert hosted is not None and hosted.hosts and run.clock.seconds < 60
    run = Run()
    host = run.machine("i-2", off=off)
    run.clock.at_sleep += [run.machine("i-3").beat, host.beat]
    assert host.meet(run.stop) is not None
    joined = run.machine("i-1").meet(run.stop)
    assert joined is not None and not joined.hosts and run.cloud.ended == [] and run.clock.seconds < 60


def test_a_machine_that_said_last_that_it_is_an_hour_later_is_not_believed_for_an_hour() -> None:
    run = Run()
    run.machine("i-2", off=3600.0).note("training")
    del run.cloud.states["i-2"]
    first = run.machine("i-1")
    assert first.meet(run.stop) is not None, "it seems to be there"
    run.clock.seconds += 180  # in which it does not come
    with pytest.raises(RunOver) as over:
        first.meet(run.stop)
    assert over.value.end.phase is Phase.PARKED and run.clock.seconds < 1300


def test_a_silent_machine_is_watched_before_it_is_ended() -> None:
    run = Run()
    host = run.machine("i-2")
    run.machine("i-3")
    assert host.meet(run.stop) is not None
    run.clock.seconds += 3000  # it hangs; the others ended at once where their clocks differed
    begun = run.clock.seconds
    first = run.machine("i-1")
    run.clock.at_sleep.append(lambda: run.stop.set() if run.cloud.ended else None)
    assert first.meet(run.stop) is None
    assert run.cloud.ended == ["i-2"] and 60 <= run.clock.seconds - begun < 120


def test_a_claim_that_another_won_is_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run()
    first, second = run.machine("i-1"), run.machine("i-2")
    assert run.store.claim_term(Claim(1, "i-2", "z", "2026-11-21T12:00:00Z"))
    second._says |= {"term": 1, "leads": True}
    second.beat()
    run.store.put_json(LAYOUT.rendezvous(1), {"instance": "i-2", "address": "127.0.0.1", "port": 5})
    found = first.meet(run.stop)
    assert found is not None and not found.hosts and found.place.instance == "i-2"


# ---------------------------------------------------------------------------------------------------- how attempts end
def test_machines_that_are_lost_are_no_failure_of_the_trainer_and_yet_not_forever() -> None:
    end = AttemptEnd(EXIT_RANKS_LOST, None, False, False, True)
    tally = Tally()
    for _ in range(RANKS_LOST_MAX):
        found = what_follows(end, tally, 1)
        assert isinstance(found, StartAgain)
        tally = found.tally
    assert isinstance(what_follows(end, tally, 1), GiveUp)
    gained = replace(end, gained=True)
    assert isinstance(what_follows(gained, tally, 1), StartAgain)


# ------------------------------------------------------------------------------------------------------ what is refused
def job(**tables: dict[str, Any]) -> dict[str, Any]:
    document: dict[str, Any] = {
        "job": {"name": "j", "repository": ".", "command": ["python", "train.py"], "nodes": "2:4"},
        "store": {"results": "efs://fs-0123456789abcdef0/training"},
    }
    for table, values in tables.items():
        document[table] = {**document.get(table, {}), **values}
    return document


def test_several_machines_need_efs_and_are_told_how_to_get_it() -> None:
    assert parse_job(job()).machines == (2, 4)
    assert parse_job(job(job={"nodes": "3"})).machines == (3, 3)
    with pytest.raises(ConfigError, match="create-efs"):
        parse_job(job(store={"results": "s3://bucket/x"}))


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        ({"fleet": {"on_demand_after": "1h"}, "limits": {"dollars": 5}}, "is for a job on one machine"),
        ({"volume": {"snapshot": "snap-0abc"}}, "several machines have no volume"),
    ],
)
def test_what_goes_with_one_machine_only_is_refused(tables: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_job(job(**tables))


def test_a_command_that_starts_its_ranks_itself_knows_nothing_of_other_machines(tmp_path: Any) -> None:
    with pytest.raises(SetupFailed, match="knows nothing of the other machines"):
        world_of(1, ["torchrun", "train.py"], gpus=0, directory=tmp_path, interpreter=tmp_path, logs=tmp_path,
                 rendezvous=["--nnodes=2:4"])  # fmt: skip


def test_idle_gpus_are_refused_on_several_machines_too(tmp_path: Any) -> None:
    """The month of the article was lost to training that did not use what it paid for."""
    with pytest.raises(SetupFailed, match="3 would stay idle"):
        world_of(1, ["python", "t.py"], gpus=4, directory=tmp_path, interpreter=tmp_path, logs=tmp_path,
                 rendezvous=["--nnodes=2:4"])  # fmt: skip


def test_the_loopback_is_found_by_an_address_on_it() -> None:
    assert device_of("127.3.4.5") == "lo"
    assert device_of("203.0.113.9") == ""


# ---------------------------------------------------------------------------------------------------- between machines
OPEN = {"GroupId": "sg-1", "IpPermissions": [{"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": "sg-1"}]}]}


@pytest.mark.parametrize(
    ("rule", "is_open"),
    [
        ({"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": "sg-1"}]}, True),
        ({"IpProtocol": "tcp", "FromPort": 0, "ToPort": 65535, "UserIdGroupPairs": [{"GroupId": "sg-1"}]}, True),
        ({"IpProtocol": "tcp", "FromPort": 22, "ToPort": 22, "UserIdGroupPairs": [{"GroupId": "sg-1"}]}, False),
        ({"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": "sg-2"}]}, False),
        ({"IpProtocol": "-1", "IpRanges": [{"CidrIp": "10.0.0.0/8"}]}, False),
    ],
)
def test_a_group_is_open_to_itself_by_a_rule_for_all_ports(rule: dict[str, Any], is_open: bool) -> None:
    assert between.is_open_to_itself({"GroupId": "sg-1", "IpPermissions": [rule]}) is is_open


def test_groups_are_found_wherever_a_launch_names_them() -> None:
    assert between.groups_of({"SecurityGroups": [{"GroupId": "sg-1"}]}) == {"sg-1"}
    assert between.groups_of({"NetworkInterfaces": [{"Groups": ["sg-1", "sg-2"]}]}) == {"sg-1", "sg-2"}
    assert between.groups_of({"SecurityGroupIds": ["sg-3"]}) == {"sg-3"}


class Account:
    """A session whose EC2 knows `groups`."""

    def __init__(self, *groups: dict[str, Any]) -> None:
        self.groups = groups

    def client(self, _: str) -> Account:
        return self

    def describe_security_groups(self, GroupIds: list[str] | None = None, **_: Any) -> dict[str, Any]:
        return {"SecurityGroups": [one for one in self.groups if GroupIds is None or one["GroupId"] in GroupIds]}


def launched(*groups: str) -> dict[str, Any]:
    return {"SecurityGroups": [{"GroupId": group} for group in groups]}


def test_a_group_of_the_operators_that_is_closed_is_refused_with_the_command_that_opens_it() -> None:
    closed: Any = Account({"GroupId": "sg-1", "IpPermissions": []})
    with pytest.raises(ConfigError) as refused:
        between.look(closed, [launched("sg-1")], "vpc-1")
    assert "--group-id sg-1 --protocol -1 --source-group sg-1" in refused.value.next_step
    opened: Any = Account(OPEN)
    assert between.look(opened, [launched("sg-1", "sg-2"), launched("sg-1")], "vpc-1") is None


def test_fleetctls_own_group_is_opened_as_a_step_of_the_plan() -> None:
    closed: Any = Account({"GroupId": "sg-1", "IpPermissions": []})
    step = between.look(closed, [launched("sg-1")], "vpc-1", own_group="sg-1")
    assert step == between.OpenBetween("sg-1", "spotheal-ssh")


def test_launches_without_a_common_group_cannot_meet() -> None:
    account: Any = Account(OPEN, {"GroupId": "sg-2", "IpPermissions": []})
    with pytest.raises(ConfigError, match="no security group in common"):
        between.look(account, [launched("sg-1"), launched("sg-2")], "vpc-1")


# --------------------------------------------------------------------------------------------------------- the status
def test_status_names_the_machines_that_live_the_one_that_leads_first() -> None:
    told = [
        {"instance": "i-1", "term": 2, "leads": False, "doing": "training", "time": "2026-11-21T11:59:50Z"},
        {"instance": "i-2", "term": 2, "leads": True, "doing": "training", "time": "2026-11-21T11:59:40Z"},
        {"instance": "i-3", "term": None, "doing": "leaving", "time": "2026-11-21T11:00:00Z"},
    ]
    found = machines.summarise(told, {"i-1", "i-2"}, NOW)
    assert [one["instance"] for one in found] == ["i-2", "i-1"]
    assert machines.in_words({**found[0], "type": "g5.xlarge", "zone": "us-west-2a"}) == (
        "g5.xlarge us-west-2a  training in rendezvous 2, which it hosts"
    )
    assert [one["instance"] for one in machines.summarise(told, None, NOW)] == ["i-2", "i-1"]
