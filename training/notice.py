"""Hear that this machine is going away: from IMDS, from the agent's notice file, from SIGTERM; and that it may.

    with Watcher.from_environment() as watcher:
        ...
        if watcher.notice: save, exit 75
        if watcher.take_save_request(): save, go on

Sources: EC2 User Guide, "Spot Instance interruption notices" (two minutes, best effort) and "EC2 instance rebalance
recommendations" (may never come true); docs/contract.md.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING

from spotheal.agent.protocol import contract
from spotheal.agent.protocol.clock import Clock, SystemClock
from spotheal.agent.protocol.contract import Notice
from spotheal.agent.protocol.notice_seconds import MARGIN_SECONDS, POLL_SECONDS, STALE_SECONDS

if TYPE_CHECKING:
    from spotheal.agent.aws.imds import Metadata

SIGTERM_SECONDS = 25.0  # a SIGTERM names no deadline; torchrun and init systems grant 30 s

log = logging.getLogger("spotheal.training")


class Watcher:
    """Polls every 2 s in a thread. `notice` is None until there is one, and then stays.

    `metadata` None asks no IMDS; the files may be None as well. Answers that make no sense are no notice.
    """

    def __init__(
        self,
        *,
        metadata: Metadata | None = None,
        notice_file: Path | None = None,
        rebalance_file: Path | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._metadata, self._notice_file, self._rebalance_file = metadata, notice_file, rebalance_file
        self._clock = clock or SystemClock()
        self._heard: Notice | None = None
        self._terminated = False  # set by the signal handler, which may do nothing else
        self._save_request = False
        self._rebalanced = rebalance_file is not None and rebalance_file.exists()  # an old one was obeyed already
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._before: dict[int, object] = {}

    @classmethod
    def from_environment(
        cls, environment: Mapping[str, str] | None = None, *, imds: bool = True, clock: Clock | None = None
    ) -> Watcher:
        """By SPOTHEAL_NOTICE_FILE and SPOTHEAL_REBALANCE_FILE where they are set, and IMDS where `imds`."""
        environment = os.environ if environment is None else environment
        files = [environment.get(name) for name in (contract.NOTICE_FILE, contract.REBALANCE_FILE)]
        paths = [Path(name) if name else None for name in files]
        metadata = _metadata(clock) if imds else None
        return cls(metadata=metadata, notice_file=paths[0], rebalance_file=paths[1], clock=clock)

    # --------------------------------------------------------------------------------------------------- what is known
    @property
    def notice(self) -> Notice | None:
        """The notice, with the moment by which this process must have ended."""
        if self._heard is None and self._terminated:
            deadline = self._clock.now() + timedelta(seconds=SIGTERM_SECONDS)
            self._heard = self._from_file() or Notice("shutdown", deadline)
        return self._heard

    def seconds_left(self) -> float:
        """Until the notice's deadline, 0 or less once it has passed; infinite without a notice."""
        notice = self.notice
        return (notice.deadline - self._clock.now()).total_seconds() if notice else float("inf")

    def take_save_request(self) -> bool:
        """Whether a save was asked for (SIGUSR1, a rebalance recommendation) since the last call."""
        request, self._save_request = self._save_request, False
        return request

    # ------------------------------------------------------------------------------------------------------- listening
    def __enter__(self) -> Watcher:
        # IMDS has a thread of its own: while it does not answer, the files must still be seen.
        for seconds, look in ((POLL_SECONDS / 4, self._look_at_files), (POLL_SECONDS, self._ask_imds)):
            self._threads.append(threading.Thread(target=self._watch, args=(seconds, look), name="notice", daemon=True))
            self._threads[-1].start()
        if threading.current_thread() is threading.main_thread():
            self._before = {
                signal.SIGTERM: signal.signal(signal.SIGTERM, self._on_sigterm),
                signal.SIGUSR1: signal.signal(signal.SIGUSR1, self._on_sigusr1),
            }
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._before = {}
        for thread in self._threads:
            thread.join(timeout=0.1)  # one may be waiting for IMDS; they are daemons

    def poll(self) -> None:
        """Look once at every source."""
        self._look_at_files()
        self._ask_imds()

    def _watch(self, seconds: float, look: Callable[[], None]) -> None:
        while not self._stop.is_set():
            look()
            self._clock.sleep(seconds, until=self._stop)

    def _look_at_files(self) -> None:
        self._hear(self._from_file())
        if self._rebalance_file is not None and self._rebalance_file.exists():
            self._hear_rebalance()

    def _ask_imds(self) -> None:
        if self._metadata is None:
            return
        from spotheal.agent.aws.imds import Rebalance

        self._hear(self._from_imds(self._metadata))
        if isinstance(self._metadata.rebalance(), Rebalance):
            self._hear_rebalance()

    def _hear(self, notice: Notice | None) -> None:
        with self._lock:
            if notice is None or self._heard is not None:
                return
            self._heard = notice
        log.warning("notice: %s, to be gone by %s", notice.action, notice.deadline.isoformat())

    def _hear_rebalance(self) -> None:
        with self._lock:
            if self._rebalanced:
                return
            self._rebalanced = self._save_request = True
        log.warning("rebalance recommendation: saving now, going on")

    def _from_file(self) -> Notice | None:
        return contract.read_notice(self._notice_file) if self._notice_file is not None else None

    def _from_imds(self, metadata: Metadata) -> Notice | None:
        from spotheal.agent.aws.imds import SpotAction

        answer = metadata.spot_action()
        if not isinstance(answer, SpotAction):
            return None
        late = (self._clock.now() - answer.time).total_seconds()
        if late > STALE_SECONDS:
            return None
        return Notice(answer.action, answer.time - timedelta(seconds=MARGIN_SECONDS))

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        self._terminated = True

    def _on_sigusr1(self, number: int, frame: FrameType | None) -> None:
        self._save_request = True


def _metadata(clock: Clock | None) -> Metadata | None:
    """A client of IMDS, or None if this interpreter has no requests: the agent's notice file is left then."""
    try:
        import requests  # noqa: F401
    except ImportError:
        log.warning("requests is not installed here: IMDS is not polled; notice file and SIGTERM are watched")
        return None
    from spotheal.agent.aws.imds import Metadata

    return Metadata(clock=clock)
