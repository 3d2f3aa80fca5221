"""A volume belongs to the job that it was made or filled for: no other job's request and no upload takes it."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from fleet_desk import Desk, desk, moto_clients, wheels

from spotheal.agent.protocol.errors import ExitCode
from spotheal.fleet.account import volumes
from spotheal.fleet.terminal import console

__all__ = ["desk", "moto_clients", "wheels"]  # fixtures
ARTICLE = "DL-datasets-checkpoints"


def write_job(desk: Desk, name: str, volume: str = "", file: str = "job.toml") -> Path:
    table = f'[volume]\nname = "{volume}"\n' if volume else ""
    path = desk.folder / file
    path.write_text(f'[job]\nname = "{name}"\nrepository = "."\ncommand = ["python", "train.py"]\n{table}')
    return path


def unclaimed(desk: Desk, name: str) -> str:
    """A volume of somebody else's making, with a Name tag only."""
    tags = [{"ResourceType": "volume", "Tags": [{"Key": "Name", "Value": name}]}]
    made = desk.account.create_volume(AvailabilityZone="us-west-2b", Size=50, TagSpecifications=tags)
    desk.pass_time(30)
    return str(made["VolumeId"])


def tags_of(desk: Desk, volume: str) -> dict[str, str]:
    found = desk.account.rules.volume(volume)
    assert found is not None
    return dict(found.tags)


@pytest.mark.parametrize("name", ["", "data"])
def test_a_volume_made_for_one_job_is_never_taken_by_another(desk: Desk, name: str) -> None:
    """Also if both jobs write the same volume name into their files."""
    write_job(desk, "day", name)
    made = desk.good("volume", "create", "--yes", "--zone", "us-west-2b")
    assert tags_of(desk, made["id"])["spotheal:job"] == "day"
    desk.pass_time(30)
    write_job(desk, "cc", name)
    assert desk.request()["volume_id"] != made["id"]
    write_job(desk, "day", name)
    done = desk.request()
    assert done["volume_id"] == made["id"]
    assert tags_of(desk, made["id"])["spotheal:run"] == done["run"]


def test_two_jobs_have_different_volume_names_by_default(desk: Desk) -> None:
    names = []
    for job in ("day", "cc"):
        write_job(desk, job)
        names.append(desk.good("volume", "create", "--yes", "--zone", "us-west-2b")["name"])
    assert names == ["spotheal-day", "spotheal-cc"]


def test_a_volume_created_twice_a_day_is_two_once_a_run_has_the_first(desk: Desk) -> None:
    """CreateVolume answers a known client token with the first volume, whoever has it by then."""
    write_job(desk, "day")
    first = desk.good("volume", "create", "--yes", "--zone", "us-west-2b")
    desk.pass_time(30)
    desk.request()
    second = desk.good("volume", "create", "--yes", "--zone", "us-west-2b")
    assert second["id"] != first["id"] and second["run"] is None


@pytest.mark.parametrize("seconds", [5, 300], ids=["at once", "later"])
def test_a_volume_created_after_one_was_deleted_is_a_new_one(
    desk: Desk, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the same day, so with the same client token: at first EC2 still answers with the one that is gone."""
    monkeypatch.setattr(volumes, "SHOWN_SECONDS_MAX", 0.0)
    write_job(desk, "day")
    first = desk.good("volume", "create", "--yes", "--zone", "us-west-2b")
    desk.pass_time(30)
    assert desk.run("volume", "rm", first["id"], "--yes").exit_code == 0
    desk.pass_time(seconds)
    second = desk.good("volume", "create", "--yes", "--zone", "us-west-2b")
    assert second["id"] != first["id"] and tags_of(desk, second["id"])["spotheal:job"] == "day"


def test_no_upload_onto_a_volume_of_another_job(desk: Desk) -> None:
    (desk.folder / "data").mkdir()
    (desk.folder / "data" / "a").write_text("a")
    write_job(desk, "cc")
    other = desk.good("volume", "create", "--yes", "--zone", "us-west-2b")["id"]
    desk.pass_time(30)
    write_job(desk, "day")
    for order in (("prepare", "--volume", other, "--yes", "--", "true"),
                  ("upload", "data", "--volume", other, "--yes"), ("adopt", other, "--yes")):  # fmt: skip
        refused = desk.run("volume", *order)
        assert refused.exit_code == ExitCode.CONFLICT, refused.output
        assert "belongs to job 'cc'" in refused.stderr


@pytest.mark.parametrize("verb", [("prepare", "--yes", "--", "true"), ("upload", "data", "--yes"), ("create", "--yes")])
def test_a_volume_found_by_its_name_alone_is_neither_filled_nor_hidden(desk: Desk, verb: tuple[str, ...]) -> None:
    (desk.folder / "data").mkdir()
    (desk.folder / "data" / "a").write_text("a")
    write_job(desk, "day", "data")
    volume = unclaimed(desk, "data")
    refused = desk.run("volume", *verb)
    assert refused.exit_code == ExitCode.CONFLICT
    assert f"fleetctl volume adopt {volume}" in refused.stderr


def test_a_request_takes_a_volume_found_by_its_name_only_after_a_question_of_its_own(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_job(desk, "day", "data")
    volume = unclaimed(desk, "data")
    refused = desk.run("request", "--yes")
    assert refused.exit_code == ExitCode.CONFLICT
    assert f"fleetctl volume adopt {volume}" in refused.stderr
    assert tags_of(desk, volume) == {"Name": "data"} and desk.live_fleets() == []

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    class Click:  # CliRunner puts its own standard input in place: the question is asked of this one
        stdin = Terminal("n\ny\ny\n")

        def __getattr__(self, name: str) -> object:
            import sys

            return getattr(sys, name)

    monkeypatch.setattr(console, "sys", Click())
    monkeypatch.setattr("spotheal.fleet.verbs.request.sys", Click())
    refused = desk.run("request")
    assert refused.exit_code == ExitCode.OK and "nothing was done" in refused.stderr
    assert tags_of(desk, volume) == {"Name": "data"} and desk.live_fleets() == []
    taken = desk.run("request")
    assert taken.exit_code == ExitCode.OK, taken.output
    assert taken.stderr.count("[y/N]") == 2
    assert tags_of(desk, volume)["spotheal:job"] == "day"


def test_the_articles_volume_is_named_in_the_plan_and_taken_after_adopt(desk: Desk) -> None:
    """Its Name tag was every job's default once."""
    write_job(desk, "day")
    volume = unclaimed(desk, ARTICLE)
    dry = desk.good("request", "--dry-run")
    assert dry["volume"]["action"] == "create"
    assert [note for note in dry["notes"] if f"fleetctl volume adopt {volume}" in note]
    assert volume in [one["id"] for one in desk.good("volume", "ls")["volumes"]]
    assert desk.good("volume", "adopt", volume, "--yes")["name"] == "spotheal-day"
    done = desk.request()
    assert done["volume_id"] == volume
    assert tags_of(desk, volume)["spotheal:state"] == "current"  # never `new`: only that may be formatted


@pytest.mark.parametrize("order", [("create", "--yes"), ("adopt", "vol-0123456789abcdef0", "--yes"),
                                   ("prepare", "--yes", "--", "true"), ("upload", ".", "--yes")])  # fmt: skip
def test_a_volume_is_filled_for_a_job_only(desk: Desk, order: tuple[str, ...]) -> None:
    (desk.folder / "job.toml").unlink()
    refused = desk.run("volume", *order)
    assert refused.exit_code == ExitCode.NOT_FOUND, refused.output
    assert "job.toml" in refused.stderr and "fleetctl init" in refused.stderr
