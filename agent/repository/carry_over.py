"""What is done inside a working copy, as the trainer's user: a trainer could have put a link anywhere in it.

    carry_over.py carry {"old", "new", "record", "keep"}  what the trainer wrote in `old` is moved to `new`
    carry_over.py link {"copy", "keep", "paths", "record"} `paths` of `copy` become links to the same paths below `keep`
    carry_over.py link-kept {"copy", "keep"}              the same for what lies in `keep` and not in `copy`
    carry_over.py changed {"copy", "record"}              the commit's files that differ, each with its content

`record` is a JSON file whose "files" are those of the commit of `old` or `copy`, and "setup" those that `setup` has
changed. Prints a JSON line for each path that a person should know of, {"path", "what"}; {"refused"} and exit 3 where
an order cannot be carried out. Everything is done by rename and may be done again after a kill. Standard library of
Python 3.7, as the text of `python -I -S -c`: the trainer's interpreter runs it, and the trainer's user may not be able
to read this file.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import stat
import sys
from collections.abc import Iterator, Sequence

CHUNK_BYTES = 1 << 20
EXIT_REFUSED = 3
LEFT = "could not be moved"  # of another owner: all else goes on
_MADE_AGAIN = {"__pycache__"}  # Python makes them again, of the new commit's files


class Refused(Exception):
    """An order that would leave its folders."""


def main() -> None:
    order = json.loads(sys.argv[2])
    try:
        if sys.argv[1] == "carry":
            lines = carry(order["old"], order["new"], _files_in(order["record"]), order["keep"])
        elif sys.argv[1] == "link":
            lines = link(order["copy"], order["keep"], order["paths"], _files_in(order["record"]))
        elif sys.argv[1] == "changed":
            lines = changed(order["copy"], _files_in(order["record"]))
        else:
            lines = link_kept(order["copy"], order["keep"])
        for path, result in lines:
            print(json.dumps({"path": path, "what": result}), flush=True)
    except (Refused, RecursionError) as refused:
        reason = (
            str(refused) if isinstance(refused, Refused) else "folders in the working copy lie too deep to be moved"
        )
        print(json.dumps({"refused": reason}), flush=True)
        sys.exit(EXIT_REFUSED)


def _files_in(record: str) -> dict[str, str]:
    with open(record, encoding="utf-8") as file:
        document = json.load(file)
    files: dict[str, str] = {**document["files"], **document.get("setup", {})}
    return files


# ------------------------------------------------------------------------------------------------------ what a file is
def content_of(path: str, *, dir_fd: int | None = None) -> str:
    """Equal for files of equal bytes, and for links to the same place; "" for a folder and for what cannot be read.

    The right to execute does not count: a script that a `setup` command made executable is still the commit's.
    """
    try:
        mode = os.stat(path, dir_fd=dir_fd, follow_symlinks=False).st_mode
        if stat.S_ISLNK(mode):
            return "link " + os.readlink(path, dir_fd=dir_fd)
        if not stat.S_ISREG(mode):
            return ""
        total = hashlib.sha256()
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=dir_fd), "rb") as file:
            for chunk in iter(lambda: file.read(CHUNK_BYTES), b""):
                total.update(chunk)
        return "file " + total.hexdigest()
    except OSError:
        return ""


def changed(copy: str, files: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Those of `files` that are in `copy` with another content."""
    for path, content in files.items():
        found = content_of(os.path.join(copy, path))
        if found not in ("", content):
            yield path, found


# ---------------------------------------------------------------------------------------------------------- carry over
def carry(old: str, new: str, files: dict[str, str], keep: str) -> Iterator[tuple[str, str]]:
    """Move to `new`, a copy of another commit, all of `old` that is not as its commit has it.

    `files`: the content of each file of the old commit. What the trainer wrote stays in its place, also where the new
    commit has a file there; where one has a folder and the other a file, the trainer's is moved beside the commit's.
    """
    parents = {os.path.dirname(path) for path in files}
    while parents - {""} and not parents.issuperset({os.path.dirname(path) for path in parents}):
        parents |= {os.path.dirname(path) for path in parents}
    try:
        yield from _carry(old, new, "", files, parents | {""}, keep)
    except PermissionError:
        yield ".", LEFT


def _carry(
    old: str, new: str, below: str, files: dict[str, str], parents: set[str], keep: str
) -> Iterator[tuple[str, str]]:
    """PermissionError if the folder `below` cannot be opened."""
    _open(os.path.join(old, below))
    for name in sorted(os.listdir(os.path.join(old, below))):
        path = os.path.join(below, name)
        if path == ".git" or name in _MADE_AGAIN:
            continue
        try:
            yield from _carry_entry(old, new, path, files, parents, keep)
        except PermissionError:
            yield path, LEFT


