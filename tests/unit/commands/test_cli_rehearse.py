"""check --rehearse: what is refused, what follows from what the ranks saw, and where the verdict goes.

Real ranks are in tests/runtime/test_rehearse.py, a real Slurm in tests/cluster.
"""

import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from slurmddp.commands.check import sandbox
from slurmddp.commands.check.compare import Outcome, Start, halved, resumed, stopped
from slurmddp.commands.check.rehearsal import Rehearsal
from slurmddp.commands.check.sandbox import RehearsalRun, Sandbox, on_this_machine, sandboxed
from slurmddp.job.resolve import Request
from slurmddp.launch.prepare import prepare
from slurmddp.records.rehearsal import VERDICT, Line, Verdict, read_verdict
from slurmddp.run import rehearsed, snapshot
from tests.helpers import LM_JOB, SIF, Desk, Result

Cli = Callable[..., Result]
OWN_JOB = "site: cores\nresources: {time: 1h}\ntrain: {script: train.py, args: [--lr, '1']}\n"


@pytest.mark.parametrize(
    ("job", "message", "todo"),
    [
        ("site: here\ntrain: {task: lm, data: {path: /data}}\n", "site here has no Slurm", "use a cluster's site"),
        (LM_JOB, "the dataset /data/books does not exist", "correct the path"),
    ],
)
def test_what_cannot_be_rehearsed_is_refused(cli: Cli, desk: Desk, job: str, message: str, todo: str) -> None:
    desk.write("job.yaml", job)
    before = desk.tree()
    shown = cli("check", "job.yaml", "--rehearse")
    assert shown.code == 2 and message in shown.err and todo in shown.err and shown.out == ""
    assert desk.tree() == before, "nothing was written"


def test_a_verdict_goes_with_jobs_of_the_same_code_and_arguments(
    cli: Cli, desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(desk.home / "state"))
    desk.program("sbatch", "#!/bin/bash\necho 7\n")
    desk.program("squeue", "#!/bin/bash\nexit 0\n")
    desk.write("train.py", "import torch\n")
    desk.write("job.yaml", OWN_JOB)

    def submitted(*words: str) -> Path:
        done = cli("submit", "job.yaml", "--json", *words, XDG_STATE_HOME=str(desk.home / "state"))
        assert done.code == 0, done.err
        return Path(json.loads(done.out)["run_folder"])

    before = submitted()
    assert not (before / VERDICT).exists()
    plan = desk.plan((desk.project / "job.yaml").read_text())
    rehearsed.keep(snapshot.code_hash(before / "code"), plan, Verdict(True, ("it resumed",)))
    assert read_verdict((submitted() / VERDICT).read_text()) == Verdict(True, ("it resumed",))
    assert not (submitted("--", "--lr", "2") / VERDICT).exists()
    desk.write("train.py", "import torch, os\n")
    assert not (submitted() / VERDICT).exists()


def start(*values: float | None, saves: tuple[int, ...] = (), acted: int | None = None, loss: float = 0.0) -> Start:
    """A start whose parameter has these values, before the first step and after each; None: not noted."""
    noted = [
        Line(step, 0.0, str(value), (value,), loss + step) for step, value in enumerate(values) if value is not None
    ]
    lines = [*noted, *(Line(step, saved="a.pt") for step in saves)]
    return Start(lines if acted is None else [*lines, Line(acted, acted=True)])


KILLED = start(1.0, 2.0, 3.0, 4.0, saves=(2,), acted=3)


@pytest.mark.parametrize(
    ("undisturbed", "again", "resumes", "text"),
    [
        (start(1.0, 2.0, 3.0, 4.0, 5.0), start(3.0, 4.0, 5.0, loss=2.0), True,
         "it resumed at step 2; its parameters and losses up to step 4 are the same as without the kill."),
        (start(1.0, 2.0, 3.0, 4.0, 5.0), start(3.0, 4.0, 5.000001, loss=2.0), True, "the same up to rounding (2e-07)."),
        (start(1.0, 2.0, 3.0, 4.0, 5.0), start(3.0, 4.5, 5.5, loss=2.0), True, "the optimizer's or the"),
        (start(1.0, 2.0, 3.0, 4.0, 5.0), start(3.0, 4.5, 5.5, loss=9.0), True, "other data, or other random states"),
        (start(1.0, 2.0, 3.0, 4.0, 5.0), start(1.0, 2.0), False, "it began at step 0 again."),
        (start(1.0, 2.0, 3.0, 4.0, 5.0), start(7.0, 8.0), None, "where it resumed is unknown."),
        (start(9.0, 8.0, 7.0, 6.0, 5.0), start(7.5, 8.5), None, "other parameters than those of any step: "),
        (start(1.0, 2.0, 3.0, 4.0, 5.0), start(), None, "it made no step when it was started again."),
    ],
)  # fmt: skip
def test_what_a_start_after_a_kill_did(undisturbed: Start, again: Start, resumes: bool | None, text: str) -> None:
    found = resumed(undisturbed, KILLED, again, "")
    assert (found.resumes, found.text.startswith("Killed after step 3, ")) == (resumes, True)
    assert found.text.endswith(text) or text in found.text, found.text


