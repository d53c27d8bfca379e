"""Dockerfiles as definition files: the texts, and what they do when a shell runs them."""

import os
import re
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from slurmddp.images.base import Base
from slurmddp.images.dockerfile import convert
from slurmddp.images.dockerfile.lines import Problems, parse
from slurmddp.images.dockerfile.running import run_lines
from slurmddp.images.dockerfile.words import expand, pairs, shell
from slurmddp.images.image_spec import of_dockerfile
from slurmddp.images.registry.image import RegistryImage
from slurmddp.images.registry.reference import parse_reference
from slurmddp.images.releases import releases

from .conftest import Dock, cut


def test_a_whole_definition(dock: Dock) -> None:
    dock.file("train.py", "pass")
    made = dock.convert('FROM debian:12\nENV A=1\nRUN echo $A\nCOPY train.py /app/\nCMD ["python3", "/app/train.py"]\n')
    (part,) = cut(made.definition)
    assert part.header == {"bootstrap": "docker", "from": "debian:12", "stage": "stage-0"}
    assert part.sections["%files from slurmddp-files"] == "    /1 /.slurmddp/\n\n"
    assert "copy 0:0 '' /app/ /.slurmddp/1/train.py\n" in part.sections["%post"]
    assert "    export A=1\n    : line 3: RUN\n    /bin/sh -c 'echo $A'\n" in part.sections["%post"]
    assert part.sections["%environment"].endswith("    export A=1\n\n")
    assert "slurmddp.base docker://debian:12\n" in part.sections["%labels"]
    assert part.sections["%startscript"].strip() == part.sections["%runscript"].strip()
    assert made.bases[-1] == Base("docker", "debian:12")
    assert made.sources == (dock.context / "train.py",)
    assert len(made.notes) == 1 and "no ENTRYPOINT" in made.notes[0]


def test_env_is_seen_by_later_commands_in_order_and_when_the_image_runs(dock: Dock) -> None:
    dock.stub("show")
    made = dock.convert(
        """FROM debian:12
RUN show "$A"
ENV A="x y" B='lit$A' C=a\\ b
RUN show "$A" "$B" "$C"
ENV A=new D=$A-$A
ENV E old form  of   it
RUN show "$A" "$D" "$E"
ENV PATH=/opt/bin:$PATH F=${NONE:-d} G=${A:+set} H=${EMPTY:-}
CMD show "$D" "$PATH" "$F" "$G"
"""
    )
    (part,) = cut(made.definition)
    done = dock.post(part)
    assert done.returncode == 0, done.stderr
    assert dock.said() == ["show<>", "show<x y><lit$A><a b>", "show<new><x y-x y><old form  of   it>"]
    dock.calls.write_text("")
    dock.run(part)
    assert dock.said() == [f"show<x y-x y></opt/bin:{dock.bin}:/usr/bin:/bin><d><set>"]


def test_home_stays_apptainers(dock: Dock) -> None:
    made = dock.convert("FROM debian:12\nENV HOME=/root X=1\nWORKDIR $HOME/x\n")
    (part,) = cut(made.definition)
    assert "export HOME=/root X=1" in part.sections["%post"]
    assert "HOME" not in part.sections["%environment"] and "export X=1" in part.sections["%environment"]
    assert "mkdir -p /root/x" in part.sections["%post"]
    assert "HOME" in made.notes[0]


def test_a_run_is_a_process_of_its_own_with_dockers_text(dock: Dock) -> None:
    dock.stub("show", "add")
    made = dock.convert(
        """FROM debian:12
RUN cd /tmp && export LOST=1; false; true
run show "$LOST" "$(pwd)" && \\
    # a comment, and an empty line

    add \\
    %post 'a  b' # the end \\
    && never
RUN ["show", "a b", "$HOME", "it's", "\\\\"]
RUN show '{{ x }}' "{{y}}" {{{z}}}
RUN printf \\
%s/%s\\
-x\\
 y > @/out && exit 0
RUN [ 1 = 1 ] && show test
"""
    )
    (part,) = cut(made.definition)
    done = dock.post(part)
    assert done.returncode == 0, done.stderr
    assert dock.said() == [
        "show<></>",
        "add<%post><a  b>",
        "show<a b><$HOME><it's><\\>",
        "show<{{ x }}><{{y}}><{{{z}}}>",
        "show<test>",
    ]
    assert (dock.root / "out").read_text() == "y/-x"


