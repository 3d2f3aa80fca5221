"""The wheels from which an instance installs the agent, made offline from the packages here, always the same bytes.

The distributions that the agent needs are zipped from their installed files as pure wheels, so that an instance with
another Python installs exactly the versions that were tested here, without a package index. A compiled module is
dropped if the same module exists in Python; a distribution that needs compiled code is refused. Of botocore's service
models only those in use are kept (28 MB of 30 are others).
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import os
import re
import shutil
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module, metadata
from pathlib import Path, PurePosixPath

from spotheal.agent.aws.clients import SERVICES
from spotheal.agent.protocol.errors import ConfigError

ROOTS = ("boto3", "requests", "tenacity", "structlog")
# The oldest versions without a security hole that is known here; setup.cfg has the same and names the advisories.
FLOORS = {
    "boto3": "1.35", "certifi": "2024.7.4", "idna": "3.15", "requests": "2.33", "structlog": "23.1",
    "tenacity": "8.2", "typing-extensions": "4.6", "urllib3": "2.8",
}  # fmt: skip
# structlog needs it on Python 3.10, which an instance may have even if this machine has a newer Python.
EXTRA = ("typing-extensions",)
OWN_PACKAGES = ("agent", "training", "userdata")
MANIFEST_NAME = "manifest.json"
_KEPT = 4
_FORMAT = 1  # part of the cache's key: a change of the zip format makes a new wheelhouse
_EPOCH = (2020, 1, 1, 0, 0, 0)  # zip entries have a time; a fixed time keeps the wheels the same
_BOTOCORE_DATA = re.compile(r"(botocore|boto3)/data/([^/]+)/")
_COMPILED = (".so", ".pyd", ".dylib")


@dataclass(frozen=True)
class Wheel:
    name: str
    sha256: str
    size: int


@dataclass(frozen=True)
class Wheelhouse:
    """A folder of wheels and its manifest. `sha256` is the manifest's, and part of the user data."""

    folder: Path
    wheels: tuple[Wheel, ...]

    @property
    def manifest(self) -> bytes:
        files = [{"name": wheel.name, "sha256": wheel.sha256, "size": wheel.size} for wheel in self.wheels]
        return json.dumps({"files": files}, separators=(",", ":")).encode()

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.manifest).hexdigest()

    @property
    def versions(self) -> tuple[str, ...]:
        """`NAME VERSION` of each wheel."""
        return tuple(" ".join(wheel.name.split("-")[:2]).replace("_", "-").lower() for wheel in self.wheels)

    @property
    def size(self) -> int:
        return sum(wheel.size for wheel in self.wheels)


def build(cache: Path | None = None) -> Wheelhouse:
    """The wheelhouse of the packages here; made once for each set of versions and kept in the user's cache.

    ConfigError if a version is below its floor: the wheels run as root on every instance.
    """
    parts = {dist.metadata["Name"]: dist for dist in needed()}
    _check_floors(parts.values())
    own_files = _own_files()
    digest = _digest(parts.values(), own_files)
    folder = (cache or cache_folder()) / f"wheelhouse-{digest[:20]}"
    if not (folder / MANIFEST_NAME).exists():
        _build_into(folder, parts.values(), own_files)
        _forget_old(folder.parent)
    listed = json.loads((folder / MANIFEST_NAME).read_bytes())["files"]
    return Wheelhouse(folder, tuple(Wheel(item["name"], item["sha256"], item["size"]) for item in listed))


def needed(roots: Iterable[str] = (*ROOTS, *EXTRA)) -> list[metadata.Distribution]:
    """The distributions of `roots` and their requirements, by name. ConfigError if one is not installed here."""
    distributions: dict[str, metadata.Distribution] = {}
    waiting = list(roots)
    while waiting:
        name = _normal(waiting.pop())
        if name in distributions:
            continue
        try:
            distributions[name] = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            if name in map(_normal, EXTRA):
                continue
            raise ConfigError(
                f"{name}, which the agent needs, is not installed here",
                next_step="install fleetctl again: pip install --force-reinstall spotheal",
            ) from None
        waiting += _requires(distributions[name])
    return [distributions[name] for name in sorted(distributions)]


