"""What a value of job.toml may be: one check a kind of value, and reading what is written in words."""

from __future__ import annotations

import json
import posixpath
import re
import shlex
from collections.abc import Callable, Sequence
from typing import Any

from spotheal.agent.protocol.names import StoreUrl, parse_results
from spotheal.agent.protocol.secret_reference import SecretReference

Check = Callable[[Any], str]  # "" where the value is good, else what is wrong with it ("must be …")
MACHINES_MAX = 64  # of a run: each is an EC2 describe and an S3 object in every look at the others
POLICY_CHARACTERS_MAX = 2048
# A card shows less than its name says (ECC, what the driver keeps): 22.5 of 24 GiB on an A10G, 15 of 16 on a T4. Two
# sizes that are sold are never so close.
SHOWN_OF_NOMINAL = 0.9
_OPERATOR = re.compile(r"&&|\|\|?|;|&|[0-9&]?>>?|[0-9]?>&[0-9]?|<{1,3}")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
_HOME = re.compile(r"~/[\w./-]*")
# Of the environment: capital letters. Hydra's own are small (`${base_lr}`), and the agent fills in ${SPOTHEAL_…}.
_VARIABLE = re.compile(r"\$(?:[A-Z_][A-Z0-9_]*\b|\{(?!SPOTHEAL_)[A-Z_][A-Z0-9_]*\})")
_PYTHON = re.compile(r"(python)?(\d+)(?:\.(\d+))?([\d.]*)t?")
_PYTHON_MINORS = range(8, 16)  # torch 2.4 was the last for 3.8; torch 2.15 is the first for 3.15 (PyPI, 2026-11)
_DURATION = re.compile(r"(\d+)\s*(s|m|h|d)")
_DURATION_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_HOST_KEY = re.compile(r"[^\s@#-]\S* (?:ssh|ecdsa|sk)-[\w@.-]+ [A-Za-z0-9+/=]+(?: [^\n]*)?")


def seconds(duration: str) -> int:
    """`"90s"`, `"20m"`, `"3h"`, `"2d"` as seconds; ValueError where it is none of these."""
    match = _DURATION.fullmatch(duration.strip())
    if not match:
        raise ValueError("is not a duration such as 90s, 20m, 3h or 2d")
    return int(match.group(1)) * _DURATION_SECONDS[match.group(2)]


def text(value: Any) -> str:
    if not isinstance(value, str):
        return "must be a string"
    return "must not hold control characters" if any(ord(c) < 32 or ord(c) == 127 for c in value) else ""


def matching(pattern: str, legal: str) -> Check:
    return lambda value: text(value) or ("" if re.fullmatch(pattern, value) else f"must be {legal}")


def one_of(*values: str) -> Check:
    return lambda value: (
        ""
        if value in values and isinstance(value, str)
        else "must be one of " + ", ".join(f'"{legal}"' for legal in values)
    )


def boolean(value: Any) -> str:
    return "" if isinstance(value, bool) else "must be true or false"


def integer(low: int, high: int) -> Check:
    def check(value: Any) -> str:
        good = isinstance(value, int) and not isinstance(value, bool) and low <= value <= high
        return "" if good else f"must be a whole number from {low} to {high}"

    return check


def python(value: Any) -> str:
    """A name or a path; its version is judged if the name has one."""
    match = _PYTHON.fullmatch(posixpath.basename(value)) if not text(value) else None
    if not match:
        return text(value)
    named, major, minor, rest = match.groups()
    if named and major == "3" and not rest and (minor is None or int(minor) in _PYTHON_MINORS):
        return ""
    first, last = (f'"python3.{minor}"' for minor in (_PYTHON_MINORS[0], _PYTHON_MINORS[-1]))
    return (
        f'must be "python3", a name from {first} to {last} (torch has no build for another), a path such as'
        ' "/opt/pytorch/bin/python", or left out: then it is the machine image\'s with torch'
    )


def volume_type(value: Any) -> str:
    """A type that CreateVolume takes without a figure for IOPS; io1 and io2 need one (EC2 API reference)."""
    if value in ("io1", "io2"):
        return (
            f'"{value}" needs a number of IOPS, which job.toml has no key for; use "gp3", or make the volume with'
            f" `aws ec2 create-volume --volume-type {value} --iops N` and a Name tag as in [volume] name: it is adopted"
        )
    return one_of("gp3", "gp2", "st1", "sc1")(value)


def rate(value: Any) -> str:
    """Of `VolumeInitializationRate`: AWS takes 100 to 300 MiB/s (EC2 API reference, CreateVolume), 0 is none."""
    return "" if value == 0 and not integer(0, 0)(value) else integer(100, 300)(value) and (
        "must be 0, or a whole number from 100 to 300")  # fmt: skip


def amount(value: Any) -> str:
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1e9
    return "" if good else "must be a number, 0 or more"


