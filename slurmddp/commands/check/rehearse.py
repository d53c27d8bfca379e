"""`slurmddp check --rehearse` of a script of the user's own: it is run, killed, stopped and started again on this
machine.
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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from slurmddp.alerts import secrets
from slurmddp.assets import package_folder
from slurmddp.commands import options as opt
from slurmddp.commands.check import nodes
from slurmddp.commands.check.compare import Outcome, Start, halved, resumed, stopped
from slurmddp.commands.terminal import exit_on_signals
from slurmddp.errors import UserError
from slurmddp.job.plan.model import Plan
from slurmddp.job.resolve import Request
from slurmddp.launch.prepare import Prepared, prepare
from slurmddp.launch.problems import refuse_problems
from slurmddp.launch.submit import make_run_folder
from slurmddp.launch.workdir import files_before
from slurmddp.launch.write import run_files
from slurmddp.records.events import Event, newest
from slurmddp.records.job_events import RanksTerminated
from slurmddp.records.rank_events import Restarted
from slurmddp.records.rehearsal import KILL, REQUEST, STARTS, STOP, Order, Verdict, read_lines
from slurmddp.run import rehearsed, snapshot
from slurmddp.run.cause import find_cause
from slurmddp.run.create import make_folder, write_file
from slurmddp.run.events import read_events
from slurmddp.run.evidence import evidence
from slurmddp.run.gate import OwnRun
from slurmddp.visible import one_line

#: Batches that an epoch has, and steps after the first save until the script is killed or asked to stop; and then, to
#: compare. Where it saves nothing: the step at which it is killed.
_BATCHES, _AFTER, _COMPARED, _UNSAVED = 8, 3, 5, 6
#: Seconds until the first step, and from there until the first save.
START_SECONDS, _SAVE = 300.0, 45.0
_LOOK_EVERY = 0.2
#: Seconds, and the longest step four times, that a script has to exit when it is asked to stop.
_GRACE = 15.0
#: Files of the working directory: up to this size, each start gets a copy, else a link; up to so many; and saves, which
#: it does not get, unless an argument names them.
_COPIED, _MOST = 2**20, 5000
_SAVES = (".pt", ".pth", ".ckpt", ".safetensors", ".distcp", ".pth.tar")


class RehearsalRun:
    """One run folder of the rehearsal, in which the ranks may be started several times."""

    def __init__(self, rehearsal: Rehearsal, name: str, order: Order | None, grace: float = _GRACE) -> None:
        """order: None: the script runs as it is. grace: seconds that it has to exit when it is asked to stop."""
        self.rehearsal = rehearsal
        self.kills = order is not None and order.act == KILL
        workdir = rehearsal.workdir(name)
        changes = {"timeouts.stop": f"{grace:.0f}", "launch.wrap": json.dumps(rehearsal.wrap(name))}
        if workdir is not None:
            changes["train.workdir"] = str(workdir)
        self._options = _options(changes)
        prepared = self._prepared(rehearsal.ranks)
        self.folder: OwnRun = make_run_folder(prepared, [], files=files_before(prepared))
        os.environ.update(rehearsal.variables)  # which it has taken away, and the next run needs again
        rehearsal.runs.append(self.folder)
        if order is not None:
            self._write(REQUEST, order.text())

    def _prepared(self, ranks: int) -> Prepared:
        options = [*self._options, *_options({"resources.ranks_per_node": str(ranks)})]
        prepared = prepare(self.rehearsal.request.adding(*options))
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
                cwd=self.rehearsal.root, env={**os.environ, "TMPDIR": str(self.rehearsal.root / "tmp")},
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
            for path in Path(self.rehearsal.plan.node_folder).glob(f"slurmddp-{os.getuid()}/{self.folder.id}-*"):
                shutil.rmtree(path, ignore_errors=True)

    def starts(self) -> list[Start]:
        """Return what rank 0 noted in each start so far, the oldest first."""
        paths = sorted((self.folder.path / STARTS).glob("*.jsonl"))
        return [Start(read_lines(path.read_bytes())) for path in paths]

    def events(self) -> Sequence[Event]:
        """Return the events of all starts."""
        return read_events(self.folder.events, self.folder.path).records

    def why(self) -> str:
        """Return why the job failed."""
        cause = find_cause(self.folder, evidence(self.folder).attempt)
        return one_line(cause.line_with_log()) if cause else f"its logs are in {self.folder.logs}"


class Result(NamedTuple):
    """What became of the script after a kill, when it was asked to stop, and on half the ranks."""

    kill: Outcome
    stop: Outcome
    half: Outcome
    code_hash: str

    @property
    def outcomes(self) -> tuple[Outcome, ...]:
        return self.kill, self.stop, self.half

    @property
    def verdict(self) -> Verdict:
        return Verdict(self.kill.resumes, tuple(each.text for each in self.outcomes))

    @property
    def not_compared(self) -> tuple[str, ...]:
        """Return what could not be compared, and why."""
        return tuple(text for each in self.outcomes for text in each.not_compared)

    @property
    def clean(self) -> bool:
        """Return whether all that was tried went as it should, so that nobody needs the folder."""
        resumes = all(each.resumes is True for each in self.outcomes)
        return resumes and not self.kill.differs and not self.not_compared


class Rehearsal:
    """Runs a script several times in a folder of its own."""

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
        _refuse_without_namespaces(self._protected("probe"))
        self.request = request.adding(*_options({"paths.runs": str(self.root)}))
        self._batches: int | None = _BATCHES
        self._code_hash, self._saves = "", set[Path]()

    def _protected(self, tmp: str) -> list[str]:
        """Return the command behind which only the rehearsal's own folder and caches can be written."""
        program = package_folder() / "launch" / "readonly.py"
        own = [str(self.root), str(self.root / "tmp" / tmp), *self._writable, "--"]
        return [sys.executable, "-I", "-S", str(program), *own]

    def wrap(self, name: str) -> list[str]:
        """Return launch.wrap for a run. Each start of its ranks has a /tmp of its own."""
        return [*self._protected(f"{name}-{{attempt}}-{{restart}}"), *self.plan.job.launch.wrap]

    def forget(self) -> None:
        """Remove what is kept for its runs outside of their folders."""
        for folder in self.runs:
            secrets.forget(folder.id, os.environ)

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
        words = self.plan.program.args
        named = any(path.name in word for word in words)
        if path.suffix == ".safetensors":  # of a model's folder, such as --model_name_or_path DIR
            named |= any(path.parent == Path(self.plan.workdir, word.rpartition("=")[2]) for word in words)
        # A .pth file of an environment says where packages are.
        save = path.name.endswith(_SAVES) and not named and "site-packages" not in path.parts
        if save:
            self._saves.add(path)
        return save or path == Path(self.plan.runs_root) or path.name == ".git" or str(path) in self._left_out

    def _order(self, act: str, undisturbed: Start, save: int | None = None) -> Order:
        """save: the steps done at the save after which it acts; None: the first one."""
        save = undisturbed.first_save if save is None else save
        if save is None or save >= undisturbed.steps:
            return Order(self._batches, act, at=min(_UNSAVED, max(1, undisturbed.steps - 1)))
        after = max(1, min(_AFTER, undisturbed.steps - save - 1))
        return Order(self._batches, act, after, None if save == undisturbed.first_save else save + after)

    def run(self) -> Result:
        """Run it undisturbed, with a kill, and with a stop and half the ranks. Raises UserError."""
        undisturbed = self._undisturbed(_BATCHES)
        if undisturbed.saves_at_end_only and undisturbed.end is not None:
            undisturbed = self._undisturbed(None)
        kill = self._kill(undisturbed)
        if kill.resumes is False and not undisturbed.saves_at_end_only:
            kill = self._after_other_saves(undisturbed, kill)
        if kill.differs and self._batches is not None:
            kill = self._confirmed(kill)
        grace = _GRACE + 4 * undisturbed.step_seconds
        stop, half = self._stop(undisturbed, grace, resumes=kill.resumes is not False)
        return Result(kill, stop, half, self._code_hash)

    def _undisturbed(self, batches: int | None, *, longer: bool = False) -> Start:
        """longer: not only until it has saved."""
        self._batches = batches
        opt.say(
            f"  undisturbed{', for longer' * longer}, {f'{batches} batches per epoch' if batches else 'all batches'}"
        )
        run = RehearsalRun(self, f"undisturbed-{'longer-' * longer}{batches or 'all'}", Order(batches))
        code = run.start(lambda starts: (_has_enough(starts) and not longer) or len(starts) > 1, _SAVE)
        starts = run.starts()
        start, self._code_hash = _first(starts), snapshot.code_hash(run.folder.code)
        start.end = None if code is None else start.steps
        failed = bool(code) or len(starts) > 1
        if failed and start.steps and batches is not None:
            opt.say(f"  failed after step {start.steps}: perhaps because of the shorter epochs")
            return self._undisturbed(None)
        if failed:
            why = f"it fails without a kill, after step {start.steps}: {run.why()}"
            todo = (
                "if it writes elsewhere than below its working directory, $SLURMDDP_RUN and /tmp: all else is read-only"
            )
            if self._saves:
                todo += f"; and it ran without your saves, such as {min(self._saves)}: name one that it needs"
            raise UserError(why, todo=todo)
        if not start.steps:
            raise UserError(f"no step of a torch optimizer was seen; its log is {run.folder.job_log}")
        return start

    def _confirmed(self, kill: Outcome) -> Outcome:
        """Return what a kill does without shorter epochs: these could be why it went on differently."""
        batches, undisturbed = self._batches, self._undisturbed(None)
        if not undisturbed.saves_at_end_only:
            kill = self._kill(undisturbed)
        else:
            text = f"epochs of more than {batches} batches: no save within {_SAVE:.0f} s"
            kill = kill._replace(not_compared=(*kill.not_compared, text))
        self._batches = batches
        return kill

    def _after_other_saves(self, undisturbed: Start, kill: Outcome) -> Outcome:
        """Return what a kill does once it has saved all that it saves: the first save may be of the model alone."""
        longer = self._undisturbed(self._batches, longer=True)
        last = max(longer.first_saves.values(), default=0)
        if (undisturbed.first_save or 0) + _AFTER < last < longer.steps:
            return self._kill(longer, last)
        return kill

    def _kill(self, undisturbed: Start, save: int | None = None) -> Outcome:
        order = self._order(KILL, undisturbed, save)
        opt.say("  killed after a save" if order.at is None else f"  killed after step {order.at}")
        run = RehearsalRun(self, f"kill-{order.at or 'save'}-{self._batches or 'all'}", order)
        code = run.start(lambda starts: len(starts) > 1 and starts[1].steps >= order.after + _COMPARED, 4 * _SAVE)
        starts = run.starts()
        if not starts or starts[0].acted is None:
            raise UserError(f"the script was not killed: {run.why()}")
        again = _first(starts[1:])
        if code and not again.states:
            text = f"Killed after step {starts[0].acted}, it failed when it was started again: {run.why()}"
            return Outcome(False, text)
        seen = newest(run.events(), Restarted)
        return resumed(undisturbed, starts[0], again, seen.how if seen else "")

    def _stop(self, undisturbed: Start, grace: float, *, resumes: bool) -> tuple[Outcome, Outcome]:
        """Return what it did when it was asked to stop, and then on half the ranks. resumes: whether to try these."""
        opt.say("  asked to stop, then started again on fewer ranks")
        run = RehearsalRun(self, "stop", self._order(STOP, undisturbed), grace)
        run.start(lambda starts: False, 2 * _SAVE + grace)
        before = run.starts()
        terminated = newest(run.events(), RanksTerminated) is not None
        again, half = Start([]), Outcome(None, "Then started on fewer ranks: not tried.")
        if resumes:
            ranks = max(1, self.ranks // 2)
            run.again(ranks)
            run.start(lambda starts: bool(starts) and starts[0].steps >= 2, _SAVE)
            again = _first(run.starts()[len(before) :])
            half = halved(_first(before), again, ranks, run.why())
        tried = again if resumes else None
        return stopped(_first(before), tried, terminated=terminated, end=undisturbed.end), half


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


def _first(starts: list[Start]) -> Start:
    """Return the first start that came as far as its first step; an empty one if none did."""
    return next((start for start in starts if start.states), Start([]))


def _has_enough(starts: list[Start]) -> bool:
    first = starts[0].first_save if starts else None
    return first is not None and starts[0].steps >= first + _AFTER + _COMPARED


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


#: What the rehearsal of an own script changes of its job.
_CHANGES = {"site": "local", "resources.nodes": "1", "resources.gpus_per_node": "null", "train.observe": "report"}


def on_this_machine(request: Request) -> Request:
    """Return the request of a rehearsal."""
    return replace(request.adding(*_options(_CHANGES)), inside=True)


def rehearse(request: Request, *, as_json: bool) -> set[str]:
    """Rehearse a script of the user's own on this machine, and keep the verdict as evidence; a bundled task as a job.

    Return the severities.
    """
    here = on_this_machine(request)
    if not prepare(here, strict=False).plan.program.own:
        return nodes.rehearse(request, as_json=as_json)
    rehearsal = Rehearsal(here)
    opt.say(f"rehearse {rehearsal.plan.job.name} with {rehearsal.ranks} ranks on this machine, in {rehearsal.root}")
    try:
        with exit_on_signals():  # the ranks must not go on where the terminal has gone
            result = rehearsal.run()
    finally:
        rehearsal.forget()
    verdict = result.verdict
    rehearsed.keep(result.code_hash, rehearsal.plan, verdict)
    good = verdict.resumes is True and not result.kill.differs
    if result.clean:
        shutil.rmtree(rehearsal.root, ignore_errors=True)
    folder = str(rehearsal.root) if rehearsal.root.exists() else None
    answer = {"schema": 1, **verdict._asdict(), "not_compared": result.not_compared, "folder": folder}
    lines = [*verdict.sentences, *(f"not compared: {each}" for each in result.not_compared)]
    opt.show(as_json, answer, [one_line(each) for each in lines])
    return set() if good else {"error" if verdict.resumes is False else "warning"}
