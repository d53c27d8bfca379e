"""The table of docs/dockerfiles.md: what becomes of each form of a Dockerfile, told by the conversion itself.

`SLURMDDP_UPDATE_GOLDEN=1 pytest tests/unit/images/dockerfile/test_forms.py` writes the table anew.
"""

import os
import re
from pathlib import Path

import pytest

from slurmddp.errors import UserError

from .conftest import Dock

DOCS = Path(__file__).resolve().parents[4] / "docs" / "dockerfiles.md"
BEGIN, END = "<!-- forms -->\n", "<!-- end of forms -->\n"
#: The form as the table shows it: lines of a Dockerfile in which it stands.
FORMS = {
    "`# syntax=docker/dockerfile:1`, `docker/dockerfile-upstream`, `# escape=`": "",
    "`# syntax=` of another frontend": "# syntax=lab.example/other\n",
    "`FROM IMAGE AS NAME`, `FROM STAGE`, `--platform` of this machine": "FROM one AS two\n",
    "`FROM --platform` of another machine": "FROM --platform=linux/mips64 debian:12\n",
    "`FROM scratch`, for files": "FROM scratch AS a\nCOPY file /\nFROM one\nCOPY --from=a /file /\n",
    "`FROM scratch`, for the image itself": "FROM scratch\n",
    "`ARG NAME`, `ARG NAME=VALUE`, before and after FROM, with a comment behind it": "ARG A=1 # one\n",
    "`ENV A=1 B=2`, `ENV A 1`, also of bash's own, such as UID": "ENV A=1 UID=2\nENV C 3\n",
    "`ARG` after an `ENV` of the same name": "ENV A=1\nARG A=2\n",
    "`${A:-b}` `${A:+b}` `${A:?b}`, also without the colon and with variables in b": "ENV A=1\nENV B=${A:+${A}}\n",
    "`${A#b}` `${A##b}` `${A%b}` `${A%%b}` `${A/b/c}` `${A//b/c}`": "ENV A=1\nENV B=${A#1} C=${A//1/2}\n",
    "`${A/b/c}` of a variable of the base": "ENV B=${A/b/c}\n",
    "a variable of the base in ENV or ARG, without its registry": "ENV B=$A\n",
    "a variable of the base in WORKDIR, USER, `--chown` or a destination": "WORKDIR $A\nUSER $B\n",
    "a variable of the base in a source of COPY": "COPY $A /x\n",
    "`RUN command`": "RUN true\n",
    '`RUN ["program", "word"]`': 'RUN ["true"]\n',
    "`RUN <<NAME`, `<<-NAME`, `<<'NAME'`, several, with an interpreter or `#!`": "RUN <<A\ntrue\nA\n",
    "`RUN` after `USER`": "USER me\nRUN true\n",
    "`RUN pip install --user`": "RUN pip install --user a\n",
    "`RUN --mount=type=cache`": "RUN --mount=type=cache,target=/c true\n",
    "`RUN --mount=type=tmpfs`": "RUN --mount=type=tmpfs,target=/c true\n",
    "`RUN --mount=type=bind`": "RUN --mount=type=bind,source=file,target=/c true\n",
    "`RUN --mount=type=bind,from=STAGE`": "FROM debian:12\nRUN --mount=from=one,source=/a,target=/c true\n",
    "`RUN --mount=type=secret`, without `--secret`": "RUN --mount=type=secret,id=a true\n",
    "`RUN --mount=type=secret,required=true`, without `--secret`": "RUN --mount=type=secret,id=a,required=true true\n",
    "`RUN` with chmod u+s or setcap; `COPY --chmod=4755`": "RUN chmod u+s /a\n",
    "`RUN --mount=type=ssh`": "RUN --mount=type=ssh true\n",
    "`RUN --network`": "RUN --network=none true\n",
    "`RUN --security`": "RUN --security=insecure true\n",
    '`SHELL ["/bin/bash", "-c"]`': 'SHELL ["/bin/bash", "-c"]\nRUN true\n',
    "`COPY`, `ADD` of files and folders, with patterns": "COPY file f* /x/\n",
    "`COPY --from=STAGE`, `--from=IMAGE`": "FROM debian:12\nCOPY --from=one /a /a\n",
    "`COPY --from=STAGE` of files in /tmp or /var/tmp": "FROM debian:12\nCOPY --from=one /tmp/a /a\n",
    "`COPY --from=STAGE / /`": "FROM debian:12\nCOPY --from=one / /\n",
    "`COPY` below /root; `WORKDIR` and `ENV` with it": "COPY file /root/\n",
    "`COPY --chown`, `--chmod`, `--link`": "COPY --chown=1:1 --chmod=644 --link file /x\n",
    "`COPY`, `ADD` to /dev, /proc or /sys": "ADD file /dev/null\n",
    "`COPY --parents`": "COPY --parents file /x/\n",
    "`COPY --exclude`": "COPY --exclude=*.log . /x/\n",
    "`COPY --from=STAGE --exclude=NAME`": "FROM debian:12\nCOPY --from=one --exclude=a/b*.so /a /x/\n",
    "`COPY --from=STAGE --exclude=*.log`": "FROM debian:12\nCOPY --from=one --exclude=*.log /a /x/\n",
    "`COPY <<NAME /file`, `ADD <<NAME /file`": "COPY <<A /x\na\nA\n",
    "`ADD` of a tar archive": "ADD archive.tar /x\n",
    "`ADD https://...`": "ADD https://lab.example/a /a\n",
    "`ADD` of a git repository": "ADD git@lab.example:a.git /a\n",
    "`WORKDIR`, with CMD or ENTRYPOINT": 'WORKDIR /w\nCMD ["true"]\n',
    "`WORKDIR` without CMD and ENTRYPOINT": "WORKDIR /w\n",
    "`USER root`, `USER 0`": "USER root\n",
    "`USER NAME`, `USER UID:GID`": "USER 1000:1000\n",
    "`ENTRYPOINT` and `CMD`, in both forms": 'ENTRYPOINT ["a"]\nCMD b\n',
    "`LABEL`, `MAINTAINER`": "LABEL a=b\nMAINTAINER c\n",
    "`ONBUILD`, for stages of this Dockerfile": "ONBUILD RUN true\nFROM one\n",
    "`ONBUILD`, for other images": "ONBUILD RUN true\n",
    "`EXPOSE`": "EXPOSE 80\n",
    "`VOLUME`": "VOLUME /a\n",
    "`STOPSIGNAL`": "STOPSIGNAL SIGINT\n",
    "`HEALTHCHECK`": "HEALTHCHECK CMD true\n",
}


