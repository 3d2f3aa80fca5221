"""torchrun, with an exit code that tells how the ranks ended: 75 if they saved and stopped, not 1 as for every failure.

    python -m spotheal.training.launch --standalone --nproc_per_node=4 --no_python python train.py

Options are torchrun's. The agent puts it in front of a command where job.toml asks for several processes; on several
machines (`--nnodes`, no `--standalone`) elastic.py lets machines come and go.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from spotheal.agent.protocol.contract import EXIT_SAVED_AND_STOPPED, NOTICE_FILE


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if every rank ended with 0; 75 if one ended with 75 and none failed before; else 1.

    Told to end by a signal, as the ranks then were: 75 where the agent has given a notice, else 128 and the signal.
    On several machines as elastic.main.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun sets the same, and prints six lines about it
    words = list(sys.argv[1:] if arguments is None else arguments)
    if "--standalone" not in words:
        mine = os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR") == "ERROR"
        from spotheal.training.elastic import main as over_machines

        if mine:  # a lost store is reported in one line, not in stacks of C++; the ranks' output stays as it is
            del os.environ["TORCH_CPP_LOG_LEVEL"]
        return over_machines(words)
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        run.main(words)
    except SignalException as told:
        print(f"ranks: told to end by {told.sigval.name}, and so were all of them", file=sys.stderr, flush=True)
        notice = os.environ.get(NOTICE_FILE)
        return EXIT_SAVED_AND_STOPPED if notice and Path(notice).exists() else 128 + told.sigval
    except ChildFailedError as ended:
        # torchrun ends the others when the first one ends, so what counts is how that one did.
        rank, first = ended.get_first_failure()
        if first.exitcode == EXIT_SAVED_AND_STOPPED:
            return EXIT_SAVED_AND_STOPPED
        ending = f"signal {-first.exitcode}" if first.exitcode < 0 else f"exit code {first.exitcode}"
        text = f"error: rank {rank} ended with {ending}; the other ranks were ended with it"
        print(text, file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
