"""The layout of the repository: who imports whom, which packages there are, what no file may hold."""

from __future__ import annotations

import ast
import configparser
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import longest_first
import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("agent", "fleet", "training", "userdata", "iam")
AGENT_THIRD_PARTY = {"boto3", "botocore", "requests", "tenacity", "structlog"}
FLEET_THIRD_PARTY = {"yaml", "botocore", "boto3", "typer", "click", "rich", "requests", "tomli"}
STDLIB_ONLY = ("agent/protocol/names.py", "agent/protocol/contract.py", "agent/protocol/clock.py", "agent/protocol/errors.py", "agent/volume/plan.py",
               "training/example/hyperparameters.py",
               "userdata/__init__.py", "userdata/minified.py", "userdata/report.py", "userdata/bootstrap.py",
               "userdata/start.py", "userdata/prepare.py",
               "iam/calls.py", "iam/policies.py", "iam/evaluation.py",
               "fleet/rehearsal/programs/init.py", "fleet/rehearsal/programs/stand_in.py")  # fmt: skip
# Modules of ours that a package may import; a name covers what is below it.
MAY_IMPORT = {
    "agent": ("spotheal.agent",),
    "training": ("spotheal.training", "spotheal.agent.protocol.contract", "spotheal.agent.aws.imds", "spotheal.agent.protocol.clock",
                 "spotheal.agent.protocol.errors"),
    "fleet": ("spotheal.fleet", "spotheal.agent.protocol.names", "spotheal.agent.protocol.contract", "spotheal.agent.aws.ec2",
              "spotheal.agent.aws.s3", "spotheal.agent.protocol.errors", "spotheal.agent.protocol.job", "spotheal.agent.protocol.job_keys",
              "spotheal.agent.protocol.job_values", "spotheal.agent.protocol.instance_config", "spotheal.agent.aws.clients",
              "spotheal.agent.protocol.clock", "spotheal.agent.protocol.bounded_json", "spotheal.agent.record.ledger", "spotheal.agent.record.lost_work",
              "spotheal.agent.protocol.secret_reference", "spotheal.agent.protocol.redaction",
              "spotheal.agent.volume.first", "spotheal.agent.money.bill_inputs",
              "spotheal.agent.money.instance_time", "spotheal.agent.money.billing", "spotheal.userdata", "spotheal.iam",
              "spotheal.training.example.hyperparameters",  # what the example trainer takes, asked before it is paid for
              "spotheal.training.yaml_list"),
    "userdata": ("spotheal.userdata",),
    "iam": ("spotheal.iam", "spotheal.agent.protocol.names", "spotheal.agent.protocol.secret_reference"),
}  # fmt: skip
LINES_MAX = 400
FUNCTION_LINES_MAX = 60


def modules(package: str) -> Iterator[Path]:
    for path in sorted((ROOT / package).rglob("*.py")):
        if "__pycache__" not in path.parts:
            yield path


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def imports(path: Path) -> set[str]:
    """Every module that `path` imports, anywhere in it; `from x import y` gives x, and x.y where that is a module."""
    package = "spotheal." + ".".join(path.relative_to(ROOT).parts[:-1])
    found: set[str] = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base]).rstrip(".")
            inner = {f"{base}.{alias.name}" for alias in node.names if _is_ours(f"{base}.{alias.name}")}
            found |= inner or {base}
            if inner and len(inner) < len(node.names):
                found.add(base)
    return found


def _is_ours(name: str) -> bool:
    """Whether `name` is one of our modules or packages, not a thing inside one."""
    parts = name.split(".")
    target = ROOT.joinpath(*parts[1:])
    return parts[0] == "spotheal" and len(parts) > 1 and (target.is_dir() or target.with_suffix(".py").is_file())


def covered(name: str, allowed: tuple[str, ...]) -> bool:
    return any(name == one or name.startswith(f"{one}.") for one in allowed)


def everything() -> list[Path]:
    return [path for package in PACKAGES for path in modules(package)]


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


# ----------------------------------------------------------------------------------------------------- who imports whom
@pytest.mark.parametrize("package", PACKAGES)
def test_the_import_map_holds(package: str) -> None:
    """Training takes the contract alone, the agent knows neither fleet nor training; fleet.rehearsal is free."""
    wrong = [
        f"{relative(path)} imports {name}"
        for path in modules(package)
        for name in sorted(imports(path))
        if name.startswith("spotheal") and not covered(name, MAY_IMPORT[package])
        if not relative(path).startswith("fleet/rehearsal/")
    ]
    assert wrong == []


def test_the_agent_needs_only_what_its_wheelhouse_holds() -> None:
    own = sys.stdlib_module_names | AGENT_THIRD_PARTY | {"spotheal"}
    wrong = [
        f"{relative(path)} imports {name}"
        for path in modules("agent")
        for name in sorted(imports(path))
        if name.split(".")[0] not in own
    ]
    assert wrong == []


def test_fleetctl_needs_neither_torch_nor_moto() -> None:
    own = sys.stdlib_module_names | FLEET_THIRD_PARTY | {"spotheal"}
    wrong = [
        f"{relative(path)} imports {name}"
        for path in modules("fleet")
        for name in sorted(imports(path))
        if name.split(".")[0] not in own and not relative(path).startswith("fleet/rehearsal/")
    ]
    assert wrong == []


