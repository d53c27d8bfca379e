"""`slurmddp migrate`: job and site files get the new names of their keys; nothing else in them changes."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from slurmddp.errors import UserError
from slurmddp.runs.layout import RunFolder
from slurmddp.spec.document import read_spans, text_of
from slurmddp.spec.renamed import old_keys


class Migration(NamedTuple):
    """A file, its text before and after, and what was renamed: "FILE:LINE: OLD -> NEW"."""

    path: Path
    before: str
    after: str
    changes: tuple[str, ...]

    def diff(self) -> Iterator[str]:
        """The lines of a unified diff."""
        before, after = self.before.splitlines(keepends=True), self.after.splitlines(keepends=True)
        for line in difflib.unified_diff(before, after, str(self.path), str(self.path)):
            yield line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"


def migrations(files: Iterable[Path]) -> list[Migration]:
    """Return the changes to each file. Writes nothing. Raises UserError for the first that cannot be edited safely."""
    return [_migration(path) for path in files]


def write(migration: Migration) -> None:
    """Replace the file by its new text, as a whole, with the same permissions. Raises UserError."""
    path = Path(os.path.realpath(migration.path))  # a link stays one
    part = path.with_name(f".{path.name}.part-{os.getpid()}")
    try:
        found = path.stat()
        try:
            with open(part, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
                file.write(migration.after.encode())
            if (found.st_uid, found.st_gid) != (part.stat().st_uid, part.stat().st_gid):
                os.chown(part, found.st_uid, found.st_gid)
            part.chmod(found.st_mode & 0o7777)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(
            f"cannot be written: {error.strerror}",
            where=str(migration.path),
            todo="`slurmddp migrate --check` shows what to change; nothing in it was changed",
        ) from None


def _migration(path: Path) -> Migration:
    name = str(path)
    if RunFolder(path.parent).exists:
        raise UserError(
            "belongs to a run: slurmddp reads its old keys as they are", where=name, todo="migrate a copy of it"
        )
    text = text_of(path, name)
    mark = text.startswith("\ufeff")  # a byte order mark, which not every parser counts
    document, spans = read_spans(text[mark:], "file", name)
    edits, changes = [], []
    for key, row in old_keys(document.tree):
        word = row.new[-1]
        new_key = (*key[:-1], word)
        old, new, where = ".".join(key), ".".join(new_key), document.origins[key].where
        if new_key in spans:
            line = document.origins[new_key].where.rpartition(":")[2]
            what = f"{old} and its new name {new} (line {line}) are both set"
            raise UserError(what, where=where, todo=f"remove {old}")
        begin, end = (mark + index for index in spans[key])
        # An anchor or a tag may stand before the word, and quotes around it.
        begin = text.rfind(key[-1], begin, end)
        if begin < 0 or text[begin + len(key[-1]) : end] not in ("", "'", '"'):
            raise UserError(f"{old} is written with escapes", where=where, todo=f"rename it to {new} by hand")
        edits.append((begin, begin + len(key[-1]), word))
        if row.value is not None:
            value = re.compile(r"\s*:\s*(\w+)").match(text, end)
            if value is None:
                raise UserError(f"{old} has a value that cannot be edited", where=where, todo=f"{new}: {row.value}")
            edits.append((*value.span(1), row.value))
        changes.append((begin, f"{where}: {old} -> {new}"))
    after = text
    for begin, end, word in sorted(edits, reverse=True):
        after = after[:begin] + word + after[end:]
    return Migration(path, text, after, tuple(change for _, change in sorted(changes)))
