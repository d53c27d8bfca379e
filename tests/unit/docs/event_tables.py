"""The tables of events in docs/files.md, made from the types: python -m tests.unit.docs.event_tables writes them."""

import inspect
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
        keys = ", ".join(map(key, fields(kind), map(meanings(kind).get, fields(kind))))
        rows.append(f"| `{events.NAMES[kind]}` | {kind.__doc__} | {keys} |".replace("|  |", "| |"))
    return "\n".join(rows) + "\n"


def meanings(kind: type) -> dict[str, str]:
    """Return what the comments say of fields: behind one, or in lines that begin with `#:` above it."""
    found, above = {}, ""
    for line in inspect.getsource(kind).splitlines():
        code, _, comment = (part.strip() for part in line.partition("#"))
        if comment and not code:
            above = f"{above} {comment.lstrip(':').strip()}".strip()
        elif name := re.match(r"(\w+): ", code):
            found[name[1]], above = above or comment, ""
    return {name: meaning for name, meaning in found.items() if meaning}


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
