"""Every command on a run folder that another user filled: nothing of the reader changes, starts, ends or hangs.

The commands come from the program itself, so that a new one is tested as soon as it exists.
"""

import gc
import hashlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import pytest
import typer

from slurmddp.cluster.local import job_id_of
from slurmddp.commands.app import app
from slurmddp.run import index
from slurmddp.run.gate import stranger
from slurmddp.run.layout import RunFolder
from tests.checkpoints import make_run
from tests.helpers import Desk, Result

Cli = Callable[..., Result]
BOB = 65534
pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="giving files to another user takes root")

#: What acts on a run, or on its job.
REFUSED = (
    "cancel RUN", "clean RUN --yes", "resume RUN", "rerun RUN", "sweep rerun RUN", "checkpoint prune RUN --keep 1",
    "sync RUN --to tensorboard", "debug shell RUN", "debug port RUN 6006", "debug stacks RUN", "debug profile RUN",
)  # fmt: skip
#: A command that takes longer than this hangs: none of them has anything to wait for.
PATIENCE = 20
#: What a run folder has besides its manifest and job.yaml, without which no command goes on to the rest.
FILES = (
    "job.json", "site.yaml", "accelerate.yaml", "rendezvous.key", "events.jsonl", "metrics.jsonl", "submission.json",
    "progress", "ranks", "stop", "profile.json", "logs/job.log", "logs/attempt-000/n1.log", "logs/attempt-000/srun.err",
    "logs/attempt-000/preflight/verdict.json", "logs/attempt-000/preflight/n1.failed", "markers/attempt-000.json",
    "alerts/sent", "alerts/spool/gpt-1.0.failed.chat/head", "alerts/spool/gpt-1.0.failed.chat/body",
    "trackers/tensorboard.json", "trackers/tensorboard.lock", "trace/gpus/attempt-000/n1.jsonl",
    "checkpoints/step-00000100/COMPLETE", "checkpoints/step-00000100/manifest.json",
    "checkpoints/step-00000100/.metadata", "code/slurmddp.zip", "code/python.sh",
    "checkpoints/step-00000100/__0_0.distcp", "sweep.json",
)  # fmt: skip
FOLDERS = (
    "logs", "logs/attempt-000", "logs/attempt-000/preflight", "markers", "alerts", "alerts/spool", "alerts/refused",
    "alerts/spool/gpt-1.0.failed.chat", "trackers", "trackers/tensorboard", "trace", "trace/gpus", "checkpoints",
    "checkpoints/step-00000100", "code", "code/project", "points",
)  # fmt: skip
#: Those of them that are traps together; the files below them are none then.
AT_ONCE = ("alerts/spool", "checkpoints", "markers", "trackers/tensorboard", "trace/gpus", "code/project", "points")
#: Programs that would act on something. Those that only ask answer nothing.
ACTING = ("scancel", "sbatch", "srun", "curl", "salloc", "apptainer", "singularity", "ssh")
ASKING = ("squeue", "sacct", "sinfo", "scontrol", "sshare", "sacctmgr", "lfs", "quota", "git", "nvidia-smi")


RUNNING = "JobId=4711 JobName=gpt UserId=nobody(65534) JobState=RUNNING Reason=None NodeList=n1 NumNodes=1"


class Hostile(NamedTuple):
    """What stands in the place of the run's files: a way to make one, for files and for folders."""

    name: str
    file: Callable[[Path, Path], None]
    folder: Callable[[Path, Path], None]


def fifo(path: Path, _home: Path) -> None:
    os.mkfifo(path)


def to_file(path: Path, home: Path) -> None:
    path.symlink_to(home / ".bashrc")


def to_home(path: Path, home: Path) -> None:
    path.symlink_to(home)


def to_runs(path: Path, home: Path) -> None:
    """The folder of the same name in a run of the reader's own."""
    path.symlink_to(home / "work" / "mine" / path.name)


def foreign(path: Path, _home: Path) -> None:
    path.write_text("{}\n")


def folder_of_files(path: Path, _home: Path) -> None:
    path.mkdir()
    (path / "x").write_text("x")


KINDS = (
    Hostile("links into the home", to_file, to_home),
    Hostile("links to the reader's run", to_file, to_runs),
    Hostile("pipes", fifo, fifo),
    Hostile("damaged", foreign, folder_of_files),
    Hostile("folders for files", folder_of_files, foreign),
)