def parsed_by(parse: Callable[[str], object], *, required: bool = False) -> Check:
    """What `parse` takes without a ValueError; an empty text is good where it is not `required`."""

    def check(value: Any) -> str:
        if text(value) or not (value or required):
            return text(value)
        try:
            parse(value)
        except ValueError as fault:
            return str(fault)
        return ""

    return check


duration = parsed_by(seconds, required=True)
store = parsed_by(StoreUrl.parse)
results = parsed_by(parse_results)
reference = parsed_by(SecretReference.parse)


def only_a_shell(sign: str) -> str:
    return f"has `{sign}`, which only a shell understands, and no shell runs the command"


def shell_sign(words: Sequence[str]) -> str:
    """The first of an argv list's words that only a shell understands, "" for none: the trainer would get it."""
    if not words or posixpath.basename(words[0]) == "find":  # whose -exec ends in `;`
        return ""
    signs = [words[0]] if _ASSIGNMENT.match(words[0]) else []
    expanded = [] if "-c" in words else [word for word in words if _is_expanded(word)]  # `sh -c` expands it
    return next(iter([*signs, *(word for word in words if _OPERATOR.fullmatch(word)), *expanded]), "")


def _is_expanded(word: str) -> bool:
    return bool(_HOME.fullmatch(word) or _VARIABLE.search(word))


def argv(value: Any) -> str:
    good = isinstance(value, list) and all(isinstance(word, str) and "\0" not in word for word in value)
    if not good:
        return 'must be a list of strings, such as ["python", "train.py"] (no shell reads it)'
    if not (sign := shell_sign(value)):
        return ""
    is_sign = [bool(_OPERATOR.fullmatch(word) or _ASSIGNMENT.match(word) or _is_expanded(word)) for word in value]
    script = " ".join(word if bare else shlex.quote(word) for word, bare in zip(value, is_sign, strict=True))
    return f'{only_a_shell(sign)}; let a shell run it: ["sh", "-c", {json.dumps(script)}]'


def argvs(value: Any) -> str:
    if isinstance(value, list) and (faults := [fault for fault in map(argv, value) if fault.startswith("has ")]):
        return faults[0]
    good = isinstance(value, list) and all(words and not argv(words) for words in value)
    return "" if good else 'must be a list of commands, each a list of strings, such as [["make", "data"]]'


def inside(value: Any) -> str:
    """A path below the clone that cannot leave it."""
    if text(value):
        return text(value)
    return "must be a path inside the repository" if value.startswith("/") or ".." in value.split("/") else ""


def insides(value: Any) -> str:
    good = isinstance(value, list) and all(word and word != "." and not inside(word) for word in value)
    return "" if good else "must be a list of paths inside the repository"


def mount(value: Any) -> str:
    safe = matching(r"/[A-Za-z0-9._/-]+", "an absolute path of letters, digits and . _ - /")(value)
    return safe or ("must not hold .." if ".." in value.split("/") else "")


def machine_range(value: Any) -> str:
    match = re.fullmatch(r"(\d{1,3})(?::(\d{1,3}))?", value) if isinstance(value, str) else None
    minimum, maximum = machines(value) if match else (0, 0)
    is_range = 1 <= minimum <= maximum <= MACHINES_MAX
    return "" if is_range else f'must be "1" to "{MACHINES_MAX}", or a range such as "2:4"'


def machines(nodes: str) -> tuple[int, int]:
    """The least and the most of `nodes`, "2" or "2:4"."""
    minimum, _, maximum = nodes.partition(":")
    return int(minimum), int(maximum or minimum)


def memory(value: Any) -> str:
    return amount(value) or ("" if 0.25 <= value <= 4096 else "must be from 0.25 to 4096")


def instance_types(value: Any) -> str:
    good = isinstance(value, list) and all(
        isinstance(name, str) and re.fullmatch(r"[a-z][a-z0-9-]*(\.[a-z0-9-]+)?", name) for name in value
    )
    return "" if good else 'must be a list of instance types or families, such as ["g5", "g6.xlarge"]'


def gpus(value: Any) -> str:
    return "" if value == "gpu" else integer(1, 64)(value) and 'must be a whole number from 1 to 64, or "gpu"'


def host_keys(value: Any) -> str:
    if not isinstance(value, str):
        return text(value)
    lines = [line.strip() for line in value.split("\n") if line.strip()]
    is_good = all(text(line) == "" and _HOST_KEY.fullmatch(line) for line in lines)
    return "" if is_good else "must be lines of known_hosts: HOST TYPE KEY"


def policy(value: Any) -> str:
    """A file's name in job.toml; on an instance the document itself."""
    if text(value) or not value.startswith("{"):
        return text(value)
    return policy_fault(value)


def policy_fault(text: str) -> str:
    """What is wrong with a session policy, "" where nothing is. AWS takes 2,048 characters of one."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return "is no JSON"
    if not isinstance(document, dict) or not isinstance(document.get("Statement"), list | dict):
        return "is no IAM policy: a JSON object with Version and Statement"
    return "" if len(text) <= POLICY_CHARACTERS_MAX else f"is longer than {POLICY_CHARACTERS_MAX} characters"
