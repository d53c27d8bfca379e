"""The marker: how an attempt ended, if it ended cleanly. Standard library only.

torchrun makes every exit code 1, and starts all ranks anew when one of them fails, even after the clean end of
the others. So whoever decides reads markers, not codes.
"""

from pathlib import Path

from slurmddp.records.marker import FAILED, Marker
from slurmddp.shared.checkpoint import layout


def write(path: Path, attempt: int, marker: Marker) -> None:
    """Write an attempt's marker: nothing starts the ranks again in it. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    layout.write_durably(path, marker.text(attempt).encode("utf-8", "replace"))


def give_up(path: Path, attempt: int, why: str) -> None:
    """Write the marker of an attempt that failed and is not to be repeated; an older one stays. Raises OSError."""
    if not path.exists():
        write(path, attempt, Marker(FAILED, why, why))


def ended(path: Path) -> bool:
    """Return whether there is a marker: this attempt is over. It was put there in one piece, at the very end."""
    return path.exists()