class Place(NamedTuple):
    """The reader's home, and the folder of another user's runs."""

    desk: Desk
    bob: Path
    calls: Path

    @property
    def home(self) -> Path:
        return self.desk.home

    def run(self, *, owner: int = BOB, job_id: str = "4711") -> Path:
        """A run folder that looks like a finished one, of this user."""
        path = self.bob / "gpt-1"
        shutil.rmtree(path, ignore_errors=True)
        run = make_run(path, 100, 200)
        facts = json.loads(run.manifest.read_text())
        run.manifest.write_text(json.dumps({**facts, "created": "2099-01-01T00:00:00+00:00", "code_hash": None}))
        run.job_yaml.write_text(
            f"name: gpt\nsite: {self.bob}/evil.yaml\nsetup: [touch {self.home}/pwned]\n"
            "resources: {time: 1h}\ntrain: {script: train.py}\n"
        )
        sent = {"schema": 1, "job_id": job_id, "scheduler": "local" if "-" in job_id else "slurm", "command": []}
        run.submission.write_text(
            json.dumps({**sent, "time": "2026-01-01T00:00:00+00:00", "host": os.uname().nodename})
        )
        run.events.write_text(
            "".join(
                json.dumps({"time": time.time(), "event": name, "attempt": 0, "job_id": job_id, "nodes": "n1", **more})
                + "\n"
                for name, more in (
                    ("job_started", {}),
                    ("attempt_started", {}),
                    ("attempt_ended", {"decision": "next"}),
                )
            )
        )
        for name in FILES:
            (run.path / name).parent.mkdir(parents=True, exist_ok=True)
            if not (run.path / name).exists():
                (run.path / name).write_text("{}\n")
        head = "target chat\nkey gpt-1.0.failed\nkind failed\ninsecure 1\nuntil 1\n"
        (run.alert_spool / "gpt-1.0.failed.chat" / "head").write_text(head)
        point = {"name": "gpt", "values": {"train.seed": "0"}}
        (path / "sweep.json").write_text(
            json.dumps({"schema": 1, "sweep": "gpt-1", "at_most": None, "points": [point, {**point, "name": "evil"}]})
        )
        for name in ("points", "code/project"):
            (path / name).mkdir(parents=True, exist_ok=True)
        shutil.copy(run.job_yaml, path / "points" / "evil.yaml")
        give(self.bob, owner)
        return path


def give(path: Path, owner: int) -> None:
    for root, folders, names in os.walk(path):
        for name in [root, *(os.path.join(root, each) for each in (*folders, *names))]:
            os.chown(name, owner, -1, follow_symlinks=False)


@pytest.fixture
def place(desk: Desk, tmp_path: Path) -> Place:
    home, bob, calls = desk.home, tmp_path / "bob", tmp_path / "calls"
    bob.mkdir()
    calls.touch()
    for name in ACTING:
        desk.program(name, f'#!/bin/bash\necho "{name} $*" >>{calls}\nexit 1\n')
    for name in ASKING:
        desk.program(name, "#!/bin/bash\nexit 0\n")
    (bob / "evil.yaml").write_text(f"name: evil\ntitle: x\nscheduler: local\njob: {{setup: [touch {home}/pwned]}}\n")
    for name in (".ssh", ".config/gh", "work"):
        (home / name).mkdir(parents=True)
        (home / name / "secret").write_text("secret")
        os.utime(home / name, (1, 1))
    (home / ".bashrc").write_text("true\n")
    make_run(home / "work" / "mine", 100, 200, 300)
    desk.write("mine.yaml", "name: mine\nsite: cores\nresources: {time: 1h, account: a}\ntrain: {script: train.py}\n")
    desk.write("train.py", "")
    return Place(desk, bob, calls)


def commands() -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command of the program, hidden ones and those of groups included."""

    def below(command: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
        if not getattr(command, "commands", None):
            yield path, command
        for name, each in getattr(command, "commands", {}).items():
            yield from below(each, (*path, name))

    return below(typer.main.get_command(app), ())


def calls_of(path: tuple[str, ...], command: Any, run: Path) -> Iterator[list[str]]:
    """Command lines that give the run wherever the command takes one, with all that makes it act without asking."""
    arguments, options, resumes = [], [], []
    for parameter in command.params:
        flags, metavar = getattr(parameter, "opts", []), str(parameter.metavar or "")
        if parameter.param_type_name == "argument":
            if not metavar.startswith("--"):
                arguments.append({"PORT": "6006", "JOB.yaml": str(run / "x.yaml")}.get(metavar, str(run)))
        elif any(flag in ("--yes", "--force", "--now", "--once") for flag in flags):
            options.append(flags[-1])
        elif "RUN" in metavar:
            resumes.append(flags[-1])
        elif parameter.required:
            options += [flags[-1], {"N": "1"}.get(metavar, "tensorboard")]
    yield [*path, *options, *arguments]
    yield [*path, *options]  # on whatever is the last run
    if "JOB.yaml|SCRIPT" in [str(parameter.metavar) for parameter in command.params]:
        yield [*path, *options, str(run / "job.yaml")]
    for flag in resumes:
        yield [*path, *options, "mine.yaml", flag, str(run)]
        yield [*path, *options, flag, str(run)]


def picture(home: Path, without: tuple[str, ...]) -> dict[str, tuple[object, ...]]:
    """All that is in the home, without some of it: kind, mode, owner, time and content."""
    found: dict[str, tuple[object, ...]] = {}
    for root, folders, names in os.walk(home):
        for path in [Path(root, name) for name in (*folders, *names)]:
            if str(path).startswith(without):
                continue
            facts = path.lstat()
            content = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
            found[str(path)] = (facts.st_mode, facts.st_uid, facts.st_mtime_ns if content else 0, content)
    return found


def hang(_signum: int, _frame: FrameType | None) -> None:
    raise AssertionError(f"the command hangs: nothing after {PATIENCE} s")


def attack(place: Place, cli: Cli, run: Path, *, names: str = "", ours: bool = False) -> None:
    """Give the run to every command, and compare the home before and after each. ours: its job may be cancelled."""
    # What commands write for themselves: the index, and the draft of `site init`.
    written = (str(place.home / ".local"), str(place.desk.config / "sites" / "cluster.yaml"))
    before = picture(place.home, written)
    previous = signal.signal(signal.SIGALRM, hang)
    try:
        for path, command in commands():
            for words in calls_of(path, command, run):
                signal.alarm(PATIENCE)
                done = cli(*words, COLUMNS="80")
                signal.alarm(0)
                shown = f"{names}: slurmddp {' '.join(words)}\n{done.out}{done.err}"
                assert "Traceback" not in done.err, shown
                now = picture(place.home, written)
                assert now == before, f"{shown}\n{set(now.items()) ^ set(before.items())}"
                scripts = (place.desk.project / "runs").rglob("*.sh")
                assert not any(b"pwned" in script.read_bytes() for script in scripts), shown
                acted = [
                    call for call in place.calls.read_text().splitlines() if not call.startswith("sbatch --parsable")
                ]
                assert not [call for call in acted if ("4711" in call and not ours) or "curl" in call], (
                    f"{shown}\n{acted}"
                )
                assert str(run) not in index.index_file().read_text() if index.index_file().exists() else True, shown
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A program of the reader in a process group of its own, which the run names as its job."""
    process = subprocess.Popen(["sleep", "600"], start_new_session=True)
    yield process
    process.kill()
    process.wait()


