"""Run a script of the user's own on this machine, where it can write in a folder of its own only: for rehearsals and
`slurmddp tune`.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from slurmddp.alerts import secrets
from slurmddp.assets import package_folder
from slurmddp.commands import options as opt
from slurmddp.commands.check.compare import Start
from slurmddp.commands.terminal import exit_on_signals
from slurmddp.container import SIF_PROGRAMS
from slurmddp.errors import UserError
from slurmddp.job.plan.model import Plan
from slurmddp.job.resolve import Request
from slurmddp.launch.prepare import Prepared, prepare
from slurmddp.launch.problems import refuse_problems
from slurmddp.launch.submit import make_run_folder
from slurmddp.launch.workdir import files_before
from slurmddp.launch.write import run_files
from slurmddp.records.events import Event
from slurmddp.records.rehearsal import REQUEST, STARTS, Order, read_lines
from slurmddp.run.cause import newest_cause
from slurmddp.run.create import make_folder, write_file
from slurmddp.run.events import read_events
from slurmddp.run.gate import OwnRun
from slurmddp.run.layout import RunFolder
from slurmddp.visible import one_line

#: Seconds until the first step.
START_SECONDS = 300.0
_LOOK_EVERY = 0.2
#: Files of the working directory: up to this size, each start gets a copy, else a link; up to so many; and saves, which
#: it does not get, unless an argument names them.
_COPIED, _MOST = 2**20, 5000
_SAVES = (".pt", ".pth", ".ckpt", ".safetensors", ".distcp", ".pth.tar")


class RehearsalRun:
    """One run folder of the rehearsal, in which the ranks may be started several times."""

    def __init__(self, sandbox: Sandbox, name: str, order: Order | None, grace: float = 15.0) -> None:
        """order: None: the script runs as it is. grace: seconds that it has to exit when it is asked to stop."""
        self._sandbox = sandbox
        workdir = sandbox.workdir(name)
        changes = {"timeouts.stop": f"{grace:.0f}", "launch.wrap": json.dumps(sandbox.wrap(name))}
        changes["recovery.no_progress"] = "2"  # the kill, and one start that fails after it
        if workdir is not None:
            changes["train.workdir"] = str(workdir)
        self._options = _options(changes)
        prepared = self._prepared(sandbox.ranks)
        # What earlier rehearsals left is no code, although the runs of this one are elsewhere.
        no_code = [Path(sandbox.plan.runs_root)]
        self.folder: OwnRun = make_run_folder(prepared, [], files=files_before(prepared), no_code=no_code)
        os.environ.update(sandbox.variables)  # which it has taken away, and the next run needs again
        sandbox.runs.append(self.folder)
        if order is not None:
            self._write(REQUEST, order.text())

    def _prepared(self, ranks: int) -> Prepared:
        options = [*self._options, *_options({"resources.ranks_per_node": str(ranks)})]
        prepared = prepare(self._sandbox.request.adding(*options))
        refuse_problems(prepared)
        return prepared._replace(plan=prepared.plan._replace(alerts=None))

    def _write(self, name: str, text: str) -> None:
        write_file(self.folder.path / name, text.encode(), mode=0o755 if name.endswith(".sh") else 0o644)

    def again(self, ranks: int) -> None:
        """Have the next start use so many ranks, whatever this one was asked for."""
        self.folder.stop.unlink(missing_ok=True)
        for name, text in run_files(self._prepared(ranks), self.folder.id).items():
            (self.folder.path / name).unlink(missing_ok=True)
            self._write(name, text)

    def start(self, enough: Callable[[list[Start]], bool], patience: float) -> int | None:
        """Start the job, and end it once that is enough, or nothing more is to be expected. patience: seconds after the
        first step. Return its exit code if it exited by itself.
        """
        known = len(self.starts())
        with self.folder.job_log.open("ab") as log:
            command = ("bash", str(self.folder.job_sh), str(self.folder.path))
            job = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                cwd=self._sandbox.root, env={**os.environ, "TMPDIR": str(self._sandbox.root / "tmp")},
            )  # fmt: skip
        began = time.monotonic()
        until = began + START_SECONDS
        try:
            while job.poll() is None:
                time.sleep(_LOOK_EVERY)
                starts = self.starts()[known:]
                if starts and starts[0].steps and until == began + START_SECONDS:
                    until = time.monotonic() + patience
                if enough(starts) or time.monotonic() > until:
                    return None
            return job.returncode
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)  # SIGTERM would have the ranks save once more
            job.wait()
            self._sweep()

    def _sweep(self) -> None:
        """Remove what the ranks left, such as compilers: these have process groups of their own."""
        scratch = self._sandbox.plan.node_folder
        for left in Path(scratch).glob(f"slurmddp-{os.getuid()}/{self.folder.id}-*"):
            logs = self.folder.attempt_logs(int(left.name.rpartition("-")[2]))
            variables = {
                "SLURMDDP_SWEEP": left.name, "SLURMDDP_RUN": str(self.folder.path), "SLURMDDP_SCHEDULER": "local",
                "SLURMDDP_LOGS": str(logs), "SLURMDDP_NODE_FOLDER": scratch,
            }  # fmt: skip
            command = ["bash", str(self.folder.python_sh), sys.executable, str(self.folder.code_archive), "sweep"]
            subprocess.run(command, stdin=subprocess.DEVNULL, env={**os.environ, **variables}, check=False)

    def starts(self) -> list[Start]:
        """Return what rank 0 noted in each start so far, the oldest first."""
        paths = sorted((self.folder.path / STARTS).glob("*.jsonl"))
        return [Start(read_lines(path.read_bytes())) for path in paths]

    def events(self) -> Sequence[Event]:
        """Return the events of all starts."""
        return read_events(self.folder.events, self.folder.path).records


def why(folder: RunFolder) -> str:
    """Return why a job failed, or where its logs are."""
    cause = newest_cause(folder)
    return one_line(cause.line_with_log()) if cause else f"its logs are in {folder.logs}"


class Sandbox:
    """The folder that holds all of its runs."""

    def __init__(self, request: Request) -> None:
        prepared = prepare(request)
        opt.show_notes(prepared)
        plan, wanted = prepared.plan, prepared.resolved.job.resources.ranks_per_node
        refuse_problems(prepared)
        self.ranks = plan.nodes.ranks_per_node or 1
        if not isinstance(wanted, int) and not plan.layout.gpus_per_node:
            self.ranks = 2
        self.plan, self._left_out = plan, set(files_before(prepared))
        self.root = Path(plan.runs_root) / f"rehearsal-{plan.job.name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        make_folder(self.root)
        self.root.chmod(0o700)  # it gets copies of what may be private
        (self.root / "tmp").mkdir()
        self.variables = {name: os.environ[name] for name in plan.job.environment_from if name in os.environ}
        self.runs: list[OwnRun] = []
        self._writable = _caches(plan)
        for folder in self._writable:  # what is not there cannot be made writable
            with contextlib.suppress(OSError):
                os.makedirs(folder, mode=0o700, exist_ok=True)
        shutil.copy(package_folder() / "launch" / "readonly.py", self.root)
        _refuse_without_namespaces([sys.executable, *self._protected("probe")])
        seen = {"container.binds": json.dumps([str(self.root)])} if plan.container.needs_image else {}
        # A kill while DeepSpeed builds an operator leaves its lock, on which each later start would wait for ever.
        seen["environment.TORCH_EXTENSIONS_DIR"] = str(self.root / "extensions")
        self.request = request.adding(*_options({"paths.runs": str(self.root), **seen}))
        self.saves_left_out = set[Path]()

    def _protected(self, tmp: str) -> list[str]:
        """Return what a Python is given so that only the rehearsal's own folder and caches can be written."""
        own = [str(self.root), str(self.root / "tmp" / tmp), *self._writable, "--"]
        return ["-I", "-S", str(self.root / "readonly.py"), *own]

    def wrap(self, name: str) -> list[str]:
        """Return launch.wrap for a run. Each start of its ranks has a /tmp of its own."""
        python = self.plan.container.python if self.plan.container.needs_image else sys.executable
        return [python, *self._protected(f"{name}-{{attempt}}-{{restart}}"), *self.plan.job.launch.wrap]

    def workdir(self, name: str) -> Path | None:
        """Make a working directory like the user's, in which nothing that is written changes theirs. None: the job has
        one in its run folder.
        """
        if not self.plan.workdir.startswith("/"):
            return None
        mirrored = self.root / f"work-{name}"
        _mirror(Path(self.plan.workdir), mirrored, self._skip)
        return mirrored

    def _skip(self, path: Path) -> bool:
        needed = any(path.name in word for word in self.plan.program.args)
        needed |= "site-packages" in path.parts  # a .pth file there says where packages are
        if path.suffix == ".safetensors":  # a model to begin from, not a Trainer's checkpoint
            needed |= any(path.parent.glob("*config.json")) and not (path.parent / "trainer_state.json").exists()
        save = path.name.endswith(_SAVES) and not needed
        if save:
            self.saves_left_out.add(path)
        return save or path == Path(self.plan.runs_root) or path.name == ".git" or str(path) in self._left_out


