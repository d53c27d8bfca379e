"""Stages that are used more than once, and what one takes from another."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurmddp.errors import UserError
from slurmddp.images.registry.image import RegistryImage
from slurmddp.images.registry.reference import parse_reference

from .conftest import Dock, cut


def test_a_stage_that_is_used_several_times_is_built_once(dock: Dock, tmp_path: Path) -> None:
    dock.stub("show")
    dock.files(f="F")
    made = dock.convert(
        """FROM debian:12 AS common
ENV A=1
ARG B=2
WORKDIR @/w
RUN show common
COPY f g
USER me
FROM common AS made
RUN show made
FROM common
USER root
COPY --from=made /out /out
RUN show "$A" "$B" "$(pwd)" "$(cat g)"
WORKDIR sub
CMD ["true"]
"""
    )
    common, other, final = cut(made.definition)
    assert (common.header["from"], other.header["bootstrap"], final.header["bootstrap"]) == (
        "debian:12",
        "scratch",
        "scratch",
    )
    assert made.definition.count("show common") == 1 and made.definition.count("/1 /.slurmddp/") == 1
    assert other.sections["%files from common"] == final.sections["%files from common"] == "    / /\n\n"
    assert "export A=1" in final.sections["%environment"] and f"{dock.root}/w/sub" in final.sections["%runscript"]
    assert [base.source for base in made.bases] == ["debian:12"] * 3
    spaces = [note for note in made.notes if "full copy" in note]
    assert (
        len(spaces) == 2
        and "the stage made starts with a full copy of the stage common, which takes an unknown" in spaces[0]
    )
    digest = "sha256:" + "0" * 64
    base = RegistryImage(parse_reference("debian:12"), digest, digest, "amd64", "linux", size=4 * 10**9)
    assert any("about 10.0 GB of disk space" in note for note in made.with_bases({"debian:12": base}).notes)
    built = {name: tmp_path / name for name in ("common", "made")}
    (built["common"] / "tree").mkdir(parents=True)
    (built["made"] / "out").mkdir(parents=True)
    (dock.root / "w").mkdir()
    (dock.root / "w/g").write_text("F")
    script = final.sections["%post"].replace("copy '' '' /out", f"copy '' '' {dock.root}/out")
    final.sections["%post"] = script
    done = dock.post(final, stages=built)
    assert done.returncode == 0, done.stderr
    assert dock.said()[-1] == f"show<1><2><{dock.root}/w><F>"
    assert (dock.root / "tree").is_dir() and (dock.root / "out").is_dir() and (dock.root / "w/sub").is_dir()


@pytest.mark.parametrize(
    "text",
    [
        "FROM debian:12 AS a\nENV A=1\nFROM a AS b\nRUN b\nFROM a\nCOPY --from=b /x /x\n",  # costs nothing
        "FROM debian:12 AS a\nRUN a\nFROM a AS b\nRUN b\nFROM a\nRUN c\n",  # b is not needed
        "FROM debian:12 AS a\nRUN a\nFROM debian:12 AS b\nCOPY --from=a /x /x\nFROM b\nCOPY --from=a /x /y\n",
    ],
)
def test_a_stage_that_is_started_from_once_goes_into_the_next_one(dock: Dock, text: str) -> None:
    assert "scratch" not in dock.convert(text).definition


def test_a_stage_is_copied_from_and_started_from(dock: Dock) -> None:
    text = "FROM debian:12 AS a\nRUN first\nFROM a AS b\nRUN second\nFROM b AS c\nRUN --mount=from=a,target=/a three\n"
    parts = cut(dock.convert(text).definition)
    assert [part.header["stage"] for part in parts] == ["a", "c"]
    assert "first" not in parts[1].sections["%post"] and "second" in parts[1].sections["%post"]
    assert parts[1].sections["%files from a"].splitlines()[:2] == ["    / /", "    / /.slurmddp/1/"]


def test_all_of_a_stage_without_what_apptainer_puts_into_it(dock: Dock, tmp_path: Path) -> None:
    text = "FROM debian:12 AS one\nRUN make\nFROM debian:12\nCOPY --from=one / @/all/\nCOPY --from=tool:1 / @/tool\n"
    _, image, final = cut(dock.convert(text).definition)
    built = {"one": tmp_path / "one", image.header["stage"]: tmp_path / "tool"}
    for name in (".singularity.d/env", "proc", "dev", "etc", "opt/x", "tmp", "var/tmp"):
        (built["one"] / name).mkdir(parents=True)
    for name in ("etc/hosts", "etc/passwd", "file"):
        (built["one"] / name).write_text("")
    (built["one"] / "environment").symlink_to(".singularity.d/env/90-environment.sh")
    (tmp_path / "tool").mkdir()
    (tmp_path / "tool/bin").write_text("")
    done = dock.post(final, stages=built)
    assert done.returncode == 0, done.stderr
    found = sorted(str(path.relative_to(dock.root)) for path in dock.root.rglob("*"))
    own = ["etc", "etc/passwd", "file", "opt", "opt/x", "var"]
    assert found == ["all", *(f"all/{name}" for name in own), "tool", "tool/bin"]


def test_a_copy_of_a_stage_leaves_out_what_it_excludes(dock: Dock, tmp_path: Path) -> None:
    text = "FROM debian:12 AS one\nRUN make\nFROM debian:12\n"
    option = "--exclude=.venv/lib --exclude=/a/cuda*.so --exclude=none"
    final = cut(dock.convert(f"{text}COPY --from=one {option} /app @/app\n").definition)[-1]
    for name in (".venv/lib/x", ".venv/bin/y", "a/cuda1.so", "a/cuda.txt"):
        path = tmp_path / "one/app" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    done = dock.post(final, stages={"one": tmp_path / "one"})
    assert done.returncode == 0, done.stderr
    found = {str(path.relative_to(dock.root)) for path in dock.root.rglob("*") if path.is_file()}
    assert found == {"app/.venv/bin/y", "app/a/cuda.txt"}
    for option in (
        "--exclude=*.so",
        "--exclude=!a",
        "--exclude=a/../../b",
        "--exclude=a/**/b",
        "--exclude=" + "a" * 9999 + "%",
    ):
        with pytest.raises(UserError, match="cannot be combined with --from"):
            dock.convert(f"{text}COPY --from=one {option} /app /x\n")
    with pytest.raises(UserError, match="a source with a pattern"):
        dock.convert(f"{text}COPY --from=one --exclude=a /app* /x/\n")


def test_names_with_spaces_of_a_stage(dock: Dock, tmp_path: Path) -> None:
    made = dock.convert(
        'FROM debian:12 AS one\nRUN make\nFROM debian:12\nCOPY --from=one ["/my dir/a b", "/my dir/* c", "@/out/"]\n'
    )
    _, final = cut(made.definition)
    assert '    "/my dir/a b" /.slurmddp/1/\n    "/my dir/* c" /.slurmddp/2/\n' in final.sections["%files from one"]
    (tmp_path / "one/my dir").mkdir(parents=True)
    for name in ("a b", "x c", "y c"):
        (tmp_path / "one/my dir" / name).write_text(name)
    final.sections["%files from one"] = final.sections["%files from one"].replace("* c", "x c", 1)
    done = dock.post(final, stages={"one": tmp_path / "one"})
    assert done.returncode == 0, done.stderr
    assert sorted(os.listdir(dock.root / "out")) == ["a b", "x c"]


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A folder directly in /tmp, which a Dockerfile's own /tmp stands for."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    yield folder
    shutil.rmtree(folder)


def test_a_copy_from_the_tmp_of_a_stage(dock: Dock, temporary: Path) -> None:
    text = f"FROM debian:12 AS one\nRUN mkdir {temporary}/dist && touch {temporary}/dist/a.whl\nFROM debian:12\n"
    first, final = cut(dock.convert(text + f"COPY --from=one {temporary}/dist/*.whl @/x/\n").definition)
    done = dock.post(first)
    assert done.returncode == 0, done.stderr
    done = dock.post(final, stages={"one": dock.root})
    assert done.returncode == 0, done.stderr
    assert os.listdir(dock.root / "x") == ["a.whl"]
    text = "FROM debian:12\nCOPY --from=tool:1 /tmp/a /x\n"
    assert "    /tmp/a /.slurmddp/1/\n" in dock.convert(text).definition, "an image has its own /tmp"


def test_a_stage_keeps_its_tmp_for_those_that_start_from_it(dock: Dock) -> None:
    text = "FROM debian:12 AS a\nRUN make > /tmp/x\nFROM a AS b\nRUN b\nFROM a\nCOPY --from=b /x /x\n"
    first, _, final = (part.sections["%post"] for part in cut(dock.convert(text).definition))
    assert first.index("make > /tmp/x") < first.index("cp -a /tmp /.slurmddp.tmp/tmp")
    assert final.index("rm -rf /tmp/*") < final.index("cp -a /.slurmddp.tmp/tmp/. /tmp/") < final.index("cd /\n")
