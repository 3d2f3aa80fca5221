"""fleetctl volume: made, filled on an instance that really runs, adopted and removed; an upload that is cut short."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from cloud_desk import CloudDesk, cloud_desk, served

from spotheal.agent.aws.ec2 import Volume
from spotheal.agent.aws.s3 import Store
from spotheal.agent.protocol.errors import ConfigError, ExitCode
from spotheal.agent.protocol.job import parse_job
from spotheal.agent.protocol.names import StoreUrl
from spotheal.fleet.rehearsal.ec2.world import EXAMPLE_IMAGE
from spotheal.fleet.rehearsal.services.objects import InMemoryS3
from spotheal.fleet.terminal.bar import line
from spotheal.fleet.volumes import filling, uploading

__all__ = ["cloud_desk", "served"]  # fixtures


# ------------------------------------------------------------------------------------------------------------- uploads
@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "data"
    (root / "sub").mkdir(parents=True)
    (root / "a.bin").write_bytes(os.urandom(300_000))
    (root / "sub" / "b.txt").write_text("hello")
    (root / "sub" / "link").symlink_to("b.txt")
    return root


def _store() -> Store:
    s3 = InMemoryS3()
    s3.create_bucket(Bucket="bucket")
    return Store(s3, StoreUrl("bucket", "uploads"))


def test_an_upload_that_was_cut_short_sends_only_what_is_missing(folder: Path) -> None:
    store, sent = _store(), []

    def cut(done: int, is_new: bool) -> None:
        sent.append(is_new)
        if len(sent) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        uploading.upload(store, uploading.scan(folder), cut, part_bytes=100_000)
    again: list[bool] = []
    keys, size = uploading.upload(store, uploading.scan(folder), lambda _, new: again.append(new), part_bytes=100_000)
    assert again == [False, False, True, True]
    assert [len(store.get_bytes(key) or b"") for key in keys] == [100_000, 100_000, 100_000, size - 300_000]


def test_a_changed_file_is_sent_again_from_its_part_on(folder: Path) -> None:
    store = _store()
    before, _ = uploading.upload(store, uploading.scan(folder), lambda *_: None, part_bytes=100_000)
    (folder / "sub" / "b.txt").write_text("other")
    after, _ = uploading.upload(store, uploading.scan(folder), lambda *_: None, part_bytes=100_000)
    assert [one == other for one, other in zip(before, after, strict=True)] == [True, True, True, False]


def test_nothing_to_upload_is_said_before_anything_is_asked(cloud_desk: CloudDesk, tmp_path: Path) -> None:
    (tmp_path / "void").mkdir()
    for path in ("void", "nowhere"):
        with pytest.raises(ConfigError):
            uploading.scan(tmp_path / path)
    result = cloud_desk.run("volume", "upload", str(tmp_path / "void"), "--yes")
    assert result.exit_code == ExitCode.USAGE and "holds no file" in result.stderr


@pytest.mark.parametrize("to", ["../up", "/etc", "a/../../b"])
def test_an_upload_stays_below_datasets(cloud_desk: CloudDesk, folder: Path, to: str) -> None:
    result = cloud_desk.run("volume", "upload", str(folder), "--to", to, "--yes")
    assert result.exit_code == ExitCode.USAGE and "leaves the datasets folder" in result.stderr


def test_a_folder_larger_than_the_volume_is_refused_before_it_is_read(folder: Path) -> None:
    """A sparse file is read as zeros: a TiB that takes nothing on the disk would be sent for a day."""
    with (folder / "sparse").open("wb") as file:
        file.truncate(3 << 40)
    with pytest.raises(ConfigError, match=r"3\.3 TB are to be uploaded, and the volume has 10 GiB"):
        uploading.check_room(uploading.scan(folder), 10)
    (folder / "sparse").unlink()
    uploading.check_room(uploading.scan(folder), 10)


def test_progress_says_rate_and_time_left() -> None:
    assert line("uploading", 25_000_000, 100_000_000, 5.0) == "uploading 25.0 of 100.0 MB, 25 %, 5.0 MB/s, 15 s left"
    assert line("uploading", 2_000, 4_000, 2.0) == "uploading 2.0 of 4.0 kB, 50 %, 1.0 kB/s, 2 s left"
    assert line("uploading", 0, 0, 0.0) == "uploading 0.0 of 0.0 kB, 100 %, 0.0 kB/s"


# ------------------------------------------------------------------------------------------------------------- volumes
def test_the_whole_life_of_a_volume(
    cloud_desk: CloudDesk, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Made, filled by a command, added to by an upload, a failing command told, and removed."""
    monkeypatch.setattr(filling, "_LOOK_SECONDS", 0.3)
    (cloud_desk.folder / "job.toml").write_text(
        '[job]\nname = "cifar"\nrepository = "."\ncommand = ["true"]\n[volume]\nname = "cifar-data"\nsize_gib = 2\n'
    )
    made = cloud_desk.good("volume", "create", "--yes", "--zone", "us-west-2b", "--size", "4", "--type", "gp2")
    assert (made["name"], made["zone"], made["size_gib"], made["role"]) == ("cifar-data", "us-west-2b", 4, "new")
    twice = cloud_desk.run("volume", "create", "--yes")
    assert twice.exit_code == ExitCode.CONFLICT and made["id"] in twice.stderr

    where = ("--volume", made["id"], "--zone", "us-west-2b", "--instance-type", "c7i.large", "--image", EXAMPLE_IMAGE,
             "--spot")  # fmt: skip
    fill = ("--", "sh", "-c", "echo downloading; echo one > one.txt")
    filled = cloud_desk.run("volume", "prepare", "--yes", "--hours", "2", *where, *fill)
    assert filled.exit_code == 0, filled.output
    assert "downloading" in filled.stdout
    filler = cloud_desk.cloud.rules.instances()[-1]
    assert (filler.type, filler.image, filler.is_spot) == ("c7i.large", EXAMPLE_IMAGE, True)
    sent = cloud_desk.good("volume", "upload", str(folder), "--to", "more", *where, "--yes")
    assert sent["volume"] == made["id"]
    files = cloud_desk.cloud.volumes.disk(made["id"]).files / "datasets"
    assert (files / "one.txt").read_text() == "one\n"
    assert (files / "more" / "a.bin").read_bytes() == (folder / "a.bin").read_bytes()
    assert (files / "more" / "sub" / "link").readlink() == Path("b.txt")

    failed = cloud_desk.run("volume", "prepare", "--yes", "--", "sh", "-c", "echo no space >&2; exit 3")
    assert failed.exit_code == ExitCode.JOB_FAILED
    assert "no space" in failed.stdout and "exit code 3" in failed.stderr
    assert [one for one in cloud_desk.cloud.rules.instances() if one.state == "running"] == []
    (row,) = [one for one in cloud_desk.good("volume", "ls")["volumes"] if one["id"] == made["id"]]
    assert (row["state"], row["role"], row["dollars_per_month"]) == ("available", "current", 0.4)

    assert cloud_desk.good("volume", "rm", made["id"], "--yes")["deleted"] == made["id"]
    assert made["id"] not in [one["id"] for one in cloud_desk.good("volume", "ls")["volumes"]]


