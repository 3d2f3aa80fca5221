"""Programs that a rehearsed machine finds first on its PATH, behaving as the real ones do on an EC2 instance.

They stand in for what needs root or hardware: the disks, the mounts, the power switch, the GPUs' driver. Each machine
gets small shell files of these names that run `stand_in.py NAME …`; `init.py` is the machine's first process. Both run
under `python -I -S`, import nothing of ours and know a machine only by its folder, SPOTHEAL_REHEARSAL_INSTANCE_DIR.
"""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent
NAMES = (
    "lsblk",
    "blkid",
    "findmnt",
    "mount",
    "umount",
    "mount.nfs4",
    "getent",
    "mkfs.xfs",
    "mkfs.ext4",
    "fsfreeze",
    "sync",
    "shutdown",
    "poweroff",
    "systemctl",
    "nvidia-smi",
    "snap",
)
INSTANCE_DIR = "SPOTHEAL_REHEARSAL_INSTANCE_DIR"
GPUS = "SPOTHEAL_REHEARSAL_GPUS"  # how many the stand-in nvidia-smi shows; none where it is not set
GPU_MIB = "SPOTHEAL_REHEARSAL_GPU_MIB"  # memory of each; an H100's if it is not set
