"""`slurmddp build-image --on-node`, with stand-ins for Apptainer and Slurm; the script really runs, on this machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slurmddp.images.build_lock import only_build
from slurmddp.launch import build_on_node
from tests.helpers import SIF, Desk, Result, check_bash

Cli = Callable[..., Result]

#: Each job is a process group with a folder of its own, in which lies what it was given and how it ended.
SBATCH = """#!/bin/bash
printf '%s\\n' "$*" >> "$HOME/calls"
env > "$HOME/environment"
[[ ! -e $HOME/refuse ]] || { echo "sbatch: error: invalid partition specified: gone" >&2; exit 1; }
job=$HOME/jobs/7
mkdir -p "$job"
rm -f "$job/code" "$job/group"
for word; do case $word in --output=*) log=${word#*=} ;; esac; done
cp "${@: -2:1}" "$job/script"
export SLURM_JOB_ID=7 SLURMD_NODENAME=n1 SLURM_CPUS_ON_NODE=3 SLURM_MEM_PER_CPU=1000
if [[ ! -e $HOME/wait ]]; then
  setsid bash -c 'echo $$ > "$1/group"; bash "$1/script" "$2"; echo $? > "$1/code"' - "$job" "$log" \\
    > "$log" 2>&1 < /dev/null &
fi
echo 7
"""
SCONTROL = """#!/bin/bash
job=$HOME/jobs/${!#}
state=RUNNING code=0:0
if [[ -e $job/state ]]; then read -r state < "$job/state"
elif [[ -e $HOME/wait ]]; then state=PENDING
elif [[ -e $job/code ]]; then
  code=$(< "$job/code"):0
  [[ $code == 0:0 ]] && state=COMPLETED || state=FAILED
fi
echo "JobId=7 JobName=x UserId=alice(1) JobState=$state Reason=Priority ExitCode=$code NodeList=n1"
"""
#: SIGTERM to the script and to its children, as Slurm does; what is in sessions of their own their parents end.
SCANCEL = """#!/bin/bash
printf '%s\\n' "scancel $*" >> "$HOME/calls"
job=$HOME/jobs/${!#}
if [[ -e $job/group ]]; then
  kill -TERM -- "-$(< "$job/group")"
  for _ in {1..100}; do kill -0 -- "-$(< "$job/group")" 2>/dev/null || break; sleep 0.05; done
fi
echo CANCELLED > "$job/state"
"""
APPTAINER = """#!/bin/bash
case $1 in
  --version) echo "apptainer version 1.4.5" ;;
  inspect) echo '{"data": {"attributes": {"labels": {}}}, "type": "container"}' ;;
  exec) exit 1 ;;
  build)
    printf '%s\\n' "$*" > "$HOME/built"
    image=${@: -2:1}
    echo "on $SLURMD_NODENAME"
    cd "$HOME/../project" && source "$HOME/build" ;;
