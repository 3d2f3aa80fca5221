"""Whole agents of one run on several machines, in one process: in-memory cloud, a folder as EFS, stand-in launchers."""

from __future__ import annotations

import json
import re
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from agent_world import AgentWorld, FolderHost, ToldMetadata
from efs_world import FS

from spotheal.agent.aws.imds import SpotAction
from spotheal.agent.files.paths import Paths
from spotheal.agent.life.run import run
from spotheal.agent.life.world import World
from spotheal.agent.nodes.life import of_node
from spotheal.agent.protocol.errors import ExitCode
from spotheal.agent.record.logs import Logs
from spotheal.fleet.rehearsal.services.client import InMemoryEc2

pytestmark = pytest.mark.processes

# What stands for torchrun: machines meet by files. The host of a rendezvous trains to step 60 once the least are there;
# the others end when it does, with 0, or with 76 where it goes away. At a notice: saved, 75.
LAUNCHER = """
import json, os, pathlib, signal, sys, time

options = dict(word.split("=", 1) for word in sys.argv[1:] if word.startswith("--") and "=" in word)
least = int(options["--nnodes"].split(":")[0])
folder = pathlib.Path(os.environ["SPOTHEAL_CHECKPOINT_DIR"])
here, host = folder / options["--rdzv_id"], "is_host=1" in options["--rdzv_conf"]
here.mkdir(exist_ok=True)
(here / options["--local_addr"]).touch()
pathlib.Path(f"wrote-{options['--local_addr']}.txt").write_text(here.name)
told = []
signal.signal(signal.SIGTERM, lambda *_: told.append(1))
limit = time.monotonic() + 30
while len([one for one in here.iterdir() if one.name[0] == "1"]) < least:
    time.sleep(0.02)
    assert time.monotonic() < limit
step = begin = max([int(one.name[5:]) for one in folder.glob("step-*")], default=0)
print(f"rendezvous {options['--rdzv_id'][-1]} at step {step}", os.environ["GLOO_SOCKET_IFNAME"])
while not (here / "over").exists():
    if (here / "gone").exists():
        sys.exit(76)
    if told or os.path.exists(os.environ["SPOTHEAL_NOTICE_FILE"]):
        (here / "gone").touch()
        sys.exit(75)
    if host:
        step += 1
        (folder / f"step-{step}").touch()
        saved = {"step": step, "path": "", "time": ""}
        progress = pathlib.Path(os.environ["SPOTHEAL_PROGRESS_FILE"])
        # It says where it began: on a busy machine it has saved again before the agent looks.
        said = {"step": step, "steps_total": 60, "saved": saved, "resumed_step": begin}
        progress.with_name("new").write_text(json.dumps(said))
        os.replace(progress.with_name("new"), progress)
        if step >= 60:
            (pathlib.Path(os.environ["SPOTHEAL_RESULTS_DIR"]) / "weights").write_text(str(step))
            (here / "over").touch()
    time.sleep(0.05)
"""


class Run(AgentWorld):
    """`begin(n)` begins a life on the fleet's n-th instance; it ends with its instance."""

    told: dict[str, ToldMetadata]
    codes: dict[str, ExitCode]

    def begin(self, number: int) -> threading.Thread:
        instance = self.launched[number]
        told = ToldMetadata(replace(self.metadata.who, instance=instance, address=f"127.0.0.{number + 1}"))
        self.told[instance] = told
        stop = threading.Event()
        root = self.folder / instance
        world = World(
            clock=self.clock, paths=Paths(root), host=FolderHost(self.disks, self.rulebook, instance),
            metadata=told, logs=Logs(root / "var/log/spotheal"), ec2=InMemoryEc2(self.rulebook, instance), s3=self.s3,
            asked_to_stop=stop,
        )  # fmt: skip

        def power_cut() -> None:
            while self.state(instance) == "running":
                time.sleep(0.05)
            stop.set()

        def live() -> None:
            self.codes[instance] = run(self.config, world, of_node)

        threading.Thread(target=power_cut, daemon=True).start()
        thread = threading.Thread(target=live, daemon=True)
        thread.start()
        return thread

    def state(self, instance: str) -> str:
        found = self.rulebook.instance(instance)
        return "" if found is None else found.state

    def shared(self, *parts: str) -> Path:
        return self.disks.joinpath("nfs", "training", "j", self.config.run, *parts)

    def log(self, number: int) -> str:
        return (self.folder / self.launched[number] / "var/log/spotheal/agent.log").read_text()


