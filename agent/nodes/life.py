"""One life of the agent on a machine of a run that has several: no volume, what is shared lies on EFS.

The machines are alike. The one that holds the rendezvous' term speaks for the run: status, ledger, limits, the end.
Of the stages of `life` those are other that a volume is in.
"""

from __future__ import annotations

import array
import fcntl
import os
import socket
import struct
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from spotheal.agent.files.folders import PRIVATE, Folders
from spotheal.agent.interruption.handover import HandoverResult
from spotheal.agent.life.boot import Boot, RunOver
from spotheal.agent.life.finish import Finishing
from spotheal.agent.life.stages import Life
from spotheal.agent.life.trainer_stage import Instruments
from spotheal.agent.machine.efs import MOUNT_POINT, Efs
from spotheal.agent.nodes.meeting import Meeting
from spotheal.agent.nodes.shared_copy import SharedCopy
from spotheal.agent.protocol.clock import Stop
from spotheal.agent.protocol.ends import End
from spotheal.agent.protocol.errors import Retryable, SetupFailed
from spotheal.agent.protocol.job_values import seconds
from spotheal.agent.protocol.names import EfsUrl, Phase
from spotheal.agent.record.results import LiveMetrics
from spotheal.agent.record.unplaced_results import Unplaced
from spotheal.agent.repository.working_copy import Fetched
from spotheal.agent.trainer.interpreter import Interpreter
from spotheal.agent.trainer.setup import made_before

END_SECONDS_MAX = 25 * 60.0  # in which another records the end that it has claimed: results may take 15 minutes
FOLLOW_SECONDS = 120.0  # in which a machine goes with the fleet that another has cancelled
EFS_SECONDS_MAX = 10 * 60.0
_SIOCGIFADDR = 0x8915
_NETWORK = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


