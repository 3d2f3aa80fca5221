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
STDLIB_ONLY = (
    *(f"agent/protocol/{name}.py" for name in ("names", "contract", "clock", "errors", "notice_seconds")),
    "agent/volume/plan.py",
    "training/example/hyperparameters.py",
    *(f"userdata/{name}.py" for name in ("__init__", "minified", "report", "bootstrap", "start", "prepare")),
    *(f"iam/{name}.py" for name in ("calls", "policies", "evaluation")),
    *(f"fleet/rehearsal/programs/{name}.py" for name in ("init", "stand_in")),
)
# The rooms, each above all that it may import. docs/architecture.md shows them with what is in each.
ROOMS = (
    "agent/protocol", "agent/processes", "agent/files", "agent/aws", "agent/machine", "agent/cage",
    "agent/interruption", "agent/repository", "agent/trainer", "agent/record", "agent/volume", "agent/money",
    "agent/life", "agent/nodes", "agent/sweep", "agent/batch", "agent",
    "training/slotfile", "training/shards", "training", "training/integrations", "training/example",
    "userdata", "iam",
    "fleet/run", "fleet/terminal", "fleet/files", "fleet/logs", "fleet/results", "fleet/account", "fleet/request",
    "fleet/status", "fleet/report", "fleet/volumes", "fleet/batch", "fleet/sweep", "fleet/ending",
    "fleet/rehearsal", "fleet/rehearsal/programs", "fleet/rehearsal/machines", "fleet/rehearsal/ec2",
    "fleet/rehearsal/services", "fleet/rehearsal/batch", "fleet/rehearsal/scenarios",
    "fleet/verbs", "fleet",
)  # fmt: skip
ENTRIES = ("training/__main__.py",)  # begins what is above it
# Modules of ours that a folder at the top may import; a name covers what is below it.
MAY_IMPORT = {
    "agent": ("agent",),
    "training": ("training", "agent.protocol.contract", "agent.protocol.clock", "agent.protocol.errors",
                 "agent.protocol.notice_seconds", "agent.aws.imds"),
    "fleet": ("fleet", "iam", "userdata",
              "agent.protocol", "agent.aws.clients", "agent.aws.ec2", "agent.aws.s3",
              "agent.record.ledger", "agent.record.lost_work", "agent.volume.first",
              "agent.money.bill_inputs", "agent.money.billing", "agent.money.instance_time",
              "training.example.hyperparameters",  # what the example trainer takes, asked before it is paid for
              "training.yaml_list"),
    "userdata": ("userdata",),
    "iam": ("iam", "agent.protocol.names", "agent.protocol.secret_reference"),
}  # fmt: skip
MODULES_MAX = 20  # side by side in a folder
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
        if name.startswith("spotheal") and not covered(name.removeprefix("spotheal."), MAY_IMPORT[package])
        if not relative(path).startswith("fleet/rehearsal/")
    ]
    assert wrong == []


def _room(name: str) -> str:
    """The room of one of our modules, named with dots or as a file."""
    path = ROOT / name.removeprefix("spotheal.").replace(".", "/") if name.startswith("spotheal") else ROOT / name
    return relative(path if path.is_dir() else path.parent)


def test_a_room_imports_only_rooms_below_it() -> None:
    """So there is no cycle, and whoever reads a room need not know those above."""
    wrong = [
        f"{relative(path)} imports {name}"
        for path in everything()
        if relative(path) not in ENTRIES
        for name in sorted(imports(path))
        if name.startswith("spotheal.")
        if ROOMS.index(_room(name)) > ROOMS.index(_room(relative(path)))
    ]
    assert wrong == []


def test_every_folder_is_a_room_and_none_is_crowded() -> None:
    assert sorted({_room(relative(path)) for path in everything()}) == sorted(ROOMS)
    folders = {*ROOMS, *(relative(path.parent) for path in (ROOT / "tests").rglob("*.py"))}
    crowded = {name: count for name in folders if (count := len(list((ROOT / name).glob("*.py")))) > MODULES_MAX}
    assert crowded == {}


def test_the_page_on_architecture_shows_every_room() -> None:
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    rows = {name: (ast.get_docstring(tree(ROOT / name / "__init__.py")) or "").split("\n")[0] for name in ROOMS}
    table = "\n".join(f"| `{name}/` | {text} |" for name, text in rows.items())
    assert table in page, f"docs/architecture.md needs this table:\n{table}"


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


_NO_NOUNS = (
    "one ones other others another that this these those it its them they what which who whose whom where when why how"
    " whether there here then now found said told left given made asked seen known kept held taken done gone begun"
    " began came come went got meant wanted needed shown sent both all each every any some none many more most less"
    " least few several such same own only again already still yet anew beside thereby so too also else even ever never"
    " always often once twice us we you he she him her his their our my your"
)
NO_NOUNS = frozenset(_NO_NOUNS.split())
NO_NOUNS_PERCENT_MAX = 1.0


def _bound_names(module: ast.Module) -> Iterator[str]:
    for node in ast.walk(module):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            yield from (argument.arg for argument in arguments if argument.arg not in ("self", "cls"))


def test_variables_are_nouns() -> None:
    """Readers who learnt English late stumble over `found`, `said` and `one`: what is it?"""
    names = [name for path in everything() for name in _bound_names(tree(path))]
    weak = sum(name.strip("_") in NO_NOUNS for name in names)
    assert 100 * weak / len(names) <= NO_NOUNS_PERCENT_MAX


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
