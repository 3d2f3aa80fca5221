"""`fleetctl batch`: what is made at AWS Batch, what is submitted, how it is followed, and how all of it goes."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from batch_desk import IMAGE, BatchDesk, Scripted, batch_desk
from fleet_desk import desk, moto_clients, wheels

from spotheal.agent.protocol.errors import ExitCode, Retryable
from spotheal.agent.protocol.names import LAYOUT
from spotheal.fleet.batch import documents
from spotheal.fleet.rehearsal.batch.things import Attempt, is_retried
from spotheal.fleet.rehearsal.ec2.world import ApiError
from spotheal.fleet.run import batch_jobs as jobs

__all__ = ["batch_desk", "desk", "moto_clients", "wheels"]


def made(batch_desk: BatchDesk, text: str = "", more: str = "") -> BatchDesk:
    batch_desk.job(text, more)
    batch_desk.good("create", "--yes")
    return batch_desk


# --------------------------------------------------------------------------------------------------------------- create
def test_create_makes_spot_before_on_demand_and_again_makes_nothing(batch_desk: BatchDesk) -> None:
    made(batch_desk, "gpus = 1")
    batch = batch_desk.batch
    kinds = {one.name: one.resources["type"] for one in batch.environments.values()}
    order = [name.rpartition("/")[2] for name in batch.queues["spotheal-cifar"].environments]
    assert [kinds[name] for name in order] == ["SPOT", "EC2"]
    spot = batch.environments[order[0]].resources
    assert (spot["allocationStrategy"], spot["minvCpus"]) == ("SPOT_PRICE_CAPACITY_OPTIMIZED", 0)
    assert spot["ec2Configuration"] == [{"imageType": "ECS_AL2023_NVIDIA"}]
    (definition,) = batch.definitions
    container = definition.asked["containerProperties"]
    assert {"type": "GPU", "value": "1"} in container["resourceRequirements"]
    calls = batch_desk.calls()
    assert batch_desk.good("create", "--yes")["steps"] == [] and batch_desk.calls() == calls


def test_a_dry_run_prints_the_exact_calls_and_makes_none(batch_desk: BatchDesk) -> None:
    document = batch_desk.good("create", "--dry-run")
    assert batch_desk.calls() == [] and not document["made"]
    definition = document["request"]["register_job_definition"]
    assert definition["retryStrategy"] == documents.retry(10)
    assert definition["containerProperties"]["image"] == IMAGE
    assert [one["computeEnvironmentName"] for one in document["request"]["create_compute_environment"]] == [
        "spotheal-cifar-spot", "spotheal-cifar-on-demand",
    ]  # fmt: skip
    assert any("7i" in one["instance_type"] for one in document["prices"])


def test_what_job_toml_changes_is_changed_and_an_old_definition_is_retired(batch_desk: BatchDesk) -> None:
    made(batch_desk)
    made(batch_desk, 'max_vcpus = 128\nmemory_gib = 30\ninstance_types = ["c6i"]')
    batch = batch_desk.batch
    assert {one.resources["maxvCpus"] for one in batch.environments.values()} == {128}
    assert [(one.revision, one.status) for one in batch.definitions] == [(1, "INACTIVE"), (2, "ACTIVE")]
    made(batch_desk, "on_demand = false")
    order = [name.rpartition("/")[2] for name in batch.queues["spotheal-cifar"].environments]
    assert order == ["spotheal-cifar-spot"]


def test_an_attempt_that_was_cut_short_goes_on(batch_desk: BatchDesk, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = batch_desk.batch.call
    for stop_at in ("CreateComputeEnvironment", "CreateJobQueue", "RegisterJobDefinition"):

        def dies(operation: str, params: Any, stop_at: str = stop_at) -> Any:
            if operation == stop_at:
                answer(operation, params)
                raise KeyboardInterrupt
            return answer(operation, params)

        monkeypatch.setattr(batch_desk.batch, "call", dies)
        assert batch_desk.run("create", "--yes").exit_code == 130
    monkeypatch.setattr(batch_desk.batch, "call", answer)
    assert batch_desk.run("create", "--yes").exit_code == 0
    assert len(batch_desk.batch.environments) == 2 and len(batch_desk.batch.definitions) == 1


def test_an_invalid_environment_is_explained_with_awss_words(batch_desk: BatchDesk) -> None:
    batch_desk.batch.role_fault = lambda resources: "the instance profile cannot be assumed"
    result = batch_desk.run("create", "--yes")
    assert result.exit_code == 1
    assert "is INVALID: CLIENT_ERROR - the instance profile cannot be assumed" in result.output


def test_what_a_container_cannot_have_is_refused_all_at_once(batch_desk: BatchDesk) -> None:
    batch_desk.job('instance_types = ["p3.2xlarge"]', more="[limits]\ndollars = 5")
    result = batch_desk.run("create", "--yes")
    assert result.exit_code == 2
    assert "[limits] dollars" in result.output and "p3.2xlarge" in result.output


def test_results_in_another_bucket_are_the_containers_to_write_and_one_that_is_not_there_is_named(
    batch_desk: BatchDesk,
) -> None:
    batch_desk.job(more='[store]\nresults = "s3://elsewhere-of-ours/models"')
    refused = batch_desk.run("create", "--yes")
    assert refused.exit_code == 4 and "there is no bucket elsewhere-of-ours" in refused.output
    assert batch_desk.calls() == []
    batch_desk.desk.s3.create_bucket(
        Bucket="elsewhere-of-ours", CreateBucketConfiguration={"LocationConstraint": "us-west-2"}
    )
    batch_desk.good("create", "--yes")
    iam = batch_desk.desk.account._others["iam"]
    asked = {"RoleName": "spotheal-batch-job-cifar", "PolicyName": "spotheal-batch-us-west-2"}
    document = iam.get_role_policy(**asked)["PolicyDocument"]
    (found,) = [one for one in document["Statement"] if one["Sid"] == "Results"]
    assert found["Resource"] == "arn:aws:s3:::elsewhere-of-ours/models/cifar/*" and "s3:PutObject" in found["Action"]
    assert batch_desk.good("create", "--yes")["steps"] == []


def test_a_file_system_that_hosts_could_not_mount_is_refused_before_anything_is_made(
    batch_desk: BatchDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_REGION", "us-west-2")
    batch_desk.job(more='[store]\nresults = "efs://fs-0123456789abcdef0"')
    refused = batch_desk.run("create", "--yes")
    assert refused.exit_code == 4 and "there is no file system fs-0123456789abcdef0" in refused.output
    assert batch_desk.calls() == []
    (batch_desk.desk.folder / "spot_fleet_config.json").unlink()  # Batch needs none
    batch_desk.job()
    made(batch_desk)
    system = batch_desk.desk.good("results", "create-efs", "--yes")["file_system"]
    batch_desk.job(more=f'[store]\nresults = "efs://{system}/training"')
    unmounted = batch_desk.run("submit", "--yes")
    assert unmounted.exit_code == 8 and f"does not mount {system}" in unmounted.output
    batch_desk.good("create", "--yes")
    assert batch_desk.good("submit", "--yes")["job_id"]


# --------------------------------------------------------------------------------------------------------------- submit
def test_a_list_is_an_array_and_a_list_of_one_a_single_job(batch_desk: BatchDesk) -> None:
    made(batch_desk)
    many = batch_desk.good("submit", batch_desk.list(3), "--yes")
    assert many["request"]["arrayProperties"] == {"size": 3}
    one = batch_desk.good("submit", batch_desk.list(1), "--yes")
    assert "arrayProperties" not in one["request"]
    told = {pair["name"]: pair["value"] for pair in one["request"]["containerOverrides"]["environment"]}
    assert told == {"SPOTHEAL_STORE": one["store"], "SPOTHEAL_INDEX": "0"}
    store = batch_desk.store(many["run"])
    document, fleet = store.get_json(LAYOUT.job_document) or {}, store.get_json(LAYOUT.fleet_document) or {}
    assert document["run"]["entries"] == 3 and fleet["batch"]["job_id"] == many["job_id"]
    assert store.get_bytes(LAYOUT.repository_bundle)


def test_overrides_reach_the_container_and_the_trainer(batch_desk: BatchDesk) -> None:
    made(batch_desk, "gpus = 2")
    document = batch_desk.good(
        "submit", "--vcpus", "8", "--memory", "60", "--gpus", "1", "--env", "LR=0.1", "--command",
        "python train.py --x", "--yes",
    )  # fmt: skip
    assert document["request"]["containerOverrides"]["resourceRequirements"] == documents.resources(8, 60, 1)
    told = batch_desk.store(document["run"]).get_json(LAYOUT.job_document) or {}
    assert told["job"]["command"] == ["python", "train.py", "--x"] and told["environment"]["LR"] == "0.1"
    assert batch_desk.run("submit", "--env", "SPOTHEAL_X=1", "--yes").exit_code == 2


def test_gpus_that_no_host_has_are_refused_since_batch_would_wait_for_ever(batch_desk: BatchDesk) -> None:
    made(batch_desk)
    result = batch_desk.run("submit", "--gpus", "1", "--yes")
    assert result.exit_code == 2 and "the hosts of job cifar have none" in result.output
    assert batch_desk.batch.jobs.all == {}


def test_a_sweep_on_batch_is_sent_to_the_verbs_that_can_do_it(batch_desk: BatchDesk) -> None:
    made(batch_desk)
    batch_desk.good("submit", batch_desk.list(2), "--yes")
    for arguments, cure in ((["retry", "cifar"], "batch submit --resume"), (["scale", "cifar", "3"], "max_vcpus")):
        result = batch_desk.desk.run("sweep", *arguments)
        assert result.exit_code == 8 and cure in result.output


def test_a_job_waits_for_those_it_depends_on(batch_desk: BatchDesk) -> None:
    made(batch_desk)
    first = batch_desk.good("submit", batch_desk.list(2), "--yes")["job_id"]
    second = batch_desk.good("submit", batch_desk.list(2), "--depends-on", "cifar:n_to_n", "--yes")
    third = batch_desk.good("submit", "--depends-on", first, "--yes")
    assert second["request"]["dependsOn"] == [{"jobId": first, "type": "N_TO_N"}]
    batch_desk.pass_time(4)
    jobs = batch_desk.batch.jobs.all
    assert {jobs[third["job_id"]].status, jobs[f"{second['job_id']}:0"].status} == {"PENDING"}
    batch_desk.pass_time(120)
    assert {jobs[one].status for one in (first, second["job_id"], third["job_id"])} == {"SUCCEEDED"}
    assert batch_desk.run("submit", "--depends-on", f"{first}:OTHER", "--yes").exit_code == 2


def test_nothing_is_written_where_the_queue_or_the_image_is_missing(batch_desk: BatchDesk) -> None:
    result = batch_desk.run("submit", "--yes")
    assert result.exit_code == 4 and "`fleetctl batch create` makes it" in result.output
    batch_desk.job()
    text = (batch_desk.desk.folder / "job.toml").read_text().replace(f'image = "{IMAGE}"', "")
    (batch_desk.desk.folder / "job.toml").write_text(text)
    assert "is not there yet" in batch_desk.run("create", "--yes").output
    result = batch_desk.run("submit", "--yes")
    assert result.exit_code == 4 and "`fleetctl batch image push`" in result.output
    assert batch_desk.batch.jobs.all == {}


def test_a_dependency_that_could_never_be_met_is_refused_before_a_run_is_begun(batch_desk: BatchDesk) -> None:
    made(batch_desk)
    three = batch_desk.good("submit", batch_desk.list(3), "--yes")
    batch_desk.script[None] = [Scripted(1, 7)]
    failed = batch_desk.good("submit", "--yes")["job_id"]
    batch_desk.pass_time(60)
    unknown = "11111111-2222-3333-4444-555555555555"
    for asked, code, said in (
        ([unknown], 4, f"knows no job {unknown}"),
        ([failed], 8, "has failed, and jobs that depend on it would fail too"),
        ([f"{three['job_id']}:N_TO_N"], 2, "that job is an array of 3, this one an array of 2"),
        ([three["job_id"], "SEQUENTIAL"], 0, ""),
        (["nobody"], 4, "there is no run of a job 'nobody'"),
    ):
        given = [word for one in asked for word in ("--depends-on", one)]
        result = batch_desk.run("submit", batch_desk.list(2), "--yes", *given)
        assert (result.exit_code, said in result.output) == (code, True), result.output
    assert batch_desk.run("submit", "--yes", "--depends-on", "SEQUENTIAL").exit_code == 2
    assert len(batch_desk.batch.jobs.all) == 4 + 1 + 3, "two arrays with their children, one job"


# --------------------------------------------------------------------------------------------------------------- follow
def test_every_line_is_told_once_though_streams_are_late_and_calls_are_throttled(batch_desk: BatchDesk) -> None:
    made(batch_desk)
    said = {index: [f"child {index} line {number}" for number in range(250)] for index in range(3)}
    for index in range(3):
        batch_desk.script[index] = [Scripted(7, 0, said[index][:200], said[index][200:])]
    faults = batch_desk.desk.account.rules.faults
    batch_desk.clock.sleeps = [lambda: setattr(faults, "throttle", 0.5)] * 3 + [lambda: setattr(faults, "throttle", 0)]
    result = batch_desk.run("submit", batch_desk.list(3), "--yes", "--wait")
    assert result.exit_code == 0, result.output
    told = Counter(line for line in result.stdout.splitlines() if line.startswith("["))
    assert told == Counter(f"[{index}] {line}" for index in range(3) for line in said[index])
    in_order = [line for line in result.stdout.splitlines() if line.startswith("[1]")]
    assert in_order == [f"[1] {line}" for line in said[1]]


def test_a_child_that_fails_is_not_tried_again_and_its_last_words_are_told(batch_desk: BatchDesk) -> None:
    made(batch_desk)
    batch_desk.script[1] = [Scripted(2, 7, ["loading"], ["ValueError: no such layer"])]
    result = batch_desk.run("submit", batch_desk.list(3), "--yes", "--wait")
    assert result.exit_code == 7
    assert "1 of 3 children failed" in result.output
    assert "child 1: Essential container in task exited; exit code 7" in result.output
    assert "ValueError: no such layer" in result.output
    assert [len(one.attempts) for one in batch_desk.batch.jobs.all.values() if one.index == 1] == [1]


def test_a_host_that_ends_costs_an_attempt_whose_lines_are_told_as_its_own(batch_desk: BatchDesk) -> None:
    made(batch_desk)
    batch_desk.script[None] = [Scripted(60, 0, ["first"]), Scripted(5, 0, ["second"])]
    rules = batch_desk.desk.account.rules

    def kill() -> None:
        (job,) = batch_desk.batch.jobs.all.values()
        assert job.running is not None
        rules.kill(job.running.host)

    batch_desk.clock.sleeps = [lambda: None] * 8 + [kill]
    result = batch_desk.run("submit", "--yes", "--wait")
    assert result.exit_code == 0, result.output
    assert [line for line in result.stdout.splitlines() if "first" in line or "second" in line] == [
        "first", "[attempt 2] second",
    ]  # fmt: skip


def test_children_that_wait_are_not_listed_and_those_that_ended_not_at_each_look(
    batch_desk: BatchDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of ten thousand each list is a hundred calls, at every look, and AWS throttles them."""
    made(batch_desk, "max_vcpus = 8")
    listed: Counter[str] = Counter()
    children = jobs.children

    def counted(session: Any, array: str, status: str) -> list[str]:
        listed[status] += 1
        return children(session, array, status)

    monkeypatch.setattr(jobs, "children", counted)
    for index in range(12):
        batch_desk.script[index] = [Scripted(6, 0, [f"of {index}"])]
    result = batch_desk.run("submit", batch_desk.list(12), "--yes", "--wait")
    assert result.exit_code == 0, result.output
    assert sorted(line for line in result.stdout.splitlines() if "] of" in line) == sorted(
        f"[{index}] of {index}" for index in range(12)
    )
    assert listed["RUNNABLE"] == 0 and listed["SUCCEEDED"] < listed["RUNNING"] / 2, listed


