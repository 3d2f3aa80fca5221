"""The wheels an instance gets: pure, complete, small, and the same every time."""

from __future__ import annotations

import ast
import configparser
import hashlib
import json
import re
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from spotheal.agent.aws.clients import SERVICES
from spotheal.agent.protocol.errors import ConfigError
from spotheal.fleet.request import wheelhouse
from spotheal.fleet.request.plan import UploadWheels
from spotheal.fleet.request.wheelhouse import Wheelhouse

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Wheelhouse:
    return wheelhouse.build(tmp_path_factory.mktemp("cache"))


def test_every_wheel_is_pure_and_as_the_manifest_says(house: Wheelhouse) -> None:
    listed = json.loads(house.manifest)["files"]
    assert sorted(item["name"] for item in listed) == sorted(path.name for path in house.folder.glob("*.whl"))
    for item in listed:
        body = (house.folder / item["name"]).read_bytes()
        assert item["name"].endswith("-py3-none-any.whl")
        assert (hashlib.sha256(body).hexdigest(), len(body)) == (item["sha256"], item["size"])
        names = zipfile.ZipFile(house.folder / item["name"]).namelist()
        assert not [name for name in names if name.endswith((".so", ".pyc")) or name.startswith(("..", "/"))]


def test_it_is_small_and_holds_no_fleetctl(house: Wheelhouse) -> None:
    assert house.size < 6_000_000
    own = next(wheel for wheel in house.wheels if wheel.name.startswith("spotheal-"))
    names = zipfile.ZipFile(house.folder / own.name).namelist()
    assert "spotheal/agent/protocol/job.py" in names
    assert "spotheal/training/__init__.py" in names
    assert not [name for name in names if name.startswith(("spotheal/fleet", "spotheal/__init__"))]


def test_the_same_installation_gives_the_same_wheelhouse(house: Wheelhouse, tmp_path: Path) -> None:
    again = wheelhouse.build(tmp_path)
    assert again.sha256 == house.sha256
    assert again.folder != house.folder


def test_it_is_made_once(house: Wheelhouse) -> None:
    before = {path: path.stat().st_mtime_ns for path in house.folder.iterdir()}
    assert wheelhouse.build(house.folder.parent).sha256 == house.sha256
    assert {path: path.stat().st_mtime_ns for path in house.folder.iterdir()} == before


def test_what_is_needed_by_what_is_needed_is_there(house: Wheelhouse) -> None:
    names = {wheel.name.split("-")[0].lower() for wheel in house.wheels}
    assert names >= {"boto3", "botocore", "s3transfer", "jmespath", "python_dateutil", "six", "urllib3", "requests",
                     "certifi", "idna", "charset_normalizer", "tenacity", "structlog", "typing_extensions"}  # fmt: skip


