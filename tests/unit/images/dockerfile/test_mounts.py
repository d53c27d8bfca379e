"""RUN --mount: what a command sees, and what is left of it. Docker 26 gives the same answers."""

from pathlib import Path

import pytest

from slurmddp.errors import UserError
from slurmddp.images.context.staging import read_secrets
from slurmddp.images.dockerfile import convert
from slurmddp.images.image_spec import of_dockerfile

from .conftest import Dock, cut


def found(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*"))


def test_a_bind_takes_the_place_of_what_is_there_and_nothing_stays(dock: Dock) -> None:
    dock.files(**{"src/a": "A", "src/b/c": "C"})
    dock.stub("show")
    made = dock.convert(
        """FROM debian:12
WORKDIR @/app
RUN mkdir keep && echo old > keep/k
RUN --mount=type=bind,target=. --mount=source=src/a,target=@/new/deep/file show "$(cat src/b/c)" "$(ls)" \\
    "$(cat @/new/deep/file)" && echo lost > src/lost
RUN show "$(cat keep/k)" "$(pwd)"
RUN --mount=type=bind,source=src/a,target=keep/k,rw show "$(cat keep/k)" && echo x > keep/made
"""
    )
    (part,) = cut(made.definition)
    done = dock.post(part)
    assert done.returncode == 0, done.stderr
    assert dock.calls.read_text() == f"show<C><Dockerfile\nsrc><A>\nshow<old><{dock.root}/app>\nshow<A>\n"
    assert found(dock.root) == ["app", "app/keep", "app/keep/k", "app/keep/made"]
    assert (dock.root / "app/keep/k").read_text() == "old\n" and (dock.context / "src/a").read_text() == "A"


def test_a_cache_lasts_from_run_to_run_and_is_no_part_of_the_image(dock: Dock) -> None:
    dock.stub("show")
    made = dock.convert(
        """FROM debian:12
RUN mkdir -p @/lists && echo base > @/lists/base
RUN --mount=type=cache,target=@/lists,mode=0700,sharing=locked show "$(ls @/lists)" && echo 1 > @/lists/1
RUN --mount=type=cache,id=x,target=@/c/pip --mount=type=tmpfs,target=@/t echo 2 > @/c/pip/2 && stat -c %a @/t
RUN --mount=target=@/other,id=x,type=cache --mount=type=cache,target=@/lists show "$(ls @/other @/lists)"
RUN --mount=type=tmpfs,target=/tmp true
"""
    )
    (part,) = cut(made.definition)
    done = dock.post(part)
    assert done.returncode == 0, done.stderr
    assert "1777" in done.stdout
    assert dock.calls.read_text() == f"show<>\nshow<{dock.root}/lists:\n1\n\n{dock.root}/other:\n2>\n"
    assert found(dock.root) == ["lists", "lists/base"]
    assert any("type=cache is empty when a build starts" in note for note in made.notes)
    assert any("type=tmpfs is ignored: /tmp is the host's" in note for note in made.notes)


def test_a_bind_of_a_stage_or_an_image(dock: Dock, tmp_path: Path) -> None:
    dock.stub("show")
    text = "FROM debian:12 AS one\nRUN true\nFROM debian:12\n"
    text += "RUN --mount=from=one,source=/out,target=@/a --mount=from=tool:1,source=/bin/t,target=@/t \\\n"
    text += '    show "$(cat @/a/x @/t)"\n'
    parts = cut(dock.convert(text).definition)
    assert [part.header["from"] for part in parts] == ["debian:12", "tool:1", "debian:12"]
    built = {part.header["stage"]: tmp_path / part.header["stage"] for part in parts}
    (built["one"] / "out").mkdir(parents=True)
    (built["one"] / "out/x").write_text("X")
    (built[parts[1].header["stage"]] / "bin").mkdir(parents=True)
    (built[parts[1].header["stage"]] / "bin/t").write_text("T")
    done = dock.post(parts[2], stages=built)
    assert done.returncode == 0, done.stderr
    assert dock.said() == ["show<XT>"] and found(dock.root) == []


def test_a_secret_is_there_for_its_run_alone(dock: Dock, tmp_path: Path) -> None:
    dock.stub("show")
    (tmp_path / "key").write_text("S3CRET")
    options = [f"id=one,src={tmp_path}/key", "id=two,env=TOKEN", "id=spare,env=TOKEN"]
    secrets = read_secrets(options, tmp_path, {"TOKEN": "T0KEN"})
    assert "T0KEN" not in repr(secrets)
    text = """FROM debian:12
RUN --mount=type=secret,id=one,target=@/key,mode=0440 show "$(cat @/key | tr a-zA-Z b-zaB-ZA)" "$(stat -c %a @/key)"
RUN --mount=type=secret,id=two,env=TOKEN test ${#TOKEN} = 5
RUN show "$TOKEN"
"""
    path = dock.file("Dockerfile", text.replace("@/", f"{dock.root}/"))
    wanted = of_dockerfile(path, {}, None, secrets=secrets)
    made = convert(path, secrets=secrets)
    dock.items = wanted.items
    (part,) = cut(made.definition)
    done = dock.post(part)
    assert done.returncode == 0, done.stderr
    assert dock.said() == ["show<T3DSFU><440>", "show<>"] and found(dock.root) == []
    for said in (made.definition, done.stdout, done.stderr, repr(wanted)):
        assert "S3CRET" not in said and "T0KEN" not in said
    assert not any(path.name == "key" for path in wanted.sources)
    assert any("no RUN uses the secret spare" in note for note in made.notes)


def test_without_a_secret_that_is_not_required_the_run_goes_without(dock: Dock) -> None:
    dock.stub("show")
    text = """FROM debian:12
RUN --mount=type=secret,id=a --mount=type=secret,id=b,env=B,required=false show "$(ls /run/secrets/a)" "${B-unset}"
"""
    made = dock.convert(text)
    (part,) = cut(made.definition)
    assert dock.post(part).returncode == 0
    assert dock.said() == ["show<><unset>"]
    assert sum("runs without it, as in Docker; --secret id=" in note for note in made.notes) == 2
    for required in ("required", "required=true", "required=1"):
        with pytest.raises(UserError, match="the build has no such secret"):
            dock.convert(f"FROM debian:12\nRUN --mount=type=secret,id=a,{required} true\n")
    with pytest.raises(UserError, match="required=maybe is not converted"):
        dock.convert("FROM debian:12\nRUN --mount=type=secret,id=a,required=maybe true\n")


@pytest.mark.parametrize(
    ("option", "what"),
    [
        ("src=x", "is not understood"),
        ("id=../x,src=x", "is not understood"),
        ("id=a,src=x,env=Y", "is not understood"),
        ("id=a,odd=x", "is not understood"),
        ("id=a,env=NONE", "the variable NONE is not set"),
        ("id=a,src=none", "there is no file"),
        ("id=a", "there is no file"),
    ],
)
def test_a_secret_that_is_none(option: str, what: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=what):
        read_secrets([option], tmp_path, {})