def row(dock: Dock, form: str, lines: str) -> str:
    """What the conversion of these lines says."""
    head = lines if lines.startswith("#") else ""
    try:
        made = dock.convert(f"{head}FROM debian:12 AS one\n{'' if head else lines}")
    except UserError as error:
        verdict, said = "refused", f"{error.what}. Instead: {error.todo}"
    else:
        own = [note for note in made.notes if not re.search("; assumed: |the image gets all of ", note)]
        verdict, said = ("noted", "; ".join(own)) if own else ("converted", "")
        if made.undecided:
            verdict, said = "asks the registry", f"in a dry run: {made.undecided.what}. Instead: {made.undecided.todo}"
    said = re.sub(rf"(^|; ){re.escape(str(dock.context))}/Dockerfile:\d+: ", r"\1", said)
    said = re.sub(r"this machine is linux/\w+", "this machine is another", said)
    return f"| {form} | {verdict} | {said.replace('|', chr(92) + '|')} |\n"


@pytest.fixture
def table(dock: Dock) -> str:
    dock.files(file="", **{"archive.tar": ""})
    rows = "".join(row(dock, form, lines) for form, lines in FORMS.items())
    return f"| Form | Result | What a build says |\n|---|---|---|\n{rows}"


def test_the_docs_say_what_becomes_of_each_form(table: str) -> None:
    before, _, rest = DOCS.read_text().partition(BEGIN)
    written, _, after = rest.partition(END)
    if os.environ.get("SLURMDDP_UPDATE_GOLDEN"):
        DOCS.write_text(before + BEGIN + table + END + after)
        return
    assert written == table, "SLURMDDP_UPDATE_GOLDEN=1 pytest tests/unit/images/dockerfile/test_forms.py"


def test_most_forms_are_converted(table: str) -> None:
    verdicts = [line.split(" | ")[1] for line in table.splitlines()[2:]]
    assert verdicts.count("converted") > 20 and "refused" in verdicts and "noted" in verdicts