def test_waiting_ends_with_6_and_the_job_goes_on(batch_desk: BatchDesk) -> None:
    made(batch_desk)
    batch_desk.script[None] = [Scripted(500)]
    result = batch_desk.run("submit", "--yes", "--wait", "--timeout", "30s")
    assert result.exit_code == 6 and "`fleetctl batch logs cifar -f` follows it again" in result.output
    assert batch_desk.good("status")["status"] == "RUNNING"
    before = batch_desk.clock.monotonic()
    assert batch_desk.run("logs", "cifar", "-f", "--timeout", "10s").exit_code == 6
    assert batch_desk.clock.monotonic() - before == 10.0, "and not at the next look after it"


def test_ctrl_c_leaves_the_job_and_says_how_to_come_back(batch_desk: BatchDesk) -> None:
    made(batch_desk)

    def interrupt() -> None:
        raise KeyboardInterrupt

    batch_desk.clock.sleeps = [lambda: None, interrupt]
    result = batch_desk.run("submit", "--yes", "--wait")
    assert result.exit_code == 130 and "the job goes on: `fleetctl batch logs cifar -f`" in result.output


def test_a_child_that_never_started_is_recorded_as_failed(batch_desk: BatchDesk) -> None:
    made(batch_desk)
    batch_desk.batch.image_fault = lambda image: "CannotPullContainerError: not found"
    result = batch_desk.run("submit", batch_desk.list(2), "--yes", "--wait")
    assert result.exit_code == 7 and "CannotPullContainerError" in result.output
    document = batch_desk.good("status")
    assert [row["index"] for row in document["failed"]] == [0, 1] and document["phase"] == "failed"
    sweep = batch_desk.desk.good("sweep", "status", "cifar")
    assert {row["state"] for row in sweep["entries"]} == {"failed"}


