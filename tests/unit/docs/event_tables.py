"""The tables of events in docs/files.md, made from the types: python -m tests.unit.docs.event_tables writes them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from slurmddp.records import events
from tests.helpers import ROOT

PAGE = ROOT / "docs/files.md"
#: Heading on the page -> the types below it.
TABLES: dict[str, Sequence[type]] = {
    "job.sh and the guard": events.JOB,
    "The ranks and torchrun's agents": events.RANKS,
    "Alerts and the watchdog": events.ALERTS,
    "Commands on the login node": events.COMMANDS,
}


def table(kinds: Sequence[type]) -> str:
    """Return the table of some types: the event, when it is written, and its keys, each with what it means."""
    rows = ["| event | when | keys |", "|---|---|---|"]
    for kind in kinds:
        when, *meanings = (line.strip() for line in (kind.__doc__ or "").split("\n") if line.strip())
        about = dict(line.split(": ", 1) for line in meanings)
        assert list(about) == [name for name in fields(kind) if name in about], f"{kind.__name__}: no such field"
        keys = ", ".join(map(key, fields(kind), map(about.get, fields(kind))))
        rows.append(f"| `{events.NAMES[kind]}` | {when} | {keys} |".replace("|  |", "| |"))
    return "\n".join(rows) + "\n"


def key(name: str, meaning: str | None) -> str:
    if name == "figures":
        return str(meaning)
    return f"`{name.rstrip('_')}`" + (f" ({meaning})" if meaning else "")


def fields(kind: type) -> tuple[str, ...]:
    return tuple(kind.__annotations__)


def page(text: str) -> str:
    """Return the text of the page with the tables of now."""
    for heading, kinds in TABLES.items():
        pattern = rf"(^### {re.escape(heading)}\n[^#]*?)^\| event .*?(?=^\n|\Z)"
        text, count = re.subn(pattern, lambda found: found[1] + table(kinds), text, flags=re.MULTILINE | re.DOTALL)  # noqa: B023
        assert count == 1, heading
    return text


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
