"""Where a run's work lies on this machine. Here: the job's volume, healed, mounted, and let go for the next machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from spotheal.agent.files.folders import Folders
from spotheal.agent.life.boot import Boot, RunOver
from spotheal.agent.life.gpus import Unsuitable
from spotheal.agent.life.preflight import between_interruptions
from spotheal.agent.life.spending import used_gib
from spotheal.agent.processes.account import Account
from spotheal.agent.protocol.clock import Stop, parse_rfc3339
from spotheal.agent.protocol.contract import BETWEEN_INTERRUPTIONS
from spotheal.agent.protocol.ends import End
from spotheal.agent.protocol.errors import Interrupted, SpothealError
from spotheal.agent.protocol.names import LAYOUT, TAG_JOB, TAG_NAME, TAG_RUN, Phase
from spotheal.agent.record.run_state import RunMemory
from spotheal.agent.record.unplaced_results import Unplaced, unplaced_results
from spotheal.agent.record.watchdog import HEALING_SECONDS_MAX
from spotheal.agent.trainer.ranks import Meeting
from spotheal.agent.volume.context import Context
from spotheal.agent.volume.heal import Held, heal, left_behind
from spotheal.agent.volume.observe import checkpoint_names
from spotheal.agent.volume.release import create_base, create_handover, detach, leave
from spotheal.agent.volume.seen import Desired
from spotheal.agent.volume.space import SpaceWatch
from spotheal.agent.volume.warmup import Warmup


class Storage:
    """Folders that are simply there. `saved_step`: the last checkpoint that is known to lie in them.

    `meeting`: with the run's other machines. `held` and `context`: of the job's volume.
    """

    meeting: Meeting | None = None
    context: Context | None = None
    held: Held | None = None
    used_gib: int | None = None

    def __init__(self, boot: Boot, folders: Folders) -> None:
        self._boot, self.folders = boot, folders
        self.saved_step: int | None = None

    @property
    def mount_point(self) -> str:
        """What must be unmounted before this machine goes, or ""."""
        return ""

    def note_predecessor(self, status: Mapping[str, Any]) -> None:
        """`status`: the document of the run, which another machine may have written."""

    def mount(self, account: Account | None, on_round: Callable[[], None], warmup: Warmup) -> None:
        """The folders can be used from now on."""

    def environment(self) -> dict[str, str]:
        """More of the trainer's environment."""
        return {}

    def watch(self, trained: Stop) -> None:
        """The trainer runs until `trained`; `look` comes with each heartbeat."""

    def look(self) -> None: ...

    def measure(self) -> None:
        """The trainer has ended."""

    @property
    def has_results(self) -> bool:
        return True

    def unplaced(self) -> Unplaced:
        """What the script wrote next to its code, and goes when the storage goes."""
        return Unplaced()

    def find(self) -> None:
        """What an earlier life of this agent left mounted."""

    def create_handover(self) -> str:
        return ""

    def create_base(self) -> object: ...

    def detach(self) -> None: ...

    def handed_over(self) -> None:
        """No rank runs here any more. The machine may begin again."""

    def step_aside(self) -> None:
        """Another instance may be writing: touch nothing but the mount."""

    def let_go(self) -> None:
        """Nothing may be in the page cache when the machine ends."""


