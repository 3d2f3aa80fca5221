"""Foreign code is started at one place: hooks, the trainer, the ranks of several machines and a child at Batch alike.

What test_cage_refusals.py shows of `ForeignProgram` (root never enters a folder that a trainer can replace by a link)
holds for all of them as long as no other line of the agent starts a program as another user or in another folder.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

from spotheal import agent
from spotheal.agent.processes import sandbox_exec

AGENT = Path(agent.__file__).parent
DOOR = "processes/group.py"
LAST_STEP = "processes/sandbox_exec.py"
STARTS = {"run", "Popen", "call", "check_call", "check_output"}
OF_OS = ("exec", "fork", "posix_spawn", "spawn", "system", "popen", "chdir", "fchdir", "setuid", "setre", "setresuid")
CHANGES = {"user", "group", "extra_groups", "preexec_fn", "cwd"}


def calls() -> Iterator[tuple[str, str, ast.Call]]:
    """(file, `module.name`, call) of each call of an attribute of a module in the agent."""
    for path in sorted(AGENT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                yield str(path.relative_to(AGENT)), ast.unparse(node.func), node


def test_one_line_of_the_agent_starts_programs_as_another_user_or_in_another_folder() -> None:
    found = set()
    for file, name, call in calls():
        module, _, function = name.rpartition(".")
        if module == "subprocess" and function in STARTS:
            changes = {str(word.arg): ast.unparse(word.value) for word in call.keywords if word.arg in CHANGES}
            if any(value not in ("'/'", "Path('/')") for value in changes.values()):
                found.add((file, name))
        elif module == "os" and function.startswith(OF_OS):
            found.add((file, name))
    own = {(LAST_STEP, f"os.{function}") for function in ("setuid", "chdir", "execve")}
    assert found == {(DOOR, "subprocess.Popen"), *own}


def test_trainers_and_commands_of_a_repository_go_through_the_door() -> None:
    users = {
        (str(path.relative_to(AGENT)), ast.unparse(node.func))
        for path in AGENT.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("ForeignProgram", "_popen", "_start_by_launcher")
    }
    assert users == {
        ("trainer/supervisor.py", "ForeignProgram"),
        ("processes/foreign_command.py", "ForeignProgram"),
        (DOOR, "_popen"),
        (DOOR, "_start_by_launcher"),
    }


def test_the_last_step_is_the_other_user_before_it_enters_the_folder() -> None:
    body = inspect.getsource(sandbox_exec.main)
    steps = ("_enclose(", "_drop_capabilities(", "os.setuid(", "_enter(", "_limit_calls(", "_execute(")
    places = [body.index(step) for step in steps]
    assert places == sorted(places)