def test_resume_submits_again_what_is_not_done(batch_desk: BatchDesk) -> None:
    made(batch_desk)
    batch_desk.batch.image_fault = lambda image: "CannotPullContainerError: not found"
    begun = batch_desk.run("submit", batch_desk.list(2), "--yes", "--wait")
    assert begun.exit_code == 7
    batch_desk.batch.image_fault = lambda image: ""
    again = batch_desk.good("submit", "--resume", "--yes")
    assert again["size"] == 2 and batch_desk.good("status")["phase"] == "requested"
    assert batch_desk.store(again["run"]).keys("queue/") == []
    assert batch_desk.run("submit", "--resume", "--yes").exit_code == 8, "it is at work"


def test_a_list_of_one_that_fails_ends_with_7_and_says_why(batch_desk: BatchDesk) -> None:
    made(batch_desk)
    batch_desk.batch.image_fault = lambda image: "CannotPullContainerError: not found"
    result = batch_desk.run("submit", batch_desk.list(1), "--yes", "--wait")
    assert result.exit_code == 7 and "CannotPullContainerError" in result.output
    document = batch_desk.good("status")
    assert [row["index"] for row in document["failed"]] == [0]
    assert "CannotPullContainerError" in batch_desk.run("status").stdout
    (entry,) = batch_desk.desk.good("sweep", "status", "cifar")["entries"]
    assert entry["state"] == "failed"