def test_without_a_seed_the_observer_decides_and_it_is_said() -> None:
    other, again = start(9.0, 8.0, 7.0, 6.0, 5.0), start(7.5, 8.5)
    found = resumed(other, KILLED, again, "from zero")
    assert (found.resumes, found.text) == (False, "Killed after step 3, it began at step 0 again.")
    assert "without a seed" in found.not_compared[0]
    found = resumed(other, KILLED, start(3.0, 4.0, 5.0, loss=2.0), "")
    assert found.resumes is True and "up to step 3 are the same" in found.text
    assert found.not_compared == (
        "steps after 3: two undisturbed starts differ, so there is nothing to compare them with",
    )


def test_parameters_that_are_no_numbers_do_not_tell_where_it_began() -> None:
    lost = float("nan")
    found = resumed(start(1.0, lost, lost), start(1.0, lost, lost, saves=(1,), acted=2), start(lost, lost), "")
    assert found.resumes is None and found.text.endswith("where it began is unknown."), "all have the same hash"
    assert found.not_compared == ("the parameters: after step 1 they are no finite numbers",)


def test_parameters_that_were_saved_unchanged_do_not_tell_where_it_began() -> None:
    same = start(1.0, 1.0, 1.0, saves=(1,), acted=2)
    found = resumed(start(1.0, 1.0, 1.0), same, start(1.0, 1.0), "unknown")
    assert found.resumes is None and found.text.endswith("where it began is unknown.")
    assert found.not_compared == ("the parameters: in the save of step 1 they are those before step 1",)
    assert halved(same, start(1.0), 1, "") == Outcome(
        None, "Then started on 1 rank, where it began is unknown.", found.not_compared
    )
    warmup = start(1.0, 1.0, 2.0, saves=(2,), acted=2)
    assert resumed(start(1.0, 1.0, 2.0), warmup, start(1.0), "").resumes is False, "a rate of 0 in the first step"


def test_without_a_seed_a_difference_is_no_rounding() -> None:
    found = resumed(start(9.0, 8.0, 7.0, 6.0, 5.0), KILLED, start(3.0, 4.1, loss=2.0), "")
    assert found.differs and "went on differently: the parameters of step 3 differ by" in found.text


def test_what_a_start_did_that_was_asked_to_stop() -> None:
    later = start(4.0, 5.0)
    saved = start(1.0, 2.0, 3.0, 4.0, saves=(1, 3), acted=2)
    assert stopped(saved, later, terminated=False) == Outcome(
        True, "Asked to stop after step 2, it saved at step 3 and exited."
    )
    assert stopped(saved, None, terminated=False).resumes is True
    its_end = stopped(saved, None, terminated=True, end=3)
    assert its_end.resumes is None and its_end.text.endswith("it went on to step 3, perhaps its last, and saved.")
    usual = start(1.0, 2.0, 3.0, 4.0, 5.0, saves=(1, 3, 4), acted=2)
    went_on = stopped(usual, None, terminated=True)
    assert went_on.resumes is False and "it went on for 2 steps until it was ended: 0 steps" in went_on.text
    over = stopped(saved, Start([]), terminated=False)
    assert over.resumes is None and over.text.endswith("perhaps its last, and saved.")
    lost = stopped(start(1.0, 2.0, 3.0, 4.0, saves=(1,), acted=2), later, terminated=False)
    assert lost.text.endswith("it exited at step 3 without a save: 2 steps after its last save lost.")
    went_on = stopped(start(1.0, 2.0, 3.0, 4.0, acted=2), later, terminated=True)
    assert went_on.text.endswith("it went on for 1 step until it was ended: 3 steps (all: it saved nothing) lost.")


def test_what_a_start_on_fewer_ranks_did() -> None:
    assert halved(KILLED, start(4.0, 5.0), 2, "").text == "Then started on 2 ranks, it resumed at step 3."
    assert halved(KILLED, start(1.0, 5.0), 1, "").text == "Then started on 1 rank, it began at step 0 again."
    assert halved(KILLED, Start([]), 1, "OOM").text == "Then started on 1 rank, it made no step: OOM."
    parts = Start([Line(step, 0.0, f"half {step}", (1.0,), None, f"firsts {step}") for step in range(4)])
    whole = Start([Line(0, 0.0, "all", (1.0,), None, "firsts 2")])
    assert halved(parts, whole, 1, "").text == "Then started on 1 rank, it resumed at step 2."


