"""An instance that boots a real Debian: systemd-nspawn gives systemd as process 1, cloud-init runs the user data.

Its root is an overlay over the cached one, its volumes are loop devices, its network is its own (instance_network).
What a container lacks of an EC2 machine is put there by the first program, `_HARDWARE`: the uuid by which cloud-init
tells EC2 (as Xen instances show it), a view of /sys that belongs to its own network, and that network's settings
below /proc/sys/net, which dhcpcd writes (the newest Debian has no other DHCP client). Linux, root.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import stat
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from aws_side import AwsSide
from debian_root import write_files
from instance_network import InstanceNetwork

from spotheal.agent.machine.devices import LINK_PREFIX, serial_of
from spotheal.fleet.rehearsal.machines.machines import Launch, Machine
from spotheal.fleet.rehearsal.machines.volumes import Disk
from spotheal.fleet.rehearsal.services.imds import ADDRESS, mac_of

if TYPE_CHECKING:
    from spotheal.fleet.rehearsal.scenarios.cloud import Cloud

_REBOOTED = 133  # nspawn's exit code where the container asked for a reboot
_HARDWARE = """#!/bin/sh
set -e
mkdir -p /run/sys /run/full
mount -t tmpfs -o mode=755 sys /run/sys
mount -t sysfs -o ro sysfs /run/full
for name in block bus class dev devices firmware fs kernel module power; do
    mkdir "/run/sys/$name"
    mount --rbind "/run/full/$name" "/run/sys/$name"
