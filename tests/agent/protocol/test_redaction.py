"""Secrets are in no text that leaves the process: whatever form they are printed in, and wherever a stream is cut."""

from __future__ import annotations

import base64
import json
import os
import string
import urllib.parse
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from spotheal.agent.processes.output import Lines
from spotheal.agent.protocol.redaction import MARK, SECRETS, Redaction, looks_secret
from spotheal.agent.record.ledger import Ledger
from spotheal.agent.record.logs import Logs

VALUES = st.text(string.ascii_letters + string.digits + '+/=_-.:"\\%& ~é', min_size=8, max_size=60).filter(
    lambda text: len(text.strip()) >= 8 and MARK not in text
)
_BODY = "b3BlbnNzaC1rZXktdjEAAAAABG5vbmU"
KEY = "-----BEGIN OPENSSH PRIVATE KEY-----\n" + f"{_BODY}\n" * 5 + "-----END OPENSSH PRIVATE KEY-----"
# (text, the secret part of it), made here of parts, so that no scanner takes this file for a leak.
LOOKS = [
    ("AKIA{}", "Q" * 16),
    ("ASIA{}", "Z2" * 8),
    ("aws_secret_access_key = {}", "wJalrXUtnFEMI/K7MDENG/bPxRfiCY" + "0123456789"),
    ('"SecretAccessKey": "{}"', "a/+B" * 10),
    ("aws_session_token={}", "IQoJb3JpZ2luX2Vj" + "x" * 60),
    ("FwoG{}", "ZXIvYXdzEA1b2" * 6),
    ("ghp_{}", "a1B2" * 9),
    ("github_pat_{}", "a1B2_" * 10),
    ("glpat-{}", "a1B2" * 5),
    ("hf_{}", "aBcD" * 8),
    ("xoxb-{}", "123456789012-abcdef"),
    ("sk-proj-{}", "a1B2" * 10),
    ("sk-{}", "a1B2" * 12),
    ("https://user:{}@example.org/x", "passw0rd"),
    ("https://{}@example.org/x", "tokenfortheserver"),
    ("postgres://u:{}@db/x", "p4w"),
    (KEY.replace(_BODY, "{}"), _BODY),
]


@pytest.fixture
def known() -> Redaction:
    return Redaction()


def forms(value: str) -> list[str]:
    raw = value.encode()
    beside = [base64.b64encode(b"u" * n + b":" + raw + b"@" * m).decode() for n in range(3) for m in range(3)]
    return [
        value, json.dumps(value), urllib.parse.quote(value, safe=""), urllib.parse.quote_plus(value), raw.hex(),
        base64.b64encode(raw).decode(), base64.urlsafe_b64encode(raw).decode(), *beside,
    ]  # fmt: skip


@settings(deadline=None)
@given(VALUES, st.text(max_size=20), st.text(max_size=20))
def test_a_known_value_is_found_in_each_form_and_in_any_surroundings(value: str, before: str, after: str) -> None:
    value = value.strip()
    known = Redaction()
    known.learn([value])
    core = base64.b64encode(value.encode()).decode()[4:-4]
    for form in (value, json.dumps(value)[1:-1], urllib.parse.quote(value, safe=""), value.encode().hex()):
        assert form not in known.text(f"{before} {form} {after}").replace(MARK, "")
    for form in forms(value):
        said = known.text(form)
        assert value not in said
        assert len(core) < 8 or core not in said


@pytest.mark.parametrize(("text", "secret"), LOOKS, ids=lambda text: text[:12])
def test_what_looks_like_a_secret_is_taken_out_unknown(text: str, secret: str, known: Redaction) -> None:
    whole = text.replace("{}", secret)
    said = known.text(f"before {whole} after")
    assert secret not in said and MARK in said
    assert said.startswith("before ") and said.endswith(" after")
    assert looks_secret(whole)


@pytest.mark.parametrize(
    "text",
    ["ssh://git@github.com/a/b", "git@github.com:a/b", "https://example.org/a@b", "s3://bucket/key", "hf_hub_download",
     "token: 5 of 10", "i-0123456789abcdef0", "sha256 " + "ab" * 32, "task-force", "mask-1234", "AKIAlike", "a" * 4000,
     "arn:aws:iam::123456789012:role/x", "01J0XYZ0123456789ABCDEFGHJ", "http://127.0.0.1:8080/x",
     "-----BEGIN CERTIFICATE-----"],
    ids=lambda text: text[:20],
)  # fmt: skip
def test_what_is_no_secret_is_left_alone(text: str, known: Redaction) -> None:
    assert known.text(text) == text
    assert not looks_secret(text)


def test_short_values_are_taken_out_where_they_stand_alone(known: Redaction) -> None:
    known.learn(["hunter2", "abc"])
    assert known.text("pw=hunter2; hunter22 abc") == f"pw={MARK}; hunter22 abc"


def test_the_lines_of_a_secret_and_the_fields_of_a_json_secret_are_secrets_too(known: Redaction) -> None:
    known.learn(["first-line-secret\nsecond-line-secret", '{"user": "longusername", "password": "p4ssw0rd!!"}'])
    assert known.text("second-line-secret, p4ssw0rd!!") == f"{MARK}, {MARK}"


