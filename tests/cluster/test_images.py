"""Images as alice makes them on the login host, without root: from a real registry, by recipe and by Dockerfile."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tarfile
import time
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.registry import PROGRAM, Registry

from .build import wanted
from .buildkit import started as docker
from .cluster import Cluster
from .runs import Alice
from .standins import EVIL, make_index, push_all

pytestmark = pytest.mark.cluster

PORT = 5000
BASE = f"127.0.0.1:{PORT}/lab/base:1.0"
HOME = "/home/alice/shelf"
EXAMPLES = Path(__file__).parents[2] / "examples/images"
#: What is in her shell's environment.
HERS = ("WANDB_API_KEY=S3CRET", "APPTAINERENV_TOKEN=S3CRET", "APPTAINER_DOCKER_PASSWORD=S3CRET",
        "http_proxy=http://127.0.0.1:9", "no_proxy=localhost")  # fmt: skip
#: What the examples start from, in the place of the registries that cannot be reached.
MIRRORED = f"""\
name: mirrored
title: the test cluster with mirrors
bases: [testcluster]
images: {{mirrors: {{docker.io: "127.0.0.1:{PORT}/hub", nvcr.io: "127.0.0.1:{PORT}/ngc"}}}}
"""


@pytest.fixture(scope="module")
def alice(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Alice]:
    """Alice, and a registry on the login host that has one base: Debian with Python and something called torch."""
    folder = tmp_path_factory.mktemp("registry")
    make_index(folder / "simple")
    with Registry.started(folder) as registry:
        push_all(registry, wanted().image_roots / "bookworm", folder / "simple", folder)
    shutil.copytree(folder / "simple", cluster.machine_path(f"{HOME}/simple"))
    cluster.write("/home/alice/.config/slurmddp/sites/mirrored.yaml", MIRRORED)
    there = cluster.machine_path("/home/alice/registry")
    shutil.copytree(registry.storage, there / "storage")
    shutil.copy(shutil.which(PROGRAM) or PROGRAM, there / PROGRAM)
    settings = {
        "version": "0.1",
        "storage": {"filesystem": {"rootdirectory": "/home/alice/registry/storage"}, "delete": {"enabled": True}},
        "http": {"addr": f"127.0.0.1:{PORT}"},
    }
    cluster.write("/home/alice/registry/config.yml", json.dumps(settings))  # JSON is YAML
    cluster.run("login", ["chown", "-R", "alice:", "/home/alice/registry", HOME], user="root")
    # Its lines go to a file: in a pipe that nobody reads it would stand still after 64 KiB of them.
    serve = "cd /home/alice/registry; exec ./docker-registry serve config.yml >log 2>&1"
    server = cluster.popen("login", ["sh", "-c", serve])
    ask = ["python3", "-c", f"import socket; socket.create_connection(('127.0.0.1', {PORT}))"]
    cluster.wait_for(lambda: cluster.run("login", ask, check=False).returncode == 0, "the registry listens", 20)
    yield Alice(cluster, "")
    server.kill()
    server.wait()


def build(alice: Alice, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    site = [] if "--site" in words else ["--site", "testcluster"]
    command = ["env", *HERS, "slurmddp", "build-image", *site, *words]
    return alice.cluster.run("login", command, cwd=HOME, check=check, timeout=300)


def example(alice: Alice, name: str) -> None:
    """A folder of examples/images in alice's."""
    for path in (path for path in (EXAMPLES / name).rglob("*") if path.is_file()):
        place = f"{HOME}/{name}/{path.relative_to(EXAMPLES / name)}"
        alice.cluster.write(place, path.read_text(), mode=path.stat().st_mode & 0o777)


