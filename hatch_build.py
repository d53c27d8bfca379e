"""The build hook: adds to a wheel or an sdist the commit that it was built from, and to a wheel the JSON Schemas."""

import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ASSETS = "slurmddp/_assets"


class AssetsHook(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":  # an editable installation asks its checkout
            return
        sys.path.insert(0, self.root)
        from slurmddp.job.schema import KINDS, schema_text
        from slurmddp.run.version import checkout_commit

        # An sdist has the commit already, and is no checkout.
        commit = None if Path(self.root, ASSETS, "commit").exists() else checkout_commit(Path(self.root))
        texts = {"commit": f"{commit}\n"} if commit else {}
        if self.target_name == "wheel":
            texts |= {f"schemas/{kind}.schema.json": schema_text(kind) for kind in KINDS}
        self._folder = tempfile.TemporaryDirectory()
        for name, text in texts.items():
            made = Path(self._folder.name, name)
            made.parent.mkdir(exist_ok=True)
            made.write_text(text, encoding="utf-8")
            build_data["force_include"][str(made)] = f"{ASSETS}/{name}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if hasattr(self, "_folder"):
            self._folder.cleanup()
