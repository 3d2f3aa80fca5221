"""Fault 21: whatever stands in any field of the configuration, the user data is one shell program that runs none of it.

Hostile strings go past every check (a check may err) into each string of the document an instance gets, keys included.
`make soak` tries 10,000 documents (SPOTHEAL_EXAMPLES).
"""

from __future__ import annotations

import base64
import gzip
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spotheal import userdata
from spotheal.agent.protocol.errors import ConfigError
from spotheal.agent.protocol.instance_config import InstanceConfig
from spotheal.agent.protocol.job import parse_job
from spotheal.agent.protocol.names import StoreUrl
from spotheal.fleet.request.userdata import refuse_secrets, render
from spotheal.userdata import report

EXAMPLES = int(os.environ.get("SPOTHEAL_EXAMPLES", "100"))
CANARY = "spotheal-canary"
_RUNS = f"touch {CANARY}"
HOSTILE = [
    f"$({_RUNS})", f"`{_RUNS}`", f"'; {_RUNS}; '", f'"; {_RUNS}; "', f"\n{_RUNS}\n", f"\r\n{_RUNS}\r\n",
    f"\\'; {_RUNS} #",
    f"${{X:-$({_RUNS})}}", f"| {_RUNS}", f"&& {_RUNS}", f"> {CANARY}", "@CONFIG@", "@BOOTSTRAP@", "@MANIFEST_SHA256@",
    "CONFIG='x'", "#!/bin/sh", "#cloud-config\nruncmd: [[touch, spotheal-canary]]", "Content-Type: multipart/mixed",
    "\\", "'", "EOF", "\u2028", "-n", "%s%n", "$IFS", "{{ ds }}", "\x1b[2J",
]  # fmt: skip
_JOINED = st.tuples(st.text(max_size=5), st.sampled_from(HOSTILE)).map("".join)
STRINGS = st.one_of(st.sampled_from(HOSTILE), st.text(max_size=40), _JOINED)
WHOLE = {
    "job": {"name": "j", "repository": "https://example.org/r", "command": ["python", "train.py"],
            "setup": [["make", "data"]], "keep": ["out"], "resume_command": ["python"]},
    "environment": {"A": "b", "C": "d"},
    "secrets": {"TOKEN": "ssm:/spotheal/j/TOKEN"},
}  # fmt: skip


def document() -> dict[str, Any]:
    store = StoreUrl("bucket", "j/run")
    config = InstanceConfig(parse_job(WHOLE), "run", "us-west-2", store, "0" * 40, "2026-01-01T00:00:00Z")
    found: dict[str, Any] = json.loads(config.to_json())
    return found


PLACES = json.dumps(document()).count('"') // 2  # at least as many strings as there are