def lock(alice: Alice, image: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(alice.cluster.machine_path(f"{image}.lock.json").read_text())
    return found


def left(alice: Alice, name: str) -> list[str]:
    """The files in her folder that have this in their name."""
    return sorted(path.name for path in alice.cluster.machine_path(HOME).iterdir() if name in path.name)


def test_a_recipe_becomes_an_image_that_is_built_once(alice: Alice) -> None:
    cluster = alice.cluster
    cluster.write(f"{HOME}/src/hello.py", "print('hello')\n")
    recipe = (
        f"base: docker://{BASE}\nfiles: ['src:/opt/my project/src']\nenvironment: {{WORD: \"it's $5\"}}\n"
        "setup:\n- env; echo proxy is $http_proxy\n- |\n  cat > /opt/made <<'END'\n    two words\n  END\n"
        "- echo 100% >> /opt/made\n"
        "test: [python3 '/opt/my project/src/hello.py', 'env; echo proxy is $http_proxy']\nlabels: {team: speech}\n"
    )
    cluster.write(f"{HOME}/mine.yaml", recipe)
    done = build(alice, "--recipe", "mine.yaml", "--force")  # an earlier try of this test may have made it
    # The image's own code, in %post and in %test, has the way to the internet, and no secret of hers
    assert done.stderr.splitlines().count("proxy is http://127.0.0.1:9") == 2 and "S3CRET" not in done.stderr
    image = done.stdout.strip()
    assert image.startswith(f"{HOME}/images/mine-") and "torch 2.13.0, CUDA 12.9, NCCL (2, 26, 3)" in done.stderr
    inside = "cat /opt/made; echo $WORD; python3 '/opt/my project/src/hello.py'; id -un"
    shown = cluster.run("login", ["srun", "-w", "node1", "apptainer", "exec", image, "sh", "-c", inside]).stdout
    assert shown.splitlines() == ["  two words", "100%", "it's $5", "hello", "alice"]

    facts = lock(alice, image)
    assert facts["registry"]["driver"] == "575.51.02" and facts["digests"][BASE].startswith("sha256:")
    assert facts["torch"] == "2.13.0" and facts["packages"] and facts["host"] == "login"
    definition = cluster.machine_path(f"{image}.def").read_text()
    assert f"From: 127.0.0.1:{PORT}/lab/base@{facts['digests'][BASE]}" in definition
    labels = cluster.run("login", ["apptainer", "inspect", "--labels", image]).stdout
    assert "team: speech" in labels and f"slurmddp.digest: {facts['digests'][BASE]}" in labels

    again = build(alice, "--recipe", "mine.yaml")
    assert again.stdout.strip() == image and "up to date" in again.stderr
    assert "up to date" in build(alice, "--recipe", "mine.yaml", "--update").stderr
    told = alice.command("image", "inspect", image, "--driver", "535.183.01").stdout
    assert "minor-version compatibility" in told and "speech" not in told


def test_no_image_and_no_recipe_of_somebody_else_runs_code_on_the_host(alice: Alice) -> None:
    cluster = alice.cluster
    pwned = cluster.machine_path("/home/alice/pwned")
    cluster.write(f"{HOME}/evil/Dockerfile", f'FROM 127.0.0.1:{PORT}/lab/evil:1.0\nCMD ["python3"]\n')
    failed = build(alice, "evil.sif", "--dockerfile", "evil/Dockerfile", check=False)
    assert failed.returncode == 1 and "a line break or control character in its Entrypoint" in failed.stderr
    cluster.write(f"{HOME}/evil/`touch pwned`", "x")
    cluster.write(f"{HOME}/evil/r.yaml", f"base: docker://{BASE}\nfiles: ['`touch pwned`:/x', '/etc/hostname:/y']\n")
    failed = build(alice, "evil.sif", "--recipe", "evil/r.yaml", check=False)
    assert failed.returncode == 2 and "contains a character that Apptainer's %files does not accept" in failed.stderr
    cluster.write(f"{HOME}/evil/r.yaml", f"base: docker://{BASE}\nfiles: ['/etc/hostname:/y']\n")
    failed = build(alice, "evil.sif", "--recipe", "evil/r.yaml", check=False)
    assert failed.returncode == 2 and "/etc/hostname is outside the recipe's folder" in failed.stderr
    assert not pwned.exists() and not list(cluster.machine_path(HOME).rglob("pwned"))


@pytest.mark.long
def test_apptainer_itself_runs_their_code_on_the_host(alice: Alice) -> None:
    """Without our checks, the attacks of the test above work."""
    cluster = alice.cluster
    head = "Bootstrap: localimage\nFrom: /opt/images/bookworm\n\n"
    for name, text in (("setup", f"%runscript\n  exec {EVIL}"), ("files", f"%files\n  `>{HOME}/pwned` /x")):
        cluster.write(f"{HOME}/{name}.def", f"{head}{text}\n")
        command = ["apptainer", "build", "--force", "evil.sif", f"{name}.def"]
        cluster.run("login", command, cwd=HOME, check=False, timeout=120)
    assert all(cluster.machine_path(f"{folder}/pwned").exists() for folder in ("/home/alice", HOME))


@pytest.mark.long
def test_pip_and_uv_keep_the_base_s_torch_and_its_pins(alice: Alice) -> None:
    cluster = alice.cluster
    for installer in ("pip", "uv"):
        recipe = {
            "base": f"docker://{BASE}", "installer": installer, "index": "file:///opt/simple",
            "files": ["simple:/opt/simple"], "pip": ["speech"],
        }  # fmt: skip
        cluster.write(f"{HOME}/{installer}.yaml", json.dumps(recipe))
        done = build(alice, f"{installer}.sif", "--recipe", f"{installer}.yaml", "--force")
        assert done.stdout == f"{HOME}/{installer}.sif\n"
        packages = lock(alice, f"{HOME}/{installer}.sif")["packages"]
        assert {"numberkit==1.0", "speech==1.0", "torch==2.13.0"} <= set(packages)
        assert any(name.startswith("uv==") for name in packages) is (installer == "uv")

        failed = build(alice, "hasty.sif", "--recipe", f"{installer}.yaml", "--pip", "hasty", "--force", check=False)
        assert failed.returncode == 1 and "hasty" in failed.stderr.split("failed with exit code")[1].split("-> ")[0]
        assert "torch" in failed.stderr.split("-> ")[1].splitlines()[0]
        assert not cluster.machine_path(f"{HOME}/hasty.sif").exists()


def test_a_failing_test_leaves_no_image_and_says_so(alice: Alice) -> None:
    failed = build(alice, "bad.sif", "--base", f"docker://{BASE}", "--recipe", "bad.yaml", check=False)
    assert failed.returncode == 2 and "does not exist" in failed.stderr
    alice.cluster.write(f"{HOME}/bad.yaml", f"base: docker://{BASE}\ntest: [echo what it says; false]\n")
    failed = build(alice, "bad.sif", "--recipe", "bad.yaml", check=False)
    assert failed.returncode == 1, failed.stderr
    assert "the image's own test failed" in failed.stderr and "| what it says" in failed.stderr
    assert left(alice, "bad.sif") == ["bad.sif.build.log"]


@pytest.mark.long
def test_without_the_internet_the_message_says_so(alice: Alice) -> None:
    failed = build(alice, "net.sif", "--base", f"docker://{BASE}", "--pip", "einops", check=False)
    assert failed.returncode == 1 and "could not reach the internet" in failed.stderr


def test_what_the_registry_does_not_have(alice: Alice) -> None:
    for name in ("lab/base:2.0", "lab/gone:1.0", f"lab/base@sha256:{'0' * 64}"):
        failed = build(alice, "x.sif", "--base", f"docker://127.0.0.1:{PORT}/{name}", check=False)
        assert failed.returncode == 2 and name.split(":")[0].split("@")[0] in failed.stderr, failed.stderr


@pytest.mark.long
def test_a_dockerfile_with_pinned_packages(alice: Alice) -> None:
    cluster = alice.cluster
    example(alice, "pinned")
    done = build(alice, "pinned.sif", "--dockerfile", "pinned/Dockerfile", "--build-arg", f"BASE={BASE}")
    assert done.stdout.strip() == f"{HOME}/pinned.sif"
    shown = cluster.run("login", ["srun", "-w", "node1", "apptainer", "run", f"{HOME}/pinned.sif"]).stdout
    assert "hello from /opt/app" in shown and "made with an exec form" in shown and "two words" in shown
    inside = ["stat", "-c", "%u %a", "/opt/app/settings.ini"]
    assert cluster.run("login", ["apptainer", "exec", f"{HOME}/pinned.sif", *inside]).stdout.split()[1] == "644"


def test_stages_of_a_dockerfile(alice: Alice) -> None:
    cluster = alice.cluster
    text = f"""
FROM {BASE} AS made
ARG WORD=salt
ENV TASTE=$WORD
RUN ["/bin/sh", "-c", "printf '%s\\\\n' \\"$TASTE\\" > /taste"]
FROM {BASE}
RUN echo "$CUDA_VERSION" > /opt/of-the-base
COPY --from=made /taste /opt/taste
WORKDIR /opt
ENTRYPOINT ["cat", "taste"]
"""
    cluster.write(f"{HOME}/stages/Dockerfile", text)
    build(alice, "stages.sif", "--dockerfile", "stages/Dockerfile", "--build-arg", "WORD=two words", "--force")
    assert cluster.run("login", ["apptainer", "run", f"{HOME}/stages.sif"]).stdout == "two words\n"
    assert list(lock(alice, f"{HOME}/stages.sif")["digests"]) == [BASE]
    seen = cluster.run("login", ["apptainer", "exec", f"{HOME}/stages.sif", "cat", "/opt/of-the-base"]).stdout
    assert seen == "12.9.0.036\n", "the base's variables are there in a RUN"


def test_an_image_starts_in_its_base_s_workdir_and_a_failing_line_is_named(alice: Alice) -> None:
    """The base's files are a user's; a build without root gives them to root."""
    cluster, owned = alice.cluster, f"FROM 127.0.0.1:{PORT}/lab/owned:1.0\n"
    text = f'{owned}USER root\nRUN chown -R 1234 .\nUSER 1234\nRUN echo made >> here\nCMD ["cat", "here"]\n'
    cluster.write(f"{HOME}/owned/Dockerfile", text)
    done = build(alice, "owned.sif", "--dockerfile", "owned/Dockerfile", "--force")
    assert "the image starts in /workspace, its base's WORKDIR, as in Docker" in done.stderr
    assert cluster.run("login", ["apptainer", "run", f"{HOME}/owned.sif"]).stdout == "of the base\nmade\n"
    cluster.write(f"{HOME}/denied/Dockerfile", f"{owned}RUN true\nRUN echo made >> here\nRUN true\n")
    failed = build(alice, "denied.sif", "--dockerfile", "denied/Dockerfile", check=False)
    assert failed.returncode == 1, failed.stderr
    assert "denied/Dockerfile:2: RUN as 1234: a build without root gives all files of the base to root" in failed.stderr
    assert "failed with exit code 255 at line 3 of the Dockerfile (RUN): line 3: RUN as 1234 may not" in failed.stderr


#: What the Docker documentation says of each form is what `seen` says below.
FORMS = f"""
FROM {BASE} AS base
ARG OF_BASE=cuda-${{CUDA_VERSION%.*}}
ENV A=one
ENV A=two B=$A C=${{A:+<${{A}}>}} PATH=/opt/bin${{PATH:+:${{PATH}}}} D=${{OF_BASE#*-}}
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
ONBUILD ENV E=of-onbuild
FROM base
RUN echo "${{BASH_VERSION:+bash}} $A $B $C $D ${{PATH%%:*}} $OF_BASE $E" >> /seen; if false | true; then exit 1; fi
SHELL ["/bin/sh", "-c"]
RUN <<EOF
echo "script ${{BASH_VERSION:-sh}}" >> /seen
%setup {{{{ x }}}} 2>/dev/null || echo "a line with a percent sign" >> /seen
EOF
RUN <<-"END"
\techo 'tabs and "quotes"' >> /seen
\tEND
RUN cat <<ONE >> /seen && cat <<'TWO' >> /seen
$A
  %post
ONE
bootstrap: $A
TWO
RUN <<EOF
#!/usr/bin/env python3
open("/seen", "a").write("by python\\n")
EOF
RUN echo 'me:x:1234:1235::/home/me:/bin/sh' >> /etc/passwd \\
  && printf 'us:x:1235:\\nmore:x:77:me,you\\n' >> /etc/group && mkdir /home/me && chmod 777 /home/me /seen
USER me
RUN echo "$(id -u):$(id -g) $(id -G) $HOME $(pwd)" >> /seen
WORKDIR /home/me
RUN ["/bin/sh", "-c", "echo exec $(id -un) $PWD >> /seen; touch /home/me/mine"]
USER 1234:77
RUN echo "$(id -u):$(id -g) $HOME" >> /seen
USER 4321
ENV HOME=/opt
RUN echo "$(id -u):$(id -g) $HOME" >> /seen
WORKDIR made
USER root
COPY <<EOF <<-'TWO' /opt/inline/
$A's {{{{ y }}}}
%files
EOF
\t$A
\tTWO
RUN echo "$(id -u) $(pwd) $(stat -c '%u %a' /opt/inline/TWO) $(stat -c %u /home/me/mine)" >> /seen \\
  && cat /opt/inline/* >> /seen
"""
SEEN = """bash two one <one> 12.9.0 /opt/bin cuda-12.9.0 of-onbuild
script sh
a line with a percent sign
tabs and "quotes"
two
  %post
bootstrap: $A
by python
1234:1235 1235 77 /home/me /
exec me /home/me
1234:77 /home/me
4321:0 /opt
0 /home/me/made 0 644 1234
two's {{ y }}
%files
$A
"""


def test_forms_of_a_dockerfile_do_in_a_build_what_docker_says(alice: Alice) -> None:
    alice.cluster.write(f"{HOME}/forms/Dockerfile", FORMS)
    build(alice, "forms.sif", "--dockerfile", "forms/Dockerfile", "--force")
    assert alice.cluster.run("login", ["apptainer", "exec", f"{HOME}/forms.sif", "cat", "/seen"]).stdout == SEEN


#: Forms of COPY, ADD and RUN --mount.
FILES = f"""\
FROM {BASE} AS one
RUN useradd -u 1234 -g 33 me && mkdir -p /o/d && echo x > /o/x && ln /o/x /o/y && chown -R 1234:34 /o \\
    && ln -s x /o/l && chmod 711 /o/d && touch -d @1000000000 /o/x
FROM {BASE}
RUN useradd -u 1234 -g 33 me && mkdir -m 700 /there && echo kept > /kept && ln -s kept /old && umask > /umask
COPY f /t01/
COPY dir /t02
COPY --chown=me dir /t03/p
COPY --chown=55 --chmod=640 f /t04
COPY --chown=:games f none* /t05/
COPY dir /there
COPY ../f /old
COPY --from=one /o /t06
COPY --from=one /o/x /o/l /t07/
COPY --from=one --chown=me /o/? /t08/
ADD --chown=me a.tgz /t09/p
ADD --chmod=644 http://127.0.0.1:{PORT + 1}/u /t10/
ADD http://127.0.0.1:{PORT + 1}/u /t11
COPY --link <<END /t12
text
END
WORKDIR /work
RUN echo old > a
RUN --mount=target=. --mount=source=f,target=/new/deep/f --mount=from=one,source=/o,target=/o \\
    --mount=type=cache,target=/c --mount=type=tmpfs,target=/t --mount=type=secret,id=word \\
    cat f /new/deep/f /o/x > /mounted && echo 1 > /c/1 && tr a-z b-za < /run/secrets/word >> /mounted
RUN --mount=type=cache,target=/c cat /c/1 a >> /mounted
RUN ls -d /new /o /c /t /run/secrets >> /mounted 2>/dev/null; \\
    find /t[0-9]* /there /kept /old /umask -printf '%y %m %U:%G %n %Ts %p %l\\n' \\
    | awk '{{ if ($5 > 1600000000) $5 = "now"; if ($1 == "d") $4 = "-"; print }}' | sort -k6 > /seen; cat /kept >> /seen
"""
#: What Docker 26 makes of them: kind, mode, owner, links, time (as far as it is not that of the build), name.
AS_DOCKER = """\
f 600 0:0 1 1000000000 /kept
l 777 0:0 1 now /old kept
d 755 0:0 - now /t01
f 600 0:0 1 1000000000 /t01/f
d 755 0:0 - 1100000000 /t02
f 644 0:0 2 1000000000 /t02/b
f 644 0:0 2 1000000000 /t02/hard
l 777 0:0 1 now /t02/link b
d 555 0:0 - now /t02/ro
d 750 0:0 - 1000000000 /t02/sub
f 644 0:0 1 1000000000 /t02/sub/c
d 755 1234:33 - now /t03
d 755 1234:33 - 1100000000 /t03/p
f 644 1234:33 2 1000000000 /t03/p/b
f 644 1234:33 2 1000000000 /t03/p/hard
l 777 1234:33 1 now /t03/p/link b
d 555 1234:33 - now /t03/p/ro
d 750 1234:33 - 1000000000 /t03/p/sub
f 644 1234:33 1 1000000000 /t03/p/sub/c
f 640 55:55 1 1000000000 /t04
d 755 0:60 - now /t05
f 600 0:60 1 1000000000 /t05/f
d 755 0:0 - now /t06
d 711 1234:34 - now /t06/d
l 777 0:0 1 now /t06/l x
f 644 1234:34 2 1000000000 /t06/x
f 644 1234:34 2 1000000000 /t06/y
d 755 0:0 - now /t07
f 644 1234:34 1 1000000000 /t07/l
f 644 1234:34 1 1000000000 /t07/x
d 755 1234:33 - now /t08
f 644 1234:33 1 1000000000 /t08/l
f 644 1234:33 1 1000000000 /t08/x
f 644 1234:33 1 1000000000 /t08/y
d 755 1234:33 - now /t09
d 755 1234:33 - now /t09/p
f 644 5:6 1 now /t09/p/b
d 750 5:6 - now /t09/p/sub
f 644 5:6 1 now /t09/p/sub/c
d 755 0:0 - now /t10
f 644 0:0 1 1200000000 /t10/u
f 600 0:0 1 1200000000 /t11
f 644 0:0 1 now /t12
d 700 0:0 - 1100000000 /there
f 644 0:0 2 1000000000 /there/b
f 644 0:0 2 1000000000 /there/hard
l 777 0:0 1 now /there/link b
d 555 0:0 - now /there/ro
d 750 0:0 - 1000000000 /there/sub
f 644 0:0 1 1000000000 /there/sub/c
f 644 0:0 1 now /umask
"""


@pytest.mark.long
def test_files_are_in_the_image_as_docker_has_them(alice: Alice) -> None:
    cluster = alice.cluster
    files = cluster.machine_path(f"{HOME}/files")
    for name in ("dir/sub", "dir/ro"):
        (files / name).mkdir(parents=True)
    for name, text in {"f": "a", "dir/b": "b", "dir/sub/c": "c", "../www/u": "u"}.items():
        (files / name).parent.mkdir(exist_ok=True)
        (files / name).write_text(f"{text}\n")
    os.link(files / "dir/b", files / "dir/hard")
    (files / "dir/link").symlink_to("b")
    with tarfile.open(files / "a.tgz", "w:gz") as archive:
        for name, mode in (("b", 0o644), ("sub", 0o750), ("sub/c", 0o644)):
            entry = archive.gettarinfo(files / "dir" / name, name)
            entry.uid, entry.gid, entry.mode, entry.mtime = 5, 6, mode, time.time()
            entry.uname = entry.gname = ""
            with (files / "dir" / name).open("rb") if entry.isreg() else nullcontext() as file:
                archive.addfile(entry, file)
    for name, mode in {"f": 0o600, "dir/sub": 0o750, "dir/ro": 0o555, "dir": 0o700}.items():
        (files / name).chmod(mode)
    for name in ("f", "dir/b", "dir/sub/c", "dir/sub"):
        os.utime(files / name, (1e9, 1e9))
    os.utime(files / "dir", (1.1e9, 1.1e9))
    os.utime(files / "../www/u", (1.2e9, 1.2e9))
    cluster.write(f"{HOME}/files/Dockerfile", FILES)
    cluster.write(f"{HOME}/word", "s3kret\n", mode=0o600)
    cluster.run("login", ["chown", "-R", "alice:", HOME], user="root")
    serve = ["python3", "-m", "http.server", str(PORT + 1), "--bind", "127.0.0.1", "--directory", f"{HOME}/www"]
    server = cluster.popen("login", serve)
    ask = ["python3", "-c", f"import socket; socket.create_connection(('127.0.0.1', {PORT + 1}))"]
    cluster.wait_for(lambda: cluster.run("login", ask, check=False).returncode == 0, "the server listens", 20)
    done = build(alice, "files.sif", "--dockerfile", "files/Dockerfile", "--secret", f"id=word,src={HOME}/word")
    server.kill()
    server.wait()
    shown = cluster.run("login", ["apptainer", "-s", "exec", f"{HOME}/files.sif", "cat", "/seen", "/mounted"]).stdout
    lines = [line.rstrip() for line in shown.splitlines()]
    assert lines == [*AS_DOCKER.splitlines(), "a", "a", "a", "x", "t3lsfu", "1", "old"]
    assert list(lock(alice, f"{HOME}/files.sif")["downloads"]) == [f"http://127.0.0.1:{PORT + 1}/u"]
    beside = [path.read_text() for path in files.parent.glob("files.sif.*")]
    assert len(beside) == 3 and not any("s3kret" in text for text in [*beside, done.stderr])
    assert (files / "dir/ro").stat().st_mode & 0o777 == 0o555 and (files / "f").read_text() == "a\n"


@pytest.mark.long
def test_a_build_that_empties_tmp_touches_nothing_on_the_host(alice: Alice) -> None:
    cluster = alice.cluster
    empty = "rm -rf /tmp/* /var/tmp/*"
    text = f"""
FROM {BASE} AS made
RUN {empty} && chmod 1777 /tmp && useradd -u 1234 me && echo of-one > /var/tmp/x
USER me
RUN mkdir /tmp/hers && echo hers > /tmp/hers/x && chmod 700 /tmp/hers
USER root
RUN mkdir /out && cp -a /var/tmp/x /tmp/hers /out
FROM {BASE}
RUN ls -A /tmp /var/tmp > /seen && {empty}
COPY --from=made /out /tmp
RUN cat /tmp/x /tmp/hers/x >> /seen && useradd -u 1234 me \\
    && mkdir -m 700 /tmp/.kept && touch /tmp/.kept/x && chown -R me /tmp/.kept
"""
    for name, content in (("tmp/Dockerfile", text), ("tmpbad/Dockerfile", f"FROM {BASE}\nRUN {empty}; false\n")):
        cluster.write(f"{HOME}/{name}", content)
    cluster.run("login", ["touch", "/tmp/of-alice", "/var/tmp/of-alice"])
    before = cluster.run("login", ["ls", "-A", "/tmp", "/var/tmp"]).stdout
    build(alice, "tmp.sif", "--dockerfile", "tmp/Dockerfile", "--force")
    seen = cluster.run("login", ["apptainer", "exec", f"{HOME}/tmp.sif", "cat", "/seen"]).stdout
    assert seen == "/tmp:\n\n/var/tmp:\nof-one\nhers\n"
    failed = build(alice, "tmpbad.sif", "--dockerfile", "tmpbad/Dockerfile", check=False)
    assert failed.returncode == 1, failed.stderr
    assert "of-alice" in before and cluster.run("login", ["ls", "-A", "/tmp", "/var/tmp"]).stdout == before


STAGES = f"""
FROM {BASE} AS common
ENV A=one
RUN useradd -u 1234 me && mkdir -p "/o/a b" /o/d && echo x > "/o/a b/x y" && date +%s%N > /o/once \\
    && chown -R 1234:34 /o && chmod 711 /o/d && echo tmp > /tmp/t
FROM common AS made
RUN cp /tmp/t /made && cp /o/once /made.once && echo whl > /tmp/a.whl && rm -r /o/d
FROM common
COPY --from=made /made /made.once /tmp/*.whl /got/
COPY --from=made ["/o/a b/x y", "/got/x y"]
COPY --from=made / /all
RUN cmp /o/once /got/made.once && cat /tmp/t /got/made "/got/x y" /got/a.whl > /seen \\
    && echo "$A $CUDA_VERSION $(stat -c '%u:%g %a' /o/d) $(ls -d /all/o/*) $(ls -A /all | grep -c singularity)" >> /seen
COPY --from=made / /
RUN ls /made >> /seen && touch /tmp/new /dev/null && test -d /proc/self -a -d /o/d
"""


@pytest.mark.long
def test_a_stage_that_others_start_from_is_built_once(alice: Alice) -> None:
    alice.cluster.write(f"{HOME}/once/Dockerfile", STAGES)
    build(alice, "once.sif", "--dockerfile", "once/Dockerfile", "--force")
    seen = alice.cluster.run("login", ["apptainer", "exec", f"{HOME}/once.sif", "cat", "/seen"]).stdout
    assert seen == "tmp\ntmp\nx\nwhl\none 12.9.0.036 1234:34 711 /all/o/a b\n/all/o/once 0\n/made\n"


@pytest.mark.long
def test_the_examples_build_and_run(alice: Alice) -> None:
    """From stand-ins for python:3.12-slim and NVIDIA's image, in a registry that mirrors theirs."""
    example(alice, "wheel")
    build(alice, "wheel.sif", "--dockerfile", "wheel/Dockerfile", "--site", "mirrored", "--force")
    assert list(lock(alice, f"{HOME}/wheel.sif")["digests"]) == ["python:3.12-slim"]
    run = partial(alice.cluster.run, "login")
    assert run(["apptainer", "run", f"{HOME}/wheel.sif"]).stdout == "1 2 3\n"
    assert run(["apptainer", "run", f"{HOME}/wheel.sif", "5"]).stdout == "1 2 3 4 5\n"
    assert run(["apptainer", "exec", f"{HOME}/wheel.sif", "cat", "/etc/built"]).stdout == "the wheel is in\n"

    example(alice, "ngc-training")
    build(alice, "ngc.sif", "--dockerfile", "ngc-training/Dockerfile", "--site", "mirrored", "--force")
    packages = lock(alice, f"{HOME}/ngc.sif")["packages"]
    assert {"datasets==3.6.0", "numberkit==1.0", "torch==2.13.0"} <= set(packages), "its own torch and pins stay"
    done = run(["apptainer", "run", f"{HOME}/ngc.sif"])
    assert done.stdout == "a first run: 100 steps\n"
    assert "from the base\ntraining on login\n" in done.stderr
    again = run(["apptainer", "run", f"{HOME}/ngc.sif", "--steps", "7", "--name", "an other run"])
    assert again.stdout == "an other run: 7 steps\n"


def test_a_build_on_a_node(alice: Alice, base_image_root: str) -> None:
    cluster = alice.cluster
    cluster.write(f"{HOME}/onnode.yaml", f"base: {base_image_root}\n")
    done = build(alice, "onnode.sif", "--recipe", "onnode.yaml", "--on-node", "--force")
    assert done.stdout == f"{HOME}/onnode.sif\n" and f"builds {HOME}/onnode.sif\n" in done.stderr
    assert lock(alice, f"{HOME}/onnode.sif")["host"] in cluster.nodes
    shown = cluster.run("login", ["apptainer", "exec", f"{HOME}/onnode.sif", "python3", "-c", "import torch; print(1)"])
    assert shown.stdout == "1\n"
    assert left(alice, "onnode.sif") == ["onnode.sif", "onnode.sif.build.log", "onnode.sif.def", "onnode.sif.lock.json"]
    assert "up to date" in build(alice, "onnode.sif", "--recipe", "onnode.yaml", "--on-node").stderr


@pytest.mark.long
def test_a_build_on_a_node_that_fails(alice: Alice, plain_image_root: str) -> None:
    cluster = alice.cluster
    setup = "echo 'E: Unable to locate package gitt'; false"
    cluster.write(f"{HOME}/onbad.yaml", json.dumps({"base": plain_image_root, "setup": [setup]}))
    failed = build(alice, "onbad.sif", "--recipe", "onbad.yaml", "--on-node", check=False)
    assert failed.returncode == 1 and failed.stdout == "", failed.stderr
    assert "has no package gitt" in failed.stderr and "failed to build the image (exit code 1)" in failed.stderr
    assert left(alice, "onbad.sif") == ["onbad.sif.build.log"]


def test_a_build_on_a_node_is_stopped_by_ctrl_c(alice: Alice, plain_image_root: str) -> None:
    cluster = alice.cluster
    cluster.write(f"{HOME}/onslow.yaml", json.dumps({"base": plain_image_root, "setup": ["echo slow now; sleep 4321"]}))
    command = "slurmddp build-image onslow.sif --recipe onslow.yaml --on-node --site testcluster"
    queue = "squeue --noheader --name=build-onslow --format=%T"
    # A shell of scripts starts background jobs with SIGINT ignored; set -m makes it start them as a terminal's does.
    script = f"set -m; {command} 2> onslow.said & until grep -qx 'slow now' onslow.said; do kill -0 %1 || break"
    script += f"; sleep 0.2; done; {queue}; kill -INT %1; wait %1; echo code $?; {queue}"
    stopped = cluster.sh("login", script, cwd=HOME, timeout=180)
    said = cluster.machine_path(f"{HOME}/onslow.said").read_text()
    assert stopped.stdout.splitlines() == ["RUNNING", "code 130"], f"{said}\n{stopped}"
    assert "cancelling job" in said and "stopped by SIGINT" in said
    assert left(alice, "onslow.sif") == ["onslow.sif.build.log"]
    for node in cluster.nodes:
        assert cluster.run(node, ["pgrep", "-f", "sleep 4321"], check=False).stdout == "", node


#: What each builder, or its container, has of its own.
_OWN = (
    "proc sys dev tmp var/tmp .slurmddp .singularity.d .exec .run .shell .test .post.script singularity environment "
    ".dockerenv etc/hosts etc/hostname etc/resolv.conf etc/mtab .slurmddp.tmp"
)
_ALL = f"find . -xdev \\( {' -o '.join(f'-path ./{name}' for name in _OWN.split())} \\) -prune -o"
#: The last RUN of a Dockerfile that is built both ways: kind, mode, owner, links' targets and content of all files.
LISTED = rf"""RUN cd / && {_ALL} -printf '%y %m %U:%G %p %l\n' | sort -k4 > /tmp/list \
    && {_ALL} -type f -exec sha256sum {{}} + | sort -k2 >> /tmp/list && mv /tmp/list /list \
    && env | grep -E '^(PATH|HOME|TASTE|EMPTY|LIST|CUDA_VERSION)=' >> /list
"""
JUDGED = rf"""ARG BASE
FROM $BASE AS common
USER root
ARG WORD=salt
ENV TASTE="$WORD and 'pepper'" EMPTY= LIST=a,b
ONBUILD RUN echo on >> /onbuild
RUN /usr/sbin/useradd -u 1234 -g 33 me && mkdir -m 750 /o && echo x > /o/x \
    && ln -s x /o/l && ln /o/x /o/y && chown -R me /o
FROM common AS made
RUN echo $TASTE > /made && mkdir -p "/out/a b" && touch "/out/a b/c" /out/.hidden
FROM common
SHELL ["/bin/bash", "-c"]
RUN echo ${{BASH_VERSION:+bash}} > /shell && ln -s /o /opt/link && mkdir -m 775 /srv/in /m /c
SHELL ["/bin/sh", "-c"]
COPY dir /opt/link
COPY dir/f dir/s? /opt/many/
COPY --chown=me:games dir /srv/in
COPY --chmod=640 dir/f /f640
COPY --from=made /out /made /got/
COPY --from=made ["/out/a b", "/got/a b"]
ADD a.tar.gz /unpacked
ADD --chown=1:2 dir/f /deep/er/
WORKDIR rel/ative
RUN --mount=type=bind,source=dir,target=/m --mount=type=cache,target=/c cat /m/f > /mounted; umask > /umask
USER me
RUN id > /o/id && echo $HOME >> /o/id
WORKDIR /by-me
USER root
LABEL a="b c"
{LISTED}ENTRYPOINT ["/bin/sh", "-c", "pwd; echo $TASTE:$EMPTY:$LIST; echo $0 $@"]
CMD ["one", "two words"]
"""


@pytest.mark.long
def test_docker_s_own_builder_makes_the_same_of_a_dockerfile(alice: Alice, tmp_path: Path) -> None:
    cluster = alice.cluster
    for name, text in {"dir/f": "f", "dir/s1": "1", "dir/sub/c": "c"}.items():
        cluster.write(f"{HOME}/judged/{name}", f"{text}\n")
    context = cluster.machine_path(f"{HOME}/judged")
    (context / "dir/sub").chmod(0o700)
    packed = ["tar", "--owner=:5", "--group=:6", "-C", str(context), "-czf", str(context / "a.tar.gz"), "dir"]
    subprocess.run(packed, check=True)
    cluster.write(f"{HOME}/judged/Dockerfile", JUDGED)
    cluster.run("login", ["chown", "-R", "alice:", f"{HOME}/judged"], user="root")
    names = {"base": BASE.partition("/")[2], "owned": "lab/owned:1.0"}
    shutil.copytree(cluster.machine_path("/home/alice/registry/storage"), tmp_path / "registry/storage")
    with Registry.started(tmp_path) as registry, docker() as judge:
        for name, image in names.items():
            user = [] if name == "base" else ["--build-arg", "WORD=pe pper"]
            judge.build(name, context, "--build-arg", f"BASE={registry.host}/{image}", *user)
            base = ["--build-arg", f"BASE=127.0.0.1:{PORT}/{image}"]
            build(alice, f"{name}.sif", "--dockerfile", "judged/Dockerfile", *base, *user, "--force")
            theirs = judge.command("run", "--rm", "--network=host", name)
            ours = cluster.run("login", ["apptainer", "-s", "run", f"{HOME}/{name}.sif"]).stdout
            assert ours == theirs
            theirs = judge.command("run", "--rm", "--network=host", "--entrypoint=cat", name, "/list")
            ours = cluster.run("login", ["apptainer", "-s", "exec", f"{HOME}/{name}.sif", "cat", "/list"]).stdout
            # A build without root gives the base's files to root
            lost = ("./workspace", "./workspace/here")
            found = [line for line in difference(ours, theirs) if line.split()[-1] not in lost]
            assert found == [], "\n".join(found)


def difference(ours: str, theirs: str) -> list[str]:
    """Return the lines that only one of them has, each with whose it is."""
    lines = {
        line: f"{whose} {line}" for whose, text in (("ours", ours), ("docker's", theirs)) for line in text.splitlines()
    }
    return [lines[line] for line in set(ours.splitlines()) ^ set(theirs.splitlines())]
