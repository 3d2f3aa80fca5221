"""Which commit is trained, and that work no instance could get is refused before anything is made."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spotheal.agent.protocol.errors import ConfigError, Conflict, NotFound, SpothealError
from spotheal.agent.protocol.job import JobConfig, parse_job
from spotheal.fleet.request.repository import check_script, resolve, same_repository, write_bundle
from spotheal.fleet.request.script import script_of


def git(folder: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", "-c", "user.email=a@example.org", "-c", "user.name=a", "-c", "protocol.file.allow=always", *arguments],
        cwd=folder, check=True, capture_output=True, text=True,
    ).stdout.strip()  # fmt: skip


def job(repository: str, revision: str = "", **more: Any) -> JobConfig:
    table = {"name": "j", "repository": repository, "revision": revision, "command": ["x"], **more}
    return parse_job({"job": table})


def commit(folder: Path, name: str = "train.py", text: str = "print(1)\n") -> str:
    (folder / name).write_text(text)
    git(folder, "add", name)
    git(folder, "commit", "-q", "-m", "x")
    return git(folder, "rev-parse", "HEAD")


@pytest.fixture
def remote(tmp_path: Path) -> Path:
    folder = tmp_path / "remote"
    folder.mkdir()
    git(folder, "init", "-q", "-b", "main")
    commit(folder)
    return folder


@pytest.fixture
def checkout(tmp_path: Path, remote: Path) -> Path:
    git(tmp_path, "clone", "-q", str(remote), "checkout")
    return tmp_path / "checkout"


def test_a_branch_a_tag_and_nothing_are_resolved_to_commits(remote: Path, tmp_path: Path) -> None:
    first = git(remote, "rev-parse", "HEAD")
    git(remote, "tag", "-a", "v1", "-m", "one")
    git(remote, "switch", "-q", "-c", "side")
    second = commit(remote, "other.py")
    git(remote, "switch", "-q", "main")
    url = str(remote)
    assert resolve(job(url), tmp_path, allow_paths=True).commit == first
    assert resolve(job(url, "side"), tmp_path, allow_paths=True).commit == second
    assert resolve(job(url, "v1"), tmp_path, allow_paths=True).commit == first  # the commit, not the tag object
    assert resolve(job(url, second), tmp_path, allow_paths=True).commit == second


def test_a_missing_revision_says_where_to_look(remote: Path, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no branch or tag 'nope'"):
        resolve(job(str(remote), "nope"), tmp_path, allow_paths=True)
    with pytest.raises(NotFound) as caught:
        resolve(job(str(remote), git(remote, "rev-parse", "HEAD")[:10]), tmp_path, allow_paths=True)
    assert "40 digits" in caught.value.next_step


def test_a_branch_and_a_tag_of_one_name_are_not_guessed_between(remote: Path, tmp_path: Path) -> None:
    git(remote, "tag", "both")
    git(remote, "switch", "-q", "-c", "both")
    commit(remote, "b.py")
    with pytest.raises(ConfigError, match="a branch and a tag 'both'"):
        resolve(job(str(remote), "both"), tmp_path, allow_paths=True)


def test_an_empty_repository_says_so(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q", "empty")
    with pytest.raises(NotFound, match="no default branch"):
        resolve(job(str(tmp_path / "empty")), tmp_path, allow_paths=True)


def test_a_repository_that_is_not_there_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        resolve(job(str(tmp_path / "nowhere")), tmp_path, allow_paths=True)


def test_a_host_that_does_not_answer_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(SpothealError, match="cannot be read"):
        resolve(job("https://127.0.0.1:1/a.git"), tmp_path)


@pytest.mark.parametrize(
    "address",
    ["ext::sh -c 'touch /tmp/x'", "--upload-pack=touch x", "/srv/repo", "../repo", "file:///srv/repo", "fd::3"],
)
def test_addresses_that_run_commands_or_are_of_this_machine_are_refused(address: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        resolve(job(address), tmp_path)


@pytest.mark.parametrize("who", ["me:hunter2", "hunter2", ":hunter2"])
def test_a_password_or_token_in_the_address_is_refused_and_not_repeated(who: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(job(f"https://{who}@example.org/a.git"), tmp_path)
    assert "hunter2" not in str(caught.value)


# ------------------------------------------------------------------------------------------------------- this checkout
def test_a_checkout_is_carried_as_a_bundle_that_clones(checkout: Path, tmp_path: Path) -> None:
    source = resolve(job("."), checkout)
    assert source.commit == git(checkout, "rev-parse", "HEAD")
    bundle = write_bundle(source, tmp_path / "repository.bundle")
    git(tmp_path, "clone", "-q", str(bundle), "clone")
    assert git(tmp_path / "clone", "rev-parse", "HEAD") == source.commit
    assert git(checkout, "for-each-ref", "refs/heads/spotheal") == ""


def test_a_bundle_may_be_of_another_commit_than_the_checkouts(checkout: Path, tmp_path: Path) -> None:
    first = git(checkout, "rev-parse", "HEAD")
    commit(checkout, "b.py")
    (checkout / "train.py").write_text("changed, but not of that commit\n")
    source = resolve(job(".", first), checkout)
    assert source.commit == first
    write_bundle(source, tmp_path / "repository.bundle")
    git(tmp_path, "clone", "-q", str(tmp_path / "repository.bundle"), "clone")
    assert not (tmp_path / "clone" / "b.py").exists()


def test_uncommitted_work_is_refused_with_the_cure(checkout: Path) -> None:
    (checkout / "train.py").write_text("changed\n")
    with pytest.raises(Conflict, match=r"uncommitted work: changed: train\.py") as caught:
        resolve(job("."), checkout)
    assert "commit" in caught.value.next_step


def test_a_forgotten_source_file_is_refused_and_other_new_files_are_a_note(checkout: Path) -> None:
    (checkout / "notes.bin").write_text("x")
    assert "notes.bin" in resolve(job("."), checkout).warnings[0]
    (checkout / "model.py").write_text("x")
    with pytest.raises(Conflict, match=r"model\.py"):
        resolve(job("."), checkout)


def test_what_is_changed_and_what_is_new_is_told_apart_with_a_way_out_for_each(checkout: Path) -> None:
    (checkout / "train.py").write_text("changed\n")
    (checkout / "model.py").write_text("x")
    (checkout / "notes.bin").write_text("x")
    with pytest.raises(Conflict) as caught:
        resolve(job("."), checkout)
    assert caught.value.message == "this checkout has uncommitted work: changed: train.py; not added to git: model.py"
    assert "`git add model.py`" in caught.value.next_step and ".gitignore" in caught.value.next_step


def test_the_job_file_of_another_job_blocks_no_request(checkout: Path) -> None:
    """A second job.toml lay beside the first, and no request went out before it was committed or hidden."""
    other = '[job]\nname = "other"\nrepository = "."\ncommand = ["x"]\n'
    (checkout / "second.toml").write_text(other)
    assert resolve(job("."), checkout).warnings == ()
    commit(checkout, "second.toml", other)
    (checkout / "second.toml").write_text(other.replace("other", "third"))
    assert resolve(job("."), checkout).warnings == ()
    (checkout / "settings.toml").write_text("[model]\nlayers = 3\n")
    with pytest.raises(Conflict, match=r"not added to git: settings\.toml"):
        resolve(job("."), checkout)


# ---------------------------------------------------------------------------------------------------------- the script
@pytest.mark.parametrize("here", [True, False])
def test_a_script_that_the_commit_lacks_is_named_with_the_one_that_it_has(
    checkout: Path, remote: Path, here: bool
) -> None:
    """It showed on the machine, minutes and cents later, as `can't open file`."""
    commit(checkout, "scripts.py")
    git(checkout, "push", "-q", "origin", "HEAD:side")
    asked = job(".") if here else job(str(remote), "side")
    wrong = replace(asked, job=replace(asked.job, command=("python", "-u", "trian.py", "--epochs", "3")))
    with pytest.raises(ConfigError, match=r"\[job\] command runs trian\.py, which is not in commit") as caught:
        resolve(wrong, checkout, allow_paths=True)
    assert "train.py" in caught.value.next_step
    with pytest.raises(ConfigError, match=r"trian\.py"):
        check_script(wrong, checkout)
    right = replace(asked, job=replace(asked.job, command=("python", "train.py")))
    check_script(right, checkout)
    assert resolve(right, checkout, allow_paths=True).commit


def test_a_script_that_was_never_added_is_found_out_though_it_lies_there(checkout: Path) -> None:
    (checkout / ".git" / "info" / "exclude").write_text("mine.py\n")
    (checkout / "mine.py").write_text("x")
    with pytest.raises(ConfigError) as caught:
        resolve(job(".", command=["python", "mine.py"]), checkout)
    assert "`git add -f mine.py`" in caught.value.next_step


def test_a_script_without_interpreter_that_is_not_executable_is_refused_with_the_command_to_write(
    checkout: Path,
) -> None:
    """It showed on the machine as `Permission denied`."""
    command = ["./train.py", "--epochs", "3"]
    for check in (check_script, resolve):
        with pytest.raises(ConfigError, match="not executable in commit") as caught:
            check(job(".", command=command), checkout)
        assert '["python", "./train.py", …]' in caught.value.next_step
    (note,) = resolve(job(".", command=command, setup=[["chmod", "+x", "train.py"]]), checkout).warnings
    assert "not executable" in note
    git(checkout, "update-index", "--chmod=+x", "train.py")
    git(checkout, "commit", "-q", "-m", "executable")
    git(checkout, "checkout", "-q", ".")
    assert check_script(job(".", command=command), checkout) == []


def test_a_script_named_without_its_folder_is_refused_with_the_command_to_write(checkout: Path) -> None:
    """A machine looks for `train.py` on PATH, where it is not, executable or not."""
    command = ["train.py", "--epochs", "3"]
    for mode, cure in (("-x", '["python", "train.py", …]'), ("+x", '["./train.py", …]')):
        git(checkout, "update-index", f"--chmod={mode}", "train.py")
        git(checkout, "commit", "-q", "--allow-empty", "-m", "mode")
        git(checkout, "checkout", "-q", ".")
        for check in (check_script, resolve):
            with pytest.raises(ConfigError, match=r"train\.py is looked for on PATH, not in the repository") as caught:
                check(job(".", command=command), checkout)
            assert cure in caught.value.next_step
    (note,) = check_script(job(".", command=command, setup=[["pip", "install", "."]]), checkout)
    assert "looked for on PATH" in note
    assert check_script(job(".", command=["elsewhere.py"]), checkout) == []  # a program of the machine image


@pytest.mark.parametrize("more", [{"setup": [["make", "trainer.py"]]}, {"submodules": True}])
def test_a_script_that_setup_or_a_submodule_may_bring_is_only_noted(checkout: Path, more: dict[str, Any]) -> None:
    (note,) = resolve(job(".", command=["python", "trainer.py"], **more), checkout).warnings
    assert "trainer.py, which is not in commit" in note


def test_the_two_files_of_the_request_need_not_be_committed(checkout: Path) -> None:
    for name in ("job.toml", "fleet.json"):
        (checkout / name).write_text("x")
    ours = (checkout / "job.toml", checkout / "fleet.json")
    assert resolve(job("."), checkout, ours=ours).warnings == ()


def test_a_folder_that_is_no_checkout_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="in no git checkout"):
        resolve(job("."), tmp_path)


def test_a_checkout_without_a_commit_says_so(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    with pytest.raises(NotFound, match="no revision 'HEAD'"):
        resolve(job("."), tmp_path)


def test_unpushed_work_of_the_jobs_own_repository_is_refused_with_the_cure(checkout: Path, remote: Path) -> None:
    commit(checkout, "b.py")
    with pytest.raises(Conflict, match="1 commit") as caught:
        resolve(job(str(remote)), checkout, allow_paths=True)
    assert "git push origin main" in caught.value.next_step
    assert 'repository = "."' in caught.value.next_step


def test_uncommitted_work_of_the_jobs_own_repository_is_refused(checkout: Path, remote: Path) -> None:
    (checkout / "train.py").write_text("changed\n")
    with pytest.raises(Conflict, match="uncommitted"):
        resolve(job(str(remote)), checkout, allow_paths=True)


def test_a_checkout_that_is_merely_behind_is_a_note(checkout: Path, remote: Path) -> None:
    ahead = commit(remote, "b.py")
    source = resolve(job(str(remote)), checkout, allow_paths=True)
    assert source.commit == ahead
    assert "this checkout is at" in source.warnings[0]


def test_a_pinned_commit_is_taken_whatever_the_checkout_holds(checkout: Path, remote: Path) -> None:
    first = git(remote, "rev-parse", "HEAD")
    commit(checkout, "b.py")
    assert resolve(job(str(remote), first), checkout, allow_paths=True).commit == first


def test_the_same_repository_is_known_by_each_of_its_addresses() -> None:
    assert same_repository("git@github.com:a/b.git", "https://github.com/a/b")
    assert same_repository("ssh://git@github.com/a/b.git", "https://me@GitHub.com/a/b/")
    assert not same_repository("https://github.com/a/b", "https://github.com/a/c")


@pytest.mark.parametrize(
    ("command", "script"),
    [
        (["python", "train.py", "other.py"], "train.py"),
        (["python3.11", "-u", "-X", "dev", "src/train.py"], "src/train.py"),
        (["torchrun", "--nproc-per-node", "2", "train.py"], "train.py"),
        (["accelerate", "launch", "--config_file", "a.yaml", "train.py"], "train.py"),
        (["bash", "run.sh"], "run.sh"),
        (["./run", "--config", "a.py"], "./run"),
        (["python", "-m", "trainer", "eval.py"], ""),
        (["python", "-c", "import x", "train.py"], ""),
        (["torchrun", "-m", "trainer", "x.py"], ""),
        (["bash", "-c", "python train.py"], ""),
        (["python", "/opt/train.py"], ""),
        (["python", "${SPOTHEAL_CHECKPOINT_DIR}/train.py"], ""),
        (["python", "../train.py"], ""),
        (["mytrainer", "train.py"], ""),
        (["python", "train"], ""),
        ([], ""),
    ],
)
def test_the_script_of_a_command_is_known_only_where_it_is_plain(command: list[str], script: str) -> None:
    assert script_of(command) == script
