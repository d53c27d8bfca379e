"""What has another effect than under Docker, and what only the base's configuration decides."""

import re
import subprocess
from pathlib import Path

import pytest

from slurmddp.errors import UserError
from slurmddp.images.image_spec import of_dockerfile
from slurmddp.images.log import BuildLog
from slurmddp.images.make import Request, Rules, decide
from slurmddp.images.registry.image import RegistryImage
from slurmddp.images.registry.reference import parse_reference

from .conftest import Dock, cut

BASE = "lab.example/base:1"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("RUN chmod u+s /x", "setuid"), ("RUN a && chmod -R 4755 /x", "setuid"), ("RUN setcap a=ep /x", "setuid"),
        ("COPY --chmod=2755 a /x", "setuid"), ("RUN chmod 0755 /x; chmod 1777 /y; chmod +x /s", ""),
        ("WORKDIR /root/x", "/root has mode 700"), ("COPY a /root/", "/root has mode 700"), ("WORKDIR /rooted", ""),
        ('ENV PATH="/root/.local/bin:$PATH"', "/root has mode 700"), ("COPY --from=one /root/a /opt/", ""),
        ("ADD a /dev/null", "files for /dev, /proc and /sys are ignored"),
    ],
)  # fmt: skip
def test_what_is_lost_when_the_image_runs_is_noted(dock: Dock, line: str, said: str) -> None:
    dock.file("a")
    notes = dock.convert(f"FROM debian:12 AS one\nRUN true\nFROM debian:12\n{line}\nCMD true\n").notes
    own = [note for note in notes if "Dockerfile:4: " in note and "base image" not in note]
    assert len(own) == (1 if said else 0) and said in "".join(own)


@pytest.mark.parametrize("shell", ["sh", "bash"])
def test_variables_that_are_bashs_own(dock: Dock, shell: str) -> None:
    """/bin/sh is bash in images of Red Hat's family, and stops where somebody sets them."""
    dock.shell = shell
    dock.stub("show")
    (part,) = cut(dock.convert('FROM debian:12\nARG EUID=1\nENV UID=2 GID=3\nRUN show "$GID"\nCMD true\n').definition)
    done = dock.post(part, POSIXLY_CORRECT="1")
    assert done.returncode == 0 and dock.said() == ["show<3>"], done.stderr
    done = subprocess.run(
        [shell, "-e"], input=part.sections["%environment"] + "echo $GID", text=True, capture_output=True
    )
    assert done.stdout == "3\n"


@pytest.mark.parametrize("shell", ["sh", "bash"])
def test_a_failing_line_is_named(dock: Dock, shell: str, tmp_path: Path) -> None:
    dock.shell = shell
    text = "FROM debian:12\nRUN true\nRUN echo one && \\\n  { echo so; exit 3; }\nRUN true\n"
    for lines, expected in (
        (text, " failed at line 3 of the Dockerfile (RUN); the end"),
        (text[:24], " failed; the end"),
    ):
        done = dock.post(cut(dock.convert(lines).definition)[-1])
        log = BuildLog(tmp_path / "log", tmp_path / "draft")
        for line in done.stderr.splitlines():
            log.said(line)
        with log:
            assert f"build{expected}" in log.failure("build failed")


def test_copying_a_folder_to_a_link_leaves_the_mode_of_where_it_leads(dock: Dock) -> None:
    dock.file("dir/f")
    (dock.root / "real").mkdir(mode=0o750)
    (dock.root / "link").symlink_to("real")
    assert dock.post(cut(dock.convert("FROM debian:12\nCOPY dir @/link\n").definition)[-1]).returncode == 0
    assert (dock.root / "real").stat().st_mode & 0o777 == 0o750 and (dock.root / "real/f").exists()


@pytest.mark.parametrize("name", ["docker.io/docker/dockerfile-upstream:master-labs", "docker/dockerfile@sha256:0"])
def test_docker_s_own_frontends(dock: Dock, name: str) -> None:
    assert dock.convert(f"# syntax={name}\nFROM debian:12\nRUN true\n").definition


def test_a_run_as_a_user_is_warned_of_once(dock: Dock) -> None:
    notes = dock.convert("FROM debian:12\nUSER me\nRUN a\nRUN b\nUSER 5\nRUN c\nUSER root\nRUN d\n").notes
    told = [note.partition("Dockerfile:")[2] for note in notes if "gives all files of the base to root" in note]
    assert [note.split(":")[:2] for note in told] == [["3", " RUN as me"], ["6", " RUN as 5"]]


def test_an_arg_after_an_env_of_its_name_is_noted(dock: Dock) -> None:
    made = dock.convert("FROM debian:12\nENV A=1 B=2\nARG A=3\nARG B=2\nARG C\nLABEL l=$A\n")
    assert "Dockerfile:3: ARG A has no effect: the ENV of that name before it wins" in made.notes[0]
    assert len(made.notes) == 1 and "    l 1\n" in made.definition and "A=3" not in made.definition


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("COPY $NAME/x /x\n", "$NAME is set by no ARG or ENV"),
        ("ENV B=${NAME/a/b}\n", "${NAME/...} is not converted: only the base image knows its value"),
        ("COPY --from=one /$NAME /x\n", "$NAME is set by no ARG or ENV"),
    ],
)
def test_what_the_registry_has_to_say_first(
    dock: Dock, line: str, what: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    dock.files(**{"a/x": ""})
    path = dock.file("Dockerfile", f"FROM {BASE} AS one\nRUN a\nFROM {BASE}\n{line}")
    wanted = of_dockerfile(path, {}, None)
    assert wanted.undecided
    with pytest.raises(UserError, match=re.escape(what)) as caught:
        wanted.labelled({}, None)
    assert caught.value.where == f"{path}:4" and "a build asks the base's registry" in str(caught.value.todo)
    digest = "sha256:" + "0" * 64
    base = RegistryImage(parse_reference(BASE), digest, digest, "amd64", "linux", env={"NAME": "a"})
    monkeypatch.setattr("slurmddp.images.make.resolve_all", lambda names, settings: dict.fromkeys(names, base))
    image = decide(Request(wanted, None, tmp_path), Rules).image
    assert not image.undecided and image.plain and "line 4" in image.definition
    taken = line.startswith("COPY $")
    assert (dock.context / "a/x" in image.sources) is taken and bool(image.items) is taken
    dock.file("Dockerfile", f"FROM {BASE}\n{line}NONSENSE\nCOPY none /\n")
    with pytest.raises(UserError, match="3 problems: nothing was converted"):
        of_dockerfile(path, {}, None)
