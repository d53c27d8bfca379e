"""What cannot be right is refused with file and line, what it is, and what to write instead."""

import gzip
import tarfile
import time
from pathlib import Path

import pytest

from slurmddp.errors import UserError
from slurmddp.images.dockerfile import convert

from .conftest import Dock, cut

HEAD = "FROM debian:12 AS one\n"


@pytest.mark.parametrize(
    ("text", "line", "what", "todo"),
    [
        (HEAD + "COPY <<a/b /x\na\na/b\n", 2, "<<a/b is not a file name", "<<NAME"),
        (HEAD + "COPY file1 <<EOF\na\nEOF\n", 2, "needs a source and a destination", "COPY"),
        (HEAD + "RUN true\nRUN --mount=type=ssh true\n", 3, "no ssh agent", "--secret"),
        (HEAD + "RUN --mount=type=secret,id=k,required true\n", 2, "has no such secret", "--secret id=k,src=FILE"),
        (HEAD + "RUN --mount=type=odd,target=/x true\n", 2, "'odd' is not a type", "bind, cache"),
        (HEAD + "RUN --mount=type=cache,from=one,target=/x true\n", 2, "from=one is not converted", "remove it"),
        (HEAD + "RUN --mount=type=cache,mode=$(id),target=/x true\n", 2, "mode=$(id) is not", "remove it"),
        (HEAD + "RUN --mount=type=cache true\n", 2, "has no target", "target=FOLDER"),
        (HEAD + "RUN --mount=type=bind,target=/usr true\n", 2, "cannot mount over /usr", "another target"),
        (HEAD + "RUN --mount=type=bind,target=/x/../proc/self true\n", 2, "mount over /proc/self", "another"),
        (HEAD + "RUN --mount=source=none,target=/x true\n", 2, "'none' is not in", "--context"),
        (HEAD + "RUN --mount=source=file*,target=/x true\n", 2, "cannot be mounted", "pattern"),
        (HEAD + "RUN \\\n  --network=none true\n", 2, "RUN --network", "remove the option"),
        (HEAD + "RUN --security=insecure true\n", 2, "RUN --security", "rights"),
        (HEAD + "ONBUILD FROM x\nFROM one\n", 2, "ONBUILD cannot contain FROM", "into the stage"),
        (HEAD + "ADD git@example.org:x.git /x\n", 2, "not the URL of a file", "RUN git clone"),
        (HEAD + "COPY --parents --from=one /a /x\n", 2, "cannot be combined with --from", "remove the option"),
        (HEAD + "COPY --keep-git-dir file1 /x\n", 2, "COPY --keep-git-dir", "remove the option"),
        (HEAD + "COPY missing /x\n", 2, "'missing' is not in", "--context DIR"),
        (HEAD + "COPY ../bin /x\n", 2, "'../bin' is not in", ": --context /"),
        (HEAD + "COPY a\n", 2, "needs a source and a destination", "COPY"),
        (HEAD + "COPY file* /x\n", 2, "2 sources match", "/x/"),
        (HEAD + "COPY file1 file2 /x\n", 2, "several sources", "end it with /"),
        (HEAD + "COPY ignored /x\n", 2, "dockerignore excludes", "!"),
        (HEAD + "COPY alone /x\n", 2, "excludes 'alone'", "!"),
        (HEAD + "COPY out /x\n", 2, "points outside of", "copy the file"),
        (HEAD + "COPY --chown=$(id) file1 /x\n", 2, "is not USER:GROUP", "--chown=USER:GROUP"),
        (HEAD + "COPY --from=7 /x /x\n", 2, "no stage 7", "from 0"),
        (HEAD + "COPY --from=one /x /x\n", 2, "does not come before", "move it up"),
        (HEAD + "FROM debian:12\nCOPY --from=one /a%b /\n", 3, "cannot be copied", "RUN mv it to a name"),
        (HEAD + "ENV A\n", 2, "has no value", "ENV A=VALUE"),
        (HEAD + "ENV A=b c\n", 2, "'c' is not NAME=VALUE", 'A="b c"'),
        (HEAD + "ENV A-B=c\n", 2, "not a valid name", "letters"),
        (HEAD + "ENV B=${A\n", 2, "an unclosed", "close it"),
        (HEAD + 'ENV A="b\n', 2, "an unclosed", "close it"),
        (HEAD + "ENV B=${A%\\y}\n", 2, "${A%...} is not converted", "write the value"),
        (HEAD + "ENV A=x\nENV B=${A/x/${C}}\n", 3, "the pattern of ${A/...} is not", "write the value"),
        (HEAD + "ENV A=x\nENV B=${A#\\x}\n", 3, "is not converted", "write the value"),
        (HEAD + "ENV A=" + "a" * 9000 + "\nENV B=${A//*a*b}\n", 3, "an unclosed", "close it"),
        (HEAD + "ENV A=" + "a" * 9000 + "\nENV B=${A//*a*b/c}\n", 3, "the pattern of ${A//...} is not", "write"),
        (HEAD + "ENV B=" + "${A:-" * 5000 + "}" * 5000 + "\n", 2, "an unclosed", "close it"),
        (HEAD + "SHELL /bin/bash -c\n", 2, "SHELL has no program", '["/bin/bash", "-c"]'),
        (HEAD + "SHELL []\n", 2, "SHELL has no program", '["/bin/bash", "-c"]'),
        (HEAD + "RUN cat <<EOF\na\n", 2, "the heredoc <<EOF has no end", "just EOF"),
        (HEAD + "RUN cat <<EOF\na\n EOF\n", 2, "the heredoc <<EOF has no end", "just EOF"),
        (HEAD + "RUN cat <<E'O'F\n", 2, "cannot read <<E'O'F", "<<NAME"),
        (HEAD + "ARG A\nENV B=${A:?needed}\n", 3, "$A is not set: needed", "ARG A=VALUE"),
        (HEAD + "LABEL a={{x}}\n", 2, "'{{'", "remove"),
        (HEAD + "LABEL %a=x\n", 2, "is not a label name", "letters"),
        (HEAD + "MAINTAINER {{x}}\n", 2, "'{{'", "remove"),
        (HEAD + 'RUN ["sh", "-c", "a\\nb"]\n', 2, "line break", "script"),
        (HEAD + 'CMD ["a\\u0000"]\n', 2, "line break or a control", "script"),
        (HEAD + "NONSENSE x\n", 2, "'NONSENSE' is not a Dockerfile instruction", "reference"),
        (HEAD + "RUN\n", 2, "RUN has no arguments", "remove the line"),
        ("RUN true\n", 1, "only ARG can come before", "FROM IMAGE"),
        ("ARG A=1\n", 1, "only ARG can come before", "FROM IMAGE"),
        ("ARG A\nFROM $A\n", 2, "the argument A has no value", "--build-arg A=VALUE"),
        ("FROM lab/x:${TAG}\n", 1, "the argument TAG has no value", "--build-arg TAG=VALUE, or ARG TAG=VALUE before"),
        ('FROM ""\n', 1, "is empty", "write FROM IMAGE"),
        ("FROM {{ x }}\n", 1, "cannot read FROM", "FROM IMAGE"),
        ("FROM {{x}}\n", 1, "{{x}}", "HOST/NAME:TAG"),
        ("FROM scratch AS a\nRUN x\nFROM debian:12\nCOPY --from=a /a /a\n", 2, "FROM scratch has none", "small base"),
        ("FROM scratch AS a\nFROM scratch\nCOPY --from=a /a /a\n", 2, "scratch", "small base"),
        ("FROM scratch\n", 1, "scratch", "small base"),
        ("FROM a AS b c\n", 1, "cannot read FROM", "FROM IMAGE AS NAME"),
        ("FROM a AS 1x\n", 1, "not a valid stage name", "letter"),
        ("FROM a AS x\nFROM b AS X\n", 2, "is used twice", "letter"),
        ("FROM --platform=linux/mips64 a\n", 1, "the stage is for linux/mips64", "of that kind"),
        ("# syntax=example.org/other\nFROM a\n", 1, "another frontend", "Docker's own"),
        ("# escape=x\nFROM a\n", 1, "escape character", "`"),
        ("FROM a\nRUN a\x00b\n", 2, "control character", "plain text"),
    ],
)
def test_refused(dock: Dock, text: str, line: int, what: str, todo: str) -> None:
    dock.files(file1="", file2="", ignored="", **{".dockerignore": "ignored\nalone\n!other", "alone/x": ""})
    (dock.context / "out").symlink_to("/etc/passwd")
    with pytest.raises(UserError) as caught:
        dock.convert(text)
    error = caught.value
    assert error.where == f"{dock.context}/Dockerfile:{line}"
    assert what in error.what
    assert error.todo is not None and todo in error.todo


