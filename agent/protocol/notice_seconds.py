"""The seconds of an interruption notice, all of them: AWS's two minutes are shared out here, and nowhere else.

Source: EC2 User Guide, "Spot Instance interruption notices": two minutes, best effort.
"""

from __future__ import annotations

LEAD_SECONDS_MAX = 120.0  # a longer notice is a wrong wall clock
POLL_SECONDS = 2.0  # until it is seen; AWS asks for 5 s or less; aws-node-termination-handler takes 2 s
MARGIN_SECONDS = 40.0  # the agent's: the trainer's deadline is AWS's time less this. It is shared out below.

KILL_SECONDS = 1.0  # between SIGTERM and SIGKILL if the trainer's deadline has passed already
RECORD_SECONDS = 2.0  # how long its end waits for what is told: a store that hangs must not hold up a handover
BUSY_SECONDS = 5.0  # so long a busy mount point is only asked again,
KILLED_SECONDS = 1.5  # and so long after its holders were killed
FREEZE_SECONDS = 1.5  # for sync, and again for the freeze
SNAPSHOT_SECONDS = 20.0  # before AWS's time: what a handover needs to be listed
SPARE_SECONDS = 7.5

LATE_GRACE_SECONDS = 5.0  # what a trainer gets to save if a notice was found late,
HANDOVER_SECONDS = 25.0  # as long as so much is left for the handover
# A notice may stay in the metadata service for ever, on an instance that was stopped and started again; and a machine
# that is still alive so long after AWS's time was not taken.
STALE_SECONDS = 300.0