def is_below(version: str, floor: str) -> bool:
    """Whether `version` is older than the release `floor`; a release candidate of the floor is older."""
    numbers = [int(part) for part in re.findall(r"\d+", re.split(r"[^\d.]", version)[0])]
    floor_numbers = [int(part) for part in floor.split(".")]
    length = max(len(numbers), len(floor_numbers))
    release = numbers + [0] * (length - len(numbers))
    oldest = floor_numbers + [0] * (length - len(floor_numbers))
    return release < oldest or (release == oldest and re.search(r"\d(a|b|rc|\.?dev)\d", version) is not None)


def _check_floors(parts: Iterable[metadata.Distribution]) -> None:
    names = {_normal(part.metadata["Name"]): part.version for part in parts}
    old = [name for name, version in names.items() if name in FLOORS and is_below(version, FLOORS[name])]
    if old:
        versions = ", ".join(f"{name} {names[name]}" for name in old)
        requirements = " ".join(f"'{name}>={FLOORS[name]}'" for name in old)
        raise ConfigError(
            f"{versions} {'has' if len(old) == 1 else 'have'} known security holes, and instances get what is here",
            next_step=f"pip install --upgrade {requirements}",
        )


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "spotheal"


def _requires(dist: metadata.Distribution) -> Iterator[str]:
    for line in dist.requires or []:
        requirement, _, marker = line.partition(";")
        if "extra" in marker or "win32" in marker or "platform_system" in marker:
            continue
        name = re.match(r"[A-Za-z0-9._-]+", requirement.strip())
        # A marker may name the Python version of the instance, which is not known here: include what is installed.
        if name and (not marker or _is_installed(name.group())):
            yield name.group()


def _is_installed(name: str) -> bool:
    try:
        metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


# --------------------------------------------------------------------------------------------------------- the contents
def _files_of(dist: metadata.Distribution) -> dict[str, Path]:
    """The files of an installed distribution by their path in a wheel, without those only for this machine."""
    name = dist.metadata["Name"]
    listed = dist.files
    if not listed:
        raise ConfigError(
            f"{name} is installed without a list of its files (RECORD), so its wheel cannot be made",
            next_step=f"pip install --force-reinstall {name}",
        )
    files: dict[str, Path] = {}
    compiled: list[str] = []
    for entry in listed:
        path = entry.as_posix()
        if path.startswith(("../", "/")) or "__pycache__" in path or path.endswith((".pyc", ".pyo")):
            continue
        if path.endswith(_COMPILED):
            compiled.append(path)
            continue
        if PurePosixPath(path).name in ("RECORD", "INSTALLER", "REQUESTED", "direct_url.json", "WHEEL"):
            continue
        if (data := _BOTOCORE_DATA.match(path)) and data.group(2) not in SERVICES:
            continue
        files[path] = Path(str(dist.locate_file(entry)))
    for path in compiled:
        module = path.split(".", 1)[0]
        if f"{module}.py" not in files and not PurePosixPath(module).name.endswith("__mypyc"):
            raise ConfigError(
                f"{name} needs compiled code ({path}), which suits this machine only",
                next_step=f"install another version of {name}, or run fleetctl on the platform of the instances",
            )
    return files


def _own_files() -> dict[str, Path]:
    """The files of our packages as they are imported here, also from an editable install."""
    files: dict[str, Path] = {}
    for package in OWN_PACKAGES:
        module = import_module(f"spotheal.{package}")
        assert module.__file__ is not None
        root = Path(module.__file__).resolve().parent
        for path in sorted(root.rglob("*")):
            inside = path.relative_to(root)
            if path.is_file() and "__pycache__" not in inside.parts and not inside.name.endswith((".pyc", ".swp", "~")):
                files[f"spotheal/{package}/{inside.as_posix()}"] = path
    return files


