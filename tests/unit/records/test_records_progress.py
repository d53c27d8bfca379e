"""The small text files of a run's progress, some of which users write, too."""

from __future__ import annotations

import pytest

from slurmddp.records.progress import (
    Failure,
    Progress,
    ranks_text,
    read_best,
    read_failures,
    read_progress,
    stuck,
)


@pytest.mark.parametrize(
    ("text", "progress"),
    [
        ("120 1000\n", Progress(120, 1000)),
        ("120", Progress(120)),
        (" 120 of 1000\n", Progress(120)),
        ("120 1000 7\n", Progress(120, 1000)),
        ("", None),
        ("step 3\n", None),
        ("1.5\n", None),
        ("-3\n", None),
        ("9" * 16 + "\n", None),
        ("\u0663\u00b2\n", None),
    ],
)
def test_what_a_user_writes_of_the_progress_is_read_as_far_as_it_is_sound(text: str, progress: Progress | None) -> None:
    assert read_progress(text) == progress


def test_what_is_written_is_read_back() -> None:
    for progress in (Progress(0), Progress(7, 9)):
        assert read_progress(progress.text()) == progress
    failures = (Failure(0, 10), Failure(3, 0))
    assert read_failures("".join(f"{failure.line()}\n" for failure in failures) + "1 2 3\n4\nx 5\n") == failures
    assert (read_best(Progress(5).text()), read_best("")) == (5, None)
    assert ranks_text(["n1", "n1", "n2"]) == "n1\nn1\nn2\n"


@pytest.mark.parametrize(
    ("steps", "limit", "step"), [((10, 57, 50, 57), 3, 57), ((10, 57, 58), 3, None), ((10,), 3, None), ((9, 9), 2, 9)]
)
def test_starts_that_get_no_further_than_the_first_of_them_are_stuck(
    steps: tuple[int, ...], limit: int, step: int | None
) -> None:
    assert stuck([Failure(0, each) for each in steps], limit) == step
