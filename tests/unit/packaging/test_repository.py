"""Files of the repository that would drift apart unnoticed: the lock, and the tests that the security page names."""

from __future__ import annotations

import re
import sys

import pytest
from packaging.requirements import Requirement

from tests.helpers import ROOT


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib came with Python 3.11")
def test_the_lock_pins_what_pyproject_asks_for() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    pins: dict[str, list[str]] = {}
    for line in (ROOT / "requirements.lock").read_text().splitlines():
        if not line.startswith("#"):
            pin = Requirement(line)
            (exact,) = pin.specifier
            assert exact.operator == "==" and not pin.url, line
            pins.setdefault(pin.name, []).append(exact.version)
    for wanted in map(Requirement, asked):
        if wanted.name != project["name"]:
            for version in pins[wanted.name.lower()]:
                assert wanted.specifier.contains(version), f"{wanted} is locked at {version}: make lock"


def test_the_lock_holds_no_address_and_no_cuda_package() -> None:
    text = (ROOT / "requirements.lock").read_text()
    assert "://" not in text and "nvidia" not in text and "index-url" not in text


def test_every_test_that_the_security_page_names_exists() -> None:
    page = (ROOT / "docs/security.md").read_text()
    named = re.findall(r"\b((?:unit|programs|runtime|cluster)/[\w/]+\.py)(?:::(\w+))?", page)
    for path, name in named:
        file = ROOT / "tests" / path
        assert file.is_file(), f"docs/security.md names {path}"
        assert not name or re.search(rf"(def|class) {name}\b", file.read_text()), f"{path}::{name}"
    assert named