def replaced(value: Any, strings: list[str]) -> Any:
    """`value` with each of its strings taken from `strings` in turn; the keys of free tables too."""
    if isinstance(value, str):
        return strings.pop()
    if isinstance(value, list):
        return [replaced(item, strings) for item in value]
    if isinstance(value, dict):
        free = set(value) <= {"A", "C", "TOKEN"}
        return {strings.pop() if free else key: replaced(item, strings) for key, item in value.items()}
    return value


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with the programs that the stub calls, and a Python that takes what it is given and tells that it ran."""
    root = tmp_path_factory.mktemp("machine")
    (root / "bin").mkdir()
    for name in ("mkdir", "mv", "touch", "cat", "rm"):
        (root / "bin" / name).symlink_to(str(shutil.which(name)))
    python = root / "bin/python3"
    python.write_text('#!/bin/sh\ncase "$3" in *ssl*) exit 0;; *gzip*) exec cat;; esac\necho "reached $2 $3"\n')
    python.chmod(0o755)
    return root


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(STRINGS, min_size=PLACES, max_size=PLACES))
def test_no_string_of_any_field_is_ever_executed(machine: Path, strings: list[str]) -> None:
    given_document = replaced(document(), list(strings))
    text = userdata.render(json.dumps(given_document), "0" * 64)
    payload = re.search(r"^CONFIG='([^']*)'$", text, re.MULTILINE)
    assert payload and json.loads(gzip.decompress(base64.b85decode(payload.group(1)))) == given_document
    checked = subprocess.run(["/bin/sh", "-n"], input=text, capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stderr) == (0, "")
    environment = {"PATH": str(machine / "bin"), "SPOTHEAL_ROOT": str(machine / "root")}
    ran = subprocess.run(
        ["/bin/sh", "-s"], input=text, capture_output=True, text=True, cwd=machine, env=environment, check=False
    )
    assert ran.returncode == 0 and ran.stdout.startswith("reached "), ran.stderr
    assert not list(machine.rglob(CANARY))


def test_the_canary_sings_where_a_string_is_executed(machine: Path) -> None:
    """What the test above would miss without it: a shell that runs the very strings leaves the canary."""
    environment = {"PATH": str(machine / "bin")}
    for hostile in (f"$({_RUNS})", f"\n{_RUNS}\n", f"'; {_RUNS}; '"):
        subprocess.run(
            ["/bin/sh", "-c", f"X='{hostile}'" if "'" in hostile else f"X={hostile}"], cwd=machine, env=environment,
            capture_output=True, check=False,
        )  # fmt: skip
        assert (machine / CANARY).exists()
        (machine / CANARY).unlink()


# --------------------------------------------------------------------------------------------------------------- tokens
def configured(**tables: Any) -> InstanceConfig:
    job = {"name": "j", "repository": "https://example.org/r", "command": ["python"], **tables.pop("job", {})}
    return InstanceConfig(parse_job({"job": job, **tables}), "run", "us-west-2", StoreUrl("bucket", "j/run"), "0" * 40)


TOKEN = "ghp_" + "a1B2" * 9


@pytest.mark.parametrize(
    ("tables", "field"),
    [
        ({"environment": {"GITHUB": TOKEN}}, "[environment] GITHUB"),
        ({"environment": {"HF_TOKEN": "hf_" + "aBcD" * 8}}, "[environment] HF_TOKEN"),
        ({"environment": {"WANDB_API_KEY": "0123456789abcdef" * 2 + "01234567"}}, "[environment] WANDB_API_KEY"),
        ({"environment": {"DB": "postgres://u:pw@host/db"}}, "[environment] DB"),
        ({"job": {"command": ["python", "train.py", f"--token={TOKEN}"]}}, "[job] command"),
        ({"job": {"setup": [["pip", "install", f"git+https://{TOKEN}@github.com/a/b"]]}}, "[job] setup"),
        ({"job": {"repository": f"https://{TOKEN}@github.com/a/b"}}, "[job] repository"),
    ],
)
def test_what_looks_like_a_token_is_refused_with_the_field_and_the_cure(tables: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        render(configured(**tables), "0" * 64)
    assert caught.value.message.startswith(field)
    assert "[secrets]" in caught.value.next_step and "fleetctl secret put" in caught.value.next_step
    assert TOKEN not in str(caught.value) and "0123456789abcdef" not in str(caught.value)


@pytest.mark.parametrize(
    "environment",
    [
        {"TOKENIZERS_PARALLELISM": "false", "PAD_TOKEN": "<pad>", "MAX_TOKENS": "4096"},
        {"HF_HOME": "/dltraining/datasets/hf", "WANDB_MODE": "offline", "TOKEN": "/run/secrets/token0123456789"},
        {"MODEL": "meta-llama/Llama-3.1-8B", "REVISION": "0123456789abcdef0123456789abcdef01234567"},
    ],
)
def test_what_is_no_secret_is_taken(environment: dict[str, str]) -> None:
    refuse_secrets(configured(environment=environment).job)


def test_references_are_no_secrets() -> None:
    refuse_secrets(configured(secrets={"HF_TOKEN": "ssm:/spotheal/j/HF_TOKEN", "B": "secretsmanager:b#c"}).job)


class WrittenByTrainers(report.Aws):
    """The store's documents in which the trainer's instance role may write anything. EC2 knows no instance."""

    def __init__(self, documents: dict[str, bytes]) -> None:
        self.documents = documents

    def listed(self, prefix: str) -> list[tuple[str, str]]:
        return [(key, "") for key in self.documents if key.startswith(prefix)]

    def store(self, method: str, key: str = "", *_: Any, **__: Any) -> bytes:
        return self.documents[key]

    def ec2(self, action: str, **parameters: str) -> str:
        return ""


@pytest.mark.parametrize(
    ("key", "document"),
    [
        ("status.json", b"[" * 100_000),
        ("status.json", b'{"progress": {"saved": {"time": "0001-01-01T00:00:00+23:59"}}}'),
        ("launches/i-1.json", b'{"instance": ["i-1"]}'),
        ("terms/1", b'{"instance": ["i-1"]}'),
    ],
)
def test_no_document_of_a_trainer_ends_the_report_of_a_failed_boot(key: str, document: bytes) -> None:
    """The report decides whether the machine is switched off: without it an idle machine costs money."""
    documents = {f"launches/i-{number}.json": b'{"outcome": "ended"}' for number in range(2, 7)}
    aws = WrittenByTrainers({**documents, "terms/1": b"{}", key: document})
    assert report.BOOTS_MAX <= report.launches_without_progress(aws, {"run": {}}, "i-7")
