"""The tables of docs/benchmarks.md. The program that measures a table writes it, with date, commit and machine."""

from __future__ import annotations

import argparse
import datetime
import os
import re
import statistics
import subprocess
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from benchmarks.environments import CHECKOUT
from benchmarks.measure import Comparison, interval

PAGE = CHECKOUT / "docs" / "benchmarks.md"
HEAD = "| | ours | theirs | min | median | max | 95 % | target |\n|---|---|---|---|---|---|---|---|\n"


class Figure(NamedTuple):
    """One row. values: ratios of pairs, or amounts in `unit`. target: what the median may be at most.

    ours, theirs: the medians behind a ratio, as shown.
    """

    title: str
    values: Sequence[float]
    unit: str = ""
    target: float | None = None
    ours: str = ""
    theirs: str = ""

    @classmethod
    def of(cls, title: str, pairs: Comparison) -> Figure:
        """Return the row of a comparison: its ratios."""
        ours, theirs = (f"{statistics.median(each):.4g} {pairs.unit}" for each in (pairs.ours, pairs.theirs))
        return cls(title, pairs.ratios, "", pairs.target, ours, theirs)

    @property
    def holds(self) -> bool:
        return self.target is None or statistics.median(self.values) <= self.target

    def row(self) -> str:
        low, middle, high = min(self.values), statistics.median(self.values), max(self.values)
        unit = f" {self.unit}" if self.unit else ""
        within = interval(self.values)
        certain = f"{within[0]:.3g} to {within[1]:.3g}" if within else ""
        target = f"{self.target:g}{unit}{'' if self.holds else ', missed'}" if self.target is not None else ""
        shown = (f"{low:.3g}", f"**{middle:.3g}**{unit}", f"{high:.3g}", certain, target)
        return f"| {' | '.join((self.title, self.ours, self.theirs, *shown))} |\n"


class Published(NamedTuple):
    """A row of the page: the median, and between what it lies with 95 % confidence, or the smallest and largest."""

    median: float
    low: float
    high: float


def options(parser: argparse.ArgumentParser) -> None:
    """Add --write."""
    parser.add_argument("--write", action="store_true", help="put the table into docs/benchmarks.md")


def finish(name: str, figures: Sequence[Figure], about: str, *, write: bool) -> int:
    """Print the table, put it into the page if asked. Returns the exit code: 1 if a target is missed."""
    text = stamp(name, about) + HEAD + "".join(figure.row() for figure in figures)
    print(f"\n{text}", end="")
    if write:
        PAGE.write_text(replaced(PAGE.read_text(encoding="utf-8"), name, text), encoding="utf-8")
    return 0 if all(figure.holds for figure in figures) else 1


def stamp(name: str, about: str) -> str:
    """Return when, of which commit and on what this is measured."""
    commit = _git("rev-parse", "--short=9", "HEAD")
    changed = ", with changes" if _git("status", "--porcelain", "--", "slurmddp", "benchmarks") else ""
    machine = f"{os.cpu_count()} cores at load {os.getloadavg()[0]:.1f}"
    return f"{datetime.date.today()}, commit {commit}{changed}, `python -m benchmarks.{name}`: {machine}; {about}.\n\n"


def replaced(page: str, name: str, text: str) -> str:
    """Return the page with another text between the marks of `name`. Raises ValueError if it has none."""
    begin, end = marks(name)
    before, found, rest = page.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"docs/benchmarks.md has no {begin.strip()} with its end")
    return f"{before}{begin}\n{text}\n{end}{after}"


def marks(name: str) -> tuple[str, str]:
    return f"<!-- measured by benchmarks.{name} -->\n", f"<!-- end of benchmarks.{name} -->\n"


def published(page: str, name: str) -> dict[str, Published]:
    """Return the rows of a table of the page that `finish` has written, by title."""
    begin, end = marks(name)
    _, _, rest = page.partition(begin)
    rows = {}
    for line in rest.partition(end)[0].partition(HEAD)[2].splitlines():
        if not line:
            break
        title, _, _, low, median, high, certain, _ = (cell.strip() for cell in line.strip("|").split("|"))
        within = certain.split(" to ") if certain else (low, high)
        rows[title] = Published(float(re.sub(r"\*\*(.*?)\*\*.*", r"\1", median)), *map(float, within))
    return rows


def moved(before: dict[str, Published], figures: Iterable[Figure]) -> list[str]:
    """Return a line for each figure whose median has moved by more than the spreads of both say."""
    lines = []
    for figure in figures:
        old = before.get(figure.title)
        low, high = interval(figure.values) or (min(figure.values), max(figure.values))
        if old is None:
            lines.append(f"{figure.title}: not in the page")
        elif low > old.high or high < old.low:
            now = f"{statistics.median(figure.values):.3g} ({low:.3g} to {high:.3g})"
            lines.append(f"{figure.title}: {now}, published {old.median:g} ({old.low:g} to {old.high:g})")
    return lines


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=CHECKOUT, check=True, capture_output=True, text=True)
    return done.stdout.strip()
