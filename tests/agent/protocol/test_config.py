"""job.toml: one table of keys, frozen result, all faults together, and the same document again on the instance."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spotheal.agent.protocol import job as config
from spotheal.agent.protocol.errors import ConfigError, ExitCode
from spotheal.agent.protocol.instance_config import InstanceConfig
from spotheal.agent.protocol.job import JobConfig, parse_job
from spotheal.agent.protocol.job_keys import FREE_TABLES, KEYS, REQUIRED, Key
from spotheal.agent.protocol.job_values import seconds
from spotheal.agent.protocol.names import StoreUrl

LEAST: dict[str, Any] = {
    "job": {"name": "digits", "repository": "https://example.org/r.git", "command": ["python", "train.py"]}
}
# Defaults that follow from another key.
DERIVED = {("volume", "name"): "spotheal-digits"}
# For every key a legal value that is not its default, and values that are not legal.
EXAMPLES: dict[tuple[str, str], tuple[Any, list[Any]]] = {
    ("job", "name"): ("a-1", ["", "A", "-a", "a-", "a" * 41, "a b", "a\n", 1]),
    ("job", "repository"): (".", [1, None, "a\nb", "a\0b"]),
    ("job", "revision"): ("v1.2", ["a b", "$(x)", "a;b", 1, "a\n"]),
    ("job", "command"): (["./run", "--lr", "0.1 ; rm"], ["python train.py", [1], [], ["a\0"], None]),
    ("job", "resume_command"): (["python", "resume.py"], ["x", [1]]),
    ("job", "setup"): ([["make", "data"]], [["make"], [[]], "x", [[1]]]),
    ("job", "repository_secret"): ("ssm:/git", ["git", "ssm:", 1, "s3://x"]),
    ("job", "directory"): ("sub/dir", ["/etc", "../x", "a/../../b", 1]),
    ("job", "region"): ("us-west-2", ["us west", "US-WEST-2", "moon", 1]),
    ("job", "python"): ("/opt/python", [1, "a\nb"]),
    ("job", "keep"): (["out", "a/b"], ["out", [""], ["."], ["/out"], ["../out"], [1]]),
    ("job", "submodules"): (True, [1, "true", None]),
    ("job", "set_aside_broken"): (True, [0, "false"]),
    ("job", "keep_on_failure"): ("20m", ["20", 20, "m", "20 minutes", "-1m", "1.5h"]),
    ("job", "gpus"): (1, [-1, "all", 1.5, True]),
    ("job", "gpu_memory_gib"): (24, [-1, "24"]),
    ("job", "nproc_per_node"): (4, [0, -1, 65, "all", True, 1.5]),
    ("job", "nodes"): ("1:1", [2, "2-4", ":", "two", "0", "3:2", "65", "2:65", "2:", ":2"]),
    ("job", "nodes_wait"): ("30m", ["15", 15, ""]),
    ("volume", "name"): ("my data", [1, "a\nb"]),
    ("volume", "size_gib"): (1, [0, 65537, 1.5, "100", True]),
    ("volume", "type"): ("st1", ["gp9", 1, "", "io1", "io2"]),
    ("volume", "mount"): ("/data/x", ["data", "/", "/a b", "/a/../etc", "/a;b", 1]),
    ("volume", "filesystem"): ("ext4", ["btrfs", 1]),
    ("volume", "snapshot"): ("snap-0abc", ["snap-", "vol-0abc", "snap-xyz", 1]),
    ("volume", "kms_key"): (
        "arn:aws-cn:kms:cn-north-1:123456789012:key/mrk-0a",
        ["alias/mine", "1234abcd", "arn:aws:kms:us-west-2:123456789012:alias/mine", "arn:aws:kms:us-west-2:1:key/a", 1],
    ),
    ("volume", "initialization_rate"): (300, [-1, 1, 99, 301, "300", True, False, 150.0, None]),
    ("volume", "snapshot_every"): ("6h", ["often", 6]),
    ("volume", "delete_superseded"): (False, ["no", 0]),
    ("fleet", "engine"): ("ec2-fleet", ["auto", 1]),
    ("fleet", "harden"): (False, ["no"]),
    ("fleet", "ssh_from"): ("203.0.113.7/32", ["anywhere", "203.0.113.7/", 1]),
    ("fleet", "public_key"): ("~/.ssh/id_ed25519.pub", [1, "a\nb"]),
    ("fleet", "on_demand_after"): ("30m", ["later"]),
    ("limits", "failures"): (5, [0, 101, 1.5]),
    ("limits", "silent"): ("30m", ["soon", 5, ""]),
    ("limits", "hours"): (1.5, [-1, "1", True, float("nan"), float("inf")]),
    ("limits", "dollars"): (20, [-1, "20"]),
    ("cage", "mode"): ("imds", ["maybe", True]),
    ("cage", "user"): ("ml", ["Root", "a b", "", "a" * 33, 1]),
    ("job", "known_hosts"): ("h ssh-ed25519 AAAA", ["h ssh-rsa", "# h", 1]),
    ("cage", "trainer_policy"): ("policy.json", [1]),
    ("store", "url"): ("s3://bucket/prefix", ["bucket", "https://b", "s3://B", 1]),
    ("store", "results"): ("s3://bucket/results", ["results"]),
    ("batch", "image"): ("123456789012.dkr.ecr.us-west-2.amazonaws.com/spotheal:1", ["a b", "$(x)", 1]),
    ("batch", "vcpus"): (8, [0, 193, "4", True]),
    ("batch", "memory_gib"): (30.5, [0, -1, "14", 5000]),
    ("batch", "gpus"): (1, [-1, 17, "gpu"]),
    ("batch", "max_vcpus"): (256, [0, "64"]),
    ("batch", "instance_types"): (["g5", "g6.xlarge"], ["g5", ["G5"], ["g5.*"], [1]]),
    ("batch", "on_demand"): (False, ["no", 0]),
    ("batch", "attempts"): (3, [0, 11, "3"]),
    ("batch", "copy_every"): ("1m", ["often", 5]),
    ("notify", "webhook"): ("https://example.org/hook", ["ftp://x", "javascript:x", 1]),
    ("notify", "sns"): ("arn:aws:sns:us-west-2:123456789012:x", ["topic", "arn:aws:s3:::x"]),
}


def job(table: str, name: str, value: Any) -> dict[str, Any]:
    document: dict[str, Any] = {key: dict(entries) for key, entries in LEAST.items()}
    document.setdefault(table, {})[name] = value
    return document


def faults(document: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as refused:
        parse_job(document)
    assert refused.value.exit_code is ExitCode.USAGE
    assert refused.value.next_step
    return refused.value.message.split("\n")


def marked(key: Key) -> str:
    return f"{key.table}.{key.name}"


# ---------------------------------------------------------------------------------------------------------------- keys
def test_every_key_has_an_example_here() -> None:
    assert sorted(EXAMPLES) == sorted((key.table, key.name) for key in KEYS)


@pytest.mark.parametrize("key", KEYS, ids=marked)
def test_the_default_of_each_key_is_legal(key: Key) -> None:
    if key.default is not REQUIRED:
        assert key.check(key.default) == ""
        default = DERIVED.get((key.table, key.name), key.default)
        assert getattr(getattr(parse_job(LEAST), key.table), key.name) == config._frozen(default)


@pytest.mark.parametrize("key", KEYS, ids=marked)
def test_a_legal_value_is_taken_or_refused_as_not_ready(key: Key) -> None:
    legal, _ = EXAMPLES[key.table, key.name]
    assert key.check(legal) == ""
    document = job(key.table, key.name, legal)
    if key.ready:
        assert getattr(getattr(parse_job(document), key.table), key.name) == config._frozen(legal)
    else:
        (fault,) = faults(document)
        assert fault.startswith(f"job.toml: [{key.table}] {key.name}: is not supported by this version")


@pytest.mark.parametrize("key", KEYS, ids=marked)
def test_an_illegal_value_is_one_fault_that_names_the_key(key: Key) -> None:
    for illegal in EXAMPLES[key.table, key.name][1]:
        (fault,) = faults(job(key.table, key.name, illegal))
        assert fault.startswith(f"job.toml: [{key.table}] {key.name}: "), (illegal, fault)


@pytest.mark.parametrize("key", [key for key in KEYS if key.default is REQUIRED], ids=marked)
def test_a_required_key_is_missed(key: Key) -> None:
    document = {"job": {name: value for name, value in LEAST["job"].items() if name != key.name}}
    assert faults(document) == [f"job.toml: [job] {key.name}: is required"]


def test_the_frozen_tables_have_exactly_the_keys() -> None:
    for table, cls in config._TABLES.items():
        assert [key.name for key in KEYS if key.table == table] == [field.name for field in dataclasses.fields(cls)]
    assert [*config._TABLES, *FREE_TABLES] == list(get_type_hints(JobConfig))


def test_the_result_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        parse_job(LEAST).job.name = "other"  # type: ignore[misc]


# -------------------------------------------------------------------------------------------------------------- faults
def test_all_faults_are_told_together() -> None:
    document = {
        "job": {"name": "Bad Name", "comand": ["x"]},
        "volume": {"size_gib": 0, "type": "gp9"},
        "limits": "none",
        "extra": {},
        "environment": {"SPOTHEAL_JOB": "x", "1A": "x", "OK": 1},
    }
    found = faults(document)
    starts = ["[extra]", "[job] comand", "[job] name", "[job] repository", "[job] command", "[volume] size_gib"]
    starts += ["[volume] type", "limits must", "[environment] SPOTHEAL_JOB", "[environment] '1A'", "[environment] OK"]
    assert sorted(starts) == sorted(next(s for s in starts if fault.startswith(f"job.toml: {s}")) for fault in found)


def test_an_unknown_key_is_told_with_the_legal_ones() -> None:
    (fault,) = faults(job("cage", "mod", "on"))
    assert fault == "job.toml: [cage] mod: no such key; did you mean mode?"


@pytest.mark.parametrize(
    "reference",
    ["ssm:/spotheal/j/TOKEN", "ssm:plain", "ssm:/a/b:3", "secretsmanager:team/token", "secretsmanager:team/token#key",
     "secretsmanager:arn:aws:secretsmanager:us-west-2:123456789012:secret:x-AbCdEf#a"],
)  # fmt: skip
def test_a_secret_names_where_it_lies(reference: str) -> None:
    assert parse_job({**LEAST, "secrets": {"TOKEN": reference}}).secrets == {"TOKEN": reference}


@pytest.mark.parametrize("value", ["", "hunter2", "ssm:", "ssm:/a b", "ssm:/a//b", "ssm:/a;id", "vault:x", "ssm:/#", 1])
def test_a_secret_that_is_no_reference_is_refused_and_not_repeated(value: Any) -> None:
    (fault,) = faults({**LEAST, "secrets": {"TOKEN": value}})
    assert fault.startswith("job.toml: [secrets] TOKEN: must")
    assert "hunter2" not in fault


def test_what_contradicts_another_key_is_refused() -> None:
    assert "stands in [environment] too" in faults({**LEAST, "environment": {"A": "1"}, "secrets": {"A": "ssm:/a"}})[0]
    policy = job("cage", "trainer_policy", "policy.json")
    assert parse_job(policy).cage.trainer_policy == "policy.json"
    for mode in ("on", "calls"):
        assert parse_job({**policy, "cage": {"trainer_policy": "p.json", "mode": mode}}).cage.mode == mode
    for mode in ("imds", "off"):
        refused = {**policy, "cage": {"trainer_policy": "p.json", "mode": mode}}
        assert 'needs mode = "on" or "calls"' in faults(refused)[0]
    here = job("job", "repository_secret", "ssm:/x")
    assert "https or ssh" in faults({**here, "job": {**here["job"], "repository": "."}})[0]


def test_on_an_instance_the_policy_is_the_document_itself() -> None:
    assert parse_job(job("cage", "trainer_policy", '{"Statement": []}')).cage.trainer_policy == '{"Statement": []}'
    for bad in ("{", '{"Version": "2012-10-17"}', '{"Statement": ["' + "x" * 2048 + '"]}'):
        assert faults(job("cage", "trainer_policy", bad))


def test_control_characters_are_in_no_text() -> None:
    for key in KEYS:
        if isinstance(EXAMPLES[key.table, key.name][0], str):
            assert key.check("a\x1b[2J") != "", marked(key)


@pytest.mark.parametrize(("text", "expected"), [("90s", 90), ("20m", 1200), ("3h", 10800), ("2d", 172800), (" 0m ", 0)])
def test_durations(text: str, expected: int) -> None:
    assert seconds(text) == expected


HOSTILE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(KEYS), HOSTILE)
def test_whatever_a_key_holds_the_answer_is_a_configuration_or_a_config_error(key: Key, value: Any) -> None:
    try:
        parsed = parse_job(job(key.table, key.name, value))
    except ConfigError as refused:
        assert all(fault.startswith("job.toml: ") for fault in refused.message.split("\n"))
    else:
        assert parse_job(json.loads(json.dumps(parsed.to_document()))) == parsed


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.text(max_size=10), HOSTILE, max_size=3))
def test_whatever_the_document_is_the_answer_is_a_config_error(document: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        parse_job(document)


@settings(max_examples=200, deadline=None)
@given(st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,20}", fullmatch=True), st.text().filter(lambda text: "\0" not in text))
def test_any_text_reaches_the_trainers_environment_unchanged(name: str, value: str) -> None:
    if not name.startswith("SPOTHEAL_"):
        document = {**LEAST, "environment": {name: value}}
        assert on_instance(document).job.environment == {name: value}


# --------------------------------------------------------------------------------------------------------- the instance
def on_instance(document: dict[str, Any]) -> InstanceConfig:
    """As `request` writes it and the agent reads it."""
    made = InstanceConfig(parse_job(document), "01J0", "us-west-2", StoreUrl("bucket", "digits/01J0"), "0" * 40)
    read = InstanceConfig.from_json(made.to_json())
    assert read == made
    return read


def test_the_instance_reads_what_request_wrote() -> None:
    document = {**LEAST, "environment": {"WANDB_MODE": "offline"}}
    for key in KEYS:
        if key.ready:
            document.setdefault(key.table, {})
            document[key.table] = {**document[key.table], key.name: EXAMPLES[key.table, key.name][0]}
    # Two keys go only with values of others that the examples do not have.
    document["job"]["repository"], document["cage"]["mode"] = "https://example.org/r.git", "on"
    assert on_instance(document).job.to_document()["volume"]["type"] == "st1"


def test_the_document_of_an_instance_is_the_same_for_the_same_job() -> None:
    assert on_instance(LEAST).to_json() == on_instance({"job": dict(reversed(LEAST["job"].items()))}).to_json()


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '"x"', "{}"])
def test_what_is_no_document_is_a_config_error(text: str) -> None:
    with pytest.raises(ConfigError):
        InstanceConfig.from_json(text)


def test_faults_of_run_and_job_are_told_together() -> None:
    text = json.dumps({"schema_version": 9, "run": {"id": "", "region": "x", "store": "s3://", "revision": "main"}})
    with pytest.raises(ConfigError) as refused:
        InstanceConfig.from_json(text, source="config.json")
    found = refused.value.message.split("\n")
    for part in ("schema_version", "[run] id", "[run] region", "[run] store", "[run] revision", "[job] name"):
        assert any(part in fault for fault in found), part
    assert all(fault.startswith("config.json: ") for fault in found)
