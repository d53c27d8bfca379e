"""The build hook: a wheel or an sdist remembers the commit that it was built from, in slurmddp/_assets/commit."""

import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

INSIDE = "slurmddp/_assets/commit"


class CommitHook(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        root = Path(self.root)
        # An editable installation asks its checkout. An sdist has the file already, and is no checkout.
        if version == "editable" or (root / INSIDE).exists():
            return
        sys.path.insert(0, self.root)
        from slurmddp.runs.version import checkout_commit

        if commit := checkout_commit(root):
            self._folder = tempfile.TemporaryDirectory()
            made = Path(self._folder.name) / "commit"
            made.write_text(commit + "\n", encoding="utf-8")
            build_data["force_include"][str(made)] = INSIDE

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if hasattr(self, "_folder"):
            self._folder.cleanup()