def until(holds: Callable[[], bool], seconds_max: float = 40.0) -> None:
    limit = time.monotonic() + seconds_max
    while not holds():
        assert time.monotonic() < limit
        time.sleep(0.05)


def machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **job: Any) -> Run:
    library = tmp_path / "library"
    library.mkdir()
    (library / "stand_in_launcher.py").write_text(LAUNCHER)
    monkeypatch.setattr("spotheal.agent.trainer.ranks.RANKS_MODULE", "stand_in_launcher")
    job = {
        "job": {"nodes": "2:3", **job},
        "store": {"results": f"efs://{FS}/training"},
        "environment": {"PYTHONPATH": str(library)},
    }
    world = Run(tmp_path, "", job, target=4)
    world.told, world.codes = {}, {}
    return world


@pytest.fixture
def several(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    return machines(tmp_path, monkeypatch)


def test_the_machines_of_a_run_end_it_once_and_its_results_are_on_efs(several: Run) -> None:
    threads = [several.begin(number) for number in (0, 1)]
    for thread in threads:
        thread.join(60)
    assert several.status()["phase"] == "done"
    assert sorted(several.codes.values()) == [ExitCode.OK, ExitCode.OK]
    assert [event["event"] for event in several.events()].count("end") == 1
    assert several.fleet_state().startswith("cancelled")
    assert several.shared("weights").read_text() == "60"
    assert not (several.folder / several.launched[0] / "dltraining").exists(), "no volume is mounted"
    assert [re.findall(r"rendezvous (\d) at step [01] (\w+)", several.log(n)) for n in (0, 1)] == [[("1", "lo")]] * 2


def test_a_host_with_a_notice_hands_the_run_to_the_others(several: Run) -> None:
    first = several.begin(0)
    until(lambda: "waiting for the other machines" in several.log(0))
    threads = [several.begin(1), several.begin(2)]
    until(lambda: several.shared("checkpoints", "step-5").exists())
    host = str(several.status()["instance"])
    several.told[host].action = SpotAction("terminate", several.clock.now() + timedelta(seconds=120))
    until(lambda: any(event["event"] == "handover" for event in several.events()))
    several.rulebook.kill(host)
    for thread in [first, *threads]:
        thread.join(60)
    status = several.status()
    assert (status["phase"], status["progress"]["step"]) == ("done", 60)
    assert status["instance"] != host
    starts = [event["resumed_step"] for event in several.events() if event["event"] == "trainer-started"]
    saved = next(event["last_step"] for event in several.events() if event["event"] == "trainer-ended")
    assert starts[0] == 0 and abs(starts[1] - saved) <= 1
    assert [event["event"] for event in several.events()].count("end") == 1
    copy = several.shared("working-copy")
    assert sorted(path.name for path in copy.glob("wrote-*")) == [f"wrote-127.0.0.{n}.txt" for n in (1, 2, 3)]
    logs = "".join(several.log(number) for number in range(3))
    assert logs.count("the working copy is made") == 1, "all share one"
    assert logs.count("the working copy is there already") == 2


def test_what_setup_and_script_write_next_to_the_code_outlives_all_machines_and_the_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    several = machines(tmp_path, monkeypatch, setup=[["sh", "-c", "echo ran >> by-setup.txt; echo 'pass' >> train.py"]])
    threads = [several.begin(number) for number in (0, 1)]
    until(lambda: several.shared("checkpoints", "step-5").exists())
    for number in (0, 1):
        several.rulebook.kill(several.launched[number])
    for thread in threads:
        thread.join(60)
    shutil.rmtree(several.folder / "repository")
    for thread in [several.begin(number) for number in (2, 3)]:
        thread.join(60)
    assert several.status()["phase"] == "done"
    copy = several.shared("working-copy")
    wrote = {f"wrote-127.0.0.{number}.txt" for number in range(1, 5)}
    assert {path.name for path in copy.glob("*.txt")} == {"by-setup.txt", *wrote}
    assert (copy / "by-setup.txt").read_text() == "ran\n", "once for all of them"
    record = json.loads(several.shared(".spotheal", "working-copy.json").read_text())
    assert list(record["setup"]) == ["train.py"], "at another commit it becomes that commit's"