def _digest(parts: Iterable[metadata.Distribution], own_files: dict[str, Path]) -> str:
    versions = sorted(f"{part.metadata['Name']}=={part.version}" for part in parts)
    contents = [f"{name} {hashlib.sha256(path.read_bytes()).hexdigest()}" for name, path in sorted(own_files.items())]
    return hashlib.sha256("\n".join([str(_FORMAT), *SERVICES, *versions, *contents]).encode()).hexdigest()


# ----------------------------------------------------------------------------------------------------------- the wheels
def _build_into(folder: Path, parts: Iterable[metadata.Distribution], own_files: dict[str, Path]) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".wheelhouse-", dir=folder.parent))
    try:
        wheels = [_wheel(scratch, part.metadata["Name"], part.version, _files_of(part)) for part in parts]
        wheels.append(_own_wheel(scratch, own_files))
        house = Wheelhouse(scratch, tuple(sorted(wheels, key=lambda wheel: wheel.name)))
        (scratch / MANIFEST_NAME).write_bytes(house.manifest)
        try:
            os.replace(scratch, folder)
        except OSError:  # another fleetctl was quicker: its wheels are the same
            if not (folder / MANIFEST_NAME).exists():
                shutil.rmtree(folder, ignore_errors=True)
                os.replace(scratch, folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _forget_old(cache: Path) -> None:
    """Keep only the newest: each change of a version, or of our own code, makes another."""
    houses = sorted(cache.glob("wheelhouse-*"), key=lambda house: house.stat().st_mtime)
    for house in houses[:-_KEPT]:
        shutil.rmtree(house, ignore_errors=True)


def _own_wheel(folder: Path, own_files: dict[str, Path]) -> Wheel:
    version = metadata.version("spotheal") if _is_installed("spotheal") else "0"
    dist_info = f"spotheal-{version}.dist-info"
    texts = {
        f"{dist_info}/METADATA": f"Metadata-Version: 2.1\nName: spotheal\nVersion: {version}\n",
        f"{dist_info}/entry_points.txt": "[console_scripts]\nspotheal-agent = spotheal.agent.__main__:main\n",
    }
    contents = {name: path.read_bytes() for name, path in own_files.items()}
    contents |= {name: text.encode() for name, text in texts.items()}
    return _zip(folder, "spotheal", version, contents)


def _wheel(folder: Path, name: str, version: str, files: dict[str, Path]) -> Wheel:
    return _zip(folder, name, version, {path: source.read_bytes() for path, source in files.items()})


def _zip(folder: Path, name: str, version: str, contents: dict[str, bytes]) -> Wheel:
    stem = f"{re.sub(r'[-_.]+', '_', name)}-{version}"
    dist_info = next(
        (path.split("/")[0] for path in contents if path.split("/")[0].endswith(".dist-info")), f"{stem}.dist-info"
    )
    contents = dict(contents)
    contents[f"{dist_info}/WHEEL"] = (
        b"Wheel-Version: 1.0\nGenerator: spotheal\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    )
    rows = [(path, f"sha256={_urlsafe(body)}", str(len(body))) for path, body in sorted(contents.items())]
    record = io.StringIO()
    csv.writer(record, lineterminator="\n").writerows([*rows, (f"{dist_info}/RECORD", "", "")])
    contents[f"{dist_info}/RECORD"] = record.getvalue().encode()
    target = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(target, "w") as archive:
        for path, body in sorted(contents.items()):
            entry = zipfile.ZipInfo(path, date_time=_EPOCH)
            entry.external_attr = 0o644 << 16
            entry.create_system = 3
            archive.writestr(entry, body, compress_type=zipfile.ZIP_DEFLATED, compresslevel=6)
    body = target.read_bytes()
    return Wheel(target.name, hashlib.sha256(body).hexdigest(), len(body))


def _urlsafe(body: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(body).digest()).rstrip(b"=").decode()