def test_a_command_that_fails_ends_the_build(dock: Dock) -> None:
    dock.stub("show")
    (part,) = cut(dock.convert('FROM debian:12\nRUN ["false"]\nRUN show\n').definition)
    assert dock.post(part).returncode != 0
    (part,) = cut(dock.convert("FROM debian:12\nRUN true && false\nRUN show\n").definition)
    assert dock.post(part).returncode != 0
    (part,) = cut(dock.convert('FROM debian:12\nRUN ["exit", "0"]\nRUN show\n').definition)
    assert dock.post(part).returncode != 0  # the program  does not existof that name
    assert not [line for line in dock.said() if line.startswith("show")]


WORDS = st.text(alphabet="ab '\"$`\\#%{}()&;!~*", max_size=8).filter(lambda word: not word.endswith("\\"))


@settings(max_examples=40)
@given(st.lists(WORDS, min_size=1, max_size=4))
@example(["%post", "'a", "b' #", "{{ x }}"])
@example(["a", "%files", "bootstrap: x", "{{x}}"])
def test_the_shell_gets_exactly_the_joined_text(pieces: list[str]) -> None:
    """Whatever the file's breaks are; a stand-in for /bin/sh prints the text that it is given."""
    instruction = parse("FROM x\nRUN x" + "\\\n".join(pieces) + ".\n", "Dockerfile", Problems())[-1]
    kept = [pieces[0], *(piece for piece in pieces[1:-1] if piece.strip() and not piece.lstrip().startswith("#"))]
    if len(pieces) > 1 and not pieces[-1].lstrip().startswith("#"):
        kept.append(pieces[-1])
    if len(kept) == len(pieces):
        assert instruction.text == "x" + "".join(pieces) + "."
    (command,) = run_lines(instruction)
    assert not any(line.lstrip().startswith("%") or line.startswith("boot") for line in command.splitlines())
    assert "{{" not in command
    script = "show() { printf '%s' \"$1\"; }\nshow " + command.removeprefix("/bin/sh -c ")
    said = subprocess.run(["sh"], input=script, capture_output=True, text=True).stdout
    if command.startswith("/bin/sh -c '"):  # the breaks are the inner shell's to take away, and it does
        assert "'" not in said and "#" not in said and "\\\\\n" not in said
        said = said.replace("\\\n", "")
    assert said == instruction.text


def test_workdir(dock: Dock) -> None:
    dock.stub("show")
    made = dock.convert('FROM debian:12\nARG D=sub\nWORKDIR "@/a b"\nWORKDIR $D/../c\nRUN show "$(pwd)"\nCMD pwd\n')
    (part,) = cut(made.definition)
    assert dock.post(part).returncode == 0
    assert dock.said() == [f"show<{dock.root}/a b/c>"]
    assert dock.run(part) == f"{dock.root}/a b/c\n"
    assert dock.run(part, "sh", "-c", "echo $PWD") == f"{dock.root}/a b/c\n"


def test_arguments_before_and_after_from(dock: Dock) -> None:
    dock.stub("show")
    text = """ARG TAG=12
ARG NAME=debian
FROM ${NAME}:${TAG} AS one
ARG TAG
ARG EMPTY
ARG VERSION=1.0
ARG OTHER="v $VERSION"
ENV KEPT=$VERSION
RUN show "$TAG" "$EMPTY" "$VERSION" "$OTHER" "$KEPT" "$NAME"
LABEL v=$OTHER
"""
    made = dock.convert(text)
    (part,) = cut(made.definition)
    assert part.header["from"] == "debian:12"
    assert dock.post(part).returncode == 0
    assert dock.said() == ["show<12><><1.0><v 1.0><1.0><>"]
    assert "VERSION" not in part.sections["%environment"] and "KEPT=1.0" in part.sections["%environment"]
    assert "    v v 1.0\n" in part.sections["%labels"]
    dock.calls.write_text("")
    made = dock.convert(text, TAG="11", EMPTY="e", VERSION="it's $x", UNKNOWN="u", http_proxy="http://p:1")
    (part,) = cut(made.definition)
    assert part.header["from"] == "debian:11"
    assert dock.post(part).returncode == 0
    assert dock.said() == ["show<11><e><it's $x><v it's $x><it's $x><>"]
    assert any("UNKNOWN has no ARG in" in note for note in made.notes)
    assert not any("http_proxy" in note for note in made.notes)
    assert "export http_proxy=http://p:1" in part.sections["%post"]
    assert "proxy" not in part.sections["%environment"]


