"""The thread that tells what the trainer did: it outlives a hook that fails, else nothing more is recorded."""

from __future__ import annotations

import pytest
import structlog

from spotheal.agent.protocol.contract import Progress
from spotheal.agent.trainer.hooks import Hooks, Teller


@pytest.mark.parametrize("error", [ValueError("a fault of ours"), OSError("No space left on device")])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_hook_that_fails_does_not_silence_those_after_it(error: Exception) -> None:
    """The thread died, and no later checkpoint reached the status, the ledger or the volume's tags."""
    steps: list[int] = []
    names: list[str] = []

    def on_progress(progress: Progress) -> None:
        steps.append(progress.step)
        if progress.step == 1:
            raise error

    with structlog.testing.capture_logs() as logs:
        teller = Teller(Hooks(on_progress=on_progress, on_event=names.append), structlog.get_logger())
        teller.progress(Progress(1))
        teller.event("trainer-ended")
        assert teller.wait(10)
        teller.progress(Progress(2))
        assert teller.wait(10)
    assert ([1, 2], ["trainer-ended"]) == (steps, names)
    assert ["what the trainer did could not be recorded"] == [entry["event"] for entry in logs]
