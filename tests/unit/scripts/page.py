"""The table of rules in docs/check.md, made from the code: python -m tests.unit.scripts.page writes it."""

from __future__ import annotations

import re

from slurmddp.scripts.check.finding import RULES, check_script
from slurmddp.scripts.check.script import parse
from tests.helpers import ROOT

PAGE = ROOT / "docs/check.md"
TABLE = re.compile(r"^\| rule \|.*?\n(?!\|)", re.MULTILINE | re.DOTALL)
check_script(parse("#!/bin/bash\n"))  # registers the rules


def table() -> str:
    """Return the table: one row per rule."""
    cells = [
        (f"`{each.id}`", each.severity, each.reason, each.fix, f"[source]({each.source})")
        for each in sorted(RULES, key=lambda rule: rule.id)
    ]
    rows = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |\n" for row in cells]
    return "| rule | severity | why | fix | |\n|---|---|---|---|---|\n" + "".join(rows)


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    new = table()
    PAGE.write_text(TABLE.sub(lambda _: new, text), encoding="utf-8")
