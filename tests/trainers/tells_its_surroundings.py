"""Writes down what it was given: environment, user, umask, signals, folder, arguments."""

import json
import os
import pathlib
import signal
import sys

mask = os.umask(0)
usual = (signal.SIG_DFL, None)  # None: Python's fault handler, for PYTHONFAULTHANDLER is set
odd = [s for s in range(1, 32) if s not in (9, 19, 13, 2, 25) and signal.getsignal(s) not in usual]
blocked = sorted(signal.pthread_sigmask(signal.SIG_BLOCK, []))
status = pathlib.Path("/proc/self/status").read_text()
ignored = int(next(row for row in status.splitlines() if row.startswith("SigIgn")).split()[1], 16)
told = {
    "environment": dict(os.environ), "uid": os.getuid(), "groups": os.getgroups(), "umask": mask, "odd": odd,
    "blocked": blocked, "int_ignored": bool(ignored & 2), "cwd": os.getcwd(), "argv": sys.argv[1:],
    "python": sys.executable, "session": os.getsid(0), "pid": os.getpid(), "stdin": os.read(0, 10).decode(),
}  # fmt: skip
pathlib.Path(os.environ["SPOTHEAL_RESULTS_DIR"], "told.json").write_text(json.dumps(told))
