"""Styled text is the plain text, and keeps which parts of it have a style."""

import json

from slurmddp.styled import Styled, columns, exact, fold, join, labelled, styled


def parts(text: str) -> list[tuple[str, str]]:
    assert isinstance(text, Styled)
    return [(str(text)[start:end], style) for start, end, style in text.spans]


def test_it_is_the_plain_text() -> None:
    text = "a " + styled("failed", "bad") + ": x"
    assert text == "a failed: x" and len(text) == 11 and json.dumps(text) == '"a failed: x"'
    assert type(styled("x", None)) is str and type(labelled("note", "x")) is str


def test_parts_keep_their_style_where_texts_are_put_together() -> None:
    line = join("  ", ["ä", styled("done", "good"), "x" + styled("lost", "bad")]).rstrip()
    assert line == "ä  done  xlost" and parts(line) == [("done", "good"), ("lost", "bad")]
    assert parts(join("\n", [line, labelled("warning", "w"), labelled("error", "e")])) == [
        ("done", "good"), ("lost", "bad"), ("warning:", "warn"), ("error:", "bad"),
    ]  # fmt: skip


TABLE = [("RUN", "STATE", "STEP", "NODES"), ("gpt-1", styled("failed", "bad"), "", "2"), ("b", "done", "10 %", "16")]


def test_columns_without_room_stand_below_their_row() -> None:
    lines = columns(TABLE, left=1)
    assert fold(join("\n", lines), 26) == lines
    assert fold(join("\n", ["runs", *lines]), 25) == [
        "runs", "RUN     STATE  STEP", "gpt-1  failed", "  NODES 2", "b        done  10 %", "  NODES 16",
    ]  # fmt: skip
    folded = fold(join("\n", lines), 12)
    assert folded[:5] == ["RUN", "gpt-1", "  STATE", "    failed", "  NODES 2"]
    assert folded[5:] == ["b", "  STATE done", "  STEP 10 %", "  NODES 16"]
    assert parts(folded[3]) == [("failed", "bad")]


def test_lines_are_folded_between_words_and_below_their_value() -> None:
    bad = styled("bad", "bad")
    folded = fold(join("", ["state    all of it is ", bad, "\nrecovered once of it"]), 20)
    assert folded == ["state    all of it", "         is bad", "recovered once of it"] and parts(folded[1]) == [
        ("bad", "bad")
    ]
    assert fold("warning: the disk is full", 16) == ["warning: the", "  disk is full"]
    assert fold("log  /a/path/of/more/than/sixteen", 16) == ["log  /a/path/of/more/than/sixteen"]


def test_commands_stay_whole() -> None:
    assert fold("to stop it: slurmddp cancel run-1, now", 24) == ["to stop it:", "  slurmddp cancel run-1,", "  now"]
    assert fold("or use `sbatch -N 2 job.sh`, here", 24) == ["or use", "  `sbatch -N 2 job.sh`,", "  here"]
    script = "srun --nodes=2 --ntasks=8 torchrun train.py\n"
    assert fold("a b c d e f\n" + exact(script), 8) == ["a b c d", "  e f", *script.split("\n")]
    assert fold("runs   " + exact("sbatch a b c"), 8) == ["runs   sbatch a b c"]
