"""The way through spython, with the library itself: its traps, and that a reading of its own is never believed."""

import sys

import pytest

from slurmddp.errors import ExternalError
from slurmddp.images.base import Base
from slurmddp.images.dockerfile.interpret import Step
from slurmddp.images.dockerfile.through import Source, sections
from slurmddp.images.spython_recipe import parse_layers

from .conftest import Dock, cut

BASE = Base("docker", "debian:12")


def test_plain_words_come_through_whole(capfd: pytest.CaptureFixture[str]) -> None:
    first, second = parse_layers(
        [
            "FROM base-0 AS one",
            "ENV A=value-1 B=value-2",
            "RUN step-3",
            "WORKDIR path-4",
            "COPY file-5 file-6",
            "FROM base-1 AS two",
            "COPY --from=one file-7 file-8",
            "LABEL label-9",
            "COPY --from=one file-10 file-11",
        ]
    )
    assert (first.name, first.base, second.name, second.base) == ("one", "base-0", "two", "base-1")
    assert first.install == ("A=value-1", "B=value-2", "step-3", "mkdir -p path-4", "cd path-4")
    assert first.environ == ("A=value-1", "B=value-2")
    assert first.files == (("file-5", "file-6"),) and first.workdir == "path-4"
    assert second.files_from == (("one", (("file-7", "file-8"), ("file-10", "file-11"))),)
    assert second.labels == ("label-9",)
    assert capfd.readouterr() == ("", "")  # it warns of each file that is not there


def test_what_it_cannot_read_is_a_typed_error() -> None:
    with pytest.raises(ExternalError, match="spython failed to read a Dockerfile"):
        parse_layers(["FROM"])
    with pytest.raises(ExternalError, match="spython failed to read a Dockerfile"):
        parse_layers(["FROM base AS one", "ENV A"])


def test_a_missing_library_is_a_typed_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "spython.main.parse.parsers", None)
    with pytest.raises(ExternalError, match="spython is missing"):
        parse_layers(["FROM a"])


def test_another_reading_is_never_believed() -> None:
    with pytest.raises(ExternalError, match="other stages"):  # the second `one` takes the place of the first
        sections([Source("one", BASE, ()), Source("one", BASE, ())])
    copy = Step("files", "COPY", 1, files=(("/a", "/b"),), stage="nowhere")
    with pytest.raises(ExternalError, match="otherwise than it was written"):  # it drops that COPY with a warning
        sections([Source("one", BASE, (copy,))])


# What spython 0.3.14 makes of each, handed over as it is, was tried; it is in the comment
TRAPS = {
    "a continued line that begins with a keyword": "RUN show \\\nadd \\\ncopy b\n",  # %files: `add`, and `copy b`
    "lower case": "run show add copy b\n",  # a line of %post that begins with `run`
    "an exec form": 'RUN ["show", "add", "copy", "b"]\n',  # a line of %post that begins with [
    "env for later commands": "ENV A=copy\nRUN show add $(printenv A) b\n",  # not exported
    "env with an escape": "ENV A=add\\ copy\nRUN show ${A%% *} ${A#* } b\n",  # IndexError
    "a comment within": "RUN show add \\\n # no\n copy b\n",  # stays, so the shell ends the command there
}


@pytest.mark.parametrize("trap", TRAPS)
def test_its_traps_within_a_stage(dock: Dock, trap: str) -> None:
    dock.stub("show")
    (part,) = cut(dock.convert("FROM debian:12\n" + TRAPS[trap]).definition)
    done = dock.post(part)
    assert done.returncode == 0, done.stderr
    assert dock.said() == ["show<add><copy><b>"]


def test_its_traps_about_stages(dock: Dock) -> None:
    # It reads From: docker.io/x/atl, Stage: as one, takes the second stage for a part of the first, and drops --from=1
    text = "FROM docker.io/x/atlas as one\nRUN true\nFROM y/bas\nRUN true\nFROM z/alias AS three\n"
    text += "COPY --from=one /a /a\nCOPY --from=1 /b /b\n"
    parts = cut(dock.convert(text).definition)
    assert [part.header["from"] for part in parts] == ["docker.io/x/atlas", "y/bas", "z/alias"]
    assert [part.header["stage"] for part in parts] == ["one", "stage-1", "three"]
    assert "%files from one" in parts[2].sections and "%files from stage-1" in parts[2].sections
