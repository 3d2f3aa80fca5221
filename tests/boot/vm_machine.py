"""An instance that is a virtual machine: QEMU's software emulation of a Nitro instance, as far as an agent can tell.

The firmware's tables say EC2, so cloud-init finds its datasource as it does there. Volumes are NVMe disks whose serial
is the volume's id, plugged into PCIe ports while the machine runs; beside them are the root volume's disk and a blank
instance store, as on GPU instances. AWS's shutdown is the power button. Root, Linux.
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aws_side import AwsSide
from instance_network import InstanceNetwork
from vm_image import LABEL, Image

from spotheal.agent.machine.devices import serial_of
from spotheal.fleet.rehearsal.machines.machines import Launch, Machine
from spotheal.fleet.rehearsal.machines.volumes import Disk
from spotheal.fleet.rehearsal.services.imds import ADDRESS, mac_of

if TYPE_CHECKING:
    from spotheal.fleet.rehearsal.scenarios.cloud import Cloud

UUID = "ec2e1916-9099-7caf-fd21-012345abcdef"
MEMORY_MIB = 768
PORTS = 4
_PLUG_SECONDS_MAX = 600.0


class Qmp:
    """QEMU's control socket. One command at a time; events are kept for `await_event`."""

    def __init__(self, path: Path, seconds_max: float = 30.0) -> None:
        limit = time.monotonic() + seconds_max
        self._socket = socket.socket(socket.AF_UNIX)
        while True:
            try:
                self._socket.connect(str(path))
                break
            except OSError:
                if time.monotonic() > limit:
                    raise
                time.sleep(0.1)
        self._socket.settimeout(60.0)
        self._file = self._socket.makefile("rb")
        self._lock = threading.RLock()
        self._events: list[dict[str, Any]] = []
        self._file.readline()  # its greeting
        self("qmp_capabilities")

    def __call__(self, command: str, **arguments: Any) -> Any:
        with self._lock:
            self._socket.sendall(json.dumps({"execute": command, "arguments": arguments}).encode() + b"\n")
            while True:
                answer = self._read()
                if "event" in answer:
                    self._events.append(answer)
                elif "error" in answer:
                    raise OSError(f"{command}: {answer['error'].get('desc')}")
                else:
                    return answer.get("return")

    def await_deleted(self, device: str, seconds_max: float) -> bool:
        """Whether the guest has let `device` go."""
        limit = time.monotonic() + seconds_max
        while time.monotonic() < limit:
            with self._lock:
                self("query-status")
                if any(e["event"] == "DEVICE_DELETED" and e["data"].get("device") == device for e in self._events):
                    return True
            time.sleep(0.5)
        return False

    def _read(self) -> dict[str, Any]:
        line = self._file.readline()
        if not line:
            raise OSError("QEMU is gone")
        found: dict[str, Any] = json.loads(line)
        return found