def test_env_wins_over_arg(dock: Dock) -> None:
    dock.stub("show")
    (part,) = cut(
        dock.convert("FROM debian:12\nENV A=env\nARG A=arg\nRUN show $A\nWORKDIR @/$A\n", A="given").definition
    )
    assert dock.post(part).returncode == 0
    assert dock.said() == ["show<env>"]
    assert (dock.root / "env").is_dir()


@pytest.mark.parametrize("shell", ["sh", "bash"])
def test_copies_go_where_docker_puts_them_and_in_their_turn(dock: Dock, shell: str) -> None:
    dock.shell = shell
    dock.files(a="A", **{"dir/b": "B", "dir/.hidden": "H", "dir/sub/c": "C", "x y": "S", "w1": "1", "w2": "2"})
    (dock.context / "dir/link").symlink_to("sub/c")
    (dock.context / "dir/sub/c").chmod(0o755)
    made = dock.convert(
        """FROM debian:12
RUN test ! -e @/first && echo old > @/a && mkdir @/there
COPY a @/a
COPY dir @/dir
COPY a "x y" @/many/
COPY ["x y", "@/json file"]
COPY w? @/glob/
COPY a @/there
WORKDIR @/work
COPY dir/sub/ .
COPY a first
RUN test -e first && rm first
ADD --chmod=700 a @/mode
"""
    )
    (part,) = cut(made.definition)
    done = dock.post(part)
    assert done.returncode == 0, done.stderr
    root = dock.root
    assert (root / "a").read_text() == "A"
    assert (root / "dir/b").read_text() == "B" and (root / "dir/.hidden").read_text() == "H"
    assert os.readlink(root / "dir/link") == "sub/c" and os.access(root / "dir/sub/c", os.X_OK)
    assert sorted(os.listdir(root / "many")) == ["a", "x y"] and (root / "json file").read_text() == "S"
    assert sorted(os.listdir(root / "glob")) == ["w1", "w2"]
    assert (root / "there/a").read_text() == "A"
    assert os.listdir(root / "work") == ["c"]
    assert (root / "mode").stat().st_mode & 0o777 == 0o700
    assert not (root / ".slurmddp").exists()
    assert dock.context / "dir" in made.sources


def test_owners_are_set_by_chown(dock: Dock) -> None:
    dock.files(a="A", **{"dir/b": "B"})
    (part,) = cut(dock.convert("FROM debian:12\nARG U=me\nCOPY --chown=$U:staff dir @/new\nCOPY a @/a\n").definition)
    assert dock.post(part).returncode == 0
    staging = dock.root / ".slurmddp"
    called = [line for line in dock.said() if line.startswith("chown")]
    assert called[0] == f"chown<-Rh><me:staff><{staging}/1/from>"
    assert called[1] == f"chown<me:staff><{dock.root}/new>"
    assert called[3] == f"chown<-Rh><0:0><{staging}/2/a>"