@pytest.mark.processes
def test_an_interpreter_with_nothing_else_imports_the_agents_needs(house: Wheelhouse, tmp_path: Path) -> None:
    for wheel in house.wheels:
        zipfile.ZipFile(house.folder / wheel.name).extractall(tmp_path)
    program = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "import boto3, requests, tenacity, structlog, spotheal.agent.aws.clients, spotheal.agent.aws.s3\n"
        "for name in ('ec2', 's3', 'sts', 'ssm', 'secretsmanager', 'sns'):\n"
        "    boto3.client(name, region_name='us-west-2')\n"
        "print(boto3.__file__)\n"
    )
    base = getattr(sys, "_base_executable", sys.executable)
    done = subprocess.run([base, "-I", "-S", "-c", program], capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert done.stdout.startswith(str(tmp_path))


class _Compiled(metadata.Distribution):
    def read_text(self, filename: str) -> str | None:
        return {
            "METADATA": "Name: fast\nVersion: 1\n",
            "RECORD": "fast/__init__.py,,\nfast/core.cpython-311.so,,\n",
        }.get(filename)

    def locate_file(self, path: object) -> Path:  # type: ignore[override]
        return Path("/nowhere") / str(path)


def test_a_package_that_needs_compiled_code_is_refused() -> None:
    with pytest.raises(ConfigError, match="fast needs compiled code"):
        wheelhouse._files_of(_Compiled())


def test_a_missing_need_names_itself() -> None:
    with pytest.raises(ConfigError, match="no-such-distribution"):
        wheelhouse.needed(["no-such-distribution"])


def test_the_wheels_hold_each_service_that_the_agent_makes_a_client_of(house: Wheelhouse) -> None:
    """One that was missing let each machine of a run start its agent for ever: `[fleet] on_demand_after`."""
    asked = {service for path in sorted((ROOT / "agent").rglob("*.py")) for service in clients_made(path.read_text())}
    assert asked == set(SERVICES)
    (botocore,) = [house.folder / wheel.name for wheel in house.wheels if wheel.name.startswith("botocore-")]
    with zipfile.ZipFile(botocore) as archive:
        models = {name.split("/")[2] for name in archive.namelist() if name.endswith("/service-2.json.gz")}
    assert models == set(SERVICES)


def clients_made(text: str) -> set[str]:
    """The services of all calls of `client("...")` and `_client("...")`, of whatever object."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in ("client", "_client"):
                found.add(str(node.args[0].value))
    return found


def test_a_client_is_found_however_it_is_asked_for() -> None:
    assert clients_made('aws.client("a", region); self._client("b"); client("c"); given.client(name)') == set("abc")


# ----------------------------------------------------------------------------------------------------------- the floors
def _normal(name: str) -> str:
    return name.lower().replace("_", "-")


def _floors_of_setup() -> dict[str, str]:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    wanted = re.findall(r"(?m)^([\w.-]+)(?:\[[\w,]+\])?>=([\d.]+)", parser["options"]["install_requires"])
    return {_normal(name): floor for name, floor in wanted}


def test_the_floors_of_the_wheels_are_those_of_setup_cfg() -> None:
    """An old installation's versions would run as root on every instance."""
    given, shipped = _floors_of_setup(), {_normal(part.metadata["Name"]) for part in wheelhouse.needed()}
    assert {name: floor for name, floor in given.items() if name in shipped} == wheelhouse.FLOORS
    assert {"requests", "urllib3", "idna", "certifi"} <= wheelhouse.FLOORS.keys()


class _Old(metadata.Distribution):
    def read_text(self, filename: str) -> str | None:
        return "Name: urllib3\nVersion: 2.7.1rc1\n" if filename == "METADATA" else None

    def locate_file(self, path: object) -> Path:  # type: ignore[override]
        return Path("/nowhere") / str(path)


def test_a_version_with_known_holes_is_refused_with_the_command_that_replaces_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(wheelhouse, "needed", lambda: [_Old()])
    with pytest.raises(ConfigError, match=r"urllib3 2\.7\.1rc1 has known security holes") as refused:
        wheelhouse.build(tmp_path)
    assert f"urllib3>={wheelhouse.FLOORS['urllib3']}" in refused.value.next_step
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("version", "floor", "is_below"),
    [("2.31.0", "2.33", True), ("2.33", "2.33.0", False), ("2.33.0", "2.33", False), ("10.0", "9.9", False),
     ("2024.7.3", "2024.7.4", True), ("2.9.0.post0", "2.9", False), ("3.15rc1", "3.15", True)],
)  # fmt: skip
def test_versions_are_compared_by_number(version: str, floor: str, is_below: bool) -> None:
    assert wheelhouse.is_below(version, floor) is is_below


def test_the_plan_names_every_version_that_it_takes(house: Wheelhouse) -> None:
    said = UploadWheels(house.versions, house.size).says()
    assert all(f"{_normal(part.metadata['Name'])} {part.version}" in said for part in wheelhouse.needed())
