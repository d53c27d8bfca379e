"""The files of the build context that one COPY takes: as few entries as .dockerignore and --exclude allow."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from slurmddp.images.context.ignore import Ignore, expression

if TYPE_CHECKING:
    from slurmddp.images.dockerfile.lines import Instruction

MAGIC = re.compile(r"[*?\[]")
#: Folders above the context in which a source that is not in it is looked for.
_ABOVE = 4


@dataclass(frozen=True)
class Context:
    """The build's folder, and what .dockerignore keeps out of it."""

    folder: Path
    ignore: Ignore

    def sources(self, pattern: str, instruction: Instruction) -> list[str]:
        """The paths, relative to the folder, that a source of COPY names. Raises UserError where there are none.

        A pattern that nothing matches is no mistake, as in Docker; `..` at the root stays there.
        """
        inside = os.path.normpath(f"/{pattern}").lstrip("/")
        paths = [""]
        for part in inside.split("/") if inside else ():
            if not MAGIC.search(part):
                paths = [os.path.join(base, part) for base in paths if os.path.lexists(self.folder / base / part)]
                continue
            try:
                matcher = expression(part)
            except (ValueError, re.error):
                raise instruction.error(f"the pattern {pattern!r} has an unclosed bracket", "close it") from None
            paths = [
                os.path.join(base, name)
                for base in paths
                if (self.folder / base).is_dir()
                for name in sorted(os.listdir(self.folder / base))
                if matcher.fullmatch(name)
            ]
        kept = [path for path in paths if not path or not self.ignore.ignored(path) or self._holds_exceptions(path)]
        if kept or MAGIC.search(inside):
            return kept
        if paths:
            raise instruction.error(f"{self.ignore.file} excludes {pattern!r}", "allow it there with !")
        raise instruction.error(f"{pattern!r} is not in {self.folder}", self._elsewhere(inside))

    def _holds_exceptions(self, path: str) -> bool:
        return self.ignore.has_exceptions and (self.folder / path).is_dir()

    def _elsewhere(self, inside: str) -> str:
        for folder in self.folder.parents[:_ABOVE]:
            if folder.parent != folder and os.path.lexists(folder / inside):
                return f"it is in {folder}: --context {folder}"
        return "a source is named from the build context, the Dockerfile's own folder without --context DIR"

    def collect(self, source: str, exclude: Ignore, instruction: Instruction) -> Tree:
        """Return what of `source`, relative to the folder, goes in. Raises UserError where that is nothing."""
        root = Path(os.path.realpath(self.folder))
        path = Path(os.path.realpath(root / source))
        if path != root and root not in path.parents:
            raise instruction.error(f"the link {source!r} points outside of {root}", "copy the file itself there")
        if not path.is_dir():
            if not path.is_file():
                raise instruction.error(f"{source!r} is neither a file nor a folder", "copy files and folders only")
            name = os.path.basename(source)
            return Tree(False, [] if exclude.ignored(name) else [(path, name, True)])
        below = "" if path == root else str(path.relative_to(root))
        tree = Tree(True)
        if _Walk(self.ignore, exclude, tree, instruction).folder(path, below, ""):
            tree.entries = [(path, "", True)]
        elif below and self.ignore.ignored(below) and not tree.entries:
            raise instruction.error(f"{self.ignore.file} excludes {source!r}", "allow it there with !")
        else:
            tree.entries.insert(0, (path, "", False))
        return tree


@dataclass
class Tree:
    """What one source of a COPY holds."""

    folder: bool  # whether the source is a folder, whose content is copied
    #: (path, name, whole): a name is relative to the source, with `/`, and "" for the source itself; of a folder that
    #: is not whole, what goes in of it follows
    entries: list[tuple[Path, str, bool]] = field(default_factory=list)

    def below(self, place: str, top: Path) -> Tree:
        """The tree as content of a folder, at `place` in it; the folders between are made as they are below `top`."""
        at = place if self.folder else os.path.dirname(place)
        names = at.split("/")
        above = [part for count in range(len(names)) if (part := "/".join(names[: count + 1]))]
        inside = [(path, os.path.join(at, name).rstrip("/"), whole) for path, name, whole in self.entries]
        return Tree(True, [*((top / part, part, False) for part in above), *inside])


@dataclass(frozen=True)
class _Walk:
    ignore: Ignore
    exclude: Ignore
    tree: Tree
    instruction: Instruction

    def folder(self, folder: Path, below: str, name: str) -> bool:
        """Add the folder's content; whether all of it went in. `below`: the folder as .dockerignore knows it."""
        whole = True
        try:
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except OSError as error:
            raise self.instruction.error(f"{folder} cannot be read: {error.strerror}", "make it readable") from None
        for entry in entries:
            inside, relative = f"{name}/{entry.name}".lstrip("/"), f"{below}/{entry.name}".lstrip("/")
            out = self.ignore.ignored(relative) or self.exclude.ignored(inside)
            if entry.is_dir(follow_symlinks=False):
                deeper = not out or self.ignore.has_exceptions or self.exclude.has_exceptions
                whole = (deeper and self._below(Path(entry.path), relative, inside, out)) and whole
            elif out or not (entry.is_symlink() or entry.is_file()):
                whole = False
            else:
                self.tree.entries.append((Path(entry.path), inside, True))
        return whole

    def _below(self, folder: Path, relative: str, inside: str, out: bool) -> bool:
        count = len(self.tree.entries)
        whole = self.folder(folder, relative, inside) and not out
        if whole:
            self.tree.entries[count:] = [(folder, inside, True)]
        elif not out or len(self.tree.entries) != count:
            self.tree.entries.insert(count, (folder, inside, False))
        return whole