def test_a_resume_that_was_cut_short_is_resumed_again(
    batch_desk: BatchDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(batch_desk)
    batch_desk.batch.image_fault = lambda image: "CannotPullContainerError: not found"
    first = batch_desk.run("submit", batch_desk.list(2), "--yes", "--wait", "--output", "json")
    run = json.loads(first.stdout[: first.stdout.rindex("}") + 1])["run"]
    batch_desk.batch.image_fault = lambda image: ""
    answer = batch_desk.batch.call

    def dies(operation: str, params: Any) -> Any:
        if operation == "SubmitJob":
            raise KeyboardInterrupt
        return answer(operation, params)

    monkeypatch.setattr(batch_desk.batch, "call", dies)
    assert batch_desk.run("submit", "--resume", "--yes").exit_code == 130
    monkeypatch.setattr(batch_desk.batch, "call", answer)
    assert batch_desk.good("status")["run"] == run, "what was there before is still shown"
    again = batch_desk.good("submit", "--resume", "--yes")
    assert again["run"] == run and again["size"] == 2


def test_a_job_whose_submission_lost_its_answer_is_found_by_the_next_one(
    batch_desk: BatchDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(batch_desk)
    batch_desk.script[None] = [Scripted(1, 7), Scripted(500)]
    batch_desk.run("submit", "--yes", "--wait")
    answer = batch_desk.batch.call

    def dies(operation: str, params: Any) -> Any:
        found = answer(operation, params)
        if operation == "SubmitJob":
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr(batch_desk.batch, "call", dies)
    assert batch_desk.run("submit", "--resume", "--yes").exit_code == 130
    monkeypatch.setattr(batch_desk.batch, "call", answer)
    refused = batch_desk.run("submit", "--resume", "--yes")
    assert refused.exit_code == 8 and "is at work" in refused.output
    document = batch_desk.good("status")
    assert document["status"] != "FAILED" and document["job_id"] == list(batch_desk.batch.jobs.all)[-1]


def test_what_batch_refuses_does_not_look_as_if_it_were_to_begin(
    batch_desk: BatchDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(batch_desk)
    answer = batch_desk.batch.call

    def refuses(operation: str, params: Any) -> Any:
        if operation == "SubmitJob":
            raise ApiError("ClientException", "no more", 400)
        return answer(operation, params)

    monkeypatch.setattr(batch_desk.batch, "call", refuses)
    assert "no more" in batch_desk.run("submit", "--yes").output
    shown = batch_desk.desk.run("status", "cifar").output
    assert "AWS Batch has refused it" in shown, shown


def test_a_job_that_batch_does_not_show_yet_is_waited_for(
    batch_desk: BatchDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(batch_desk)
    answer = batch_desk.batch.call
    looks: list[str] = []

    def stale(operation: str, params: Any) -> Any:
        found = answer(operation, params)
        if operation == "DescribeJobs" and len(looks) < 3:
            looks.append(operation)
            return {"jobs": []}
        return found

    monkeypatch.setattr(batch_desk.batch, "call", stale)
    result = batch_desk.run("submit", "--yes", "--wait")
    assert result.exit_code == 0, result.output


def test_a_failed_job_ends_the_wait_with_7_also_where_aws_falls_silent_then(
    batch_desk: BatchDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(batch_desk)
    batch_desk.script[None] = [Scripted(2, 7)]

    def silent(*_: Any) -> Any:
        raise Retryable("could not describe the jobs: Too Many Requests")

    monkeypatch.setattr("spotheal.fleet.batch.status.gather", silent)
    result = batch_desk.run("submit", "--yes", "--wait")
    assert result.exit_code == 7, result.output


# --------------------------------------------------------------------------------------------------------------- delete
def test_what_is_being_deleted_is_not_made_again_beside_it(batch_desk: BatchDesk) -> None:
    made(batch_desk)
    batch_desk.batch.queues["spotheal-cifar"].status = "DELETING"
    result = batch_desk.run("create", "--yes")
    assert result.exit_code == 8 and "job queue spotheal-cifar is being deleted" in result.output
    del batch_desk.batch.queues["spotheal-cifar"]
    batch_desk.batch.environments["spotheal-cifar-spot"].status = "DELETING"
    result = batch_desk.run("create", "--yes")
    assert result.exit_code == 8 and "compute environment spotheal-cifar-spot is being deleted" in result.output


def test_a_queue_that_somebody_else_made_is_not_changed(batch_desk: BatchDesk) -> None:
    made(batch_desk)
    batch_desk.batch.queues["spotheal-cifar"].asked["tags"] = {"team": "other"}
    batch_desk.job("on_demand = false")
    result = batch_desk.run("create", "--yes")
    assert result.exit_code == 8 and "a job queue spotheal-cifar that fleetctl has not made" in result.output


def test_delete_takes_the_only_order_that_aws_takes_and_leaves_nothing(batch_desk: BatchDesk) -> None:
    made(batch_desk)
    batch_desk.good("delete", "--yes")
    batch = batch_desk.batch
    assert not batch.environments and not batch.queues and not batch.logs.groups
    assert {one.status for one in batch.definitions} == {"INACTIVE"}
    assert not batch_desk.good("delete", "--yes")["deleted"]


def test_delete_refuses_while_jobs_run_unless_it_is_told_to(batch_desk: BatchDesk) -> None:
    made(batch_desk)
    batch_desk.script[None] = [Scripted(500)]
    job = batch_desk.good("submit", "--yes")["job_id"]
    batch_desk.pass_time(30)
    refused = batch_desk.run("delete")
    assert refused.exit_code == 8 and "1 job(s) of queue spotheal-cifar are not over" in refused.output
    batch_desk.good("delete", "--yes")
    assert batch_desk.batch.jobs.all[job].status == "FAILED" and not batch_desk.batch.queues


def test_what_somebody_else_made_is_not_touched(batch_desk: BatchDesk) -> None:
    made(batch_desk)
    batch_desk.batch.environments["spotheal-cifar-spot"].asked["tags"] = {"team": "other"}
    result = batch_desk.run("create", "--yes")
    assert result.exit_code == 8 and "fleetctl has not made" in result.output
    batch_desk.good("delete", "--yes")
    assert list(batch_desk.batch.environments) == ["spotheal-cifar-spot"]


def test_cancel_ends_what_runs_and_what_waits(batch_desk: BatchDesk) -> None:
    made(batch_desk)
    batch_desk.script[None] = [Scripted(500)]
    batch_desk.good("submit", "--yes")
    batch_desk.pass_time(30)
    assert batch_desk.good("cancel", "--yes")["cancelled"]
    batch_desk.pass_time(5)
    document = batch_desk.good("status")
    assert (document["status"], document["attempts"]) == ("FAILED", 1), "a job that was ended is not tried again"
    assert not batch_desk.good("cancel", "--yes")["cancelled"]


# ---------------------------------------------------------------------------------------------------------------- image
def test_the_dockerfile_is_printed_without_docker(batch_desk: BatchDesk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(batch_desk.desk.folder))
    document = batch_desk.good("image", "push", "--print")
    assert document["image"].startswith("123456789012.dkr.ecr.us-west-2.amazonaws.com/spotheal:")
    assert "FROM pytorch/pytorch:" in document["dockerfile"] and "spotheal-0-py3" in document["dockerfile"]
    result = batch_desk.run("image", "push")
    assert result.exit_code == 1 and "there is no docker" in result.output


def test_docker_that_does_not_run_is_found_before_anything_is_made(
    batch_desk: BatchDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = batch_desk.desk.folder / "docker"
    program.write_text("#!/bin/sh\necho 'Cannot connect to the Docker daemon' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{batch_desk.desk.folder}:/usr/bin:/bin")
    result = batch_desk.run("image", "push")
    assert result.exit_code == 1 and "docker does not work here: Cannot connect" in result.output
    assert "created repository" not in result.output


DOCKER = """#!/bin/sh
# Notes what it is told; builds only from a context that a Dockerfile of ours could be built from.
echo "$@" >> "$0.told"
case "$1" in
build) shift; while [ $# -gt 1 ]; do shift; done
       test -s "$1/Dockerfile" && test -n "$(ls "$1"/wheels/spotheal-0-py3*.whl)" && test ! -e "$0.full" ;;
login) cat > "$0.password" ;;
esac
"""


def test_an_image_is_built_and_pushed_and_no_password_is_on_a_command_line(
    batch_desk: BatchDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, told = batch_desk.desk.folder / "docker", batch_desk.desk.folder / "docker.told"
    program.write_text(DOCKER)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{batch_desk.desk.folder}:/usr/bin:/bin")
    first = batch_desk.run("image", "push")
    assert first.exit_code == 0 and "created repository spotheal in ECR" in first.output
    name = batch_desk.good("image", "push", "--print")["image"]
    verbs = [line.split() for line in told.read_text().splitlines()]
    assert [words[0] for words in verbs] == ["info", "build", "login", "push"]
    assert name in verbs[1] and verbs[2][-1] == name.partition("/")[0] and verbs[3] == ["push", name]
    password = (batch_desk.desk.folder / "docker.password").read_text()
    assert password and password not in told.read_text()

    (batch_desk.desk.folder / "docker.full").touch()
    told.unlink()
    again = batch_desk.run("image", "push")  # the repository is there by now
    assert again.exit_code == 1 and "could not build the image: docker ended with 1" in again.output
    assert "created repository" not in again.output and "push" not in told.read_text()


# ---------------------------------------------------------------------------------------------------------------- rules
@pytest.mark.parametrize(
    ("attempt", "again"),
    [
        (Attempt("s", "i-1", 0, status_reason="Host EC2 (instance i-1) terminated."), True),
        (Attempt("s", "i-1", 0, exit_code=75, status_reason="Essential container in task exited"), True),
        (Attempt("s", "i-1", 0, exit_code=7, status_reason="Essential container in task exited"), False),
        (Attempt("s", "i-1", 0, exit_code=1, status_reason="Essential container in task exited"), False),
        (Attempt("s", "i-1", 0, reason="CannotPullContainerError: x", status_reason="Task failed to start"), False),
        (Attempt("s", "i-1", 0, reason="DockerTimeoutError: x", status_reason="Task failed to start"), True),
        (Attempt("s", "i-1", 0, exit_code=137, reason="OutOfMemoryError: Container killed", status_reason="E"), False),
    ],
)
def test_ends_of_hosts_are_tried_again_and_ends_of_jobs_are_not(attempt: Attempt, again: bool) -> None:
    assert is_retried(documents.retry(10), 1, attempt) is again
    assert not is_retried(documents.retry(10), 10, attempt)


def test_the_rules_of_retrying_are_such_as_aws_takes(batch_desk: BatchDesk) -> None:
    rules = documents.retry(10)["evaluateOnExit"]
    assert len(rules) <= 5 and json.dumps(rules)
    made(batch_desk)  # the rehearsal's Batch refuses what does not match AWS's patterns


# --------------------------------------------------------------------------------------------------- beside a fleet
def test_a_job_at_work_on_batch_gets_no_spot_fleet_beside_it(batch_desk: BatchDesk) -> None:
    made(batch_desk)
    desk = batch_desk.desk
    begun = batch_desk.good("submit", "--array", "2", "--yes")["run"]
    for arguments in (["request"], ["request", "--new-run"], ["request", "--resume"],
                      ["sweep", "run", batch_desk.list(2)]):  # fmt: skip
        refused = desk.run(*arguments, "--yes")
        assert refused.exit_code == ExitCode.CONFLICT
        assert f"is at work on AWS Batch: run {begun}" in refused.stderr, refused.stderr
    assert desk.live_fleets() == []
    ways_on = ((["cancel", "--yes"], "fleetctl batch cancel cifar"), (["status", "-w"], "batch logs cifar -f"))
    for arguments, cure in ways_on:
        refused = desk.run(*arguments)
        assert (refused.exit_code, cure in refused.stderr) == (ExitCode.CONFLICT, True), refused.stderr
    assert "at Batch  " in desk.run("status").stdout
    batch_desk.pass_time(60)
    assert "--new-run begins another here" in desk.run("request", "--yes").stderr
    assert desk.request("--new-run")["run"] != begun


def test_a_job_that_a_spot_fleet_works_on_is_not_submitted_beside_it(batch_desk: BatchDesk) -> None:
    made(batch_desk)
    batch_desk.desk.request()
    refused = batch_desk.run("submit", "--yes")
    assert refused.exit_code == ExitCode.CONFLICT
    assert "works on job 'cifar'" in refused.stderr and "fleetctl cancel cifar" in refused.stderr
    assert "SubmitJob" not in batch_desk.calls()


# ---------------------------------------------------------------------------------------------------------- two regions
def test_a_job_in_two_regions_keeps_the_policy_of_each_until_it_is_deleted_there(batch_desk: BatchDesk) -> None:
    """A role is the account's, not a region's."""
    made(batch_desk)
    iam = batch_desk.desk.account.client("iam", "")
    here = {"RoleName": "spotheal-batch-job-cifar", "PolicyName": "spotheal-batch-us-west-2"}
    other = {**here, "PolicyName": "spotheal-batch-eu-west-1"}
    document = iam.get_role_policy(**here)["PolicyDocument"]
    iam.put_role_policy(**other, PolicyDocument=json.dumps(document).replace("us-west-2", "eu-west-1"))
    batch_desk.good("delete", "--yes")
    assert iam.list_role_policies(RoleName=here["RoleName"])["PolicyNames"] == [other["PolicyName"]]
    iam.delete_role_policy(**other)
    assert iam.get_role(RoleName=here["RoleName"])
