"""What `slurmddp check` says of faults and alerts."""

import pytest

from slurmddp.report.plan import survival_lines
from tests.helpers import LM_JOB, Desk

SITE = (
    "name: s\ntitle: t\n{more}partitions: {{p: {{gpus_per_node: 1}}}}\n"
    "job: {{resources: {{partition: p, time: 2h}}, container: {{runtime: none}}}}\n"
)
AGAIN, CHAIN = "requeued", "followed by a new job (this site forbids requeues)"
ASKED = "ranks are asked to save"
SAVED, ELSE = "If the script saved to RUN/checkpoints in this job, ", ". If not, the run stops (recovery.requeue)"


def told(desk: Desk, *options: str, more: str = "", job: str = "name: n\nsite: s\ntrain: {script: a.py}\n") -> dict:
    desk.site(SITE.format(more=more))
    lines = survival_lines(desk.plan(job, *options))
    return {line[:20].strip(): line[20:] for line in lines}


@pytest.mark.parametrize(
    ("options", "more", "lost", "limit"),
    [
        (
            (),
            "",
            f"the job is {AGAIN}",
            f"{ASKED} 120 s before it. {SAVED}the job is {AGAIN} until training is done{ELSE}",
        ),
        (
            ("recovery.requeue=never",),
            "",
            "the run fails",
            f"{ASKED} 120 s before it; then the run stops",
        ),
        (
            ("resources.nodes={min: 2, max: 4, spares: 1}", "resources.time=2m"),
            "requeue: chain\n",
            f"a spare node replaces it, then the run continues on the other nodes (at least 2); with "
            f"fewer nodes, the job is {CHAIN}",
            f"no save before it. {SAVED}the job is {CHAIN} until training is done{ELSE}",
        ),
        (
            ("resources.nodes=1-2", "timeouts.stop=5m"),
            "",
            f"the run continues on the other nodes (at least 1); with fewer nodes, the job is {AGAIN}",
            f"{ASKED} 300 s before it. {SAVED}the job is {AGAIN} until training is done{ELSE}",
        ),
    ],
)
def test_nodes_and_time(desk: Desk, options: tuple[str, ...], more: str, lost: str, limit: str) -> None:
    lines = told(desk, *options, more=more)
    assert (lines["a node is lost"], lines["time limit"]) == (lost, limit)


def test_ranks_and_the_breaker(desk: Desk) -> None:
    own = told(desk, "recovery.no_progress=5")
    assert own["a rank dies"] == "all ranks restart in place (up to 100 times)"
    assert own["no progress"].startswith("after 5 failed starts") and "preflight" not in own
    ours = told(desk, "launch.rendezvous=static", "recovery.preflight=false", job=LM_JOB)
    assert ours["a rank dies"] == "all ranks restart in the next attempt, from the newest checkpoint"
    assert "RUN/checkpoints" not in told(desk, "recovery.requeue=always")["time limit"]
    assert ours["preflight"] == "none: recovery.preflight is false"


def test_only_of_a_bundled_task_it_is_known_that_it_resumes(desk: Desk) -> None:
    own, ours = told(desk), told(desk, job=LM_JOB)
    assert own["your script"] == (
        "continues if it loads at its start what it saved (docs/frameworks.md); else it begins at step 1 again"
    )
    assert not any("resume" in text for text in own.values())
    assert "your script" not in ours and ours["a node is lost"] == "the job is requeued and resumes"
    assert ours["time limit"].endswith("the job is requeued and resumes until training is done")


def test_who_is_told(desk: Desk) -> None:
    assert told(desk)["alerts"].startswith("none")
    targets = "alerts=[{to: slack, on: [failed]}, {to: mail, on: [failed, finished]}]"
    assert told(desk, targets)["alerts"] == "slack (failed), mail (fail, end); sent by job.sh"
    more = "watchdog: {partition: p}\nalerts: {from: login}\n"
    assert told(desk, targets, more=more)["alerts"].endswith(
        "; sent from the login node; a watchdog job checks how it ended"
    )
    mail = told(desk, "alerts=[{to: mail, on: [failed]}]", more=more)["alerts"]
    assert mail == "mail (fail)"


def test_this_machine_has_neither_nodes_nor_limits(desk: Desk) -> None:
    lines = told(desk, job="site: here\ntrain: {script: a.py}\n")
    assert set(lines) == {"a rank dies", "no progress", "your script", "alerts"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((), "up to 2 per start, for as many starts as training needs: recovery.max_gpu_hours limits all together"),
        (("recovery.requeue=never",), "at most 2: nothing requeues the job"),
        (("recovery.requeue=never", "recovery.max_gpu_hours=9"), "at most 2: nothing requeues the job"),
        (
            ("recovery.max_gpu_hours=9",),
            "at most 9 for all starts (recovery.max_gpu_hours), then the ranks save and the run stops",
        ),
        (
            ("recovery.requeue=never", "recovery.max_gpu_hours=1.5"),
            "at most 1.5 for all starts (recovery.max_gpu_hours), then the ranks save and the run stops",
        ),
    ],
)
def test_what_all_starts_may_use_together(desk: Desk, options: tuple[str, ...], words: str) -> None:
    assert told(desk, *options)["GPU hours"] == words


def test_gpu_hours_of_a_job_without_gpus(desk: Desk) -> None:
    plan = desk.plan("name: n\nsite: cores\ntrain: {script: a.py}\n", "recovery.max_gpu_hours=9")
    assert [note.text for note in plan.notes if "max_gpu_hours" in note.text] == [
        "recovery.max_gpu_hours limits nothing: this job has no GPUs"
    ]
    assert not any(line.startswith("GPU hours") for line in survival_lines(plan))
