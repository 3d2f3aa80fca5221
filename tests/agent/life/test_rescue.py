"""`[fleet] on_demand_after`: an on-demand instance where spot has had no capacity for so long, and only there."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import boto3
import pytest
import structlog
from agent_world import AgentWorld
from fleet_desk import Desk, Died, HandClock, desk, moto_clients, wheels

from spotheal.agent.life.on_demand import Rescue
from spotheal.agent.protocol.errors import ExitCode
from spotheal.agent.protocol.job import JobConfig, parse_job
from spotheal.agent.protocol.names import StoreUrl, rescue_schedule, schedule_expression
from spotheal.fleet.files import rescue
from spotheal.fleet.rehearsal.ec2.rulebook import Rulebook
from spotheal.fleet.rehearsal.scenarios.api import Endpoint
from spotheal.fleet.rehearsal.services.authorization import OWNER
from spotheal.fleet.rehearsal.services.client import InMemoryEc2, client_error
from spotheal.fleet.rehearsal.services.schedules import InMemoryScheduler, Schedules
from spotheal.iam import policies
from spotheal.iam.evaluation import Question, is_allowed

__all__ = ["desk", "moto_clients", "wheels"]
RUN = "01J" + "0" * 23
JOB, HOUR = "cifar", 3600.0
SCOPE = policies.Scope("123456789012", "us-west-2", StoreUrl("bucket", ""), job=JOB)
LOG = structlog.get_logger()
SPECIFICATION = {"ImageId": "ami-1", "InstanceType": "g5.xlarge", "Placement": {"AvailabilityZone": "us-west-2a"}}


def job(**fleet: Any) -> JobConfig:
    table = {"name": "cifar", "repository": "https://example.org/r.git", "command": ["x"]}
    return parse_job({"job": table, "fleet": {"on_demand_after": "1h", **fleet}, "limits": {"dollars": 20}})


class Account:
    """A spot fleet of one on a clock by hand, with its schedule."""

    def __init__(self, engine: str = "spot-fleet") -> None:
        self.clock = HandClock()
        self.rules = Rulebook(self.clock)
        self.schedules = Schedules(self.rules)
        self.scheduler = InMemoryScheduler(self.schedules)
        self.fleet = self._request(engine)
        self.arm()

    def _request(self, engine: str) -> str:
        ec2 = InMemoryEc2(self.rules)
        if engine == "spot-fleet":
            role = "arn:aws:iam::123456789012:role/fleet"
            config = {"IamFleetRole": role, "TargetCapacity": 1, "LaunchSpecifications": [SPECIFICATION]}
            return str(ec2.request_spot_fleet(SpotFleetRequestConfig=config)["SpotFleetRequestId"])
        ec2.create_launch_template(LaunchTemplateName="template", LaunchTemplateData={
            "ImageId": "ami-1", "InstanceType": "g5.xlarge", "Placement": {"AvailabilityZone": "us-west-2a"},
        })  # fmt: skip
        template = {"LaunchTemplateSpecification": {"LaunchTemplateName": "template", "Version": "1"}}
        capacity = {"TotalTargetCapacity": 1, "DefaultTargetCapacityType": "spot"}
        made = ec2.create_fleet(LaunchTemplateConfigs=[template], TargetCapacitySpecification=capacity)
        return str(made["FleetId"])

    def arm(self) -> None:
        rescue.arm(self.scheduler, rescue.schedule(job(), RUN, self.fleet, SCOPE, self.clock), self.clock)

    def agent(self) -> Rescue:
        return Rescue(self.scheduler, JOB, RUN, HOUR, self.clock, LOG)

    def pass_time(self, seconds: float) -> None:
        self.clock.seconds += seconds
        self.rules.tick()

    def running(self) -> list[bool]:
        """For each instance that runs, whether it is a spot instance."""
        return [one.is_spot for one in self.rules.instances() if one.state in ("pending", "running")]


@pytest.mark.parametrize("engine", ["spot-fleet", "ec2-fleet"])
def test_an_hour_without_spot_capacity_brings_an_on_demand_instance(engine: str) -> None:
    account = Account(engine)
    account.rules.no_capacity(["us-west-2a"], 24 * HOUR)
    account.pass_time(0.9 * HOUR)
    assert account.running() == []
    account.pass_time(0.2 * HOUR)
    account.pass_time(600)
    assert account.running() == [False]
    assert [(name, code) for name, _, _, code in account.schedules.fired] == [(rescue_schedule(JOB, RUN), "")]


def test_while_an_instance_lives_the_rescue_never_comes() -> None:
    account = Account()
    agent = account.agent()
    for _ in range(600):  # ten hours of heartbeats
        account.pass_time(60)
        agent.put_off()
    assert account.running() == [True]
    assert account.schedules.fired == []


def test_the_hour_begins_when_the_last_instance_was_heard() -> None:
    account = Account()
    agent = account.agent()
    for _ in range(120):
        account.pass_time(60)
        agent.put_off()
    (lost,) = account.rules.instances()
    account.rules.no_capacity(["us-west-2a"], 24 * HOUR)
    account.rules.kill(lost.id)
    account.pass_time(0.8 * HOUR)
    assert account.running() == []
    account.pass_time(0.3 * HOUR)
    account.pass_time(600)
    assert account.running() == [False]


def test_a_rescue_that_has_fired_or_was_removed_is_asked_for_once_and_warns_nobody() -> None:
    account = Account()
    account.scheduler.delete_schedule(Name=rescue_schedule(JOB, RUN))
    agent, asked = account.agent(), Counter[str]()

    class Counting:
        def __getattr__(self, name: str) -> Any:
            asked[name] += 1
            return getattr(account.scheduler, name)

    agent._scheduler = Counting()
    with structlog.testing.capture_logs() as lines:
        for _ in range(10):
            account.pass_time(HOUR)
            agent.put_off()
        agent.drop()
        account.agent().drop()
    assert asked == {"get_schedule": 1}
    assert [line["event"] for line in lines] == ["the on-demand rescue has fired, or was removed"]


def test_a_scheduler_that_refuses_stops_nothing_and_is_asked_again() -> None:
    account = Account()
    agent = account.agent()

    class Refusing:
        def get_schedule(self, **_: Any) -> None:
            raise client_error("GetSchedule", "AccessDeniedException", "no", 403)

        delete_schedule = get_schedule

    agent._scheduler, real = Refusing(), agent._scheduler
    agent.put_off()
    agent.drop()
    agent._scheduler = real
    account.pass_time(1800)
    agent.put_off()
    account.pass_time(0.9 * HOUR)
    assert account.schedules.fired == []


def test_asking_aws_is_rare() -> None:
    account = Account()
    agent, asked = account.agent(), []
    real = account.schedules.update
    account.schedules.update = lambda name, body: asked.append(1) or real(name, body)  # type: ignore[method-assign,func-returns-value]
    for _ in range(120):
        account.pass_time(60)
        agent.put_off()
    assert len(asked) <= 2 * rescue_share() + 1


def rescue_share() -> int:
    from spotheal.agent.life.on_demand import PUT_OFF_SHARE

    return PUT_OFF_SHARE


def test_the_same_run_under_another_fleet_takes_its_schedule_along() -> None:
    account = Account()
    account.fleet = "fleet-00000000-0000-0000-0000-000000000000"
    account.arm()
    found = account.schedules.get(rescue_schedule(JOB, RUN))
    assert json.loads(found["Target"]["Input"])["FleetId"] == account.fleet
    assert found["Target"]["Arn"].endswith("ec2:modifyFleet")


def test_a_role_too_young_for_scheduler_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    account = Account()
    account.scheduler.delete_schedule(Name=rescue_schedule(JOB, RUN))
    refusals = [1, 1]

    class Young:
        def create_schedule(self, **wanted: Any) -> Any:
            if refusals:
                refusals.pop()
                said = "The execution role you provide must allow AWS EventBridge Scheduler to assume the role."
                raise client_error("CreateSchedule", "ValidationException", said, 400)
            return account.scheduler.create_schedule(**wanted)

    wanted = rescue.schedule(job(), RUN, account.fleet, SCOPE, account.clock)
    rescue.arm(Young(), wanted, account.clock)
    assert account.schedules.get(rescue_schedule(JOB, RUN))["ScheduleExpression"] == wanted["ScheduleExpression"]


def test_it_needs_a_limit_in_dollars_and_a_fleet_that_can_launch_on_demand() -> None:
    free = parse_job({"job": {"name": "a", "repository": ".", "command": ["x"]}, "fleet": {"on_demand_after": "1h"}})
    assert "needs [limits] dollars" in rescue.faults(free, has_templates=False)[0]
    assert rescue.faults(job(), has_templates=False) == []
    assert "no on-demand part" in rescue.faults(job(harden=False), has_templates=False)[0]
    assert rescue.faults(job(harden=False), has_templates=True) == []
    assert rescue.faults(job(harden=False, engine="ec2-fleet"), has_templates=False) == []
    assert "10m or more" in rescue.faults(job(on_demand_after="5m"), has_templates=False)[0]


def test_the_schedule_is_made_changed_and_removed_over_http_as_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = HandClock()
    with Endpoint(Rulebook(clock)) as endpoint:
        key = endpoint.key_of_person(OWNER)
        keys = {"aws_access_key_id": key.id, "aws_secret_access_key": key.secret}
        client = boto3.client("scheduler", region_name="us-west-2", endpoint_url=endpoint.url, **keys)
        rescue.arm(client, rescue.schedule(job(), RUN, "sfr-1", SCOPE, clock), clock)
        rescue.arm(client, rescue.schedule(job(), RUN, "sfr-2", SCOPE, clock), clock)
        agent = Rescue(client, JOB, RUN, HOUR, clock, LOG)
        clock.seconds += HOUR / 2
        agent.put_off()
        found = client.get_schedule(Name=rescue_schedule(JOB, RUN))
        assert "sfr-2" in found["Target"]["Input"]
        assert found["ActionAfterCompletion"] == "DELETE", "an update that leaves a value out would reset it"
        assert found["ScheduleExpression"] != schedule_expression(clock.now())
        agent.drop()
        with pytest.raises(client.exceptions.ResourceNotFoundException):
            client.get_schedule(Name=rescue_schedule(JOB, RUN))


def test_an_instance_puts_the_rescue_off_and_the_end_of_the_run_removes_it(tmp_path: Path) -> None:
    more = {"fleet": {"on_demand_after": "1h"}, "limits": {"dollars": 5}}
    world = AgentWorld(tmp_path, "print('done')\n", job=more)
    client = InMemoryScheduler(world.schedules)
    early = rescue.schedule(world.config.job, world.config.run, world.fleet, SCOPE, world.clock)
    early["ScheduleExpression"] = "at(2099-01-01T00:00:00)"
    updates: list[str] = []
    real = world.schedules.update
    world.schedules.update = lambda name, body: updates.append(body["ScheduleExpression"]) or real(name, body)  # type: ignore[method-assign,func-returns-value]
    client.create_schedule(**early)
    assert world.live() is ExitCode.OK
    assert world.status()["phase"] == "done"
    assert updates, "the instance has said that it lives"
    assert updates[0] < early["ScheduleExpression"]
    with pytest.raises(Exception, match="does not exist"):
        client.get_schedule(Name=rescue_schedule(world.config.job.job.name, world.config.run))


def want_rescue(desk: Desk, dollars: str = "[limits]\ndollars = 9\n") -> None:
    path = desk.folder / "job.toml"
    path.write_text(path.read_text() + f'[fleet]\non_demand_after = "2h"\n{dollars}')


def test_a_request_arms_it_for_its_fleet_and_the_plan_says_so(desk: Desk) -> None:
    want_rescue(desk)
    said = desk.run("request", "--dry-run")
    assert "after 2h without spot capacity: one on-demand instance, within the job's $9" in said.stderr
    done = desk.request()
    found = desk.account.schedules.get(rescue_schedule(JOB, done["run"]))
    assert json.loads(found["Target"]["Input"])["SpotFleetRequestId"] == done["fleet_id"]
    assert found["Target"]["RoleArn"] == "arn:aws:iam::123456789012:role/spotheal-rescue-cifar"
    iam = desk.account.client("iam", "")
    role = iam.get_role_policy(RoleName="spotheal-rescue-cifar", PolicyName="rescue-us-west-2")
    actions = {action for one in role["PolicyDocument"]["Statement"] for action in one["Action"]}
    assert actions == {"ec2:ModifySpotFleetRequest", "ec2:ModifyFleet"}


def test_a_jobs_instance_reaches_no_schedule_of_another_and_passes_no_role_that_may_change_its_fleet() -> None:
    documents = [policies.instance_with_rescue(SCOPE)]
    ours, theirs = (rescue_schedule(name, RUN) for name in (JOB, "other"))
    at = "arn:aws:scheduler:us-west-2:123456789012:schedule/default/"
    passed = {"iam:PassedToService": ("scheduler.amazonaws.com",)}
    role = "arn:aws:iam::123456789012:role/spotheal-rescue-"
    for schedule, job, answer in ((ours, JOB, True), (theirs, "other", False)):
        assert len(schedule) <= 64
        for action in ("Get", "Update", "Delete"):
            assert is_allowed(documents, Question(f"scheduler:{action}Schedule", at + schedule)) is answer
        assert is_allowed(documents, Question("iam:PassRole", role + job, passed)) is answer
        tags = {"aws:ResourceTag/spotheal:job": (job,), "aws:ResourceTag/spotheal:run": (RUN,)}
        fleet = "arn:aws:ec2:us-west-2:123456789012:fleet/fleet-1"
        assert is_allowed([policies.rescue_role(SCOPE)], Question("ec2:ModifyFleet", fleet, tags)) is answer


def test_who_makes_no_roles_may_still_arm_a_rescue_whose_role_is_there() -> None:
    class Iam:
        def get_role_policy(self, **asked: str) -> dict[str, Any]:
            assert asked["RoleName"] == "spotheal-rescue-cifar"
            return {"PolicyDocument": policies.rescue_role(SCOPE)}

    rescue.ensure_role(Iam(), SCOPE)  # any other call of it is a fault


def test_a_rescue_in_one_region_leaves_that_of_another_as_it_is(desk: Desk) -> None:
    """A role is the account's, not a region's."""
    iam = desk.account.client("iam", "")
    scopes = [replace(SCOPE, region=region) for region in ("us-west-2", "eu-west-1")]
    for scope in scopes:
        rescue.ensure_role(iam, scope)
    names = iam.list_role_policies(RoleName=SCOPE.rescue_role)["PolicyNames"]
    documents = [iam.get_role_policy(RoleName=SCOPE.rescue_role, PolicyName=name)["PolicyDocument"] for name in names]
    assert sorted(map(str, documents)) == sorted(str(policies.rescue_role(scope)) for scope in scopes)


def test_a_request_that_dies_anywhere_leaves_a_fleet_that_is_armed_when_it_goes_on(desk: Desk) -> None:
    want_rescue(desk)
    for changes in range(1, 40):
        desk.account.changed, desk.account.die_at = 0, changes
        result = desk.run("request", "--yes", "--output", "json")
        if not isinstance(result.exception, Died) and result.exit_code == ExitCode.OK:
            break
    (fleet,) = desk.live_fleets()
    run = fleet.tags["spotheal:run"]
    assert fleet.id in desk.account.schedules.get(rescue_schedule(JOB, run))["Target"]["Input"]


def test_without_a_limit_in_dollars_it_is_refused(desk: Desk) -> None:
    want_rescue(desk, dollars="")
    refused = desk.run("validate")
    assert refused.exit_code == ExitCode.USAGE
    assert "on_demand_after: needs [limits] dollars" in refused.output