def test_it_copies_the_users_files_and_no_saves_or_earlier_rehearsals(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "_refuse_without_namespaces", lambda command: None)
    monkeypatch.chdir(desk.project)
    desk.write("train.py", "import torch\n")
    desk.write("runs/rehearsal-old/work/left.py", "")
    model, checkpoint = ("base/config.json", "base/model.safetensors"), ("out/config.json", "out/trainer_state.json")
    for name in (*model, *checkpoint, "out/model.safetensors", "last.pt"):
        desk.write(name, "{}")
    environment = {**desk.environment, "XDG_STATE_HOME": str(desk.home / "state")}
    with sandboxed(on_this_machine(Request("train.py", environment=environment))) as box:
        run = RehearsalRun(box, "first", None)
        copied = [path.name for path in run.folder.project.rglob("*.py")]
        assert copied == ["train.py"], "the verdict is kept for a job's code, in which nothing of runs/ is"
        assert f"{box.root}/extensions" in (run.folder.path / "node.sh").read_text(), "a kill must not leave locks"
        mirrored = box.root / "work-first"
        files = {str(path.relative_to(mirrored)) for path in mirrored.rglob("*") if not path.is_dir()}
        assert files == {"train.py", *model, *checkpoint}
        assert {path.name for path in box.saves_left_out} == {"model.safetensors", "last.pt"}
    assert not (box.root / "tmp").exists() and run.folder.path.exists()


def test_nothing_that_a_rank_started_is_left(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "_refuse_without_namespaces", lambda command: None)
    monkeypatch.chdir(desk.project)
    desk.write("train.py", "import torch\n")
    environment = {**desk.environment, "XDG_STATE_HOME": str(desk.home / "state")}
    with sandboxed(on_this_machine(Request("train.py", environment=environment))) as box:
        run = RehearsalRun(box, "first", None)
        attempt = f"{run.folder.id}-local-7-0"
        scratch = Path(box.plan.node_folder, f"slurmddp-{os.getuid()}", attempt)
        scratch.mkdir(parents=True)
        left, other = (
            subprocess.Popen(
                ["sleep", "60"], env={"SLURMDDP_RENDEZVOUS_ID": name, "SLURMDDP_NODE": "0"}, start_new_session=True
            )
            for name in (attempt, "another-local-7-0")
        )
        try:
            run._sweep()
            assert left.wait(10) == -signal.SIGKILL and other.poll() is None
            assert not scratch.exists() and (run.folder.attempt_logs(0) / "sweep").exists()
        finally:
            for process in (left, other):
                process.kill()
                process.wait()


@pytest.mark.parametrize(
    ("why", "steps", "todo"),
    [
        ("OSError: [Errno 30] Read-only file system: '/scratch'", 0, "$SLURMDDP_RUN or /tmp"),
        ("AssertionError: Torch not compiled with CUDA enabled", 3, "this machine has no GPU"),
        ("FileNotFoundError: 'best.pt'", 0, "name one that it needs, such as best.pt, in an argument"),
        ("ValueError: bad label 7", 3, None),
    ],
)
def test_what_to_do_about_a_failure_follows_from_its_cause(desk: Desk, why: str, steps: int, todo: str | None) -> None:
    box = object.__new__(Sandbox)
    box.plan, box.saves_left_out = desk.plan(OWN_JOB), {Path("best.pt")}
    told = Rehearsal(box)._todo(why, start(*range(steps + 1)))
    assert told is None if todo is None else told is not None and todo in told


@pytest.mark.parametrize(
    ("program", "more", "image"),
    [("apptainer", "", True), ("another", "", False), ("apptainer", ", runtime: none", False)],
)
def test_it_runs_in_the_jobs_image_where_that_can_be_started(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, program: str, more: str, image: bool
) -> None:
    monkeypatch.setattr(sandbox, "_refuse_without_namespaces", lambda command: None)
    monkeypatch.setenv("PATH", str(desk.program(program, "#!/bin/bash\n").parent))
    monkeypatch.chdir(desk.project)
    desk.write("train.py", "import torch\n")
    desk.write("torch.sif", SIF)
    desk.write("job.yaml", f"container: {{image: torch.sif{more}}}\n{OWN_JOB}")
    request = on_this_machine(Request(str(desk.project / "job.yaml"), environment=desk.environment))
    plan = prepare(request, strict=False).plan
    assert (plan.container.runtime == "apptainer") is image
    if image:
        box = Sandbox(request)
        python, *_, wrap = (*box.wrap("first"), box.root / "readonly.py")
        assert python == plan.container.python and str(wrap) in box.wrap("first"), "of the image, and seen in it"
        binds = prepare(box.request, strict=False).plan.container.binds
        assert str(box.root) in {bind.destination for bind in binds if bind.mode == "rw"}
