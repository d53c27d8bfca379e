"""What node.sh says where it cannot start: supervisor/node.py writes it, job.sh's supervisor reads it."""

from __future__ import annotations

import pytest

from slurmddp.records.refusal import Refusal, read


@pytest.mark.parametrize("refusal", [Refusal("cannot bind /x"), Refusal("setup line failed: a 'b' \"c\"", "user")])
def test_what_is_written_is_read(refusal: Refusal) -> None:
    assert read(refusal.write()) == refusal


@pytest.mark.parametrize("text", ["", "1 user", "setup line failed\n", "2 user\nx\n"])
def test_what_is_not_sound_says_nothing(text: str) -> None:
    assert read(text).text == ""
