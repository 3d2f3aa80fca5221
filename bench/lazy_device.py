"""A block device whose blocks take milliseconds at their first read, as those of a volume from a snapshot do.

A block that was read or written before takes `LOADED_SECONDS`, about the latency of a gp3 volume.
A file system of one file, in a process of its own (the kernel's FUSE protocol, version 7.31), and a loop device on that
file, with direct access: a read that the kernel sends to the device waits, up to `DEPTH` of them at once. Linux, root.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

DEPTH = 64
LOADED_SECONDS = 0.001
_BLOCK_BYTES = 4096
_HEADER = struct.Struct("<IIQQIIII")
_ATTRIBUTES = struct.Struct("<QQQQQQIIIIIIIIII")
_REQUEST_BYTES_MAX = (1 << 20) + 4096
_LOOKUP, _FORGET, _GETATTR, _OPEN, _READ, _WRITE, _FSYNC, _INIT, _BATCH_FORGET = 1, 2, 3, 14, 15, 16, 20, 26, 42
_WITHOUT_CONTENT = (18, 25, _FSYNC, 34)  # release, flush, fsync, access: done
_ROOT, _FILE, _NAME = 1, 2, b"disk"


@contextlib.contextmanager
def lazy_device(image: Path, seconds: float) -> Iterator[str]:
    """The path of a device with the content of `image`."""
    folder = image.with_name("lazy")
    folder.mkdir(exist_ok=True)
    argv = [sys.executable, __file__, str(image), str(folder), str(seconds)]
    server = subprocess.Popen(argv, start_new_session=True)  # a Ctrl-C would end it before the device is unmounted
    try:
        until = time.monotonic() + 20
        while not (folder / "disk").exists():
            if time.monotonic() > until:
                raise TimeoutError("the lazily read file system did not come up")
            time.sleep(0.05)
        argv = ["losetup", "--find", "--show", "--direct-io=on", str(folder / "disk")]
        device = subprocess.run(argv, check=True, capture_output=True, text=True).stdout.strip()
        try:
            yield device
        finally:
            subprocess.run(["losetup", "--detach", device], check=False)
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=False)
        server.terminate()
        server.wait(10)


class _Server:
    def __init__(self, image: str, folder: str, seconds: float) -> None:
        self._disk, self._seconds = os.open(image, os.O_RDWR), seconds
        self._size = os.fstat(self._disk).st_size
        self._loaded = bytearray(-(-self._size // _BLOCK_BYTES))
        self._fuse = os.open("/dev/fuse", os.O_RDWR)
        self._pool = ThreadPoolExecutor(DEPTH)
        self._lock = threading.Lock()
        options = f"fd={self._fuse},rootmode=40000,user_id=0,group_id=0,max_read={1 << 20}".encode()
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mount(b"lazy", folder.encode(), b"fuse.lazy", 0, options) != 0:
            raise OSError(ctypes.get_errno(), "the lazily read file system cannot be mounted")

    def serve(self) -> None:
        while True:
            try:
                request = os.read(self._fuse, _REQUEST_BYTES_MAX)
            except OSError as error:
                if error.errno in (errno.ENOENT, errno.EINTR):
                    continue
                return  # unmounted
            _, operation, unique, node, *_ = _HEADER.unpack_from(request)
            body = request[_HEADER.size :]
            if operation in (_READ, _WRITE):
                self._pool.submit(self._transfer, operation, unique, body)
            elif operation not in (_FORGET, _BATCH_FORGET):
                self._answer(unique, *self._content(operation, node, body))

    def _answer(self, unique: int, content: bytes, fault: int = 0) -> None:
        os.write(self._fuse, struct.pack("<IiQ", 16 + len(content), -fault, unique) + content)

    def _transfer(self, operation: int, unique: int, body: bytes) -> None:
        offset, size = struct.unpack_from("<QI", body, 8)
        blocks = slice(offset // _BLOCK_BYTES, -(-(offset + size) // _BLOCK_BYTES))
        if operation == _WRITE:
            written = os.pwrite(self._disk, body[40 : 40 + size], offset)
            self._load(blocks)
            self._answer(unique, struct.pack("<II", written, 0))
            return
        time.sleep(self._seconds if 0 in self._loaded[blocks] else LOADED_SECONDS)
        self._load(blocks)
        self._answer(unique, os.pread(self._disk, size, offset))

    def _load(self, blocks: slice) -> None:
        with self._lock:
            self._loaded[blocks] = b"\1" * len(self._loaded[blocks])

    def _content(self, operation: int, node: int, body: bytes) -> tuple[bytes, int]:
        if operation == _INIT:
            flags = 1 << 0 | 1 << 5 | 1 << 15 | 1 << 22  # reads at once, large writes, direct access at once, 1 MiB
            head = struct.pack("<IIIIHHIIHHI", 7, 31, 1 << 20, flags, DEPTH, DEPTH, 1 << 20, 1, 256, 0, 0)
            return head + bytes(28), 0
        if operation == _LOOKUP:
            if body.rstrip(b"\0") != _NAME:
                return b"", errno.ENOENT
            return struct.pack("<QQQQII", _FILE, 0, 3600, 3600, 0, 0) + self._attributes(_FILE), 0
        if operation == _GETATTR:
            return struct.pack("<QII", 3600, 0, 0) + self._attributes(node), 0
        if operation == _OPEN:
            return struct.pack("<QII", 0, 0, 0), 0
        return b"", 0 if operation in _WITHOUT_CONTENT else errno.ENOSYS

    def _attributes(self, node: int) -> bytes:
        mode, size = (0o040755, 0) if node == _ROOT else (0o100600, self._size)
        return _ATTRIBUTES.pack(node, size, size // 512, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0)


if __name__ == "__main__":
    _Server(sys.argv[1], sys.argv[2], float(sys.argv[3])).serve()