class VolumeStorage(Storage):
    """The job's volume."""

    context: Context

    def __init__(self, boot: Boot) -> None:
        mount = boot.config.job.volume.mount
        super().__init__(boot, Folders.at(boot.world.paths.root, mount))
        self._path = boot.world.paths.mount_point(mount)
        self._space: SpaceWatch | None = None
        self.context = self._healing()

    @property
    def mount_point(self) -> str:
        return str(self._path) if self.held is not None else ""

    def note_predecessor(self, status: Mapping[str, Any]) -> None:
        self._boot.money.note_predecessor(status)

    # -------------------------------------------------------------------------------------------------------- healing
    def mount(self, account: Account | None, on_round: Callable[[], None], warmup: Warmup) -> None:
        """The job's volume, mounted here under a term of ours."""
        boot, self.context = self._boot, self._healing()
        boot.status.note(phase=Phase.HEALING)
        beats = boot.world.liveness.expect("healing", HEALING_SECONDS_MAX)

        def on_healing_round() -> None:
            beats()
            on_round()

        self.context.on_round = on_healing_round
        try:
            held = heal(self.context)
        except (Interrupted, RunOver, Unsuitable):
            raise
        except SpothealError:
            self._tell_story()
            raise
        finally:
            boot.world.liveness.release("healing")
        if isinstance(held, End):
            self._tell_story()
            raise RunOver(held)
        self.held = held
        if held.moved_from is not None:  # a copy of a snapshot gives each block slowly at its first reading
            warmup.moved_volume(self.folders, held.device)
        boot.world.logs.use_volume(self.folders.logs, boot.here.instance)
        boot.status.note(volume=held.volume)
        self._note_volume(held)
        # Minutes of setup follow: a machine that is killed in them would have told nothing of itself.
        boot.beside("ledger", boot.ledger.flush)
        boot.beside("story", self._tell_story)

    def _note_volume(self, held: Held) -> None:
        disk = self._boot.config.job.volume
        settings = {"size_gib": disk.size_gib, "type": disk.type}
        if held.moved_from is not None and disk.initialization_rate and not self.context.memory.lazy:
            settings["initialization_rate"] = disk.initialization_rate  # AWS charges for each GiB of the snapshot
        fields = {"volume": held.volume, "moved_from": held.moved_from, "device": held.device, **settings}
        self._boot.ledger.note("volume", **fields)

    def _tell_story(self) -> None:
        """What healing saw and did (`fleetctl logs --story`): a reason is one sentence, and this machine goes."""
        story = [{"observed": repr(observed), "action": repr(action)} for observed, action in self.context.memory.story]
        with suppress(SpothealError):
            document = {"desired": repr(self.context.desired), "story": story}
            self._boot.store.put_json(LAYOUT.story(self._boot.here.instance), document)

    def _healing(self) -> Context:
        boot, job = self._boot, self._boot.config.job
        desired = Desired(
            run=boot.config.run,
            instance=boot.here.instance,
            zone=boot.here.zone,
            mountpoint=str(self._path),
            filesystem=job.volume.filesystem,
            size_gib=job.volume.size_gib,
            type=job.volume.type,
            tags={TAG_JOB: job.job.name, TAG_RUN: boot.config.run, TAG_NAME: job.volume.name},
            initialization_rate=job.volume.initialization_rate,
        )
        return Context(
            desired=desired,
            ec2=boot.cloud,
            store=boot.store,
            host=boot.world.host,
            clock=boot.clock,
            stop=boot.stop,
            log=boot.log,
            checkpoint_names=checkpoint_names,
            on_term=boot.on_term,
            beside=lambda work: boot.beside("healing", work),
        )

    # ------------------------------------------------------------------------------------------------------- training
    def environment(self) -> dict[str, str]:
        """How often this run is interrupted. Each term but the first came after a machine that was lost."""
        requested_at = self._boot.config.requested_at
        if self.held is None or not requested_at:
            return {}
        run_seconds = (self._boot.clock.now() - parse_rfc3339(requested_at)).total_seconds()
        saves = RunMemory.read(self.folders, self._boot.config.run, requested_at).final_saves
        return {BETWEEN_INTERRUPTIONS: f"{between_interruptions(run_seconds, self.held.term - 1, saves):.0f}"}

    def watch(self, trained: Stop) -> None:
        self._space = SpaceWatch(self._path, self._boot.clock.now().timestamp(), trained, self._boot.status.note)

    def look(self) -> None:
        if (space := self._space) is not None:
            space.look(self._boot.clock.monotonic(), self._boot.beside)

    def measure(self) -> None:
        self._space = None
        self.used_gib = used_gib(self._path)

    @property
    def has_results(self) -> bool:
        return self.held is not None

    def unplaced(self) -> Unplaced:
        return unplaced_results(self.folders)

    # --------------------------------------------------------------------------------------------- the ways to leave it
    def find(self) -> None:
        """The volume of an earlier life of this agent that was killed before its handover was done; else a successor
        would wait for this machine's end."""
        if self.held is not None or (held := left_behind(self.context)) is None:
            return
        self.held = held
        self._boot.log.info("handing over what an earlier agent held", volume=held.volume, term=held.term)
        with suppress(SpothealError):
            for event in self._boot.ledger.events():
                if event["event"] == "trainer-ended" and event["term"] == held.term:
                    self.saved_step = event.get("saved_step")

    def create_handover(self) -> str:
        return "" if self.held is None else create_handover(self.context, self.held, self.saved_step)

    def create_base(self) -> object:
        return None if self.held is None else create_base(self.context, self.held, self.saved_step)

    def detach(self) -> None:
        if self.held is not None:
            detach(self.context, self.held)

    def step_aside(self) -> None:
        self._boot.world.logs.leave_volume()
        leave(self.context)

    def let_go(self) -> None:
        self._boot.world.logs.leave_volume()
        if self.held is None:
            return
        host = self._boot.world.host
        try:
            if not host.unmount(self.mount_point):
                host.sync(self.mount_point)
        except (SpothealError, OSError) as error:
            self._boot.log.warning("the volume is still mounted", error=str(error))