def test_all_problems_are_named_at_once_in_the_order_of_lines(dock: Dock) -> None:
    with pytest.raises(UserError) as caught:
        dock.convert(
            "FROM debian:12 AS one\nCOPY missing /x\nRUN --network=none --security=insecure true\nFROM one AS two\n"
            "NONSENSE x\nFROM debian:12\nCOPY --from=two /a /b\nCOPY --from=one /a /b\nADD git@example.org:x /x\nRUN\n"
        )
    text = str(caught.value).replace(f"{dock.context}/", "")
    places = [line.split(": ")[0] for line in text.splitlines() if line.startswith("Dockerfile:")]
    assert places == [f"Dockerfile:{line}" for line in (2, 3, 3, 5, 9, 10)], text
    assert text.count("\n  -> ") == 6 and text.endswith("\n6 problems: nothing was converted")
    assert caught.value.where == f"{dock.context}/Dockerfile:2" and caught.value.exit_code == 2


def test_what_is_not_needed_is_not_refused(dock: Dock) -> None:
    made = dock.convert("FROM scratch AS export\nSHELL x\nFROM debian:12\nRUN true\n")
    assert "export" in made.notes[0]
    dock.convert('FROM debian:12\nRUN echo "a <<EOF" $((1<<2)) <<< x\n')  # no heredocs