def test_stages_named_unnamed_and_by_number(dock: Dock, tmp_path: Path) -> None:
    made = dock.convert(
        """FROM debian:12
RUN make
FROM debian:11 AS Middle
COPY --from=0 /out/bin /bin/
FROM debian:10 AS unused
RUN --mount=type=cache,target=/x never
FROM python:3.12-slim
COPY --from=middle /bin/tool /root/.local @/opt/
COPY --from=ghcr.io/astral-sh/uv:0.5 /uv @/uv
COPY --chown=1:2 --from=0 /wheels/*.whl @/wheels/
"""
    )
    parts = cut(made.definition)
    names = [part.header["stage"] for part in parts]
    assert [part.header["from"] for part in parts] == [
        "debian:12",
        "debian:11",
        "ghcr.io/astral-sh/uv:0.5",
        "python:3.12-slim",
    ]
    assert len(set(names)) == 4 and names[1] == "middle"
    assert f"%files from {names[0]}" in parts[1].sections
    assert "%post" not in parts[2].sections and "%runscript" not in parts[3].sections
    assert any("unused" in note for note in made.notes)
    assert made.bases[-1] == Base("docker", "python:3.12-slim")
    built = {name: tmp_path / "built" / name for name in names}
    for name, file in (
        (names[1], "bin/tool"),
        (names[1], "root/.local/x"),
        (names[2], "uv"),
        (names[0], "wheels/a.whl"),
    ):
        (built[name] / file).parent.mkdir(parents=True, exist_ok=True)
        (built[name] / file).write_text(file)
    done = dock.post(parts[3], stages=built)
    assert done.returncode == 0, done.stderr
    assert sorted(os.listdir(dock.root / "opt")) == ["tool", "x"]
    assert (dock.root / "uv").read_text() == "uv" and (dock.root / "wheels/a.whl").exists()


def test_a_stage_built_on_another_takes_all_of_it(dock: Dock) -> None:
    dock.stub("show")
    made = dock.convert(
        """FROM debian:12 AS common
ARG A=1
ENV B=$A
WORKDIR @/w
CMD ["echo", "common"]
FROM common AS test
RUN show test
FROM common AS final
RUN show "$A" "$B" "$(pwd)"
ENTRYPOINT ["echo", "final"]
"""
    )
    (part,) = cut(made.definition)
    assert made.bases[-1] == Base("docker", "debian:12")
    assert dock.post(part).returncode == 0
    assert dock.said() == [f"show<1><1><{dock.root}/w>"]
    assert dock.run(part) == "final\n"  # ENTRYPOINT takes the CMD of the base away
    (part,) = cut(dock.convert((dock.context / "Dockerfile").read_text(), target="common").definition)
    assert dock.run(part) == "common\n"
    (part,) = cut(dock.convert((dock.context / "Dockerfile").read_text(), target="1").definition)
    assert "show test" in part.sections["%post"]


@pytest.mark.parametrize(
    ("lines", "arguments", "said"),
    [
        ('CMD ["show", "a b", "$HOME"]', [], "show<a b><$HOME>"),
        ('CMD ["show", "a b"]', ["show", "c d", "e'f"], "show<c d><e'f>"),
        ('CMD show "a b" $HOME', [], "show<a b></h>"),
        ("CMD ['show']", ["show"], "show"),
        ('ENTRYPOINT ["show", "x y"]\nCMD ["d 1", "{{ d2 }}"]', [], "show<x y><d 1><{{ d2 }}>"),
        ('CMD ["d 1"]\nENTRYPOINT ["show", "x y"]', [], "show<x y><d 1>"),
        ('ENTRYPOINT ["show", "x y"]\nCMD ["d 1"]', ["a", ""], "show<x y><a><>"),
        ('ENTRYPOINT show "$HOME" "x y"', [], "show</h><x y>"),
        ('ENTRYPOINT show in\nCMD ["d"]', [], "show<in>"),
        ('ENTRYPOINT show "$0"', ["arg"], "show<arg>"),
        ('ENTRYPOINT ["show"]\nCMD a "b c"', [], 'show</bin/sh><-c><a "b c">'),
        ('ENTRYPOINT ["lost"]\nENTRYPOINT ["show", "it\'s \\"q\\" \\\\ `x`"]', [], 'show<it\'s "q" \\ `x`>'),
        ('ENTRYPOINT []\nCMD ["show"]', [], "show"),
        ('ENTRYPOINT ["show"]\nCMD []', [], "show"),
    ],
)
def test_entrypoint_and_cmd(dock: Dock, lines: str, arguments: list[str], said: str) -> None:
    dock.stub("show")
    (part,) = cut(dock.convert(f"FROM debian:12\n{lines}\n").definition)
    printed = dock.run(part, *arguments, HOME="/h")
    assert dock.said() == [said], printed


def test_an_image_without_a_command_says_so(dock: Dock) -> None:
    (part,) = cut(dock.convert("FROM debian:12\nENTRYPOINT []\n").definition)
    assert "no command" in dock.run(part)
    (part,) = cut(dock.convert("FROM debian:12\nRUN true\n").definition)
    assert "%runscript" not in part.sections  # the base's own stays


