"""The stop file: written and read in one place; a file of anybody else asks to stop, too."""

from __future__ import annotations

import pytest

from slurmddp.records.stop import BY_HAND, CANCELLED, StopRequest, read


@pytest.mark.parametrize(
    "request_", [StopRequest(CANCELLED), StopRequest("SIGTERM", signal=True), StopRequest('ä "b"')]
)
def test_what_is_written_is_read(request_: StopRequest) -> None:
    assert read(request_.text()) == request_


@pytest.mark.parametrize(
    "text", ["", "\n", "cancelled by the user\n", "{", '{"reason": 3, "signal": true}', '{"reason": ""}']
)
def test_what_a_person_has_made_asks_to_stop_and_no_more(text: str) -> None:
    assert read(text) == StopRequest(BY_HAND)


def test_what_a_person_has_written_is_the_reason() -> None:
    assert read("enough\nof it\n") == StopRequest("enough")


def test_a_reason_is_one_plain_line() -> None:
    assert read(StopRequest("two\nlines\x1b[2J").text()).reason == "two"
    assert read(StopRequest("\x1b[1mtwo\x1b[0;31m words\x1b[m").text()).reason == "two words"
