"""The whole story with real processes: request, user data, agent, a stranger's trainer, interruption, the end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from spotheal.fleet.rehearsal.scenarios.job import git
from spotheal.fleet.rehearsal.scenarios.run import Options, rehearse

pytestmark = pytest.mark.processes

# Keeps the contract, imports nothing of ours, and needs no torch.
TRAINER = """
import json, os, random, signal, sys, time

checkpoint = os.path.join(os.environ["SPOTHEAL_CHECKPOINT_DIR"], "state.json")
stop = []
signal.signal(signal.SIGTERM, lambda *_: stop.append(True))


def put(path, value):
    with open(path + ".tmp", "w") as file:
        json.dump(value, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(path + ".tmp", path)


state = {"step": 0, "weight": 0.0}
if os.path.exists(checkpoint):
    with open(checkpoint) as file:
        state = json.load(file)
saved, total = state["step"], 150


def report():
    done = {"step": saved, "path": checkpoint, "time": ""}
    put(os.environ["SPOTHEAL_PROGRESS_FILE"], {"step": state["step"], "steps_total": total, "saved": done})


report()
while state["step"] < total:
    time.sleep(0.05)
    state["step"] += 1
    state["weight"] = 0.9 * state["weight"] + random.Random(state["step"]).random()
    leaves = bool(stop)  # looked at once: a signal that comes while the progress is written is the next step's
    if state["step"] % 20 == 0 or leaves:
        put(checkpoint, state)
        saved = state["step"]
    report()
    if leaves:
        sys.exit(75)
with open(os.path.join(os.environ["SPOTHEAL_RESULTS_DIR"], "weight.npy"), "w") as file:
    file.write(repr(state["weight"]))
"""
FLEET = {
    "TargetCapacity": 1,
    "IamFleetRole": "arn:aws:iam::<ACCOUNT_NUMBER>:role/DL-Training-Spot-Fleet-Role",
    "LaunchSpecifications": [
        {
            "ImageId": "ami-0027dfad6168539c7",
            "InstanceType": "p3.2xlarge",
            "Placement": {"AvailabilityZone": "us-west-2a, us-west-2b"},
            "IamInstanceProfile": {"Arn": "arn:aws:iam::<ACCOUNT_NUMBER>:instance-profile/DL-Training"},
        }
    ],
}
# A webhook that nobody answers at, and a bucket that is somebody's: a rehearsal uses neither.
ELSEWHERE = """
[notify]
webhook = "https://hooks.invalid/services/T0/B0/secret"
sns = "arn:aws:sns:us-west-2:999999999999:mine"
[store]
results = "s3://their-results/weights"
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A stranger's repository with the two files beside the trainer."""
    folder = tmp_path / "checkout"
    folder.mkdir()
    (folder / "train.py").write_text(TRAINER)
    git(folder, "init", "--quiet", "--initial-branch", "main")
    git(folder, "add", "train.py")
    git(folder, "commit", "--quiet", "--message", "A trainer")
    job = '[job]\nname = "strange"\nrepository = "."\ncommand = ["python", "train.py"]\n[volume]\nsize_gib = 1\n'
    (folder / "job.toml").write_text(job)
    (folder / "spot_fleet_config.json").write_text(json.dumps(FLEET))
    return folder


def test_a_strangers_job_is_interrupted_in_one_zone_and_ends_in_another_without_a_step_lost(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    kept = tmp_path / "kept"
    with (checkout / "job.toml").open("a") as file:
        file.write(ELSEWHERE)
    options = Options(checkout / "spot_fleet_config.json", scenario="notice-other-zone", keep=kept, seconds_max=900)
    summary = rehearse(options)
    found = summary.to_document()
    expected = {
        "outcome": "ok",
        "instances": 2,
        "zones": 2,
        "interruptions": 1,
        "zone_moves": 1,
        "steps_total": 150,
        "steps_lost_with_notice": 0,
        "exact": True,
        "volumes_left": 1,
        "webhook": ["interruption", "done"],
    }
    assert {key: found[key] for key in expected} == expected, f"{summary.broken}\n{last_words(kept)}"
    assert found["throttled_calls"] > 0
    assert found["fleet_cancelled_by"] == found["timeline"][-1]["instance"]
    assert (kept / "volume" / "results" / "weight.npy").is_file()
    assert (kept / "results" / "weight.npy").is_file()
    for row in found["timeline"]:
        assert (kept / "instances" / row["instance"] / "logs" / "agent.log").read_text()


def last_words(kept: Path) -> str:
    """What the agents said last."""
    logs = sorted(kept.glob("instances/*/logs/agent.log"))
    return "\n".join(f"{log}\n" + "\n".join(log.read_text().splitlines()[-60:]) for log in logs)


def test_a_rehearsal_that_is_ended_half_way_leaves_no_process_and_no_folder(checkout: Path, tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    program = textwrap.dedent(
        """
        import sys
        from pathlib import Path
        from spotheal.fleet.rehearsal.scenarios.run import Options, rehearse
        rehearse(Options(Path(sys.argv[1]), scenario="quiet"))
        """
    )
    environment = {
        **os.environ,
        "PYTHONPATH": ".ci/import_path",
        "TMPDIR": str(scratch),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }
    argv = [sys.executable, "-c", program, str(checkout / "spot_fleet_config.json")]
    rehearsal = subprocess.Popen(argv, env=environment, stderr=subprocess.DEVNULL)
    try:
        assert eventually(lambda: len(processes_of(scratch)) >= 3, seconds=180)
        rehearsal.send_signal(signal.SIGTERM)
        rehearsal.wait(30)
    finally:
        rehearsal.kill()
        rehearsal.wait()
    assert eventually(lambda: not processes_of(scratch), seconds=5)
    assert list(scratch.iterdir()) == []


def processes_of(folder: Path) -> list[str]:
    """Command lines of processes whose environment names the folder, the rehearsal itself left out."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                environment = Path(f"/proc/{name}/environ").read_bytes()
                if b"SPOTHEAL_ROOT=" + str(folder).encode() in environment:
                    found.append(Path(f"/proc/{name}/cmdline").read_text())
            except OSError:
                continue
    return found


def eventually(fact: Callable[[], object], seconds: float) -> bool:
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        if fact():
            return True  # asked once: a moment later it may not hold any more
        time.sleep(0.1)
    return bool(fact())
