"""What node.sh says where it cannot start: bash writes it, this reads it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from slurmddp.records.refusal import Refusal, read
from tests.helpers import SHELL


@pytest.mark.parametrize("refusal", [Refusal("cannot bind /x"), Refusal("setup line failed: a 'b' \"c\"", "user")])
def test_what_is_written_is_read(refusal: Refusal) -> None:
    assert read(refusal.write()) == refusal


@pytest.mark.parametrize("text", ["", "1 user", "setup line failed\n", "2 user\nx\n"])
def test_what_is_not_sound_says_nothing(text: str) -> None:
    assert read(text).text == ""


@pytest.mark.parametrize(("word", "fault"), [("user ", "user"), ("", "")])
def test_bash_writes_the_same(tmp_path: Path, word: str, fault: str) -> None:
    functions = (SHELL / "node.sh").read_text().partition("\n# srun ends the other nodes")[0]
    script = f"logs={tmp_path} host=n1 preflight=yes alone=\n{functions}\nfail {word}'it is \"so\"' $'two\\nlines'\n"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and done.stderr == 'slurmddp: node n1: it is "so" two\nlines\n'
    text = (tmp_path / "preflight" / "n1.failed").read_text()
    assert text == Refusal('it is "so" two lines', fault).write()