esac
"""


class Place:
    """The desk with a base, the stand-ins, and a site."""

    def __init__(self, desk: Desk) -> None:
        self.desk, self.home, self.project = desk, desk.home, desk.project
        for name, text in (("sbatch", SBATCH), ("scontrol", SCONTROL), ("scancel", SCANCEL), ("apptainer", APPTAINER)):
            desk.program(name, text)
        (desk.project / "base.sif").write_bytes(SIF.encode())
        self.builds("cp ./base.sif $image")

    def builds(self, script: str) -> None:
        (self.home / "build").write_text(script)

    @property
    def calls(self) -> list[str]:
        path = self.home / "calls"
        return path.read_text().splitlines() if path.exists() else []

    @property
    def left(self) -> list[str]:
        return sorted(path.name for path in self.project.iterdir() if "x.sif" in path.name)


@pytest.fixture
def place(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.setattr(build_on_node, "ASK_EVERY", 0.2)
    monkeypatch.setattr(build_on_node, "LOOK_EVERY", 0.05)
    monkeypatch.setattr(build_on_node, "LATE", 0.5)
    return Place(desk)


@pytest.fixture
def build(place: Place, cli: Cli) -> Callable[..., Result]:
    def run(*words: str, **variables: str) -> Result:
        return cli("build-image", "x.sif", "--base", "base.sif", "--on-node", "--site", "gpus", *words, **variables)

    return run


Build = Callable[..., Result]


def test_the_same_command_builds_in_the_job(place: Place, build: Build) -> None:
    done = build("--pip", "einops>=0.8", "--pip", "it's $5==1")
    assert done.code == 0, done.err
    assert done.out == f"{place.project}/x.sif\n"
    assert place.left == ["x.sif", "x.sif.build.log", "x.sif.def", "x.sif.lock.json"]
    assert f"job 7 builds {place.project}/x.sif\n" in done.err and "on n1\n" in done.err
    assert "exit code" not in done.err
    assert "it's $5==1" in (place.project / "x.sif.def").read_text().replace('"', "")
    # mksquashfs may take what the job was given: its processors, and half of its memory.
    assert "--mksquashfs-args -processors 3 -mem 1500M" in (place.home / "built").read_text()

    again = build("--pip", "einops>=0.8", "--pip", "it's $5==1")
    assert again.out == done.out and "up to date" in again.err
    assert len(place.calls) == 1


def test_without_a_name_it_gets_one_here(place: Place, cli: Cli) -> None:
    words = ("build-image", "--base", "base.sif", "--on-node", "--site", "gpus")
    done = cli(*words)
    assert done.code == 0, done.err
    (image,) = (place.project / "images").glob("*.sif")
    assert done.out == f"{image}\n"
    assert "up to date" in cli(*words).err and len(place.calls) == 1


def test_passwords_are_in_no_script_and_on_no_command_line(place: Place, build: Build) -> None:
    # The command on the node has it; the builder does not, since a base in a file needs none
    at = "tr '\\0' '\\n' < /proc/$PPID/environ | sed -n s/^APPTAINER_DOCKER_PASSWORD=//p"
    place.builds(f'echo "$({at})$APPTAINER_DOCKER_PASSWORD" > "$HOME/password"; cp ./base.sif $image')
    done = build(APPTAINER_DOCKER_USERNAME="me", APPTAINER_DOCKER_PASSWORD="hunter2", SLURM_JOB_ID="3")
    assert done.code == 0, done.err
    assert (place.home / "password").read_text() == "hunter2\n"
    script = (place.home / "jobs/7/script").read_text()
    assert "#SBATCH --export=ALL\n" in script
    assert "hunter2" not in script + done.err + "".join(place.calls)
    assert "SLURM_JOB_ID=3\n" not in (place.home / "environment").read_text(), "of the job that we are in"


@pytest.mark.parametrize(
    ("script", "code", "said"),
    [
        ("echo E: Unable to locate package gitt; exit 100", 1, "the base's Debian or Ubuntu has no package gitt"),
        ("kill -TERM $PPID; sleep 30", 1, "job 7 ended in state FAILED on n1"),
    ],
)
def test_a_build_that_fails(place: Place, build: Build, script: str, code: int, said: str) -> None:
    place.builds(script)
    done = build()
    assert done.code == code and done.out == "", done.err
    assert said in done.err
    assert place.left == ["x.sif.build.log"]


def test_what_the_node_refuses(place: Place, build: Build) -> None:
    place.desk.program("apptainer", "#!/bin/bash\necho no >&2; exit 1\n")
    done = build("--base", "base.sif")
    assert done.code == 1 and "slurmddp: " in done.err and "job 7 failed to build the image (exit code 1)" in done.err
    (place.desk.bin / "apptainer").unlink()
    done = build()
    assert done.code == 2 and "neither apptainer nor singularity is on PATH" in done.err
    assert "job 7 refused to build the image" in done.err


def test_what_is_refused_before_there_is_a_job(place: Place, build: Build, cli: Cli) -> None:
    assert "does not exist" in build("--base", "gone.sif").err
    assert (
        "contains a backslash" in cli("build-image", "a\\b.sif", "--base", "base.sif", "--on-node", "--site=gpus").err
    )
    place.desk.write("x.sif", "of another")
    assert "already exists" in build().err
    (place.project / "x.sif").unlink()
    with only_build(place.project / "x.sif", [].append):
        assert "is already being built" in build().err
    here = cli("build-image", "x.sif", "--base", "base.sif", "--on-node", "--site", "here")
    assert here.code == 2 and "site here has no Slurm" in here.err and "remove --on-node" in here.err
    place.desk.site("name: paid\ntitle: t\nrequired: [resources.account]\n")
    assert "site paid requires an account" in build("--site", "paid").err
    (place.desk.bin / "sbatch").unlink()
    missing = build()
    assert missing.code == 2 and "sbatch is not on this machine" in missing.err
    assert place.calls == [] and place.left == []


def test_a_job_that_slurm_refuses_leaves_nothing(place: Place, cli: Cli) -> None:
    (place.home / "refuse").touch()
    done = cli("build-image", "new/x.sif", "--base", "base.sif", "--on-node", "--site", "gpus")
    assert done.code == 2 and "invalid partition specified: gone" in done.err and "images.on_node" in done.err
    assert not (place.project / "new").exists()


def test_a_registry_that_only_nodes_reach(place: Place, cli: Cli) -> None:
    words = ("build-image", "--base", "docker://127.0.0.1:1/a/b:1", "--on-node", "--site", "gpus")
    done = cli(*words)
    assert "note: cannot reach the registry of the base from this machine" in done.err
    assert len(place.calls) == 1 and done.code == 1 and "job 7 failed to build the image" in done.err


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ("TIMEOUT", "reached its time limit on n1: no image was made\n  -> set a larger images.on_node.time in"),
        ("OUT_OF_MEMORY", "ran out of memory on n1"),
        ("CANCELLED", "job 7 was cancelled on n1: no image was made"),
        ("COMPLETED", "this machine sees none of its files in"),
    ],
)
def test_a_job_that_never_came_to_its_end(place: Place, build: Build, state: str, said: str) -> None:
    (place.home / "wait").touch()
    (place.home / "jobs/7").mkdir(parents=True)
    (place.home / "jobs/7/state").write_text(f"{state}\n")
    (place.project / ".x.sif.0123abcd.part").write_text("half")
    done = build()
    assert done.code in (1, 2) and said in done.err, done.err
    assert place.left == []


def _as_in_a_terminal() -> None:
    """What runs in the background, or under nohup, is born with these ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def started(place: Place) -> Iterator[subprocess.Popen[str]]:
    """The command as a process of its own, ended after two minutes at the latest."""
    command = [sys.executable, "-m", "slurmddp", "build-image", "x.sif", "--base=base.sif", "--on-node", "--site=gpus"]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, cwd=place.project, env=place.desk.environment, stderr=pipe, text=True, preexec_fn=_as_in_a_terminal
    ) as process:
        end = threading.Timer(120, process.kill)
        end.start()
        yield process
        process.kill()
        end.cancel()