def test_an_ngc_base_is_known(dock: Dock) -> None:
    dock.file("train.py")
    made = dock.convert('FROM nvcr.io/nvidia/pytorch:25.04-py3\nCOPY train.py .\nCMD ["python", "train.py"]\n')
    (part,) = cut(made.definition)
    assert made.bases[-1].release == releases()["25.04"]
    assert "copy 0:0 '' /workspace/ " in part.sections["%post"]
    assert "exec /opt/nvidia/nvidia_entrypoint.sh" in part.sections["%runscript"]


def test_labels_and_what_has_no_meaning(dock: Dock) -> None:
    made = dock.convert(
        """FROM debian:12
LABEL a.b="c  d" e='f' "g"=h
LABEL old style
MAINTAINER Someone, example.org
EXPOSE 80/tcp
VOLUME ["/data"]
STOPSIGNAL SIGINT
HEALTHCHECK --interval=5s CMD true
USER root
RUN true
USER nobody
"""
    )
    (part,) = cut(made.definition)
    for line in ("a.b c  d", "e f", "g h", "old style", "maintainer Someone, example.org"):
        assert f"    {line}\n" in part.sections["%labels"]
    notes = "\n".join(made.notes)
    for number, word in ((5, "EXPOSE"), (6, "VOLUME"), (7, "STOPSIGNAL"), (8, "HEALTHCHECK"), (11, "USER nobody")):
        assert f"Dockerfile:{number}: {word}" in notes


def test_continuations_comments_and_the_escape_directive(dock: Dock) -> None:
    dock.stub("show")
    made = dock.convert(
        "# escape=`\r\n# a comment\r\nFROM debian:12\r\n  # another\r\nRUN show a\\ `\r\n  # inside\r\n\r\n  c:\\x\r\n"
        'ENV A=b` c\r\nRUN show "$A"\r\n'
    )
    (part,) = cut(made.definition)
    assert dock.post(part).returncode == 0
    assert dock.said() == ["show<a ><c:x>", "show<b c>"]


def test_dockerignore_is_honoured(dock: Dock) -> None:
    dock.files(
        **{
            ".dockerignore": "# no\n.git\n**/*.log\ndata\n!data/keep\n/secret.*\nDockerfile\n.dockerignore\n",
            ".git/x": "",
            "a.py": "",
            "src/b.py": "",
            "src/c.log": "",
            "data/big": "",
            "data/keep": "k",
            "secret.env": "",
            "whole/d": "",
        }
    )
    made = dock.convert("FROM debian:12\nCOPY . @/app/\n")
    (part,) = cut(made.definition)
    assert dock.post(part).returncode == 0
    found = sorted(str(path.relative_to(dock.root)) for path in dock.root.rglob("*") if path.is_file())
    assert found == ["app/a.py", "app/data/keep", "app/src/b.py", "app/whole/d"]
    assert dock.context / "whole" in made.sources and dock.context / "src" not in made.sources
    assert made.notes == ()


def test_without_dockerignore_a_copy_of_all_is_noted(dock: Dock) -> None:
    made = dock.convert("FROM debian:12\nCOPY . /app\n")
    assert "Dockerfile:2: the image gets all of" in made.notes[0] and ".dockerignore" in made.notes[0]


def test_add_unpacks_a_local_archive(dock: Dock) -> None:
    dock.file("x", "X")
    with tarfile.open(dock.context / "a.tar.gz", "w:gz") as archive:
        archive.add(dock.context / "x", "inside/x")
    (part,) = cut(dock.convert("FROM debian:12\nADD a.tar.gz @/out\nCOPY a.tar.gz @/kept\n").definition)
    done = dock.post(part)
    assert done.returncode == 0, done.stderr
    assert (dock.root / "out/inside/x").read_text() == "X" and (dock.root / "kept").is_file()


@settings(max_examples=20)
@given(st.lists(st.text(alphabet=" ab'\"$`\\{}%#!~*\t\u00e9", max_size=9), min_size=1, max_size=8))
def test_a_word_reaches_the_shell_as_it_is(words: list[str]) -> None:
    quoted = [shell(word) for word in words]
    assert not any("{{" in word for word in quoted)
    done = subprocess.run(["sh"], input="printf '<%s>' " + " ".join(quoted), capture_output=True, text=True)
    assert done.stdout == "".join(f"<{word}>" for word in words)


