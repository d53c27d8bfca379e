"""Each cause finds its own examples, names its source, and is in the page."""

import io

import pytest

from slurmddp.doctor.diagnose import Examination
from slurmddp.doctor.rules import UNKNOWN, Cause, catalogue, known_cause, literal_of, parse
from tests.unit.doctor.page import HEAD, PAGE, catalogue_text

CAUSES = catalogue().causes


@pytest.mark.parametrize("cause", CAUSES, ids=lambda cause: cause.id)
def test_the_examples_alone_lead_to_the_cause(cause: Cause) -> None:
    for example in cause.examples:
        found = Examination()
        after = "" if cause.id == UNKNOWN else "epoch 2\n"  # an epoch behind it: the run went on
        found.read("log", io.BytesIO(f"epoch 1\n{example}\n{after}".encode()))
        answer = found.diagnose()
        assert answer.root is not None
        assert (answer.root.first.cause.id, answer.root.first.line) == (cause.id, 2), example


@pytest.mark.parametrize("cause", CAUSES, ids=lambda cause: cause.id)
def test_a_cause_is_complete(cause: Cause) -> None:
    assert cause.source.startswith("https://")
    assert cause.title and cause.why.endswith(".") and cause.fix.endswith((".", ")"))
    assert cause.examples or cause.id == "code"
    for pattern in cause.patterns:
        assert len(pattern.literal) >= 3, pattern.text
        assert all(part.groupindex == {} for part in pattern.parts)


def test_ids_are_unique() -> None:
    assert len(catalogue().by_id) == len(CAUSES)


@pytest.mark.parametrize(
    ("pattern", "literal"),
    [("abc", "abc"), ("a.bcd", "bcd"), ("abc[de]fg", "abc"), ("(a|bcdef)gh", "gh"), (r"a\.b\d+cdef", "cdef"),
     ("abcd?ef", "abc"), ("ab+cd", "ab"), ("x{2,3}yz", "yz"), (r"version .GL_[0-9]+. not", "version ")],
)  # fmt: skip
def test_the_literal_of_a_pattern(pattern: str, literal: str) -> None:
    assert literal_of(pattern) == literal


@pytest.mark.parametrize(
    "text", ["cause x\norder 1\ntitle a\ntitle b", "cause x\nordr 1", "cause x\norder 1\nlikely a|b"]
)
def test_a_mistake_in_the_file_is_an_error(text: str) -> None:
    with pytest.raises((KeyError, ValueError)):
        parse(text)


def test_the_page_has_the_catalogue_of_the_rules() -> None:
    """After a change of the rules: python -m tests.unit.doctor.page."""
    page = PAGE.read_text(encoding="utf-8")
    assert page.partition(HEAD)[2] == catalogue_text()


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("rank 1 on n1: torch.OutOfMemoryError: CUDA out of memory. (in x.log)", "gpu-memory"),
        ("rank 0 on n1: killed by SIGKILL (out of memory?) (in x.log)", "killed"),
        ("rank 3 on n2: ValueError: boom (in x.log)", None),
        ("rank 0 on n1: RuntimeError: Connection reset by peer (in x.log)", None),
    ],
)
def test_the_cause_that_status_adds(text: str, cause: str | None) -> None:
    known = known_cause(text)
    assert (known.id if known else None) == cause