def test_a_document_stays_a_document(known: Redaction) -> None:
    known.learn(["s3cr3t-value"])
    body = {"a": ["x s3cr3t-value", 1, None], "s3cr3t-value": {"b": True}}
    assert known.tree(body) == {"a": [f"x {MARK}", 1, None], MARK: {"b": True}}
    assert json.loads(json.dumps(known.tree({"reason": KEY.split("-----END")[0]})))["reason"].endswith(MARK)


# -------------------------------------------------------------------------------------------------------------- streams
def streamed(data: bytes, size: int, secrets: Redaction, line_max: int = 64) -> str:
    lines, stream = Lines(line_max, secrets), secrets.stream()
    found = [line for at in range(0, len(data), size) for line in lines.feed(data[at : at + size])]
    return "".join(stream.lines(found + lines.rest()))


@settings(max_examples=int(os.environ.get("SPOTHEAL_EXAMPLES", "100")), deadline=None)
@given(
    st.integers(0, 700) | st.integers(380, 500),  # the first cut is made at about 460
    st.integers(1, 90),
    st.sampled_from(["", "\n", "\x1b[31m", "é"]),
    st.integers(0, 700),
)
@example(491, 39, "", 149)  # the cut is between the two bytes of the é
def test_a_secret_is_found_wherever_chunks_and_lines_are_cut(before: int, size: int, beside: str, after: int) -> None:
    secret = "S3cr3tValue-0123456789-abcdefghijklmnopqrstuvwxyz-é"
    known = Redaction()
    known.learn([secret])
    data = ("." * before + beside + secret + beside + "," * after).encode()
    said = streamed(data, size, known)
    assert all(secret[at : at + 8] not in said for at in range(len(secret) - 8))
    assert (said.count("."), said.count(",")) == (before, after)


@pytest.mark.parametrize("size", [1, 7, 64, 4096])
@pytest.mark.parametrize("prefix", ["", "    ", "2026 | "])
def test_a_private_key_is_taken_out_over_its_lines_and_what_follows_is_not(size: int, prefix: str) -> None:
    text = "start\n" + "".join(f"{prefix}{line}\n" for line in KEY.split("\n")) + "goes on\n"
    known = Redaction()
    said = streamed(text.encode(), size, known, 8192) if prefix != "2026 | " else known.text(text)
    assert "b3BlbnNz" not in said
    assert said.startswith("start") and (said.rstrip().endswith("goes on") or prefix == "2026 | ")


def test_a_key_that_never_ends_swallows_no_log(known: Redaction) -> None:
    stream = known.stream()
    assert stream.line(KEY.split("\n")[0]).startswith("-----BEGIN")
    assert stream.line("b3BlbnNzaC1rZXk") == MARK
    assert stream.line("Traceback (most recent call last):") == "Traceback (most recent call last):"
    assert stream.line("b3BlbnNzaC1rZXk") == "b3BlbnNzaC1rZXk"


@settings(deadline=None)
@given(st.binary(max_size=400), st.integers(1, 50))
def test_bytes_that_are_no_text_pass_as_before(data: bytes, size: int) -> None:
    plain, known = Redaction(), Redaction()
    known.learn(["this-is-a-secret-value"])
    assert streamed(data, size, known, 8192) == streamed(data, size, plain, 8192)


# ------------------------------------------------------------------------------------------------------------ pipelines
@pytest.fixture
def canary() -> Iterator[str]:
    SECRETS.learn(["canary-0123456789-canary"])
    yield "canary-0123456789-canary"
    SECRETS.forget()


def test_no_log_line_of_the_agent_holds_a_secret_in_any_field(canary: str, tmp_path: Path) -> None:
    stderr = (tmp_path / "err").open("w")
    logs = Logs(tmp_path / "log", stderr=stderr)
    logs.use_volume(tmp_path / "volume", "i-1")
    logs.bind(zone=canary)
    logs.log.info(f"said {canary}", path=Path(f"/x/{canary}"), many=[canary, {"deep": canary}], **{canary: 1})
    try:
        raise ValueError(canary)
    except ValueError:
        logs.log.exception("failed")
    logs.leave_volume()
    stderr.close()
    written = [path.read_text() for path in tmp_path.rglob("*") if path.is_file()]
    assert len(written) >= 4 and all(MARK in text for text in written if text)
    assert not any(canary in text for text in written)


def test_the_ledger_holds_no_secret(canary: str) -> None:
    from spotheal.agent.aws.s3 import Store
    from spotheal.agent.protocol.clock import SystemClock
    from spotheal.agent.protocol.names import StoreUrl
    from spotheal.fleet.rehearsal.services.client import InMemoryS3

    store = Store(InMemoryS3("bucket"), StoreUrl("bucket", "j/r"))
    Ledger(store, SystemClock(), "i-1", "z").add("end", reason=f"because {canary}")
    store.write_status({"reason": canary, "tail": [canary]})
    for key, _ in store.sizes():
        assert canary.encode() not in (store.get_bytes(key) or b"")
