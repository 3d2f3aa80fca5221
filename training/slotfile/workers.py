"""A store's threads: all of them started before any is given work, and the processor time that they have used."""

from __future__ import annotations

import contextlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor

START_SECONDS = 60.0


class Workers:
    """`count` threads of this process. They end with `end`; a forked child has none of them and makes its own."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._starting = threading.Lock()  # two barriers in one pool would wait for each other's threads
        self._started = False
        self.pool = self._new_pool()

    def _new_pool(self) -> ThreadPoolExecutor:
        self._clocks: list[int] = []  # its own: the clocks of threads that are gone cannot be asked
        return ThreadPoolExecutor(
            self._count, thread_name_prefix="checkpoint", initializer=_keep_clock, initargs=(self._clocks,)
        )

    def start(self) -> ThreadPoolExecutor:
        """`pool`, with every thread running: work for a thread that cannot start would never be done.

        RuntimeError where the system gives no more threads; the next call tries again.
        """
        with self._starting:
            if not self._started:
                met = threading.Barrier(self._count + 1)
                try:
                    for _ in range(self._count):
                        self.pool.submit(met.wait, START_SECONDS)
                    met.wait(START_SECONDS)
                except BaseException:  # no thread available, or an interrupt: waiting threads must end soon
                    met.abort()
                    self.pool.shutdown(wait=False)
                    self.pool = self._new_pool()
                    raise
                self._started = True
            return self.pool

    def processor_seconds(self) -> float:
        """Of all threads together, since they were started; 0 if the system does not tell a thread's time."""
        with contextlib.suppress(OSError):  # the interpreter ends, and a thread has gone
            return sum(map(time.clock_gettime, self._clocks))
        return 0.0

    def end(self) -> None:
        """Wait until all work is done; no more is taken."""
        self.pool.shutdown()


def _keep_clock(clocks: list[int]) -> None:
    """Note this thread's clock, if the system has one."""
    if hasattr(time, "pthread_getcpuclockid"):
        clocks.append(time.pthread_getcpuclockid(threading.get_ident()))