@pytest.mark.parametrize("waits", [False, True])
def test_ctrl_c_ends_the_job_and_leaves_nothing(place: Place, waits: bool) -> None:
    place.builds("echo half > $image; echo $$ > $HOME/builder; echo now; sleep 60")
    if waits:
        (place.home / "wait").touch()
    for process in started(place):
        assert process.stderr is not None
        word = "job 7 is pending (Priority)\n" if waits else "now\n"
        said = iter(process.stderr.readline, "")
        assert word in said, "it never came so far"
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
        assert process.wait(timeout=60) == 130
        assert "cancelling job 7" in rest and "stopped by SIGINT" in rest
    assert place.calls[-1] == "scancel --verbose 7"
    assert place.left == ([] if waits else ["x.sif.build.log"])
    if not waits:
        with pytest.raises(ProcessLookupError):
            os.kill(int((place.home / "builder").read_text()), 0)


def test_a_terminal_that_goes_away_ends_the_job(place: Place) -> None:
    place.builds("echo now; sleep 60")
    for process in started(place):
        assert process.stderr is not None
        assert "now\n" in iter(process.stderr.readline, "")
        process.stderr.close()
        process.send_signal(signal.SIGHUP)
        assert process.wait(timeout=60) != 0
    assert place.calls[-1] == "scancel --verbose 7" and place.left == ["x.sif.build.log"]