@contextlib.contextmanager
def sandboxed(request: Request) -> Iterator[Sandbox]:
    """Give a sandbox, and then remove what only its runs need: secrets, and mount points in their /tmp: thousands.

    Raises UserError.
    """
    sandbox = Sandbox(request)
    try:
        with exit_on_signals():  # the ranks must not go on where the terminal has gone
            yield sandbox
    finally:
        for folder in sandbox.runs:
            secrets.forget(folder.id, os.environ)
        shutil.rmtree(sandbox.root / "tmp", ignore_errors=True)


def _caches(plan: Plan) -> list[str]:
    """Return what a script may write besides: caches that anything can make anew, and its scratch folder."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    named = [os.environ.get(name) for name in ("HF_HOME", "TORCH_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")]
    scratch = f"{plan.node_folder}/slurmddp-{os.getuid()}"
    return [path for path in (home, plan.cache, scratch, *named) if path]


def _refuse_without_namespaces(command: Sequence[str]) -> None:
    done = subprocess.run([*command, "true"], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise UserError(
            f"a rehearsal keeps your files read-only, which this machine does not allow: {done.stderr.strip()}",
            todo="rehearse on a machine where `unshare --user --mount true` works, such as a compute node",
        )


def _options(changes: Mapping[str, str]) -> list[tuple[str, str, str]]:
    return [(key, value, f"the rehearsal's {key}") for key, value in changes.items()]


def _mirror(source: Path, target: Path, skip: Callable[[Path], bool]) -> None:
    """Make a folder like another one: small files copied, others and what is too much linked."""
    made = 0
    for folder, folders, files in os.walk(source):
        place = target / os.path.relpath(folder, source)
        place.mkdir(parents=True, exist_ok=True)
        known = [path for name in (*files, *folders) if not skip(path := Path(folder, name))]
        made += len(known)
        kept = {path.name for path in known if path.is_dir() and not path.is_symlink()} if made <= _MOST else set()
        folders[:] = sorted(kept)
        for path in known:
            if path.name in kept:
                continue
            with contextlib.suppress(OSError):  # what cannot be read is linked
                if path.is_file() and path.stat().st_size <= _COPIED:
                    shutil.copy(path, place / path.name)
                    continue
            (place / path.name).symlink_to(os.path.realpath(path))


#: What changes in the job of an own script.
_CHANGES = {"site": "local", "resources.nodes": "1", "resources.gpus_per_node": "null", "train.observe": "report"}


def on_this_machine(request: Request) -> Request:
    """Return the request of a run in the sandbox: in the job's image, if this machine has what starts it."""
    here = replace(request.adding(*_options(_CHANGES)), inside=True)
    resolved = prepare(here, strict=False).resolved
    origin = resolved.layered.origins.get(("container", "runtime"))
    of_site = origin is None or origin.layer.startswith("site ")
    if resolved.job.container.image and of_site and (runtime := next(filter(shutil.which, SIF_PROGRAMS), "")):
        return here.adding(*_options({"container.runtime": runtime}))
    return here
