"""Runs the trainer, attempt by attempt, until it is done, the run has failed, or the machine must go.

Everything a trainer must keep and may rely on is in `contract`; what the end of an attempt means is decided in
`attempts`; processes and signals are `process_group`'s.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from spotheal.agent.files import untrusted_folders
from spotheal.agent.files.folders import Folders
from spotheal.agent.processes.account import Account
from spotheal.agent.processes.group import ForeignProgram, end_leftovers
from spotheal.agent.protocol import contract
from spotheal.agent.protocol.clock import Clock
from spotheal.agent.protocol.contract import Notice, Progress
from spotheal.agent.protocol.ends import Kind, TrainerEnd
from spotheal.agent.protocol.errors import SetupFailed, SpothealError
from spotheal.agent.protocol.instance_config import InstanceConfig
from spotheal.agent.protocol.job_values import seconds
from spotheal.agent.protocol.notice_seconds import RECORD_SECONDS
from spotheal.agent.trainer import idle_gpus
from spotheal.agent.trainer.attempt_watch import Request, Timing, Watch
from spotheal.agent.trainer.attempts import AttemptEnd, Done, GiveUp, StartAgain, Stopped, Tally, decide
from spotheal.agent.trainer.environment import expand, trainer_environment
from spotheal.agent.trainer.hang_detector import Silence
from spotheal.agent.trainer.hooks import Hooks, Teller
from spotheal.agent.trainer.progress_files import (
    Mark,
    describe,
    drop_metrics_after,
    grown_elsewhere,
    newest,
    progress_of,
)
from spotheal.agent.trainer.ranks import Meeting, Rendezvous, World, gpu_count, last_words, visible, world_of
from spotheal.agent.trainer.saved_files import SavedFiles
from spotheal.agent.trainer.set_aside import SaveShelf, SetAside

__all__ = ["Folders", "Hooks", "Supervisor", "Timing"]

_TAIL_LINES = 20
_NAMED_MAX = 5
_LIMIT_SECONDS = 120.0
_PROMPT_SECONDS = 30.0  # what the trainer is told where a person waits for its last checkpoint


class Supervisor:
    """One run of the trainer on this machine. `notify`, `rebalance`, `stop`, `stop_for_limit` from any thread.

    `first_attempt`, `best_step`, `failures` and `saved_step` carry on from earlier instances. Trainer's user and
    interpreter are the caller's (`account.trainer_account`, `interpreter.find_interpreter`). `meeting`: of a run on
    several machines, asked before each attempt where they meet; what they all see only the one that leads writes.
    """

    def __init__(
        self,
        config: InstanceConfig,
        folders: Folders,
        clock: Clock,
        log: Any,
        *,
        interpreter: Path,
        account: Account | None = None,
        given: Mapping[str, str] | None = None,
        first_attempt: int = 1,
        best_step: int | None = None,
        saved_step: int | None = None,
        failures: int = 0,
        hooks: Hooks | None = None,
        timing: Timing | None = None,
        meeting: Meeting | None = None,
    ) -> None:
        self._meeting = meeting
        self._rendezvous: Rendezvous | None = None
        self._config, self._folders, self._clock, self.log = config, folders, clock, log
        self._interpreter, self._account = interpreter, account
        self._given = dict(given or {})  # beside the contract: secrets among it
        self._hooks, self._timing = hooks or Hooks(), timing or Timing()
        self._teller = Teller(self._hooks, log)
        self._silent_seconds = float(seconds(config.job.limits.silent))
        self._silence = Silence(clock, 0.0, tuple)
        self.attempt = first_attempt - 1
        self.best_step = best_step
        self.progress: Progress | None = None
        self._saved_step = saved_step
        self._tally = Tally(failures=failures, failures_at_all=failures)
        self._reports = False  # whether a progress file was ever written in this run
        self._began = 0.0
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._warned = False
        self._aside = SaveShelf(folders)
        self._has_recalled = False  # what an earlier agent set aside
        self._tried_without = False  # what is torn was set aside once since the last step gained
        self._lock = threading.Lock()
        self._request: Request | None = None
        self._rebalance = False
        self._requested = threading.Event()
        self._saved_files = SavedFiles(folders, self._requested)  # a walk must not delay a handover
        self.wake = threading.Event()

    # ---------------------------------------------------------------------------------------- told from other threads
    def notify(self, notice: Notice, *, until: float | None = None) -> None:
        """The machine goes away: the trainer must have ended by the notice's deadline (`until`: monotonic, the same
        moment where the caller has measured it already)."""
        if until is None:
            until = self._clock.monotonic() + (notice.deadline - self._clock.now()).total_seconds()
        self._ask(Request("interrupted", notice, until, f"notice: {notice.action}"))

    def stop(self, seconds: float) -> None:
        """The machine is shut down without a notice: the same, with the time that is left."""
        notice = Notice("shutdown", self._clock.now() + timedelta(seconds=seconds))
        self._ask(Request("interrupted", notice, self._clock.monotonic() + seconds, "shutdown"))

    def stop_for_limit(self, reason: str = "a limit of the run is reached", seconds: float = _LIMIT_SECONDS) -> None:
        """Save and end: the run has used up what it may."""
        notice = Notice("shutdown", self._clock.now() + timedelta(seconds=seconds))
        self._ask(Request("limit", notice, self._clock.monotonic() + seconds, reason))

    def cancel(self, reason: str, seconds: float) -> None:
        """An operator ends the run: save and exit soon; killed only after `seconds`, which may be more.

        Nothing where the machine goes away already: that saves too, and has less time.
        """
        notice = Notice("shutdown", self._clock.now() + timedelta(seconds=min(_PROMPT_SECONDS, seconds)))
        if self._request is None:
            self._ask(Request("cancelled", notice, self._clock.monotonic() + seconds, reason))

    def rebalance(self) -> None:
        """The machine may go away: the trainer is told to save now and goes on."""
        self._rebalance = True
        self.wake.set()

    def _ask(self, request: Request) -> None:
        with self._lock:
            if self._request is not None and self._request.kind in ("limit", "cancelled"):
                request = replace(self._request, notice=request.notice, until=min(self._request.until, request.until))
            self._request = request
        self._requested.set()
        self.wake.set()

    # ------------------------------------------------------------------------------------------------------- the run
    def run(self) -> TrainerEnd:
        """Raises SetupFailed where the command cannot be started at all."""
        self._folders.make(self._account)
        leftovers = end_leftovers(contract.NOTICE_FILE, str(self._folders.notice_file), self._clock)
        if leftovers:
            self.log.warning("ended what an earlier agent had left running", processes=leftovers)
        self._drop(self._folders.rebalance_file)
        if self.attempt == 0 and self._leads:
            self._drop(self._folders.progress_file)
        try:
            return self._until_over()
        finally:
            if not self._teller.wait(RECORD_SECONDS):
                self.log.warning("what the trainer did is still being recorded")

    def _until_over(self) -> TrainerEnd:
        while True:
            if self._request is not None:
                return self._ended(self._request.kind, None, self._request.reason)
            if self._meeting is not None:
                meeting_end = self._meeting.meet(self._requested)
                if meeting_end is None:
                    continue
                self._rendezvous = meeting_end
            self._put_back_of_an_earlier_agent()
            end = self._attempt()
            verdict = decide(end, self._tally, self._config.job.limits.failures)
            match verdict:
                case Stopped():
                    self._put_back(end)
                    request = self._request
                    kind: Kind = request.kind if request else "interrupted"
                    reason = request.reason if request else "saved and stopped"
                    return self._report(self._ended(kind, end, f"{reason}; the trainer {end}"))
                case Done():
                    return self._report(self._ended("done", end, "the trainer exited with 0"))
                case GiveUp(tally, reason):
                    self._tally = tally
                    self._put_back(end)
                    return self._report(self._ended("failed", end, reason + self._suspect(tally)))
                case StartAgain(seconds, tally, reason):
                    self._tally = tally
                    self._report(self._ended("failed", end, reason), restarting=True)
                    self.log.warning("starting the trainer again", why=reason, failures=tally.failures, after=seconds)
                    self._put_back(end)
                    self._set_aside_torn(tally)
                    self._clock.sleep(seconds, until=self._requested)

    def _attempt(self) -> AttemptEnd:
        """Start the trainer, watch it to its end, and leave no process of it."""
        self.attempt += 1
        self._hooks.on_attempt(self.attempt)
        before = self._before_start()
        self._began = self._clock.now().timestamp()
        self._tail.clear()
        self._silence = Silence(self._clock, self._silent_seconds, self._saved_files.mark)
        progress = progress_of(self._folders.progress_file)
        world, program = self._start()
        watch = Watch(
            self,
            program,
            self._folders,
            self._clock,
            self._timing,
            self._silence,
            written=progress[1] if progress else 0,
        )
        over = threading.Event()
        if world.gpus > 1:
            job = self._config.job.job
            expected = min(job.gpus or world.gpus, world.gpus) if job.nproc_per_node == 1 else world.gpus
            idle_gpus.start(expected, lambda: watch.gained, self._on_idle_gpus, self._clock, over)
        try:
            watch.until_end()
        finally:
            over.set()
            orphans = program.end_all(self._clock)
            if orphans:
                self.log.error("processes of the trainer cannot be killed", processes=orphans)
                self.event("unkillable", processes=orphans)
        watch.look()
        watch.tell_started()
        if program.exit_code and not watch.asked:
            for line in last_words(world.logs):
                self._line(line)
        self.warn_of_empty_checkpoints()
        gained = watch.gained if self._reports else bool(self._saved_files.mark() - before)
        was_asked = watch.asked
        if program.exit_code == contract.EXIT_SAVED_AND_STOPPED and not was_asked:
            was_asked = self._clock.sleep(self._timing.unasked_wait_seconds, until=self._requested)
        hung = self._config.job.limits.silent if watch.hung else ""
        return AttemptEnd(program.exit_code, program.signal, was_asked, gained, self._reports, hung)

    def _drop(self, path: Path) -> None:
        """A `setup` or a trainer may have made a folder of that name; one that cannot be removed ends no agent."""
        try:
            untrusted_folders.remove(path)
        except (OSError, SpothealError) as error:
            self.log.warning("what an earlier attempt left cannot be removed", path=str(path), error=str(error))

    def _before_start(self) -> Mark:
        self._drop(self._folders.notice_file)
        # Only what this very process saw saved is certain: what an earlier machine was known to have saved may lie
        # before the checkpoint that its trainer left, and lines up to that one must stay.
        saved = self.progress.saved if self.progress else None
        if saved is not None and self._leads:
            dropped = drop_metrics_after(self._folders.metrics_file, saved.step)
            if dropped:
                self.log.info("dropped metrics of steps that are done again", lines=dropped, after=saved.step)
        return self._saved_files.mark()

    def _on_idle_gpus(self, text: str) -> None:
        self.event("gpus-idle", what=text)
        job = self._config.job.job
        if job.nproc_per_node == 1 and job.gpus < 2:  # nobody has said that it takes more than one
            self.log.warning(text)
            return
        notice = Notice("shutdown", self._clock.now() + timedelta(seconds=_LIMIT_SECONDS))
        self._ask(Request("failed", notice, self._clock.monotonic() + _LIMIT_SECONDS, text))

    def _world(self, argv: list[str], directory: Path, environment: Mapping[str, str]) -> World:
        """The ranks of this attempt, said in the log. SetupFailed where they are not what was asked for."""
        world = world_of(
            self._config.job.job.nproc_per_node,
            argv,
            gpus=visible(gpu_count(), environment),
            directory=directory,
            interpreter=self._interpreter,
            logs=(self._folders.ranks or self._folders.logs / "ranks") / f"attempt-{self.attempt}",
            rendezvous=() if self._rendezvous is None else self._rendezvous.options(),
        )
        if world.says:
            self.log.info(world.says, others=str(world.logs) if world.logs else None)
        if world.warns:
            self.log.warning(world.warns)
        return world

    def _start(self) -> tuple[World, ForeignProgram]:
        job = self._config.job.job
        resumes = self.attempt > 1 and (self._saved_step is not None or self._saved_files.anything())
        command = job.resume_command if resumes and job.resume_command else job.command
        environment = trainer_environment(
            self._config, self._folders, self._interpreter, os.environ, self._account, self.attempt, self._given
        )
        argv = expand(command, environment, self._interpreter)
        directory = self._folders.clone / job.directory
        if not os.path.isdir(directory):  # False for any OSError: a link to a name that is too long ended the agent
            raise SetupFailed(
                f"the repository has no folder {job.directory!r}", next_step="correct `directory` in job.toml"
            )
        world = self._world(argv, directory, environment)
        self.log.info("starting the trainer", attempt=self.attempt, command=argv, directory=str(directory))
        try:
            return world, ForeignProgram(
                world.argv,
                directory=directory,
                environment=environment,
                account=self._account,
                on_line=self._line,
                on_end=self.wake.set,
                mark=contract.NOTICE_FILE,
            )
        except OSError as error:
            raise SetupFailed(
                f"the trainer could not be started: {argv[0]}: {error.strerror}",
                next_step="correct `command` in job.toml; PATH on the instance is " + environment["PATH"],
            ) from error

    @property
    def _leads(self) -> bool:
        return self._meeting is None or self._meeting.leads

    def _line(self, line: str) -> None:
        self._silence.heard()
        self._tail.append(line)
        self._hooks.on_line(line)

    # ------------------------------------------------------------------------------------------------------ the ends
    def _ended(self, kind: Kind, end: AttemptEnd | None, reason: str) -> TrainerEnd:
        return TrainerEnd(
            kind=kind,
            exit_code=end.exit_code if end else None,
            signal=end.signal if end else None,
            last_step=self.progress.step if self.progress else None,
            saved_step=self._saved_step,
            reason=reason,
            attempts=self.attempt,
            failures=self._tally.failures,
            tail=tuple(self._tail),
        )

    def _report(self, ended: TrainerEnd, *, restarting: bool = False) -> TrainerEnd:
        self.event(
            "trainer-ended",
            attempt=self.attempt,
            kind="restarting" if restarting else ended.kind,
            exit_code=ended.exit_code,
            signal=ended.signal,
            last_step=ended.last_step,
            saved_step=ended.saved_step,
            reason=ended.reason,
        )
        return ended

    # ----------------------------------------------------------------------------------------------- trainer's files
    def _suspect(self, tally: Tally) -> str:
        """Which saves may be the cause of restarts without a step: the torn ones, else the newest file."""
        if tally.failures < 2:
            return ""
        if self._aside.saves:
            return "; " + ", ".join(f"{aside.save} was set aside as {aside.moved.name}" for aside in self._aside.saves)
        torn = self._saved_files.torn()
        if torn:
            rest = f" and {len(torn) - _NAMED_MAX} more" if len(torn) > _NAMED_MAX else ""
            return f"; incomplete: {', '.join(map(str, torn[:_NAMED_MAX]))}{rest}"
        newest_files = [name for name in map(newest, self._saved_files.kept) if name]
        last = max(newest_files, key=lambda seen: seen.changed, default=None)
        return f"; the newest file that it has saved is {describe(last)}" if last else ""

    def _set_aside_torn(self, tally: Tally) -> None:
        """Before the last start that `limits.failures` leaves: a torn save fails each start in the same way."""
        last = tally.failures == max(1, min(2, self._config.job.limits.failures - 1))
        if not last or self._tried_without or not self._leads:
            return
        torn = self._saved_files.torn()
        if torn and not self._config.job.job.set_aside_broken:
            names = [str(save) for save in torn]
            self.log.warning("incomplete saves may be why no step is gained (set_aside_broken = false)", saves=names)
            return
        for save in torn:
            try:
                aside = self._aside.add(save, self._clock.now())
            except OSError as error:
                self.log.warning("an incomplete save could not be set aside", save=str(save), error=str(error))
                continue
            self.log.warning("set an incomplete save aside", save=str(save), now=str(aside.moved))
            self.event("set-aside", file=save.name, now=str(aside.moved))
        self._tried_without = True

    def _put_back(self, end: AttemptEnd) -> None:
        """Unless the next start gains a step, what was set aside was not the cause: it lies where it lay again."""
        if end.gained:  # another save may be torn one day
            self._aside.forget()
            self._tried_without = False
        self._aside.put_back(self._on_put_back)

    def _on_put_back(self, aside: SetAside) -> None:
        self.log.warning("put a save back: the trainer gained no step without it", save=str(aside.save))
        self.event("put-back", file=aside.save.name)

    def _put_back_of_an_earlier_agent(self) -> None:
        """An agent that was killed could not: until its trainer gained a step, the promise stands."""
        if not self._leads or self._has_recalled:
            return
        self._has_recalled = True
        reported = self.best_step is not None  # then its first step has ended the record
        self._aside.recall(lambda moment: not reported and self._saved_files.newer_than(moment))
        self._aside.put_back(self._on_put_back)

    def warn_of_empty_checkpoints(self) -> None:
        """Name the files that grew next to the code while the checkpoint folder stayed empty."""
        if self._warned or any(newest(folder) for folder in self._saved_files.kept):
            return
        grown = grown_elsewhere(self._folders.clone, self._began)
        if grown:
            self._warned = True
            files = [f"{file.shown} ({file.size} bytes)" for file in grown]
            if self._folders.has_working_copy:
                message = "the trainer writes next to its code: that outlives the machine, and the next one finds it"
                self.log.info(message, files=files, folder=str(self._folders.clone))
                return
            self.log.warning(
                "nothing is written to the checkpoint folder, but these files grew in the clone and will be lost with"
                " the machine: write to ${SPOTHEAL_CHECKPOINT_DIR}, or list their folders under `keep` in job.toml",
                files=files,
            )
            self.event("checkpoints-elsewhere", files=files)

    # ---------------------------------------------------------------------------------------- what a watch works with
    def event(self, name: str, **fields: Any) -> None:
        self._teller.event(name, **fields)

    def pending(self) -> Request | None:
        with self._lock:
            return self._request

    def take_rebalance(self) -> bool:
        is_asked, self._rebalance = self._rebalance, False
        return is_asked

    def note(self, progress: Progress) -> bool:
        """A new progress document; whether it is a step beyond the best so far."""
        self._reports = True
        before, self.progress = self.progress, progress
        if self._rendezvous is not None and before is not None and progress.step < before.step:
            # The launcher has started the ranks again, without or with another machine, in the same attempt.
            resumed = progress.saved.step if progress.saved else progress.step
            self.event(
                "trainer-ended", attempt=self.attempt, kind="restarting", exit_code=None, signal=None,
                last_step=before.step, saved_step=resumed, reason="another world of machines",
            )  # fmt: skip
            self.event("trainer-started", attempt=self.attempt, resumed_step=resumed)
        if progress.saved is not None:
            self._saved_step = progress.saved.step
        gained = progress.step > (self.best_step or 0)
        if gained and self._aside.saves:
            self._aside.forget_record()
        self.best_step = max(progress.step, self.best_step or 0)
        self._teller.progress(progress)
        return gained