def _carry_entry(
    old: str, new: str, path: str, files: dict[str, str], parents: set[str], keep: str
) -> Iterator[tuple[str, str]]:
    source, target = os.path.join(old, path), os.path.join(new, path)
    if os.path.isdir(source) and not os.path.islink(source):
        if os.path.isdir(target) and not os.path.islink(target):
            yield from _carry(old, new, path, files, parents, keep)
        elif path not in parents:
            yield from _move(source, target, path)  # all of it is the trainer's
        elif _holds_more(source, path, files):
            yield from _make_room(target, path)
            os.mkdir(target)
            yield from _carry(old, new, path, files, parents, keep)
    elif _is_link_into(source, keep):
        if not os.path.lexists(target):
            os.rename(source, target)
    elif _is_of_earlier_mount(source, keep, path):
        if not os.path.lexists(target):
            os.symlink(os.path.join(keep, path), target)
    elif path not in files or files[path] != content_of(source):
        changed = path in files or (os.path.lexists(target) and not os.path.isdir(target))
        yield from _move(source, target, path)
        if changed:
            yield path, "changed"


def _open(folder: str) -> int:
    """Let its owner list and write it; returns its mode before. PermissionError if it is of another owner."""
    mode = stat.S_IMODE(os.stat(folder).st_mode)
    if mode & 0o700 != 0o700:
        os.chmod(folder, mode | 0o700)
    return mode


def _set_mode(folder: str, mode: int) -> None:
    if stat.S_IMODE(os.stat(folder).st_mode) != mode:
        os.chmod(folder, mode)


def _move(source: str, target: str, path: str) -> Iterator[tuple[str, str]]:
    """By rename, over a file and never over a folder."""
    if not os.path.isdir(source) or os.path.islink(source):
        if os.path.isdir(target) and not os.path.islink(target):
            target = _free(target)
            yield path, "moved to " + os.path.basename(target)
        os.rename(source, target)
        return
    mode = _open(source)  # a rename writes the folder's own entry `..`
    aside = _free(target) if os.path.lexists(target) else ""
    if aside:
        os.rename(target, aside)
    try:
        os.rename(source, target)
    except PermissionError:
        if aside:
            os.rename(aside, target)
        _set_mode(source, mode)
        raise
    _set_mode(target, mode)
    if aside:
        yield path, "changed"


def _make_room(target: str, path: str) -> Iterator[tuple[str, str]]:
    """The new commit has a file where the trainer's folder is: the commit's gives way, for it can be had again."""
    if os.path.lexists(target):
        os.rename(target, _free(target))
        yield path, "changed"


def _free(path: str) -> str:
    names = (path + ".spotheal" + (str(n) if n > 1 else "") for n in range(1, 10_000))
    return next(name for name in names if not os.path.lexists(name))


def _holds_more(folder: str, below: str, files: dict[str, str]) -> bool:
    """Whether anything in the folder is not as the old commit has it."""
    closed: list[OSError] = []
    for place, folders, names in os.walk(folder, onerror=closed.append):
        folders[:] = [name for name in folders if name not in _MADE_AGAIN]
        links = [name for name in folders if os.path.islink(os.path.join(place, name))]
        for name in names + links:
            path = os.path.join(below, os.path.relpath(os.path.join(place, name), folder))
            if path not in files or files[path] != content_of(os.path.join(place, name)):
                return True
    return bool(closed)  # a folder that cannot be listed may hold work


def _is_link_into(path: str, folder: str) -> bool:
    return os.path.islink(path) and os.readlink(path).startswith(folder + "/")


def _is_of_earlier_mount(place: str, keep: str, path: str) -> bool:
    """Whether the link of the kept `path` was made when the volume was mounted elsewhere. Taken for a save of the
    script, such a link to nothing replaced the kept folder, and the next machine found it empty."""
    earlier = os.path.join(os.sep, os.path.basename(keep), path)
    return os.path.islink(place) and os.readlink(place).endswith(earlier)