@settings(max_examples=20)
@given(st.text(alphabet="ab '$\\{}=\"", max_size=12))
def test_quoted_values_are_taken_as_docker_takes_them(value: str) -> None:
    """In single quotes all is as it stands; in double ones a backslash takes a meaning away."""
    escaped = re.sub(r'(["\\$])', r"\\\1", value)
    (single,) = parse("ENV A='" + value.replace("'", "") + "'", "Dockerfile", Problems())
    (double,) = parse(f'ENV A="{escaped}"', "Dockerfile", Problems())
    ((_, raw),) = pairs(single)
    assert "".join(map(str, expand(raw, lambda _: None, single))) == value.replace("'", "")
    ((_, raw),) = pairs(double)
    assert "".join(map(str, expand(raw, lambda _: None, double))) == value


def test_each_stage_begins_in_the_workdir_of_its_own_base(dock: Dock) -> None:
    text = 'FROM one AS made\nWORKDIR a\nFROM two AS mid\nFROM mid\nCOPY --from=made /x /y\nWORKDIR b\nCMD ["x"]\n'
    path = dock.file("Dockerfile", text)
    digest = "sha256:" + "0" * 64

    def said(name: str, **config: Any) -> RegistryImage:
        return RegistryImage(parse_reference(name), digest, digest, "amd64", "linux", **config)

    bases = {"one": said("one", workdir="/srv/{{ x }}/"), "two": said("two", workdir="rel", user="root:root")}
    made = convert(path, bases=bases)
    first, second = (part.sections["%post"] for part in cut(made.definition))
    assert "/rel" not in first and "/srv/" in first and "/rel/b" in second and "/srv" not in second
    assert not any("WORKDIR" in note or "ENTRYPOINT" in note or "USER" in note for note in made.notes)
    assert any("begins at / here" in note for note in convert(path).notes)


def test_the_image_starts_in_the_workdir_of_its_base_as_in_docker(dock: Dock) -> None:
    path = dock.file("Dockerfile", 'FROM one AS a\nFROM a\nCMD ["python3", "train.py"]\n')
    digest = "sha256:" + "0" * 64
    for workdir, expected in (("/work space", "cd '/work space' ||"), (None, "cd / ||")):
        said = RegistryImage(parse_reference("one"), digest, digest, "amd64", "linux", workdir=workdir)
        made = convert(path, bases={"one": said})
        for section in ("%runscript", "%startscript"):
            assert expected in cut(made.definition)[-1].sections[section]
        (note,) = made.notes
        assert note.startswith(
            f"the image starts in {workdir or '/'}, its base's WORKDIR, as in Docker: relative paths"
        )
    assert "its WORKDIR is /" in convert(path).notes[-1], "a dry run asks no registry"
    path = dock.file("Dockerfile", "FROM nvcr.io/nvidia/pytorch:25.04-py3\nCMD true\n")
    assert "cd /workspace ||" in convert(path).definition
    path = dock.file("Dockerfile", "FROM one\nRUN true\n")
    assert "%runscript" not in convert(path).definition, "the base's own stays"


def test_it_is_read_once(dock: Dock) -> None:
    """Whoever edits it while registries are asked does not get an image of other inputs than the lock's."""
    dock.files(a="", b="")
    path = dock.file("Dockerfile", "FROM debian:12\nRUN one\nCOPY ? /x/\n")
    dock.file(".dockerignore", "b")
    wanted = of_dockerfile(path, {}, None)
    before = wanted.definition
    dock.file("Dockerfile", "FROM debian:12\nRUN two\nCOPY ? /x/\n")
    dock.file(".dockerignore", "a")
    digest = "sha256:" + "0" * 64
    base = RegistryImage(parse_reference("debian:12"), digest, digest, "amd64", "linux", workdir="/w")
    informed = wanted.with_bases({"debian:12": base})
    after = informed.definition
    assert "cd /w" in after and after.replace("    mkdir -p /w\n    cd /w\n", "") == before
    assert informed.plain == wanted.plain
