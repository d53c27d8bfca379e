"""Whole scripts, letter by letter; see README.md for how to renew them. `make lint` runs shellcheck on them."""

from tests.golden.update import HERE, expected, present


def test_scripts_are_as_they_were() -> None:
    for path, text in expected().items():
        shown = path.relative_to(HERE)
        assert path.is_file(), f"{shown} is missing: python -m tests.golden.update"
        assert text == path.read_text(encoding="utf-8"), f"{shown}; if this was meant: python -m tests.golden.update"


def test_nothing_is_left_of_kinds_and_sites_that_are_gone() -> None:
    assert present() == set(expected())


def test_all_of_it_can_be_read() -> None:
    """A change of a template should show in few files."""
    assert sum(len(path.read_text(encoding="utf-8").splitlines()) for path in present()) < 3400
