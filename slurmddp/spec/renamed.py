"""Keys that have a new name: the table of them, and what reads the old ones in the files of older runs."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from slurmddp.shared.run_folder import RunFolder
from slurmddp.shared.task_options import OPTIONS
from slurmddp.spec.document import Document, Key, Origin, read_file


class Renamed(NamedTuple):
    """One key. `old` and `new` differ in their last word only; `since`: the first version that refuses `old`.

    option: it belongs to the bundled tasks; a task of the user's own may still call an option by the old name.
    value: what the new key gets, whatever the old one had, where their values differ.
    """

    old: Key
    new: Key
    since: str
    option: bool = False
    value: str | None = None


def _row(old: str, word: str, since: str, *, option: bool = False, value: str | None = None) -> Renamed:
    key = tuple(old.split("."))
    return Renamed(key, (*key[:-1], word), since, option, value)


#: Keys of a site file stand here as they are written there, those of a job without the `job` above them.
RENAMED = (
    _row("checkpoint.every", "interval", "0.1.0"),
    _row("train.data.held_out", "validation_fraction", "0.1.0", option=True),
    _row("train.evaluate.every", "every_steps", "0.1.0"),
    _row("train.not_finite", "on_nonfinite", "0.1.0"),
    _row("train.agree_every", "replica_check_every", "0.1.0"),
    _row("deadman", "watchdog", "0.1.0"),
    _row("experimental", "level", "0.1.0", value="documented"),
)
_BY_KEY = {row.old: row for row in RENAMED}


def row_of(key: Key) -> Renamed | None:
    """The row of an old key; None for any other."""
    return _BY_KEY.get(key)


def old_keys(tree: dict[str, Any]) -> Iterator[tuple[Key, Renamed]]:
    """Each old key in the tree of a job file, or of a site file and its `job`, with its row."""
    for above in ((), ("job",)):
        for row in RENAMED:
            key = (*above, *row.old)
            holder = _at(tree, key[:-1])
            if key[-1] in holder and not (row.option and _own_task(_at(tree, (*above, "train")))):
                yield key, row


def renamed(document: Document) -> Document:
    """The document with the new names, in the same order. A key whose new name is there, too, stays as it is."""
    tree, origins = document.tree, dict(document.origins)
    for old, row in old_keys(document.tree):
        new = (*old[:-1], row.new[-1])
        if new in origins:
            continue
        tree = _with_word(tree, old, row)
        moved = [path for path in origins if path[: len(old)] == old]
        origins |= {(*new, *path[len(old) :]): origins.pop(path) for path in moved}
    return Document(tree, origins)


def read_layer(path: Path, layer: str, shown: str | None = None) -> Document:
    """Read a job or site file. One in a run folder, which an older slurmddp may have written, may have old keys."""
    if RunFolder(path.parent).exists:
        return renamed(read_file(path, layer, shown, below=path.parent))
    return read_file(path, layer, shown)


def advice(row: Renamed, origin: Origin, new_origin: Origin | None) -> str:
    """Return what is wrong with an old key, and what to do: by where it is set, and by where its new name is."""
    old, new = ".".join(row.old), ".".join(row.new)
    what = f"renamed to {new} in {row.since}"
    if origin.layer == "environment":
        return f"{what}\n  -> set SLURMDDP_{'__'.join(row.new).upper()} instead"
    if origin.layer == "command line":
        return f"{what}\n  -> write --set {new}=VALUE"
    file = origin.where.rpartition(":")[0]
    if not file:  # the dict that a program submits
        return f"{what}\n  -> write {new}"
    if new_origin is not None and new_origin.where.startswith(f"{file}:"):
        return f"{what}, and line {new_origin.where.rpartition(':')[2]} sets {new}, too\n  -> remove {old}"
    return f"{what}\n  -> slurmddp migrate {shlex.quote(file)}"


def _at(tree: Any, key: Key) -> dict[str, Any]:
    """The map at a key; an empty one where there is none."""
    for part in key:
        tree = tree.get(part) if isinstance(tree, dict) else None
    return tree if isinstance(tree, dict) else {}


def _own_task(train: dict[str, Any]) -> bool:
    """Return whether `train` names the user's own task or program. A layer that names none is for a bundled one."""
    return train.get("task", "lm") not in OPTIONS or any(train.get(name) is not None for name in ("script", "module"))


def _with_word(tree: dict[str, Any], key: Key, row: Renamed) -> dict[str, Any]:
    """A copy of the tree in which the last word of `key`, and its value where that differs, are the new ones."""
    if len(key) > 1:
        return {**tree, key[0]: _with_word(tree[key[0]], key[1:], row)}
    new = row.new[-1], tree[key[0]] if row.value is None else row.value
    return dict(new if name == key[0] else (name, value) for name, value in tree.items())