def test_what_slurm_is_asked_for(place: Place, cli: Cli, tmp_path: Path) -> None:
    place.desk.site(
        "name: all\ntitle: t\nunsupported_flags: [--mem]\nrequired: [resources.account]\n"
        "partitions: {cpu: {max_time: 30m, ask: {constraint: big, qos: q}}}\n"
        "images: {on_node: {partition: cpu, cpus_per_node: 8, mem_per_node: 32G, sbatch: [--reservation=r]}}\n"
        "job: {resources: {partition: gpu, qos: long}, setup: ['export WORD=\"$A b\"', module load apptainer]}\n"
    )
    words = ("build-image", "it's.sif", "--base", "base.sif", "--on-node", "--site", "all", "--dry-run")
    before = sorted(path.name for path in place.project.iterdir())
    done = cli(*words, SLURMDDP_RESOURCES__ACCOUNT="mine")
    assert done.code == 0, done.err
    definition, _, script = done.out.partition("\n# --- build.sh: what sbatch gets\n")
    assert "Bootstrap: localimage" in definition
    assert [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH")] == [
        "--job-name=build-image", "--nodes=1", "--ntasks=1", "--cpus-per-task=8", "--time=00:30:00", "--account=mine",
        "--qos=q", "--constraint=big", "--export=ALL", "--no-requeue", "--reservation=r",
    ]  # fmt: skip
    assert "would run: sbatch --parsable" in done.err
    check_bash(script, "build.sh", tmp_path)
    assert sorted(path.name for path in place.project.iterdir()) == before and place.calls == []


def test_what_slurm_is_asked_for_where_the_profile_does_not_say(place: Place, build: Build) -> None:
    done = build("--dry-run")
    options = [line.removeprefix("#SBATCH ") for line in done.out.splitlines() if line.startswith("#SBATCH")]
    assert options == [
        "--job-name=build-image", "--nodes=1", "--ntasks=1", "--cpus-per-task=4", "--time=01:00:00",
        "--partition=main", "--export=ALL", "--no-requeue",
    ]  # fmt: skip


def test_setup_lines_come_first(place: Place, build: Build) -> None:
    place.desk.site('name: mod\ntitle: t\njob: {setup: [export LC_WORD="a b", \'test "$LC_WORD" = "a b"\']}\n')
    place.builds('echo "it is $LC_WORD"; cp ./base.sif $image')
    assert "it is a b\n" in build("--site", "mod").err
    place.desk.site("name: bad\ntitle: t\njob: {setup: [module load gone-for-good]}\n")
    done = build("--site", "bad", "--force")
    assert done.code == 1 and "node n1: setup line failed with exit code" in done.err


def test_options_that_are_ours(place: Place, build: Build) -> None:
    place.desk.site("name: s\ntitle: t\nimages: {on_node: {sbatch: [--output=x]}}\n")
    done = build("--site", "s")
    assert done.code == 2 and "is set by build-image itself" in done.err


def test_gc_finds_the_log_of_a_job_that_nobody_waited_for(place: Place, cli: Cli) -> None:
    (place.project / ".x.sif.0123abcd.job").write_text("half\n")
    assert ".x.sif.0123abcd.job" in cli("clean", "--images", ".").out
    assert json.loads(cli("image", "list", ".", "--json").out)[0]["path"].endswith("base.sif")
