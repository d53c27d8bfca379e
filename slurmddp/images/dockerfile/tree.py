"""The files of the build context that one COPY takes: as few entries as .dockerignore and links allow."""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass, field
from pathlib import Path

from slurmddp.images.base import is_carried
from slurmddp.images.dockerfile.ignore import Ignore, expression
from slurmddp.images.dockerfile.lines import Instruction

_MAGIC = re.compile(r"[*?\[]")


@dataclass
class Tree:
    """What one source of a COPY holds; names are relative to the source, with `/`.

    folder:  whether the source is a folder, whose content is copied.
    entries: files, and folders that go in whole, (path, name); the name is "" where the source itself does.
    links:   symbolic links, which Apptainer would follow: (target, name).
    folders: folders that are made by hand, since not all of them goes in: (name, mode).
    """

    folder: bool
    entries: list[tuple[Path, str]] = field(default_factory=list)
    links: list[tuple[str, str]] = field(default_factory=list)
    folders: list[tuple[str, int]] = field(default_factory=list)


def sources(context: Path, pattern: str, ignore: Ignore, instruction: Instruction) -> list[str]:
    """The paths, relative to the context, that a source of COPY names. Raises UserError where there are none."""
    parts = [part for part in pattern.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise instruction.error(f"{pattern!r} leads out of the folder of the Dockerfile", "move the Dockerfile up")
    found = [""]
    for part in parts:
        if not _MAGIC.search(part):
            found = [os.path.join(base, part) for base in found if os.path.lexists(context / base / part)]
            continue
        try:
            wanted = expression(part)
        except (ValueError, re.error):
            raise instruction.error(f"the pattern {pattern!r} is broken", "close its bracket") from None
        found = [
            os.path.join(base, name)
            for base in found
            if (context / base).is_dir()
            for name in sorted(os.listdir(context / base))
            if wanted.fullmatch(name)
        ]
    kept = [path for path in found if not path or not ignore.ignored(path) or _holds_exceptions(context / path, ignore)]
    if not kept:
        why = f"is kept out by {ignore.file}" if found else f"is not in {context}"
        raise instruction.error(f"{pattern!r} {why}", "a source is named from the Dockerfile's own folder")
    return kept


def _holds_exceptions(path: Path, ignore: Ignore) -> bool:
    return ignore.has_exceptions and path.is_dir()


def collect(context: Path, source: str, ignore: Ignore, instruction: Instruction) -> Tree:
    """What of `source`, relative to the context, goes in. Raises UserError for names that cannot be carried."""
    root = Path(os.path.realpath(context))
    path = Path(os.path.realpath(root / source))
    if path != root and root not in path.parents:
        raise instruction.error(f"the link {source!r} leads out of {root}", "copy the file itself there")
    if not path.is_dir():
        if not path.is_file():
            raise instruction.error(f"{source!r} is no file and no folder", "copy files and folders only")
        tree = Tree(False, [(path, os.path.basename(source))])
    else:
        tree = Tree(True)
        if _walk(path, source, "", ignore, tree, instruction):
            tree = Tree(True, [(path, "")])
        elif source and ignore.ignored(source) and not (tree.entries or tree.links):
            raise instruction.error(f"{source!r} is kept out by {ignore.file}", "allow it there with !")
    for entry, name in tree.entries:
        _check(str(entry), instruction)
        _check(name or "/", instruction)
    return tree


def _walk(folder: Path, below: str, name: str, ignore: Ignore, tree: Tree, instruction: Instruction) -> bool:
    """Add the folder's content; whether all of it went in. `below`: the folder as .dockerignore knows it."""
    whole = True
    try:
        found = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        raise instruction.error(f"{folder} cannot be read: {error.strerror}", "make it readable") from None
    for entry in found:
        inside, relative = f"{name}/{entry.name}".lstrip("/"), f"{below}/{entry.name}".lstrip("/")
        out = ignore.ignored(relative)
        if entry.is_symlink():
            whole = False
            if not out:
                tree.links.append((os.readlink(entry.path), inside))
        elif entry.is_dir():
            if out and not ignore.has_exceptions:
                whole = False
                continue
            kept = _walk_below(Path(entry.path), relative, inside, out, ignore, tree, instruction)
            whole = whole and kept
        elif out or not entry.is_file():
            whole = False
        else:
            tree.entries.append((Path(entry.path), inside))
    return whole


def _walk_below(
    folder: Path, relative: str, inside: str, out: bool, ignore: Ignore, tree: Tree, instruction: Instruction
) -> bool:
    entries, links, folders = len(tree.entries), len(tree.links), len(tree.folders)
    whole = _walk(folder, relative, inside, ignore, tree, instruction)
    if whole and not out:
        del tree.entries[entries:]
        tree.entries.append((folder, inside))
        return True
    if not out or (len(tree.entries), len(tree.links), len(tree.folders)) != (entries, links, folders):
        tree.folders.insert(folders, (inside, stat.S_IMODE(folder.stat().st_mode)))
    return False


def _check(text: str, instruction: Instruction) -> None:
    if not is_carried(text):
        raise instruction.error(
            f"the name {text!r} holds a character that Apptainer's %files does not carry",
            "rename it, or keep it out with .dockerignore",
        )