# -------------------------------------------------------------------------------------------------------------- `keep`
def link(copy: str, keep: str, paths: Sequence[str], files: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Make each of `paths` below `copy` a link to the same path below `keep`; again is harmless.

    `files`: the content of each file of the commit. What the trainer wrote in place of a link (a save that replaces the
    file by rename) goes over the file in `keep`, which is renamed next to it.
    Of a file that is as the commit has it the content in `keep` wins; files that only the copy has are moved. A path
    that neither has becomes a folder, or nothing yet if it has a suffix (`log.csv`) and no slash at its end. Raises
    Refused if a link would lead out of either folder.
    """
    linked: list[str] = []
    for text in sorted(paths, key=lambda path: path.strip("/").count("/")):
        path = os.path.normpath(text)
        if any(path == linked_path or path.startswith(linked_path + "/") for linked_path in linked):
            continue  # a kept folder keeps what is in it
        for top in (copy, keep):
            parent = os.path.dirname(os.path.join(top, path))
            _refuse_outside(parent, top, text)
            os.makedirs(parent, exist_ok=True)
        as_file = bool(os.path.splitext(path)[1]) and not text.endswith("/")
        try:
            yield from _link(copy, keep, path, as_file, files)
        except PermissionError:
            yield path, LEFT
        linked.append(path)


def _refuse_outside(parent: str, top: str, text: str) -> None:
    """Looked at before anything is made: a folder that a link led to was made outside (S7 of the same audit)."""
    if os.path.commonpath([os.path.realpath(parent), os.path.realpath(top)]) != os.path.realpath(top):
        raise Refused(f"`keep` names {text!r}, but {parent} leads out of {top} by a link")


def link_kept(copy: str, keep: str) -> Iterator[tuple[str, str]]:
    """Link what lies in `keep`, of an earlier version or a `keep` that job.toml no longer has, where `copy` has nothing
    of that name."""
    for place, folders, names in os.walk(keep):
        below = os.path.relpath(place, keep)
        for name in sorted(folders + names):
            path = os.path.normpath(os.path.join(below, name))
            target = os.path.join(copy, path)
            if os.path.lexists(target):
                continue
            os.symlink(os.path.join(keep, path), target)
            yield path, "linked"
        folders[:] = [n for n in folders if _is_folder_of(copy, os.path.normpath(os.path.join(below, n)))]


def _is_folder_of(copy: str, path: str) -> bool:
    place = os.path.join(copy, path)
    return os.path.isdir(place) and not os.path.islink(place)


def _link(copy: str, keep: str, path: str, as_file: bool, files: dict[str, str]) -> Iterator[tuple[str, str]]:
    place, home = os.path.join(copy, path), os.path.join(keep, path)
    if os.path.islink(place) and os.readlink(place) == home:
        if os.path.exists(home) or as_file:
            return
        os.unlink(place)
    elif _is_of_earlier_mount(place, keep, path):
        os.unlink(place)
    if os.path.islink(home):
        os.unlink(home)  # nothing of ours is a link there
    if os.path.lexists(place):
        yield from _move_home(place, home, path, files)
        if os.path.lexists(place):
            _remove(place)
    elif not os.path.exists(home) and not as_file:
        os.mkdir(home)
    os.symlink(home, place)


def _move_home(source: str, home: str, path: str, files: dict[str, str]) -> Iterator[tuple[str, str]]:
    """File by file; a kill between two renames leaves each file in one of the two places."""
    mode = os.lstat(source).st_mode
    if stat.S_ISDIR(mode):
        if os.path.lexists(home) and (os.path.islink(home) or not os.path.isdir(home)):
            if not _holds_more(source, path, files):
                return
            yield from _put_aside(home, path)
        os.makedirs(home, exist_ok=True)
        _open(source)
        for name in sorted(os.listdir(source)):
            if name not in _MADE_AGAIN:
                target = os.path.join(home, name)
                yield from _move_home(os.path.join(source, name), target, os.path.join(path, name), files)
    elif stat.S_ISREG(mode) or stat.S_ISLNK(mode):
        if os.path.lexists(home):
            content = content_of(source)
            if content and content in (files.get(path), content_of(home)):
                return
            yield from _put_aside(home, path)
        _rename_or_copy(source, home)


def _put_aside(home: str, path: str) -> Iterator[tuple[str, str]]:
    """Never deleted: it may be the only good save."""
    aside = _free(home)
    os.rename(home, aside)
    yield path, "the copy before is " + os.path.basename(aside)


def _rename_or_copy(source: str, target: str) -> None:
    """A clone on the machine's own disk is on another file system than `keep`; the file at `target` is a whole one."""
    try:
        os.rename(source, target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        part_file = os.path.join(os.path.dirname(target), "." + os.path.basename(target) + ".spotheal")
        if os.path.lexists(part_file):
            os.unlink(part_file)
        shutil.copy2(source, part_file, follow_symlinks=False)
        os.rename(part_file, target)


def _remove(path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    else:
        os.unlink(path)


if __name__ == "__main__":
    main()
