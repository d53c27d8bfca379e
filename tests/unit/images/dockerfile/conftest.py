"""A folder with a Dockerfile, its definition file cut as Apptainer cuts it, and its %post run without root."""

import os
import re
import shlex
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from slurmddp.images.context.staging import FOLDER, Item, gathered
from slurmddp.images.dockerfile import convert
from slurmddp.images.dockerfile.copying import FILES
from slurmddp.images.image_spec import Wanted

STUB = """#!/bin/sh
{ printf '%s' "${0##*/}"; for word; do printf '<%s>' "$word"; done; echo; } >> "$CALLS"
"""


@dataclass
class Part:
    """One stage as Apptainer reads it: its header, and its sections by their whole first line."""

    header: dict[str, str]
    sections: dict[str, str] = field(default_factory=dict)


def cut(text: str) -> list[Part]:
    """The stages of a definition file but for the context's (apptainer, pkg/build/types/parser/deffile.go)."""
    assert not re.search(r"\{\{\s*\w+\s*\}\}", text)
    starts = [match.start() for match in re.finditer(r"(?mi)^bootstrap:", text)]
    parts = []
    for begin, end in zip(starts, [*starts[1:], len(text)], strict=True):
        part = Part({})
        name = ""
        for line in text[begin:end].splitlines():
            words = line.split()
            if words and words[0].startswith("%"):
                name = line.strip()
                assert name not in part.sections
                part.sections[name] = ""
            elif name:
                part.sections[name] += line + "\n"
            elif words and not words[0].startswith("#"):
                key, _, value = line.partition(":")
                part.header[key.lower()] = value.strip()
        parts.append(part)
    return [part for part in parts if part.header.get("stage") != FILES]


class Dock:
    """A build context in a temporary folder. `root` stands for the image's root where a Dockerfile names it."""

    def __init__(self, folder: Path) -> None:
        self.context = folder / "context"
        self.root = folder / "root"
        self.bin = folder / "bin"
        self.calls = folder / "calls"
        self.shell = "sh"
        self.items: tuple[Item, ...] = ()
        for made in (self.context, self.root, self.bin):
            made.mkdir()
        self.calls.write_text("")

    def files(self, **texts: str) -> None:
        for name, text in texts.items():
            self.file(name, text)

    def file(self, name: str, text: str = "") -> Path:
        path = self.context / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def convert(self, text: str, target: str | None = None, **arguments: str) -> Wanted:
        path = self.file("Dockerfile", text.replace("@/", f"{self.root}/"))
        made = convert(path, arguments=arguments, target=target)
        self.items = made.items
        return made

    def stub(self, *names: str) -> None:
        for name in names:
            (self.bin / name).write_text(STUB)
            (self.bin / name).chmod(0o755)

    def post(
        self, part: Part, *, stages: dict[str, Path] | None = None, **environment: str
    ) -> "subprocess.CompletedProcess[str]":
        """Do what %files says, as Apptainer does, and run %post; /.slurmddp is in `root`."""
        staging = self.root / ".slurmddp"
        self.stub("chown")
        folder = self.bin.parent
        with gathered(self.items, folder):
            for name, lines in part.sections.items():
                if not name.startswith("%files"):
                    continue
                origin = name.split()[-1]
                above = {FILES: folder / FOLDER, "%files": folder, **(stages or {})}[origin]
                for source, place in map(shlex.split, lines.strip().splitlines()):
                    target = self.root if place == "/" else Path(place.replace("/.slurmddp", str(staging), 1))
                    (target if place.endswith("/") else target.parent).mkdir(parents=True, exist_ok=True)
                    name = source.lstrip("/").replace(" ", "\\ ") or "."
                    copy = f'cp -a {above}/{name} "$1"'
                    subprocess.run(["sh", "-c", copy, "sh", str(target)], check=True)
        script = part.sections["%post"].replace("/.slurmddp", str(staging))
        variables = {"PATH": f"{self.bin}:/usr/bin:/bin", "CALLS": str(self.calls), **environment}
        return subprocess.run([self.shell, "-ex"], input=script, text=True, capture_output=True, env=variables)

    def run(self, part: Part, *arguments: str, **environment: str) -> str:
        """What %runscript prints when the image is run with these arguments, in the environment of %environment."""
        script = Path(self.bin).parent / "runscript"
        script.write_text(part.sections["%environment"] + part.sections["%runscript"])
        done = subprocess.run(
            ["sh", str(script), *arguments],
            capture_output=True,
            text=True,
            env={"PATH": f"{self.bin}:/usr/bin:/bin", "CALLS": str(self.calls), **environment},
        )
        return done.stdout + done.stderr

    def said(self) -> list[str]:
        return self.calls.read_text().splitlines()


@pytest.fixture
def dock(tmp_path: Path) -> Dock:
    assert os.path.isabs(tmp_path)
    return Dock(tmp_path)