def test_what_runs_first_needs_the_standard_library_only() -> None:
    wrong = [
        f"{name} imports {module}"
        for name in STDLIB_ONLY
        if (ROOT / name).exists()
        for module in sorted(imports(ROOT / name))
        if module.split(".")[0] not in sys.stdlib_module_names | {"spotheal"}
    ]
    assert wrong == []


def test_nothing_outside_fleet_knows_of_the_rehearsal() -> None:
    """The same agent and trainer run against AWS and against the rehearsal."""
    wrong = [
        relative(path)
        for package in ("agent", "training", "userdata", "iam")
        for path in modules(package)
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "REHEARSAL" in node.value
    ]
    assert wrong == []


# --------------------------------------------------------------------------------------------------------- the packages
def settings() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser


def test_the_package_list_is_the_folders() -> None:
    listed = settings()["options"]["packages"].split()
    there = sorted(
        "spotheal." + ".".join(path.parent.relative_to(ROOT).parts)
        for path in everything()
        if path.name == "__init__.py"
    )
    assert sorted(listed) == there


def test_every_folder_with_modules_is_a_package() -> None:
    assert [relative(p) for p in everything() if not (p.parent / "__init__.py").exists()] == []


def test_every_package_is_mapped_below_spotheal() -> None:
    lines = settings()["options"]["package_dir"].split("\n")
    mapped = dict(line.replace(" ", "").split("=") for line in lines if line)
    assert mapped == {f"spotheal.{package}": package for package in PACKAGES}


def test_type_checkers_and_pytest_find_the_packages_through_links() -> None:
    links = ROOT / ".ci/import_path/spotheal"
    assert sorted(link.name for link in links.iterdir()) == sorted(PACKAGES)
    for link in links.iterdir():
        assert os.readlink(link) == f"../../../{link.name}"


def test_type_information_is_shipped() -> None:
    assert [package for package in PACKAGES if not (ROOT / package / "py.typed").exists()] == []


def test_torch_is_no_requirement_of_fleetctl_or_the_agent() -> None:
    required = settings()["options"]["install_requires"]
    assert not re.search(r"^(torch|torchvision|moto|numpy)\b", required, re.MULTILINE)


# ------------------------------------------------------------------------------------------------------------- the text
def test_no_module_has_a_name_that_says_nothing() -> None:
    vague = re.compile(r"(^|_)(util|utils|helper|helpers|common|manager|managers|misc)(_|$)")
    assert [relative(path) for path in everything() if vague.search(path.stem)] == []


def test_everything_is_caught_in_two_places_only() -> None:
    wrong = [
        f"{relative(path)}:{node.lineno}"
        for path in everything()
        if relative(path) not in ("agent/__main__.py", "fleet/terminal/console.py")
        for node in ast.walk(tree(path))
        if isinstance(node, ast.ExceptHandler) and _catches_all(node)
    ]
    assert wrong == []


def _catches_all(handler: ast.ExceptHandler) -> bool:
    """Not where it is raised again after tidying up."""
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    last = handler.body[-1]
    again = isinstance(last, ast.Raise) and last.exc is None
    return not again and any(kind is None or _name(kind) in ("Exception", "BaseException") for kind in kinds)


def test_no_program_is_run_through_a_shell() -> None:
    wrong = [
        f"{relative(path)}:{node.lineno}"
        for path in everything()
        for node in ast.walk(tree(path))
        if (isinstance(node, ast.keyword) and node.arg == "shell" and not _is_false(node.value))
        or (isinstance(node, ast.Attribute) and node.attr in ("system", "popen") and _name(node.value) == "os")
    ]
    assert wrong == []


def _is_false(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


def _name(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else ""


def test_no_tracked_file_names_a_machine_or_a_registry() -> None:
    """Written in parts here, so that this file holds none of them."""
    places = ["/wor" + "k/main", "/wor" + "k/shared", "/tmp/" + "brief", "pypi" + ".org", "pythonhosted" + ".org",
              "download.py" + "torch.org", "/opt/" + "pypi", "index" + "-url"]  # fmt: skip
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    wrong = []
    for name in filter(None, listed.stdout.split("\0")):
        path = ROOT / name
        if path.is_file() and not path.is_symlink() and path.stat().st_size < 1_000_000:
            text = path.read_bytes().decode("utf-8", "replace")
            wrong += [f"{name}: {place}" for place in places if place in text]
    assert wrong == []


def test_modules_and_functions_fit_a_screen() -> None:
    """A warning, not a failure: size is a sign, not a fault."""
    large = [f"{relative(p)}: {n} lines" for p in everything() if (n := p.read_text().count("\n")) > LINES_MAX]
    large += [
        f"{relative(path)}: {node.name} has {length} lines"
        for path in everything()
        for node in ast.walk(tree(path))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and (length := (node.end_lineno or 0) - node.lineno) > FUNCTION_LINES_MAX
    ]
    for line in large:
        warnings.warn(line, stacklevel=1)


def test_the_files_that_workers_begin_with_are_there() -> None:
    named = {*longest_first.LONGEST, *longest_first.TOGETHER}
    assert [name for name in sorted(named) if not (ROOT / "tests" / name).is_file()] == []
