"""The order in which xdist hands out files, and which of them go to one worker.

xdist itself begins with the files that have the most tests. Here a few tests take a minute each and their files would
come last, to one worker while the others have nothing left.
"""

from __future__ import annotations

from typing import Any

# By what they take; those that mostly wait are told apart from those that compute, so that both go on at once.
LONGEST = (
    "boot/test_boot.py",  # waits
    "simulation/test_random_histories.py",
    "simulation/test_random_histories_too.py",
    "rehearsal/test_rehearsal_run.py",  # waits
    "training/test_training_ranks.py",
    "simulation/test_crashes.py",
    "boot/test_bad_boots.py",  # waits
    "rehearsal/test_rehearsal_ranks.py",  # waits
    "project/test_mutants.py",
    "simulation/test_simulated_life.py",
    "fleet/batch/test_batch_fleet.py",
    "rehearsal/test_efs_rehearsal.py",
    "rehearsal/test_sweep_rehearsal.py",
    "fleet/account/test_fleet_account.py",
    "rehearsal/cloud/test_fleet_cloud.py",
    "fleet/volumes/test_fleet_volume.py",
    "agent/repository/test_repo.py",
    "agent/trainer/test_supervisor_surroundings.py",
    "agent/trainer/test_silence.py",  # waits
    "simulation/test_parity.py",
    "simulation/test_simulated_healing.py",
    "simulation/test_simulated_sweep.py",
    "project/test_wheel.py",
    "userdata/test_userdata.py",
    "userdata/test_userdata_hostile.py",
)
# Files whose tests are forked from a server that has torch imported (forked.py): one server does for all of them.
TOGETHER = frozenset({
    "training/test_training_ranks.py", "training/integrations/test_integrations_ranks.py",
    "agent/nodes/test_nodes_launcher.py", "training/slotfile/test_sharded_training.py",
    "training/test_training_resume.py", "project/test_docs.py",
})  # fmt: skip
_PLACES = {name: place for place, name in enumerate(LONGEST)}


def place(path: str) -> int:
    """Where a file, named from the root of the repository, comes in the order."""
    name = path.removeprefix("tests/")
    return _PLACES.get("training/test_training_ranks.py" if name in TOGETHER else name, len(_PLACES))


def scheduler(config: Any, log: Any) -> Any:
    """xdist's for whole files, in the order of collection (which conftest.py makes this one)."""
    from xdist.scheduler import LoadFileScheduling

    class LongestFirst(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = str(super()._split_scope(nodeid))
            return "forked" if path.removeprefix("tests/") in TOGETHER else path

    config.option.loadscopereorder = False
    return LongestFirst(config, log)
