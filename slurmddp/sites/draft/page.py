"""A site profile as text: each value with a comment that says where it comes from."""

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from slurmddp.job.document import is_null
from slurmddp.visible import one_line

#: A list of texts, or one value.
Value = str | int | bool | list[str]


class Page:
    """Collects the lines of a profile, the facts behind its values, and what was not found."""

    def __init__(self, date: str) -> None:
        self._date = date
        self._lines: list[str] = []
        self._open: tuple[str, ...] = ()
        self._values = 0
        self._sources: dict[str, dict[str, bool]] = {}
        self._missing: list[str] = []

    def comment(self, text: str = "", depth: int = 0) -> None:
        """Add a line that is only for people; without a text, an empty one."""
        self._lines.append(f"{'  ' * depth}# {one_line(text)}" if text else "")

    def value(
        self, key: str | tuple[str, ...], value: Value, source: str = "", note: str = "", *, sure: bool = True
    ) -> None:
        """Add a value. key: as a.b.c, or in its parts; source: the command that told it; note: what else to say;
        sure: it holds for the nodes, too."""
        path = tuple(key.split(".")) if isinstance(key, str) else key
        *above, name = path
        self._enter(tuple(above))
        origin = f"{source}, {self._date}" if source else ""
        comment = one_line("; ".join(filter(None, (origin, note))))
        self._lines.append(f"{'  ' * len(above)}{_scalar(name)}: {_written(value)}{f' # {comment}' if comment else ''}")
        self._values += 1
        if source:
            section = ".".join(path[:2] if path[0] == "job" else path[:1])
            self._sources.setdefault(section, {})[source] = sure

    @contextmanager
    def part(self, key: tuple[str, ...], note: str) -> Iterator[None]:
        """Begin a map that stays empty where none of its values is found."""
        self._enter(key)
        header, before = len(self._lines) - 1, self._values
        yield
        empty = " {}" if self._values == before else ""
        self._lines[header] += f"{empty} # {one_line(note)}"

    def missing(self, key: str, why: str) -> None:
        """Add to the list of what was not found. why: and how to find it."""
        self._missing.append(f"# {key}: {one_line(why)}")

    def text(self, more: Sequence[str] = ()) -> str:
        """Return the profile. Facts name the commands per part of the profile; `more` is for people."""
        lines = list(self._lines)
        if self._sources:
            lines += ["", "facts:"]
            for section, sources in self._sources.items():
                source = json.dumps("; ".join(sources), ensure_ascii=False)
                sure = _written(all(sources.values()))
                lines.append(f"  {section}: {{source: {source}, date: {self._date}, verified: {sure}}}")
        if self._missing:
            lines += ["", "# Not found:", *self._missing]
        if more:
            lines += ["", "# Node types:", *(f"# {one_line(line)}" for line in more)]
        return "\n".join(lines) + "\n"

    def _enter(self, above: tuple[str, ...]) -> None:
        """Write the keys above a value that do not stand there yet."""
        same = 0
        while same < min(len(above), len(self._open)) and above[same] == self._open[same]:
            same += 1
        for depth in range(same, len(above)):
            self._lines.append(f"{'  ' * depth}{_scalar(above[depth])}:")
        self._open = above


def _written(value: Value) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_scalar, value))}]"
    return str(value).lower() if isinstance(value, bool) else _scalar(str(value))


def _scalar(text: str) -> str:
    """Quote a text where YAML would read it as something else."""
    plain = re.fullmatch(r"[A-Za-z0-9/][A-Za-z0-9_./+-]*( [A-Za-z0-9_./+-]+)*", text) and not is_null(text)
    return text if plain else json.dumps(one_line(text), ensure_ascii=False)
