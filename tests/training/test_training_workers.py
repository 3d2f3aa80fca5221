"""A store's threads: asked for by two at once, refused by the system, and their time."""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

import pytest

from spotheal.training.slotfile import workers
from spotheal.training.slotfile.workers import Workers


def test_two_that_start_them_at_once_get_them_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "START_SECONDS", 5.0)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # the two meet within the start
    try:
        for _ in range(20):
            pool, got = Workers(4), []
            threads = [threading.Thread(target=lambda pool=pool, got=got: got.append(pool.start())) for _ in "ab"]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert got == [pool.pool, pool.pool]
            pool.end()
    finally:
        sys.setswitchinterval(interval)


def test_after_a_start_that_failed_the_time_of_the_next_threads_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    start, count = threading.Thread.start, [0]

    def third_fails(self: Any) -> None:
        count[0] += 1
        if count[0] == 3:
            raise RuntimeError("can't start new thread")
        start(self)

    pool = Workers(4)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", third_fails)
        with pytest.raises(RuntimeError):
            pool.start()

    def spin() -> None:
        until = time.thread_time() + 0.05
        while time.thread_time() < until:
            pass

    pool.start().submit(spin).result()
    assert pool.processor_seconds() >= 0.05
    pool.end()
