"""The scripts of every site, letter by letter; see README.md for how to renew them. `make lint` runs shellcheck on them."""

from __future__ import annotations

import pytest

from tests.golden.update import HERE, KINDS, SITES, present, scripts


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("site", SITES)
def test_scripts_are_as_they_were(site: str, kind: str) -> None:
    for name, text in scripts(site, kind).items():
        path = HERE / site / f"{kind}-{name}"
        assert path.is_file(), f"{path.name} of {site} is missing: python -m tests.golden.update"
        assert text == path.read_text(encoding="utf-8"), "if this was meant: python -m tests.golden.update"


def test_nothing_is_left_of_sites_that_are_gone() -> None:
    assert {path.parent.name for path in present()} == set(SITES)