class NodeLife(Life):
    """`meeting` is what its trainer's launcher asks where to meet the others."""

    def __init__(self, boot: Boot) -> None:
        config = boot.config
        place = config.job.store.results_place
        if not isinstance(place, EfsUrl):  # refused by `config`, which a newer job.json may not have gone through
            raise SetupFailed("a run on several machines keeps its checkpoints on EFS", next_step=_EFS)
        self._shared = place
        super().__init__(boot)
        self._meeting = Meeting(
            self._store, self._cloud, self._clock, self._log, self._here,
            run=config.run, machines=config.job.machines, wait_seconds=seconds(config.job.job.nodes_wait),
            on_term=self._on_term,
        )  # fmt: skip
        scratch = self._folders.run_dir / "metrics.jsonl"
        self._live: _SpokenFor = _SpokenFor(self._results, self._folders, scratch, self._clock, self._log)
        self._live.meeting = self._meeting
        self._money.budget.others = self._meeting.known
        self._copy = SharedCopy(
            config, self._folders, self._store, self._cloud, self._meeting, self._here.instance, self._clock,
            self._stop, self._log,
        )  # fmt: skip
        self._ended_by_us = False

    def __enter__(self) -> NodeLife:
        super().__enter__()
        self._beside("meeting", lambda: self._meeting.beat_until(self._closing))
        return self

    def _lay_out(self) -> Folders:
        """datasets are the job's, all else the run's."""
        root, name = self._world.paths.root, self._config.job.job.name
        of_job = root / MOUNT_POINT / self._shared.folder / name
        run = of_job / self._config.run
        own = Folders.at(root, self._config.job.volume.mount)
        logs = run / "logs"
        return replace(
            own,
            clone=run / "working-copy",
            datasets=of_job / "datasets",
            checkpoints=run / "checkpoints",
            results=run / "working" / "results",
            logs=logs,
            keep=run / "keep",
            environments=run / PRIVATE,
            progress=run / "progress" / "progress.json",
            ranks=logs / "ranks" / self._here.instance,
        )

    # ------------------------------------------------------------------------------------------------------- the stages
    def look_back(self) -> None:
        if not self._here.address:
            raise SetupFailed("the instance's identity document names no private IPv4 address: the machines of a run"
                              " cannot meet", next_step="launch into a subnet with IPv4 addresses")  # fmt: skip
        super().look_back()

    def _note_predecessor(self, status: Mapping[str, Any]) -> None:
        """Whoever wrote the status may well live: each machine's own document says when it was heard of."""

    def heal_volume(self) -> None:
        """EFS, mounted, with the run's folders on it."""
        self._status.note(phase=Phase.HEALING)
        self._meeting.note("mounting EFS")
        beats = self._liveness.expect("healing", EFS_SECONDS_MAX)
        try:
            self._make_folders(self._efs(self._shared))
        finally:
            self._liveness.release("healing")
        beats()

    def _make_folders(self, efs: Efs) -> None:
        account, name, run = self._confinement.account, self._config.job.job.name, self._config.run
        try:
            if account is not None:
                self._meeting.note("mounting EFS", uid=account.uid)
                self._meeting.check_user(account.uid)
            efs.folder(name, "datasets", account=account)
            efs.folder(name, run, mode=0o755)  # root's: else a trainer puts links where its folders and our memory are
            for below in ("checkpoints", "keep", "logs", "progress", "working/results"):
                efs.folder(name, run, *below.split("/"), account=account)
            efs.folder(name, run, PRIVATE)
        except Retryable as error:  # tried for minutes: a run that cannot save must not go on, nor cost
            raise RunOver(End(Phase.SETUP_FAILED, str(error))) from error

    def _put_code(self, clone: Future[Fetched]) -> tuple[str, Interpreter]:
        """The working copy that all machines share: made by one, and no other touches it while some train in it."""
        with self._copy.turn(lambda: self._copy.made() is not None, "the working copy") as ours:
            if ours:
                self._copy.wait_until_unused()
                copy, interpreter = super()._put_code(clone)
                self._copy.publish(copy)
                return copy, interpreter
        self._end_fetch(clone)
        self._log.info("the working copy is there already", path=str(self._folders.clone))
        return self._copy.made() or "", self._find_interpreter()

    def _set_up(self, interpreter: Interpreter, copy: str) -> Interpreter:
        """Once for all machines: what the commands write into the copy and into the environment is on EFS."""
        where = self._confinement.surroundings()

        def is_made() -> bool:
            return made_before(self._config, self._folders, interpreter, where, copy=copy) is not None

        with self._copy.turn(is_made, "the environment of `setup`"):
            return super()._set_up(interpreter, copy)

    def _unplaced(self) -> Unplaced:
        """What the script wrote next to its code is on EFS already, and stays there."""
        return Unplaced()

    def _instruments(self) -> Instruments:
        self._meeting.note("preparing")
        return Instruments(
            self._clock, self._world.logs, self._ledger, self._status, self._launch, None, None,
            self._money.limits(self._tell), self._money.curves(self._folders.metrics_file), self._meeting,
        )  # fmt: skip

    def _surroundings(self) -> dict[str, str]:
        """By which network device ranks meet: gloo takes what the host's name resolves to, on Debian the loopback."""
        device = device_of(self._here.address)
        said = self._config.job.environment
        return {name: device for name in _NETWORK if device and name not in said}

    def _on_term(self, term: int) -> None:
        super()._on_term(term)
        self._status.update(phase=Phase.TRAINING, reason="")

    # ------------------------------------------------------------------------------------------------ the ways to leave
    def _step_aside(self) -> None:
        self._confinement.end_processes()
        self._meeting.leave()

    def _left_behind(self) -> None:
        """These machines have no volume."""

    def _report_handover(self, result: HandoverResult) -> None:
        self._meeting.leave()
        super()._report_handover(result)

    @property
    def _has_results_here(self) -> bool:
        return self._ended_by_us

    def finish(self, end: End) -> None:
        """One of the machines records the end and cancels the fleet."""
        if not self._over:
            known = self._meeting.recorded_end(END_SECONDS_MAX, self._stop)
            self._over = known is not None
            end = known or end
        self._ended_by_us = not self._over
        super().finish(end)

    def _leave_machine(self, work: Finishing, end: End) -> None:
        self._meeting.leave()
        if not self._ended_by_us and self._clock.sleep(FOLLOW_SECONDS, until=self._world.asked_to_stop):
            return
        super()._leave_machine(work, end)


class _SpokenFor(LiveMetrics):
    """The metrics at their place, put there by the machine that leads."""

    meeting: Meeting | None = None

    def _once(self, stop: Stop) -> str:
        return super()._once(stop) if self.meeting is not None and self.meeting.leads else ""


def device_of(address: str) -> str:
    """The network device that has the IPv4 address, "" where none is known to (not on Linux)."""
    if address.startswith("127."):
        return "lo"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = array.array("B", struct.pack("256s", os.fsencode(name)[:15]))
            try:
                fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request, True)
            except OSError:
                continue
            if socket.inet_ntoa(request.tobytes()[20:24]) == address:
                return name
    return ""


_EFS = 'fleetctl results create-efs makes a file system; [store] results = "efs://fs-…/folder" in job.toml'
