"""Ends at once with the code given and leaves two grandchildren: one in its group, one a daemon without a trace."""

import os
import pathlib
import subprocess
import sys

results = pathlib.Path(os.environ["SPOTHEAL_RESULTS_DIR"])
sleeper = [sys.executable, "-c", "import time; time.sleep(60)"]
plain = subprocess.Popen(sleeper)
read, write = os.pipe()
if os.fork() == 0:  # a daemon: a session of its own, its parent gone, its environment empty
    os.setsid()
    daemon = subprocess.Popen(sleeper, env={}, start_new_session=True)
    os.write(write, str(daemon.pid).encode())
    os._exit(0)
(results / "pids").write_text(f"{plain.pid} {os.read(read, 20).decode()}")
os._exit(int(sys.argv[1]))
