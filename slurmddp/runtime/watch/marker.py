"""The marker: how an attempt ended, if it ended cleanly. Standard library only.

torchrun makes every exit code 1, and starts all ranks anew when one of them fails, even after the clean end of
the others. So whoever decides reads markers, not codes.
"""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slurmddp.shared.checkpoint import layout


def write(path: Path, attempt: int, record: Mapping[str, Any]) -> None:
    """Write an attempt's marker: `record`, the attempt's number, the time, and that it is not to be started
    again. Raises OSError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    layout.write_json(path, {"restart": False, **record, "attempt": attempt, "time": round(time.time(), 3)})


def give_up(path: Path, attempt: int, why: str) -> None:
    """Write the marker of an attempt that failed and is not to be repeated; an older one stays. Raises OSError."""
    if not path.exists():
        facts = {"state": "failed", "step": None, "steps": None, "reason": why, "cause": why, "validation": None}
        write(path, attempt, facts)


def ended(path: Path) -> bool:
    """Return whether there is a marker that says that this attempt is over. One that cannot be read says so too:
    it was put there in one piece, at the very end.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return False
    except (OSError, ValueError):
        return path.exists()
    return not (isinstance(content, dict) and content.get("restart"))
