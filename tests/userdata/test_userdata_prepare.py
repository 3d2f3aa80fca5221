"""What the instance of `volume prepare` and `volume upload` does before its work: the filesystem, the aws program."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from spotheal.userdata import prepare

HALF, WHOLE = b"half a filesystem", b"XFSB and all the rest"


class PowerCut(Exception):
    """The machine is gone."""


@dataclass
class Machine:
    """A volume and the programs that see it. `cut`: the machine dies in mkfs. `mark`: what the store was told last."""

    folder: Path
    cut: bool = False
    mark: str = ""
    made: list[tuple[str, ...]] = field(default_factory=list)

    @property
    def device(self) -> Path:
        return self.folder / "device"

    def run(self, *argv: str, seconds_max: float | None = None) -> subprocess.CompletedProcess[str]:
        code, out, said = 0, "", ""
        content = self.device.read_bytes()
        if argv[0] == "lsblk":
            out = json.dumps({"blockdevices": [{"name": "sdf", "path": str(self.device), "serial": "vol1"}]})
        elif argv[0] == "blkid":
            out, code = ("TYPE=xfs", 0) if content in (HALF, WHOLE) else ("", 2)
        elif argv[0] == "mount":
            code, said = (0, "") if content == WHOLE else (32, "wrong fs type, bad superblock")
        elif argv[0].startswith("mkfs."):
            self.made.append(argv)
            if content.strip(b"\0") and "-f" not in argv:
                code, said = 1, "appears to contain an existing filesystem"
            else:
                self.device.write_bytes(HALF if self.cut else WHOLE)
                if self.cut:
                    raise PowerCut
        return subprocess.CompletedProcess(argv, code, out, said)

    def put(self, url: str, body: bytes) -> bool:
        self.mark = json.loads(body)["mkfs"]
        return url == "signed"

    def mounted(self, **more: Any) -> str:
        config = {"volume": "vol-1", "mount": str(self.folder / "mnt"), "filesystem": "xfs", "format": True,
                  "begun": self.mark == "begun", "urls": {"mkfs": "signed"}, **more}  # fmt: skip
        return prepare.mounted(config)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine(tmp_path)
    made.device.write_bytes(bytes(4096))
    monkeypatch.setattr(prepare, "run", made.run)
    monkeypatch.setattr(prepare, "put", made.put)
    return made


def test_a_machine_that_dies_in_the_first_mkfs_leaves_a_volume_that_the_next_one_formats(machine: Machine) -> None:
    """blkid names a type, the kernel mounts nothing, and the volume was lost to every later command (finding D1)."""
    machine.cut = True
    with pytest.raises(PowerCut):
        machine.mounted()
    machine.cut = False
    assert machine.mounted().endswith("mnt")
    assert (machine.device.read_bytes(), machine.mark) == (WHOLE, "ended")


def test_what_mounts_is_never_formatted_though_its_mkfs_is_not_known_to_have_ended(machine: Machine) -> None:
    machine.device.write_bytes(WHOLE)
    machine.mark = "begun"
    assert machine.mounted().endswith("mnt")
    assert (machine.made, machine.mark) == ([], "ended")


@pytest.mark.parametrize(
    ("content", "more", "says"),
    [
        (HALF, {}, "bad superblock"),
        (HALF, {"format": False, "begun": True}, "bad superblock"),
        (b"data of another" * 9, {}, "is not blank"),
        (bytes(4096), {"format": False}, "holds no filesystem"),
    ],
)
def test_what_no_mkfs_of_ours_left_is_never_formatted(
    machine: Machine, content: bytes, more: dict[str, Any], says: str
) -> None:
    machine.device.write_bytes(content)
    with pytest.raises(prepare.Failed, match=says):
        machine.mounted(**more)
    assert (machine.made, machine.device.read_bytes()) == ([], content)


def test_without_a_store_that_knows_of_it_nothing_is_formatted(machine: Machine) -> None:
    with pytest.raises(prepare.Failed, match="the store could not be told"):
        machine.mounted(urls={"mkfs": "lost"})
    assert machine.made == []


# --------------------------------------------------------------------------------------------------------- the aws CLI
class Image:
    """The programs of an image, small files in its one folder on PATH."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bin = folder / "bin"
        self.bin.mkdir()
        monkeypatch.setenv("PATH", f"{self.bin}:/bin")

    def has(self, name: str, script: str) -> None:
        (self.bin / name).write_text(f"#!/bin/sh\n{script}\n")
        (self.bin / name).chmod(0o755)

    def prepare(self, folder: Path, *command: str) -> int:
        (folder / "var/log/spotheal").mkdir(parents=True)
        (folder / "datasets").mkdir()
        story = prepare.Story({"urls": {}})
        return prepare.command({"command": command, "region": "us-west-2", "seconds_max": 20}, str(folder), story)


@pytest.fixture
def image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Image:
    monkeypatch.setattr(prepare, "ROOT", str(tmp_path))
    return Image(tmp_path, monkeypatch)


@pytest.mark.parametrize("packages", ["snap", "apt-get"])
def test_the_quick_starts_aws_s3_cp_runs_on_an_image_without_aws(image: Image, tmp_path: Path, packages: str) -> None:
    """It ended in exit code 127: Ubuntu's own image, which a job without GPUs gets, has no `aws` (finding C10)."""
    aws = image.bin / "aws"
    program = f"printf '#!/bin/sh\\necho $* > copied\\n' > {aws}; chmod +x {aws}"
    image.has(packages, f'echo "$@" >> {tmp_path}/asked\ncase $* in install*) {program};; esac')
    assert image.prepare(tmp_path, "aws", "s3", "cp", "s3://b/data", ".") == 0
    assert (tmp_path / "datasets" / "copied").read_text() == "s3 cp s3://b/data .\n"
    asked = (tmp_path / "asked").read_text().splitlines()
    assert asked == {
        "snap": ["wait system seed.loaded", "install aws-cli --classic"],
        "apt-get": ["update -q", "install -q -y awscli"],
    }[packages]


def test_an_image_with_aws_installs_nothing(image: Image, tmp_path: Path) -> None:
    image.has("snap", "exit 1")
    image.has("aws", "exit 0")
    assert image.prepare(tmp_path, "aws", "s3", "ls") == 0


def test_where_aws_cannot_be_installed_one_line_says_why_and_what_to_write(image: Image, tmp_path: Path) -> None:
    image.has("snap", "echo 'error: cannot reach the store' >&2; exit 1")
    with pytest.raises(prepare.Failed, match=r"no program `aws`.*cannot reach the store.*--image AMI"):
        image.prepare(tmp_path, "aws", "s3", "ls")