def test_stages_that_copy_from_each_other_without_end(dock: Dock) -> None:
    def stages(count: int) -> str:
        return HEAD + "".join(f"FROM debian:12 AS s{i}\nCOPY --from={i - 1} /x /x\n" for i in range(1, count))

    assert len(cut(dock.convert(stages(50)).definition)) == 50
    with pytest.raises(UserError, match=r"Dockerfile:1: more than 50 stages copy from each other in a row"):
        dock.convert(stages(51))
    with pytest.raises(UserError, match=r"more than 50 stages"):
        dock.convert(stages(400))


def test_the_file_itself(dock: Dock) -> None:
    with pytest.raises(UserError, match="is empty"):
        dock.convert("# nothing\n")
    with pytest.raises(UserError, match="no stage 'x'"):
        dock.convert("FROM debian:12 AS a\n", target="x")
    with pytest.raises(UserError, match="build argument A contains a line break"):
        dock.convert("FROM debian:12\nARG A\n", A="1\n%post")
    (dock.context / "Dockerfile").unlink()
    (dock.context / "Dockerfile").mkdir()
    with pytest.raises(UserError, match="cannot be read"):
        from slurmddp.images.dockerfile import convert

        convert(dock.context / "Dockerfile")


def test_a_name_that_a_line_cannot_hold(dock: Dock) -> None:
    dock.files(**{"dir/it's\n%setup": "", "$x": "", "a\nb": ""})
    (dock.context / "dir/link").symlink_to("it's")
    dock.convert('FROM debian:12\nCOPY dir /x\nCOPY ["\\\\$x", "/x"]\n')
    with pytest.raises(UserError, match=r"the file name .* is not plain text"):
        dock.convert("FROM debian:12\nCOPY a?b /x\n")


def test_secrets_given_as_arguments_are_noted(dock: Dock) -> None:
    made = dock.convert("FROM debian:12\nARG HF_TOKEN\nRUN true\n", HF_TOKEN="x")
    assert "everyone who has the image can read the argument HF_TOKEN" in made.notes[0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("RUN echo " + "x" * 5_000_000, "Dockerfile: the Dockerfile is longer than 256 KiB"),
        ("RUN echo " + "x" * 100_000, "Dockerfile:2: the instruction is longer than 32 KiB"),
        ("RUN echo \\\n" + "xxxx \\\n" * 9_000 + "y", "Dockerfile:2: the instruction is longer than 32 KiB"),
        ("RUN " + "[" * 30_000, None),
        ("WORKDIR a\n" * 25_000, "Dockerfile:1001: the Dockerfile has more than 1000 instructions"),
        ("WORKDIR /a\n" * 999, None),
        ("ENV A=" + "$A" * 4_000, None),
        ("ARG A=xx\n" + "ARG A=$A$A\n" * 60, "a value is longer than 32 KiB"),
        ("ENV A=" + "x" * 30_000 + "\nENV B=" + "$A" * 15_000, "Dockerfile:3: a value is longer than 32 KiB"),
        (f"RUN {'x' * 30_000}\n" * 3, "section that begins with '%post' is longer than 64 KiB"),
    ],
    ids=range(10),
)
def test_nothing_takes_long(tmp_path: Path, text: str, words: str | None) -> None:
    (tmp_path / "Dockerfile").write_text(f"FROM ubuntu:1\n{text}\n")
    begun = time.process_time()
    if words is None:
        convert(tmp_path / "Dockerfile")
    else:
        with pytest.raises(UserError) as caught:
            convert(tmp_path / "Dockerfile")
        assert words in str(caught.value) and len(str(caught.value)) < 600
    assert time.process_time() - begun < 5


@pytest.mark.parametrize("kind", ["x", "L"])
def test_an_archive_s_header_is_not_believed(tmp_path: Path, kind: str) -> None:
    """An extended header of 64 GB, in 60 KB of gzip: only the first block is read."""
    entry = tarfile.TarInfo("a")
    entry.type, entry.size = kind.encode(), 64 << 30
    with gzip.open(tmp_path / "a.tgz", "wb") as file:
        file.write(entry.tobuf() + bytes(60 << 20))
    (tmp_path / "cut.tgz").write_bytes((tmp_path / "a.tgz").read_bytes()[:20])
    (tmp_path / "Dockerfile").write_text("FROM ubuntu:1\nADD a.tgz /x/\nADD cut.tgz /y/\n")
    begun = time.process_time()
    text = convert(tmp_path / "Dockerfile").definition
    assert time.process_time() - begun < 5
    assert "unpack 0:0 /x/ /.slurmddp/1/a.tgz" in text and "copy 0:0 '' /y/ /.slurmddp/2/cut.tgz" in text