def until_available(cloud_desk: CloudDesk, volume: str) -> None:
    while getattr(cloud_desk.cloud.rules.volume(volume), "state", "") == "creating":
        time.sleep(0.01)


def test_a_volume_is_adopted_by_its_name_and_never_a_runs(cloud_desk: CloudDesk) -> None:
    (cloud_desk.folder / "job.toml").write_text(
        '[job]\nname = "bert"\nrepository = "."\ncommand = ["true"]\n[volume]\nname = "bert-data"\n'
    )
    rules = cloud_desk.cloud.rules
    def tags(name: str) -> list[dict[str, object]]:
        return [{"ResourceType": "volume", "Tags": [{"Key": name, "Value": "x"}]}]

    free = rules.call("CreateVolume", {"AvailabilityZone": "us-west-2a", "Size": 1, "VolumeType": "gp3"})["VolumeId"]
    taken = rules.call("CreateVolume", {"AvailabilityZone": "us-west-2a", "Size": 1, "VolumeType": "gp3",
                                        "TagSpecifications": tags("spotheal:run")})["VolumeId"]  # fmt: skip
    assert cloud_desk.good("volume", "adopt", free, "--yes")["name"] == "bert-data"
    assert (rules.volume(free) or pytest.fail("gone")).tags == {"Name": "bert-data", "spotheal:job": "bert"}
    refused = cloud_desk.run("volume", "adopt", taken, "--yes")
    assert refused.exit_code == ExitCode.CONFLICT and "belongs to run x" in refused.stderr
    for volume in (free, taken):
        until_available(cloud_desk, volume)  # EC2 deletes no volume that it still creates
        cloud_desk.good("volume", "rm", volume, "--yes")


@pytest.mark.parametrize(
    ("arguments", "code"),
    [(("rm", "vol-0123456789abcdef0", "--yes"), ExitCode.NOT_FOUND), (("rm", "../../x", "--yes"), ExitCode.USAGE),
     (("adopt", "vol-$(id)", "--yes"), ExitCode.USAGE), (("create", "--type", "floppy", "--yes"), ExitCode.USAGE),
     (("create", "--size", "0", "--yes"), ExitCode.USAGE), (("prepare", "--yes"), ExitCode.USAGE),
     (("rm", "vol-0123456789abcdef0"), ExitCode.NOT_FOUND), (("create",), ExitCode.USAGE)],
)  # fmt: skip
def test_exit_codes(cloud_desk: CloudDesk, arguments: tuple[str, ...], code: ExitCode) -> None:
    (cloud_desk.folder / "job.toml").write_text('[job]\nname = "digits"\nrepository = "."\ncommand = ["true"]\n')
    result = cloud_desk.run("volume", *arguments)
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize("name", ["ls", "create", "adopt", "prepare", "upload", "rm"])
def test_each_has_help_with_an_example(cloud_desk: CloudDesk, name: str) -> None:
    assert f"Example: fleetctl volume {name}" in cloud_desk.run("volume", name, "--help").stdout


def test_the_plan_names_the_volume_that_is_not_made_yet() -> None:
    """It read `unpack the upload with  at /dltraining`."""
    job = parse_job({"job": {"name": "j", "repository": ".", "command": ["x"]}})
    told = filling.Filling(Volume("", "us-west-2a", "", 10, "gp3"), job, "ami-1", "c7i.large", "subnet-1").says()
    assert told[1] == "unpack the upload with the new volume at /dltraining, then terminate it"
