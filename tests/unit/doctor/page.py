"""The catalogue in docs/doctor.md, made from the rules: python -m tests.unit.doctor.page writes it."""

from collections.abc import Iterator

from slurmddp.doctor.rules import SYMPTOMS, Cause, catalogue
from tests.helpers import ROOT

PAGE = ROOT / "docs/doctor.md"
HEAD = "## Catalogue\n"
#: Lowest order of each part, and its heading.
PARTS = (
    (0, "Machine, memory, driver, container, Slurm"),
    (20, "Setup, launch and network"),
    (28, "Code and files"),
    (SYMPTOMS, "Errors that name no reason"),
    (50, "What follows from another failure"),
)


def catalogue_text() -> str:
    """Return the catalogue: one part per kind of cause, one entry per cause."""
    ends = [start for start, _ in PARTS[1:]] + [1000]
    return "".join(
        f"\n### {title}\n" + "".join(_entry(cause) for cause in _between(start, end))
        for (start, title), end in zip(PARTS, ends, strict=True)
    )


def _between(start: int, end: int) -> Iterator[Cause]:
    return (cause for cause in catalogue().causes if start <= cause.order < end)


def _entry(cause: Cause) -> str:
    seen = "".join(f"    {line.strip()[:150]}\n" for line in cause.examples)
    return (
        f"\n#### {cause.id}: {cause.title}\n\n"
        + (f"{seen}\n" if seen else "")
        + f"{cause.why} **Do:** {cause.fix} [Source]({cause.source})\n"
    )


if __name__ == "__main__":
    before, _, _ = PAGE.read_text(encoding="utf-8").partition(HEAD)
    PAGE.write_text(before + HEAD + catalogue_text(), encoding="utf-8")