def test_the_commands_are_found() -> None:
    found = [" ".join(path) for path, _ in commands()]
    assert {"status", "cancel", "clean", "checkpoint prune", "sweep rerun", "alert watch"} <= set(found)
    assert len(found) > 35


def test_another_users_run(place: Place, cli: Cli, sleeper: subprocess.Popen[bytes]) -> None:
    run = place.run(job_id=str(job_id_of(sleeper.pid)))
    attack(place, cli, run)
    assert sleeper.poll() is None
    assert stranger(RunFolder(run)) == "belongs to nobody"
    for words in (("status", str(run)), ("logs", str(run)), ("report", str(run), "--json")):
        assert str(cli(*words).code) in "013", words  # colleagues read each other's runs


@pytest.mark.parametrize("words", REFUSED)
def test_what_is_refused_names_the_owner(place: Place, cli: Cli, words: str) -> None:
    """Also where the job runs, as the scheduler says."""
    run = place.run()
    place.desk.program("scontrol", f'#!/bin/bash\necho "{RUNNING}"\n')
    done = cli(*words.replace("RUN", str(run)).split(" "))
    assert done.code == 2 and "nobody" in done.err, done
    assert place.calls.read_text() == ""


@pytest.fixture(autouse=True)
def _folders_are_closed() -> Iterator[None]:
    """`main` ends a process, so it lets its garbage be; here it would keep every run folder open."""
    yield
    gc.unfreeze()
    gc.collect()


def _kinds() -> list[Any]:
    """The kinds of trap; `make test` has the two that did harm."""
    marks = {kind.name: () if kind.name in ("links into the home", "pipes") else (pytest.mark.long,) for kind in KINDS}
    return [pytest.param(kind, id=kind.name, marks=marks[kind.name]) for kind in KINDS]


@pytest.mark.parametrize("kind", _kinds())
@pytest.mark.parametrize("owner", [BOB, 0], ids=["of bob", "unpacked"])
def test_a_run_full_of_traps(place: Place, cli: Cli, kind: Hostile, owner: int) -> None:
    run = place.run(owner=owner)
    for name in FILES if kind.file is fifo else (*AT_ONCE, *FILES):
        spring(run / name, kind, place.home)
    give(place.bob, owner)
    attack(place, cli, run, names=kind.name)


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS, ids=[kind.name for kind in KINDS])
@pytest.mark.parametrize("name", ["manifest.json", "job.yaml", *FILES, *FOLDERS])
def test_each_trap_alone(place: Place, cli: Cli, kind: Hostile, name: str) -> None:
    for owner in (BOB, 0):
        run = place.run(owner=owner)
        spring(run / name, kind, place.home)
        give(place.bob, owner)
        attack(place, cli, run, names=f"{name}, {kind.name}", ours=owner == 0)


def spring(path: Path, kind: Hostile, home: Path) -> None:
    """Put a trap in the place of a file or folder, if its own folder is not a trap already."""
    parent = path.parent
    if parent.resolve() != Path(os.path.abspath(parent)) or not parent.is_dir():
        return
    is_folder = path.is_dir() and not path.is_symlink()
    shutil.rmtree(path) if is_folder else path.unlink(missing_ok=True)
    (kind.folder if is_folder else kind.file)(path, home)
