"""The options of a bundled task as its factory reads them."""

from collections.abc import Mapping
from typing import Any

from slurmddp.runtime.errors import UserError
from slurmddp.shared.task_options import OPTIONS, mistakes, overlaid


def checked(task: str, part: str, given: Mapping[str, Any], data: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the defaults overlaid with `given`. `data`: as in `mistakes`. Raises UserError for the first mistake."""
    known = OPTIONS[task][part]
    for mistake in mistakes(task, part, given, data):
        if mistake.kind == "unknown":
            raise UserError(f"unknown key train.{part}.{mistake.key}; known keys: {', '.join(known)}")
        raise UserError(f"train.{part}.{mistake.key} must be {mistake.wanted}, not {mistake.value!r}")
    return overlaid(known, given)