class VirtualMachine(Machine):
    """See above. `cloud` is asked for late: the cloud makes its machines."""

    def __init__(
        self,
        folder: Path,
        launch: Launch,
        on_end: Callable[[Machine], None] | None,
        image: Image,
        cloud: Callable[[], Cloud],
    ) -> None:
        self._image, self._cloud = image, cloud
        self._ports: dict[str, int] = {}  # volume -> port
        self._plugged = 0  # names must not be used again
        self._names: dict[str, str] = {}
        self._qmp: Qmp | None = None
        self._aws: AwsSide | None = None
        self._typed = 0
        super().__init__(folder, launch, on_end)

    # ----------------------------------------------------------------------------------------------------- processes
    def _lay_out(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._own = Path(tempfile.mkdtemp(prefix="sp-vm-"))  # sockets' paths must be short
        self.console = self.folder / "console.log"
        self.console.touch()
        backed = ["-b", str(self._image.disk), "-F", "raw"]
        argv = ["qemu-img", "create", "-q", "-f", "qcow2", *backed, f"{self._own}/root"]
        subprocess.run(argv, check=True, capture_output=True, timeout=60)
        with (self._own / "store").open("wb") as file:
            file.truncate(1 << 30)
        self._network: InstanceNetwork | None = InstanceNetwork(
            self.launch.instance, mac_of(self.launch.instance), ADDRESS, tap=True
        )

    def boot(self) -> None:
        with self._lock:
            if self._ending or self._process is not None:
                return
            assert self._network is not None
            self._aws = AwsSide(self._cloud(), self.launch.instance, self._network)
            self.started_at = time.monotonic()
            with (self.folder / "qemu.log").open("wb") as said:
                self._process = subprocess.Popen(
                    ["ip", "netns", "exec", self._network.aws, *self._qemu()],
                    stdin=subprocess.DEVNULL, stdout=said, stderr=said, start_new_session=True,
                )  # fmt: skip
            self._qmp = Qmp(self._own / "qmp")
        threading.Thread(target=self._await_end, name=f"end of {self.launch.instance}", daemon=True).start()

    def _qemu(self) -> list[str]:
        own, image = self._own, self._image
        argv = [
            "qemu-system-x86_64", "-accel", "tcg,thread=multi", "-machine", "q35", "-cpu", "Nehalem", "-smp", "2",
            "-m", f"{MEMORY_MIB}M", "-nodefaults", "-display", "none", "-no-user-config",
            "-smbios", "type=0,vendor=Amazon EC2,version=1.0",
            "-smbios", f"type=1,manufacturer=Amazon EC2,product={self.launch.instance_type},serial={UUID},uuid={UUID}",
            "-kernel", str(image.kernel), "-initrd", str(image.initrd),
            "-append", f"root=LABEL={LABEL} rw console=ttyS0 earlyprintk=ttyS0 mitigations=off",
            "-chardev", f"file,id=console,path={self.console}", "-serial", "chardev:console",
            "-chardev", f"socket,id=operator,path={own}/operator,server=on,wait=off", "-serial", "chardev:operator",
            "-qmp", f"unix:{own}/qmp,server=on,wait=off",
            "-netdev", "tap,id=net,ifname=gw,script=no,downscript=no",
            "-device", f"virtio-net-pci,netdev=net,mac={mac_of(self.launch.instance)}",
            "-device", "virtio-rng-pci",
            "-drive", f"if=none,id=root,file={own}/root,format=qcow2,cache=unsafe",
            "-device", "nvme,drive=root,serial=vol00000000000000001",
            "-drive", f"if=none,id=store,file={own}/store,format=raw,cache=unsafe",
            "-device", "nvme,drive=store,serial=AWS00000000000000001",
        ]  # fmt: skip
        for port in range(PORTS):
            argv += ["-device", f"pcie-root-port,id=port{port},chassis={port + 1},slot={port + 1}"]
        return argv

    def end(self) -> None:
        with self._lock:
            self._ending = True
            process = self._process
        if process is not None and process.poll() is None:
            process.kill()  # the power is cut: what the guest holds in memory is lost
            process.wait(30)
        self._clear()
        self._ended()

    def shut_down(self, seconds_max: float) -> None:
        """The power button."""
        if self._qmp is not None and self.running:
            with suppress(OSError):
                self._qmp("system_powerdown")
        limit = time.monotonic() + seconds_max
        while time.monotonic() < limit and self.running:
            time.sleep(0.2)
        self.end()

    def _await_end(self) -> None:
        assert self._process is not None
        self._process.wait()
        self._clear()
        self._ended()

    def _clear(self) -> None:
        with self._lock:
            aws, self._aws = self._aws, None
            network, self._network = self._network, None
            self._ports.clear()
        if aws is not None:
            aws.close()
        if network is not None:
            network.close()
        shutil.rmtree(self._own, ignore_errors=True)

    def run(self, command: str, seconds_max: float = 120.0) -> str:
        """The output of `command` on the operator's shell."""
        self._typed += 1
        begin, end = f"BEGIN-{self._typed}-", f"END-{self._typed}-"
        typed = f"stty -echo; echo {begin[:3]}''{begin[3:]}; {{ {command}; }} 2>&1; echo {end[:2]}''{end[2:]}$?\n"
        with socket.socket(socket.AF_UNIX) as line:
            line.settimeout(seconds_max)
            line.connect(f"{self._own}/operator")
            line.sendall(typed.encode())
            seen = ""
            while not (end in seen and seen.rpartition(end)[2].strip().isdigit()):
                got = line.recv(4096)
                if not got:
                    raise OSError("the machine is gone")
                seen += got.decode("utf-8", "replace").replace("\r", "")
        return seen.partition(begin)[2].partition(end)[0].strip("\n")

    # --------------------------------------------------------------------------------------------------------- disks
    def attach(self, disk: Disk) -> str:
        with self._lock:
            if disk.volume not in self._ports:
                free = sorted(set(range(PORTS)) - set(self._ports.values()))[0]
                self._ports[disk.volume] = free
                self._plugged += 1
                self._names[disk.volume] = f"ebs{self._plugged}"
                threading.Thread(target=self._plug_in, args=(disk, free), daemon=True).start()
        return ""

    def _plug_in(self, disk: Disk, port: int) -> None:
        """The image is locked as long as another machine has it open."""
        name, limit = self._names[disk.volume], time.monotonic() + _PLUG_SECONDS_MAX
        while self._qmp is not None and self.running:
            try:
                file = {"driver": "file", "filename": str(disk.image)}
                self._qmp("blockdev-add", **{"node-name": name, "driver": "raw", "file": file})
                serial = serial_of(disk.volume)
                self._qmp("device_add", driver="nvme", id=f"{name}d", drive=name, serial=serial, bus=f"port{port}")
                return
            except OSError as fault:
                if time.monotonic() > limit:
                    raise
                print(f"boot-vm: {disk.volume} is not plugged in yet: {fault}", flush=True)
                time.sleep(1.0)

    def detach(self, volume: str) -> None:
        with self._lock:
            if self._ports.pop(volume, None) is not None:
                threading.Thread(target=self._unplug, args=(self._names.pop(volume),), daemon=True).start()

    def _unplug(self, name: str) -> None:
        """A guest that boots, or goes down, hears of it late; its reset lets the disk go too."""
        while self._qmp is not None and self.running:
            with suppress(OSError):  # asked already, or gone already
                self._qmp("device_del", id=f"{name}d")
            with suppress(OSError):
                if self._qmp.await_deleted(f"{name}d", 20.0):
                    self._qmp("blockdev-del", **{"node-name": name})
                    return

    def has_mounted(self, volume: str) -> bool:
        """EC2 cannot look into a machine either: the guest decides whether it lets a disk go."""
        return False