done
mount --rbind /sys/fs/cgroup /run/sys/fs/cgroup
mkdir /run/sys/hypervisor
echo ec2e1916-9099-7caf-fd21-012345abcdef >/run/sys/hypervisor/uuid
mount -o remount,ro,bind /run/sys
umount -l /run/full
mount --rbind /run/sys /sys
mount --bind /proc/sys/net /proc/sys/net
mount -o remount,rw,bind /proc/sys/net
exec /sbin/init "$@"
"""
# A container has this machine's kernel. Newer ones say "Address already assigned" where cloud-init 22 looks for "File
# exists" when it reads the metadata a second time, which is for networks that change between boots.
_NEWER_KERNEL = "updates: {network: {when: [boot-new-instance]}}\n"


class BootedMachine(Machine):
    """See above. `cloud` is asked for late: the cloud makes its machines."""

    def __init__(
        self,
        folder: Path,
        launch: Launch,
        on_end: Callable[[Machine], None] | None,
        debian: Path,
        cloud: Callable[[], Cloud],
    ) -> None:
        self._debian, self._cloud = debian, cloud
        self._loops: dict[str, str] = {}  # volume -> loop device
        self._network: InstanceNetwork | None = None
        self._aws: AwsSide | None = None
        self.boots: list[float] = []  # monotonic
        super().__init__(folder, launch, on_end)

    # ----------------------------------------------------------------------------------------------------- processes
    def _lay_out(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._disk = Path(tempfile.mkdtemp(prefix="spotheal-boot-", dir="/dev/shm"))
        for name in ("upper", "work", "root"):
            (self._disk / name).mkdir(parents=True)
        self.root = self._disk / "upper"  # what the instance has written
        write_files(self.root)
        (self.root / "etc/cloud/cloud.cfg.d/96_kernel.cfg").write_text(_NEWER_KERNEL)
        (self.root / "ec2-hardware").write_text(_HARDWARE)
        (self.root / "ec2-hardware").chmod(0o755)
        (self.folder / "console.log").touch()
        self._network = InstanceNetwork(self.launch.instance, mac_of(self.launch.instance), ADDRESS)

    def boot(self) -> None:
        with self._lock:
            if self._ending or self._process is not None:
                return
            assert self._network is not None
            self._aws = AwsSide(self._cloud(), self.launch.instance, self._network)
            self.started_at = time.monotonic()
            self._power_on()
        threading.Thread(target=self._await_end, name=f"end of {self.launch.instance}", daemon=True).start()

    def _power_on(self) -> None:
        assert self._network is not None
        disk = self._disk
        options = f"lowerdir={self._debian},upperdir={disk}/upper,workdir={disk}/work"
        nspawn = [
            "systemd-nspawn", "--quiet", f"--directory={disk}/root", "--register=no", "--keep-unit",
            f"--network-namespace-path=/run/netns/{self._network.instance}", f"--machine={self.launch.instance}",
            "--console=read-only", "--link-journal=no", "--kill-signal=SIGRTMIN+3", "--capability=all",
            "--resolv-conf=off", "--timezone=off", "/ec2-hardware",
        ]  # fmt: skip
        # The mount is in a namespace of its own: it is gone with the machine, however that ends.
        mount = f'mount -t overlay overlay -o "{options}" "{disk}/root" && exec "$@"'
        with (self.folder / "console.log").open("ab") as console, _no_mounts_of_other_tests():
            self._process = subprocess.Popen(
                ["unshare", "--mount", "--propagation", "private", "sh", "-c", mount, "sh", *nspawn],
                stdin=subprocess.DEVNULL, stdout=console, stderr=console, start_new_session=True,
            )  # fmt: skip
            _await_own_mounts(self._process)
        self.boots.append(time.monotonic())
        threading.Thread(target=self._plug_in, args=(len(self.boots),), daemon=True).start()

    def _plug_in(self, boot: int) -> None:
        """The volumes that are attached are there when a machine boots."""
        limit = time.monotonic() + 30
        while time.monotonic() < limit and len(self.boots) == boot and self.running:
            leader = self.leader()
            if leader and Path(f"/proc/{leader}/root/dev/console").exists():
                with self._lock:
                    for volume, loop in self._loops.items():
                        self._show(leader, volume, loop)
                return
            time.sleep(0.05)

    def _await_end(self) -> None:
        while True:
            process = self._process
            assert process is not None
            code = process.wait()
            with self._lock:
                if code == _REBOOTED and not self._ending:
                    self._power_on()
                    continue
            break
        self._pull_the_plug()
        self._ended()

    def leader(self) -> int | None:
        """Process 1 of the instance, as this machine sees it; None before it is there."""
        process = self._process
        if process is None or process.poll() is not None:
            return None
        try:
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            found = [int(pid) for pid in children if Path(f"/proc/{pid}/comm").read_text().strip() == "systemd"]
        except OSError:
            return None
        return found[0] if found else None

    def run(self, *argv: str, check: bool = True) -> str:
        """The output of a program that runs on the instance."""
        leader = self.leader()
        if leader is None:
            raise RuntimeError(f"{self.launch.instance} does not run")
        enter = ["nsenter", "--target", str(leader), "--mount", "--uts", "--ipc", "--net", "--pid", "--cgroup"]
        path = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}
        done = subprocess.run([*enter, *argv], capture_output=True, text=True, timeout=60, env=path)
        if check and done.returncode != 0:
            raise RuntimeError(f"{argv}: {done.returncode} {done.stderr.strip() or done.stdout.strip()}")
        return done.stdout.strip()

    def user_data_exit(self) -> int | None:
        raise NotImplementedError("ask cloud-init")

    def end(self) -> None:
        with self._lock:
            self._ending = True
            process = self._process
        if process is not None and process.poll() is None:
            leader = self.leader()
            with suppress(OSError):
                os.kill(leader or process.pid, signal.SIGKILL)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10)
        self._pull_the_plug()
        self._ended()

    def shut_down(self, seconds_max: float) -> None:
        """The power button: systemd stops all services, then switches off."""
        leader = self.leader()
        if leader is not None:
            with suppress(OSError):
                os.kill(leader, signal.SIGRTMIN + 4)
        limit = time.monotonic() + seconds_max
        while time.monotonic() < limit and self.running:
            time.sleep(0.1)
        self.end()

    def _pull_the_plug(self) -> None:
        with self._lock:
            loops, self._loops = self._loops, {}
            aws, self._aws = self._aws, None
            network, self._network = self._network, None
        for loop in loops.values():
            subprocess.run(["losetup", "--detach", loop], capture_output=True, timeout=30)
            _await_free(loop)
        if aws is not None:
            aws.close()
        if network is not None:
            network.close()

    def remove(self) -> None:
        """Its own disk, which tests look into after its end."""
        shutil.rmtree(self._disk, ignore_errors=True)

    # --------------------------------------------------------------------------------------------------------- disks
    def attach(self, disk: Disk) -> str:
        with self._lock:
            if disk.volume not in self._loops:
                argv = ["losetup", "--find", "--show", str(disk.image)]
                done = subprocess.run(argv, check=True, capture_output=True, text=True, timeout=30)
                self._loops[disk.volume] = done.stdout.strip()
            loop = self._loops[disk.volume]
            leader = self.leader()
            if leader is not None:
                self._show(leader, disk.volume, loop)
            return loop

    def _show(self, leader: int, volume: str, loop: str) -> None:
        """The device node, and the link that udev makes of an EBS volume's serial."""
        dev = Path(f"/proc/{leader}/root/dev")
        node = dev / Path(loop).name
        if not node.exists():
            os.mknod(node, 0o600 | stat.S_IFBLK, os.stat(loop).st_rdev)
        link = dev / "disk/by-id" / (LINK_PREFIX + serial_of(volume))
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.is_symlink():
            link.symlink_to(f"../../{node.name}")

    def detach(self, volume: str) -> None:
        with self._lock:
            loop = self._loops.pop(volume, None)
            if loop is None:
                return
            if leader := self.leader():
                dev = Path(f"/proc/{leader}/root/dev")
                (dev / "disk/by-id" / (LINK_PREFIX + serial_of(volume))).unlink(missing_ok=True)
                (dev / Path(loop).name).unlink(missing_ok=True)
            subprocess.run(["losetup", "--detach", loop], capture_output=True, timeout=30)

    def has_mounted(self, volume: str) -> bool:
        loop, leader = self._loops.get(volume), self.leader()
        if loop is None or leader is None:
            return False
        with suppress(OSError):
            return f" {loop} " in Path(f"/proc/{leader}/mountinfo").read_text()
        return False


@contextmanager
def _no_mounts_of_other_tests() -> Iterator[None]:
    """A new mount namespace keeps what is mounted at that moment busy; test_host_root mounts under this lock."""
    with Path(tempfile.gettempdir(), "spotheal-loop-devices.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _await_own_mounts(process: subprocess.Popen[bytes], seconds_max: float = 30.0) -> None:
    limit = time.monotonic() + seconds_max
    while time.monotonic() < limit and process.poll() is None:
        with suppress(OSError):
            if os.readlink(f"/proc/{process.pid}/ns/mnt") != os.readlink("/proc/self/ns/mnt"):
                return
        time.sleep(0.01)


def _await_free(loop: str, seconds_max: float = 10.0) -> None:
    """A mount that died with its machine is written out by the kernel first."""
    limit = time.monotonic() + seconds_max
    while time.monotonic() < limit:
        done = subprocess.run(["losetup", "--list", "--noheadings", loop], capture_output=True, text=True, timeout=30)
        if not done.stdout.strip():
            return
        time.sleep(0.05)
