"""Has no handler of any signal and reports nothing: what most scripts are."""

import os
import pathlib
import time

pathlib.Path(os.environ["SPOTHEAL_RESULTS_DIR"], "ready").touch()
time.sleep(60)
