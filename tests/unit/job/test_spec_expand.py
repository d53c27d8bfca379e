"""Variables in paths: expanded once, by us, never by a shell."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmddp.errors import UserError
from slurmddp.job.expand import Expander
from tests.helpers import LM_JOB, Desk, refusal

HERE = {"WORK": "/work/alice", "HOME": "/home/alice", "EMPTY": "", "NESTED": "$WORK/x", "USER": "alice"}


@pytest.mark.parametrize(
    ("text", "expanded"),
    [
        ("$WORK/a", "/work/alice/a"),
        ("${WORK}a", "/work/alicea"),
        ("/x/$USER/$USER", "/x/alice/alice"),
        ("$$WORK", "$WORK"),
        ("$$$WORK", "$/work/alice"),
        ("$$$$", "$$"),
        ("$NESTED", "$WORK/x"),
        ("~", "/home/alice"),
        ("~/a", "/home/alice/a"),
        ("~bob/a", "~bob/a"),
        ("a/~", "a/~"),
        ("$(id)", "$(id)"),
        ("`id`", "`id`"),
        ("$1 $ $-", "$1 $ $-"),
        ("${WORK:-x}", "${WORK:-x}"),
        ("${WORK", "${WORK"),
        ("a$", "a$"),
    ],
)
def test_expansion(text: str, expanded: str) -> None:
    expander = Expander(HERE)
    assert expander.text(text, ()) == expanded
    assert not expander.unset


@pytest.mark.parametrize("text", ["$NOPE/a", "${NOPE}/a", "$EMPTY/a"])
def test_an_unset_or_empty_variable_stays_and_is_told(text: str) -> None:
    expander = Expander(HERE)
    assert expander.text(text, ("container", "image")) == text
    assert expander.unset == [(("container", "image"), "EMPTY" if "EMPTY" in text else "NOPE")]


@given(st.text())
def test_doubled_dollars_bring_any_text_through(text: str) -> None:
    escaped = text.replace("$", "$$")
    if not escaped.startswith("~"):
        assert Expander(HERE).text(escaped, ()) == text


JOB = LM_JOB.replace("/data/books", "$WORK/books") + (
    "container:\n  image: ${WORK}/a.sif\n  binds: [$WORK/in:/in:ro, {source: ~/out, destination: /out}]\n"
    "  options: [--env=A=$WORK]\n"
    "environment: {A: $WORK}\npaths: {runs: $WORK/runs, cache: ~/.cache}\n"
)


def test_paths_are_expanded_and_all_else_is_not(desk: Desk) -> None:
    job = desk.resolve(JOB, "train.data.glob=$WORK", WORK="/w").job
    assert job.container.image == "/w/a.sif"
    assert [(bind.source, bind.destination) for bind in job.container.binds] == [
        ("/w/in", "/in"),
        (f"{desk.home}/out", "/out"),
    ]
    assert (job.paths.runs, job.paths.cache) == ("/w/runs", f"{desk.home}/.cache")
    assert job.train.data == {"path": "/w/books", "glob": "$WORK"}
    assert (job.container.options, job.environment) == (("--env=A=$WORK",), {"A": "$WORK"})


def test_a_list_of_data_paths_is_expanded(desk: Desk) -> None:
    assert desk.resolve(LM_JOB, "train.data.path=[$WORK/a, /b]", WORK="/w").job.train.data["path"] == ["/w/a", "/b"]


def test_unset_is_an_error_in_submit_and_a_warning_in_a_dry_run(desk: Desk) -> None:
    with pytest.raises(UserError) as caught:
        desk.resolve(JOB)
    assert "the variable $WORK is not set" in refusal(caught.value)
    assert f"{desk.project}/job.yaml:" in refusal(caught.value)
    found = desk.resolve(JOB, strict=False)
    assert found.job.container.image == "${WORK}/a.sif"
    assert any(
        "job.yaml:7: container.image: the variable $WORK is not set on this machine" in text for text in found.warnings
    )
    assert desk.plan(JOB, strict=False).container.image == "${WORK}/a.sif"


@pytest.mark.parametrize("variable", ["a:b", "a,b", 'a"b'])
def test_what_a_variable_brings_is_judged_as_if_it_were_written(desk: Desk, variable: str) -> None:
    with pytest.raises(UserError):
        desk.plan(JOB, WORK=f"/w/{variable}")


def test_a_literal_dollar_survives_to_the_plan(desk: Desk) -> None:
    plan = desk.plan(LM_JOB + "container: {image: $$x/a.sif}\n")
    assert plan.container.image == f"{desk.project}/$x/a.sif"
