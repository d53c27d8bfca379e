"""Slurm's times."""

import pytest

from slurmddp.cluster.duration import seconds_of


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30", 1800),
        ("30:15", 1815),
        ("90:00", 5400),
        ("02:03:04", 7384),
        ("1-02", 93600),
        ("1-02:03", 93780),
        ("1-02:03:04", 93784),
        ("0", 0),
        (" 01:00:00 ", 3600),
        ("UNLIMITED", None),
        ("INFINITE", None),
        ("-1", None),
    ],
)
def test_every_form_of_slurm(text: str, seconds: "int | None") -> None:
    assert seconds_of(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "30m", "1h", "1:2:3:4", "1-", "-5", "1-2-3", "1.5", "Partition_Limit", "٣", "1 2"]
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a Slurm time"):
        seconds_of(text)
