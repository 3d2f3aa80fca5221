"""`keep`: paths of the clone that live on the volume, so that what a trainer writes there outlives the machine."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Sequence
from pathlib import Path

from spotheal.agent.account import Account
from spotheal.agent.errors import SetupFailed
from spotheal.agent.folders import give


def link_kept(clone: Path, paths: Sequence[str], kept: Path, account: Account | None) -> None:
    """Make each of `paths` below `clone` a link to the same path below `kept`; again is harmless.

    What the clone has there is moved the first time; later the volume's content wins, and files that only the clone
    has are added. A path that neither has becomes a folder, or nothing yet where it has a suffix (`log.csv`) and no
    slash at its end. Raises SetupFailed where a link would lead out of either folder.
    """
    done: list[Path] = []
    for text in sorted(paths, key=lambda path: path.strip("/").count("/")):
        path = Path(text)
        if any(path == other or other in path.parents for other in done):
            continue  # a kept folder keeps what is in it
        place, home = clone / path, kept / path
        for parent, top in ((place.parent, clone), (home.parent, kept)):
            parent.mkdir(parents=True, exist_ok=True)
            if not parent.resolve().is_relative_to(top.resolve()):
                raise SetupFailed(
                    f"`keep` names {text!r}, but {parent} leads out of {top} by a link",
                    next_step="correct `keep` in job.toml",
                )
            _own_parents(parent, top, account)
        _link(place, home, as_file=bool(path.suffix) and not text.endswith("/"), account=account)
        done.append(path)


def _link(place: Path, home: Path, *, as_file: bool, account: Account | None) -> None:
    if place.is_symlink() and os.readlink(place) == str(home) and (home.exists() or as_file):
        return
    if home.is_symlink():
        home.unlink()  # nothing of ours is a link there, and root must not follow one
    if os.path.lexists(place):
        _add(place, home)
        give(home, account)
        _remove(place)
    elif not home.exists() and not as_file:
        home.mkdir()
        give(home, account)
    os.symlink(home, place)
    if account is not None:
        os.lchown(place, account.uid, account.gid)


def _add(source: Path, target: Path) -> None:
    """Copy `source` to `target`, leaving alone what is there; by rename, so that a file there is a whole one."""
    mode = os.lstat(source).st_mode
    if stat.S_ISDIR(mode):
        if os.path.lexists(target) and (target.is_symlink() or not target.is_dir()):
            return  # never through a link that a trainer made
        target.mkdir(exist_ok=True)
        for name in os.listdir(source):
            _add(source / name, target / name)
    elif not os.path.lexists(target):
        beside = target.with_name(f".{target.name}.spotheal")
        beside.unlink(missing_ok=True)
        if stat.S_ISLNK(mode):
            os.symlink(os.readlink(source), beside)
        elif stat.S_ISREG(mode):
            shutil.copy2(source, beside)
        else:
            return
        os.rename(beside, target)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _own_parents(parent: Path, top: Path, account: Account | None) -> None:
    """Folders that had to be made on the way are the account's."""
    while account is not None and parent != top:
        os.lchown(parent, account.uid, account.gid)
        parent = parent.parent
