"""The two files of a request: every fault at once, with its place and its cure."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spotheal.agent.protocol.errors import ConfigError, NotFound
from spotheal.agent.protocol.job import parse_job
from spotheal.fleet.files import jsonfile
from spotheal.fleet.files.config import parse_fleet, read_job, read_request

ARTICLE = Path(__file__).resolve().parents[2] / "data" / "article_spot_fleet_config.json"
GOOD: dict[str, Any] = {
    "TargetCapacity": 1,
    "IamFleetRole": "arn:aws:iam::123456789012:role/fleet",
    "LaunchSpecifications": [
        {
            "ImageId": "ami-0123456789abcdef0",
            "InstanceType": "g5.xlarge",
            "Placement": {"AvailabilityZone": "us-west-2a, us-west-2b"},
            "IamInstanceProfile": {"Arn": "arn:aws:iam::123456789012:instance-profile/agent"},
            "UserData": "base64_encoded_bash_script",
        }
    ],
}


def faults(document: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_fleet(json.dumps(document), "fleet.json")
    return caught.value.message


def with_spec(**changes: Any) -> dict[str, Any]:
    document = copy.deepcopy(GOOD)
    document["LaunchSpecifications"][0].update(changes)
    return document


def test_a_good_file_gives_types_zones_and_region() -> None:
    fleet = parse_fleet(json.dumps(GOOD))
    assert fleet.instance_types == ("g5.xlarge",)
    assert fleet.zones == ("us-west-2a", "us-west-2b")
    assert fleet.region == "us-west-2"


def test_a_file_of_two_accounts_is_refused_before_anybody_asks_aws() -> None:
    said = faults({**GOOD, "IamFleetRole": "arn:aws:iam::999999999999:role/fleet"})
    assert "IamFleetRole is of account 999999999999" in said and "of account 123456789012" in said


def test_the_profile_of_another_job_is_refused(tmp_path: Path) -> None:
    """The job's role may touch that job's things alone: each machine would have been refused by its store."""
    arn = "arn:aws:iam::123456789012:instance-profile/spotheal-job-other"
    for named in ({"Name": "spotheal-job-other"}, {"Arn": arn}):
        (tmp_path / "fleet.json").write_text(json.dumps(with_spec(IamInstanceProfile=named)))
        (tmp_path / "job.toml").write_text('[job]\nname = "mine"\nrepository = "."\ncommand = ["x"]\n')
        with pytest.raises(ConfigError, match=r"spotheal-job-other of job other, but job.toml is for job mine"):
            read_request(tmp_path / "fleet.json", tmp_path / "job.toml")
        (tmp_path / "job.toml").write_text('[job]\nname = "other"\nrepository = "."\ncommand = ["x"]\n')
        read_request(tmp_path / "fleet.json", tmp_path / "job.toml")


@pytest.mark.parametrize(
    ("key", "words", "sign"),
    [
        ("command", ["torchrun", "train.py", "&&", "echo", "done"], "&&"),
        ("command", ["python", "train.py", "2>&1"], "2>&1"),
        ("command", ["A=1", "python", "train.py"], "A=1"),
        ("command", ["python", "train.py", "|", "tee", "log"], "|"),
        ("resume_command", ["python", "train.py", ">", "log"], ">"),
        ("setup", [["cd", "src", "&&", "make"]], "&&"),
        ("command", ["python", "train.py", "--data", "$HOME/data"], "$HOME/data"),
        ("command", ["python", "~/train.py"], "~/train.py"),
        ("command", ["python", "train.py", "--data=${HOME}/data"], "--data=${HOME}/data"),
        ("command", ["python", "train.py", "--data=${DATA}"], "--data=${DATA}"),
        ("setup", [["pip", "install", "$MY_WHEEL"]], "$MY_WHEEL"),
    ],
)
def test_what_only_a_shell_understands_is_refused_as_init_refuses_it(key: str, words: list[Any], sign: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_job({"job": {"name": "j", "repository": ".", "command": ["x"], key: words}})
    assert f"has `{sign}`, which only a shell understands, and no shell runs the command" in caught.value.message
    assert '["sh", "-c", ' in caught.value.message


@pytest.mark.parametrize(
    "words",
    [
        ["sh", "-c", "a && b"],
        ["x", "--pad", "<pad>"],
        ["x", "a;b"],
        ["x", "A=1"],
        ["find", ".", "-exec", "x", ";"],
        ["sh", "-c", "$HOME/x"],
        ["x", "--out=${SPOTHEAL_RESULTS_DIR}", "~", "^a$", "--cost=$5", "dir=${hydra:runtime.cwd}", "lr=${base_lr}"],
    ],
)
def test_an_argument_that_only_looks_like_a_shells_is_taken(words: list[str]) -> None:
    assert parse_job({"job": {"name": "j", "repository": ".", "command": words}}).job.command == tuple(words)


@pytest.mark.parametrize(
    "name", ["python3.99", "python2.7", "python3.6", "python4", "3.11", "python3.11.4", "/usr/bin/python3.99"]
)
def test_a_python_that_torch_has_no_build_for_is_refused_with_the_names_that_it_has(name: str) -> None:
    """It was found out on the machine, after the fleet had been paid for."""
    with pytest.raises(ConfigError) as caught:
        parse_job({"job": {"name": "j", "repository": ".", "command": ["x"], "python": name}})
    assert 'must be "python3", a name from "python3.8" to "python3.15" (torch has no build for another)' in (
        caught.value.message
    )


@pytest.mark.parametrize(
    "name", ["", "python", "python3", "python3.8", "python3.13t", "/opt/pytorch/bin/python", "/opt/my env/bin/python3"]
)
def test_a_python_that_a_machine_may_have_is_taken(name: str) -> None:
    assert parse_job({"job": {"name": "j", "repository": ".", "command": ["x"], "python": name}}).job.python == name


def test_the_wrapper_of_the_api_is_taken_too() -> None:
    assert parse_fleet(json.dumps({"SpotFleetRequestConfig": GOOD})).document == GOOD


def test_the_articles_sample_names_what_is_missing_where_and_the_cure() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_fleet(ARTICLE.read_text(), "spot_fleet_config.json")
    said = caught.value.message
    assert (
        "spot_fleet_config.json:11:12: the placeholder <SECURITY_GROUP_ID> is still there, and without quotes" in said
    )
    assert '    "GroupId": <SECURITY_GROUP_ID>\n               ^' in said
    assert "spot_fleet_config.json:39:2: the file ends before it is closed; add ] } at the end" in said
    assert "the placeholder <ACCOUNT_NUMBER> is still in IamFleetRole" in said
    assert "aws sts get-caller-identity" in said
    assert "the placeholder <KEYPAIR_NAME> is still in LaunchSpecifications[0].KeyName" in said
    assert "base64_encoded_bash_script" not in said


def test_the_articles_sample_is_good_once_its_faults_are_cured() -> None:
    text = ARTICLE.read_text().rstrip() + "] }"
    text = text.replace("<SECURITY_GROUP_ID>", '"sg-0123456789abcdef0"').replace("<ACCOUNT_NUMBER>", "123456789012")
    fleet = parse_fleet(text.replace("<KEYPAIR_NAME>", "mine"))
    assert fleet.instance_types == ("p3.2xlarge", "p2.xlarge")
    assert "lowestPrice" in fleet.warnings[0]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"a": [1, 2,]}', "f:1:12: no comma may stand before a closing bracket"),
        ('{"a": 1,\n}', "f:1:8: no comma may stand before a closing bracket"),
        ('{"a": 1 "b": 2}', "f:1:9: a comma is missing"),
        ('{"a": [1}', "f:1:9: ] is missing before this }"),
        ('{"a": 1}}', "f:1:9: one } too many"),
        ('{"a": True}', "f:1:7: True is Python; JSON writes true"),
        ('{"a": us-west-2}', 'f:1:7: text needs quotes: "us-west-2"'),
        ("{'a': 1}", "f:1:2: ' is no quote in JSON"),
        ('// mine\n{"a": 1}', "f:1:1: JSON has no comments"),
        ('{"a": "b', "f:1:7: this text has no closing quote"),
        ('{"a": {"b": [', "f:1:14: the file ends before it is closed; add ] } } at the end"),
        ('{"a": 1, "a": 2}', '"a" stands twice'),
        ("", "f:1:1: the file is empty"),
    ],
)
def test_json_faults_have_line_column_and_cure(text: str, says: str) -> None:
    assert says in "\n".join(jsonfile.parse(text, "f").faults)


def test_every_fault_of_the_json_is_reported_in_one_run() -> None:
    parsed = jsonfile.parse('{"a": [1,], "b": None, "c": <X>', "f")
    assert len(parsed.faults) == 4
    assert parsed.value == {"a": [1], "b": None, "c": "<X>"}


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="{}[]\",:<>ab1 \n\\'#/-.tT", max_size=40))
def test_any_text_is_parsed_or_has_a_fault(text: str) -> None:
    parsed = jsonfile.parse(text, "f")
    if parsed.faults:
        assert all(fault.startswith("f:") for fault in parsed.faults)
    else:
        assert parsed.value == json.loads(text)


@settings(max_examples=100, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
        max_leaves=8,
    ),
    st.integers(1, 30),
)
def test_a_file_cut_short_names_what_to_add_or_where_it_broke(value: Any, cut: int) -> None:
    text = json.dumps({"LaunchSpecifications": [value]})[:-cut]
    assert jsonfile.parse(text, "f").faults


def test_unknown_missing_and_wrong_typed_keys_are_reported_together() -> None:
    document = {"TargetCapacity": "one", "IamFleetrole": "x", "LaunchSpecifications": [{"ImageID": "ami-1"}]}
    said = faults(document)
    assert "TargetCapacity: must be a whole number, is one" in said
    assert "IamFleetrole: no such key; did you mean IamFleetRole?" in said
    assert "IamFleetRole: is required" in said
    assert "LaunchSpecifications[0].ImageID: no such key; did you mean ImageId?" in said
    assert "LaunchSpecifications[0]: names no zone" in said


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"TargetCapacity": 2}, "TargetCapacity: must be 1"),
        ({"Type": "request"}, 'Type: must be "maintain"'),
        ({"AllocationStrategy": "cheapest"}, 'AllocationStrategy: "cheapest" is not one of'),
        ({"InstanceInterruptionBehavior": "hibernate"}, "must not be"),
        ({"SpotMaintenanceStrategies": {"CapacityRebalance": {"ReplacementStrategy": "launch"}}}, "side by side"),
        ({"IamFleetRole": "fleet-role"}, "IamFleetRole:"),
        ({"OnDemandTargetCapacity": 1}, "OnDemandTargetCapacity: must be left out"),
        (
            {"LaunchTemplateConfigs": [{"LaunchTemplateSpecification": {"LaunchTemplateId": "lt-0", "Version": "1"}}]},
            "one of them",
        ),
        ({"LaunchSpecifications": []}, "LaunchSpecifications: is required"),
    ],
)
def test_fleets_that_one_volume_cannot_serve_are_refused(change: dict[str, Any], says: str) -> None:
    assert says in faults({**GOOD, **change})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"ImageId": "ami-xyz"}, "ImageId"),
        ({"IamInstanceProfile": None}, "IamInstanceProfile: is required"),
        ({"UserData": "IyEvYmluL3No"}, "UserData: is filled by fleetctl"),
        ({"Placement": {"AvailabilityZone": "us-west-2"}}, "is not of the form us-west-2a"),
        ({"Placement": {"AvailabilityZone": "us-west-2a, eu-west-1a"}}, "zones of several regions"),
        ({"Placement": {}}, "names no zone"),
        ({"WeightedCapacity": 0.5}, "several instances"),
        ({"SubnetId": "my-subnet"}, "is not of the form subnet-"),
    ],
)
def test_specifications_that_cannot_work_are_refused(change: dict[str, Any], says: str) -> None:
    document = with_spec(**change)
    if change.get("IamInstanceProfile", "") is None:
        del document["LaunchSpecifications"][0]["IamInstanceProfile"]
    assert says in faults(document)


@pytest.mark.parametrize("value", [[], "text", 1, None])
def test_a_file_that_is_no_object_is_one_fault(value: Any) -> None:
    with pytest.raises(ConfigError, match="must hold one JSON object"):
        parse_fleet(json.dumps(value))


@pytest.mark.parametrize("value", [5, "x", [1], {"a": 1}, [[]], [{"Placement": 3}], [{"SubnetId": 3}], None])
@pytest.mark.parametrize("key", ["LaunchSpecifications", "LaunchTemplateConfigs"])
def test_wrong_shapes_are_faults_and_never_crashes(key: str, value: Any) -> None:
    assert faults({**GOOD, "LaunchSpecifications": [], key: value})


def test_a_missing_job_file_shows_one_to_copy(tmp_path: Path) -> None:
    with pytest.raises(NotFound) as caught:
        read_job(tmp_path / "job.toml")
    assert 'command = ["python", "train.py"]' in str(caught.value)
    assert "--job FILE" in str(caught.value)


def test_malformed_toml_has_line_column_and_caret(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text("[job]\nname = my-job\n")
    with pytest.raises(ConfigError) as caught:
        read_job(path)
    assert f"{path}:2:8:" in caught.value.message
    assert "    name = my-job\n           ^" in caught.value.message


def test_the_faults_of_both_files_come_together(tmp_path: Path) -> None:
    (tmp_path / "fleet.json").write_text('{"TargetCapacity": 3}')
    (tmp_path / "job.toml").write_text('[job]\nname = "A"\ncolour = "red"\n')
    with pytest.raises(ConfigError) as caught:
        read_request(tmp_path / "fleet.json", tmp_path / "job.toml")
    said = caught.value.message
    assert "TargetCapacity: must be 1" in said
    assert "[job] colour: no such key" in said
    assert "[job] command: is required" in said


@pytest.mark.parametrize("value", ["9" * 6000, "[" * 100_000 + "]" * 100_000], ids=["digits", "brackets"])
def test_what_no_parser_reads_to_its_end_is_a_fault_of_the_file(tmp_path: Path, value: str) -> None:
    with pytest.raises(ConfigError, match="too long, or brackets too deep"):
        parse_fleet(f'{{"TargetCapacity": {value}}}', "fleet.json")
    (tmp_path / "job.toml").write_text(f"x = {value}\n")
    with pytest.raises(ConfigError, match="too long, or brackets too deep"):
        read_job(tmp_path / "job.toml")
