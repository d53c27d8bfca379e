"""Fewer and spare nodes, restarts, the way back into the queue, and the lead before the time limit."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmddp.errors import UserError
from slurmddp.job.plan.batch import fewer, plan_batch, uneven_nodes
from slurmddp.job.plan.build import make_plan
from slurmddp.job.plan.model import Allocation, Context, NodePlan, RecoveryPlan
from slurmddp.job.plan.recovery import RESTARTS, explain_stop_lead, lead_of, plan_stop_lead
from slurmddp.job.train import Batch
from slurmddp.render.documents import job_yaml
from slurmddp.render.scripts import job_script, node_script
from slurmddp.report.plan import cost_line, plan_report
from slurmddp.shared import batch as dealing
from tests.helpers import GPU_SITE, LM_JOB, Desk, plan_of, refusal

BATCH = ("train.batch.global=64", "train.batch.micro=2")


def nodes(text: str) -> str:
    return f"resources.nodes={text}"


def refused(desk: Desk, job: str, *options: str) -> str:
    with pytest.raises(UserError) as caught:
        desk.plan(job, *options)
    return refusal(caught.value)


@pytest.mark.parametrize(
    ("written", "found", "option"),
    [
        ("3", (3, 3, 0), "--nodes=3"),
        ("{min: 2, max: 4}", (2, 4, 0), "--nodes=2-4"),
        ("{min: 2, max: 4, spares: 1}", (2, 4, 1), "--nodes=2-5"),
        ("{max: 4, spares: 2}", (4, 4, 2), "--nodes=4-6"),
        ("{min: 3, max: 3}", (3, 3, 0), "--nodes=3"),
        ("2-4", (2, 4, 0), "--nodes=2-4"),
        ("4+1", (4, 4, 1), "--nodes=4-5"),
        ("2-4+1", (2, 4, 1), "--nodes=2-5"),
    ],
)
def test_the_forms_of_nodes(desk: Desk, written: str, found: tuple[int, int, int], option: str) -> None:
    plan = desk.plan(LM_JOB, nodes(written), *BATCH)
    assert (plan.nodes.min, plan.nodes.max, plan.nodes.spares) == found
    assert option in plan.sbatch
    assert plan.nodes.elastic == ("--no-kill" in plan.sbatch) == (found[0] < found[1] or found[2] > 0)
    assert plan.nodes.total == found[1] + found[2]


@pytest.mark.parametrize(
    ("job", "options", "message"),
    [
        (LM_JOB, ("{min: 4, max: 2}",), "resources.nodes has min 4 above max 2"),
        (LM_JOB, ("4-2",), "'4-2' has min 4 above max 2"),
        (LM_JOB, ("{min: 1, max: 2, spares: -1}",), "resources.nodes.spares: must be at least 0"),
        (LM_JOB, ("{min: 0, max: 2}",), "resources.nodes.min: must be at least 1"),
        (LM_JOB, ("{min: 2}",), "resources.nodes.max: is missing"),
        (LM_JOB, ("{min: 2}",), "-> write 4, 2-4, 4+1 or 2-4+1"),
        (LM_JOB, ("2-x",), "not '2-x'\n  -> write 4, 2-4, 4+1 or 2-4+1"),
        (LM_JOB, ("+1",), "has only spares"),
        (LM_JOB, ("{min: 2, max: 4, spare: 1}",), "did you mean resources.nodes.spares?"),
        (LM_JOB, ("two-four",), "resources.nodes: must be a whole number, not 'two-four'"),
        (LM_JOB, ("{min: 60, max: 64, spares: 1}",), "65 nodes (with 1 spare) are more than the 64"),
        ("site: here\ntrain: {script: a.py}\n", ("1+1",), "this machine only, not on 2 nodes"),
        ("site: here\ntrain: {script: a.py}\n", ("1-2",), "this machine only, not on 2 nodes"),
    ],
)
def test_refused(desk: Desk, job: str, options: tuple[str, ...], message: str) -> None:
    assert message in refused(desk, job, nodes(options[0]))


@pytest.mark.parametrize("wanted", ["1-2", "2+1"])
def test_inside_an_allocation_the_nodes_are_those_that_are_there(desk: Desk, wanted: str) -> None:
    resolved = desk.resolve(LM_JOB, nodes(wanted))
    with pytest.raises(UserError, match="the number of nodes is fixed") as caught:
        make_plan(resolved, Context(str(desk.project), "python3", inside=True, allocation=Allocation(2, 8)))
    assert caught.value.todo == "use --nodes 2"


def test_a_site_without_no_kill_is_told(desk: Desk) -> None:
    desk.site(
        "name: s\ntitle: t\nunsupported_flags: [--no-kill]\npartitions: {p: {gpus_per_node: 1}}\n"
        "job: {resources: {partition: p}, container: {runtime: none}}\n"
    )
    plan = desk.plan("name: n\nsite: s\ntrain: {script: a.py}\n", nodes("1-2"))
    assert "--no-kill" not in plan.sbatch
    assert any("rejects --no-kill" in note.text for note in plan.notes)


# --- the arithmetic on fewer nodes


def test_the_same_global_batch_on_every_number_of_nodes(desk: Desk) -> None:
    resolved = desk.resolve(LM_JOB, nodes("1-4+1"), "resources.time=2h", *BATCH)
    plan = plan_of(resolved, desk.project)
    lines = plan_report(plan, resolved).splitlines()
    assert "nodes               1 to 4, as many as are healthy, and 1 spare" in lines
    assert "global batch        64 = 2 (micro batch) x 2 (accumulation) x 4 (GPUs per node) x 4 (nodes)" in lines
    begin = lines.index("with fewer nodes (same global batch)")
    assert lines[begin + 1 : begin + 4] == [
        "  3 nodes x 4 = 12 ranks, accumulation 3, uneven",
        "  2 nodes x 4 = 8 ranks, accumulation 4",
        "  1 node x 4 = 4 ranks, accumulation 8",
    ]
    assert "note: on 3 nodes, micro batches are uneven (every sample weighs the same)" in lines
    assert cost_line(plan) == "cost: up to 40 GPU-hours (5 nodes x 4 GPUs x 02:00:00)"
    assert plan.gpu_hours == 5 * 4 * 2
    assert plan.node_hours == 10


def test_of_many_numbers_of_nodes_some_are_shown(desk: Desk) -> None:
    resolved = desk.resolve(LM_JOB, nodes("2-60"), "train.batch.global=480", "train.batch.micro=2")
    lines = plan_report(plan_of(resolved, desk.project), resolved).splitlines()
    shown = [text for text in lines if text.startswith("  ") and "accumulation" in text and "ranks" in text]
    assert [text.split()[0] for text in shown if "nodes x" in text][-1] == "2"
    assert len(shown) <= 16


def test_an_even_batch_has_to_be_even_on_all_of_them(desk: Desk) -> None:
    even = (*BATCH, "train.batch.even=true")
    assert desk.plan(LM_JOB, nodes("4"), *even).batch
    text = refused(desk, LM_JOB, nodes("1-4"), *even)
    assert "a global batch of 64 is not even on 3 nodes, which resources.nodes allows" in text
    assert desk.plan(LM_JOB, nodes("1-2"), *even).batch


@given(
    total=st.integers(1, 600),
    micro=st.integers(1, 20),
    ranks=st.integers(1, 8),
    least=st.integers(1, 12),
    more=st.integers(0, 12),
    even=st.booleans(),
)
def test_what_is_planned_holds_on_every_number_of_nodes(
    total: int, micro: int, ranks: int, least: int, more: int, even: bool
) -> None:
    planned = NodePlan(least, least + more, 0, ranks)
    counts = range(least, least + more + 1)
    uneven = [count for count in counts if not dealing.is_even(total, micro, count * ranks)]
    wanted = Batch.model_validate({"global": total, "micro": micro, "even": even})
    if even and uneven:
        with pytest.raises(UserError):
            plan_batch(wanted, planned, "here")
        return
    plan, notes = plan_batch(wanted, planned, "here")
    assert (plan.total, plan.micro) == (total, micro)
    assert uneven_nodes(plan, planned) == [count for count in uneven if count < planned.max]
    told = [note.text for note in notes if "uneven" in note.text]
    assert bool(told) == bool(uneven)
    for count in counts:
        dealt = [dealing.micro_batches(total, micro, count * ranks, rank) for rank in range(count * ranks)]
        samples = sorted(sample for rank in dealt for batch in rank for sample in batch)
        assert samples == list(range(total))


@pytest.mark.parametrize(
    ("counts", "words"),
    [([3], "3"), ([3, 5], "3 and 5"), ([3, 5, 6], "3, 5 and 6"), ([3, 5, 6, 7, 9], "3, 5, 6 and 2 more")],
)
def test_some_numbers_in_words(counts: list[int], words: str) -> None:
    assert fewer(counts) == words


def test_shards_have_to_fit_all_of_them(desk: Desk) -> None:
    assert desk.plan(LM_JOB, nodes("1-4"), "parallel.shard=4")
    text = refused(desk, LM_JOB, nodes("1-4"), "parallel.shard=8")
    assert "parallel.shard 8 does not divide the ranks of 1 and 3 nodes, which resources.nodes allows" in text
    assert desk.plan(LM_JOB, nodes("4+2"), "parallel.shard=8"), "spares do not train beside the others"
    text = refused(desk, LM_JOB, nodes("1-2"), "parallel.shard=4", "parallel.replicate=2")
    assert "parallel.replicate is fixed at 2, but resources.nodes allows 1 to 2 nodes" in text


# --- restarts and the queue


def test_restarts_in_place(desk: Desk) -> None:
    assert desk.plan(LM_JOB).max_restarts == RESTARTS
    assert desk.plan(LM_JOB, "launch.max_restarts=2").max_restarts == 2
    assert desk.plan(LM_JOB, "launch.max_restarts=0").max_restarts == 0
    assert desk.plan(LM_JOB, "launch.rendezvous=static").max_restarts == 0
    assert desk.plan(LM_JOB, "launch.rendezvous=static", "launch.max_restarts=0").max_restarts == 0
    text = refused(desk, LM_JOB, "launch.rendezvous=static", "launch.max_restarts=1")
    assert "launch has max_restarts 1 with rendezvous static" in text


@pytest.mark.parametrize(
    ("site", "option", "inside", "requeue", "flag"),
    [
        ("", "", False, "requeue", "--requeue"),
        ("requeue: chain\n", "", False, "chain", "--no-requeue"),
        ("requeue: chain\n", "recovery.requeue=never", False, "none", "--no-requeue"),
        ("", "recovery.requeue=always", False, "requeue", "--requeue"),
        ("", "", True, "none", "--no-requeue"),
    ],
)
def test_requeue(desk: Desk, site: str, option: str, inside: bool, requeue: str, flag: str) -> None:
    desk.site(
        f"name: s\ntitle: t\n{site}partitions: {{p: {{gpus_per_node: 1}}}}\n"
        "job: {resources: {partition: p}, container: {runtime: none}}\n"
    )
    plan = desk.plan("name: n\nsite: s\ntrain: {script: a.py}\n", *([option] if option else ["name=n"]), inside=inside)
    saving = requeue != "none" and "always" not in option
    most = None if "always" in option else 2
    assert plan.recovery == RecoveryPlan(requeue, must_save=saving, from_zero=most)  # type: ignore[arg-type]
    assert f" from_zero={most or ''} " in job_script(plan)
    assert [line for line in plan.sbatch if "requeue" in line] == [flag]


@pytest.mark.parametrize(("value", "requeue"), [("yes", "requeue"), ("true", "requeue"), ("no", "none")])
def test_yes_is_auto_and_no_is_never(desk: Desk, value: str, requeue: str) -> None:
    plan = desk.plan(LM_JOB, f"recovery.requeue={value}")
    assert plan.recovery.requeue == requeue
    assert "must be one of" in refused(desk, LM_JOB, "recovery.requeue=perhaps")


def test_recovery_of_this_machine(desk: Desk) -> None:
    plan = desk.plan("site: here\ntrain: {script: a.py}\n", "recovery.no_progress=5", "recovery.preflight=false")
    assert plan.recovery == RecoveryPlan("none", from_zero=2)
    assert (plan.job.recovery.no_progress, plan.job.recovery.preflight) == (5, False)
    assert not plan.nodes.elastic


@pytest.mark.parametrize(
    ("job", "why"),
    [
        ("site: cores\ntrain: {script: a.py}\n", ""),
        ("site: here\ntrain: {script: a.py}\n", ""),
        (
            "site: cores\nlaunch: {mode: srun}\ntrain: {script: a.py}\n",
            "with launch.mode srun, no agent starts the ranks",
        ),
        ("site: gpus\ntrain: {script: a.py}\n", ""),
        ("site: amd\ntrain: {script: a.py}\n", "forked ranks were not tried with AMD's GPUs"),
        (LM_JOB, "only scripts of your own are forked, not the bundled tasks"),
    ],
)
def test_forked_ranks(desk: Desk, job: str, why: str) -> None:
    desk.site(GPU_SITE.replace("name: gpus", "name: amd") + "gpu_vendor: amd\n")
    plan = desk.plan(job, "recovery.fork=true")
    notes = [note.text for note in plan.notes if "recovery.fork" in note.text]
    assert notes == ([f"recovery.fork has no effect: {why}"] if why else [])
    names = [[item.name for group in each.environment for item in group.variables] for each in (plan, desk.plan(job))]
    assert ["SLURMDDP_FORK" in each for each in names] == [True, False]


@pytest.mark.parametrize("flag", ["--requeue", "--no-requeue", "--no-kill"])
def test_flags_that_are_ours(desk: Desk, flag: str) -> None:
    assert f"{flag} is set by slurmddp itself" in refused(desk, LM_JOB, f"resources.sbatch_extra=[{flag}]")


# --- the lead before the time limit


@pytest.mark.parametrize(
    ("time", "wanted", "saves", "lead", "why"),
    [
        (None, None, None, None, "no time limit is known"),
        (179, None, 5.0, None, "is too short"),
        (180, None, None, 60, "a third of 180 s, which is less than 120 s"),
        (3600, None, None, 120, "the save time is unknown"),
        (3600, None, 3.0, 120, "took 3 s: twice that + 30 s, at least 120 s"),
        (3600, None, 100.2, 231, "took 100 s"),
        (3600, 90, 100.2, 90, "as set"),
        (3600, 600, None, 600, "as set"),
        (900, None, 400.0, 300, "a third of 900 s, which is less than 830 s"),
    ],
)
def test_the_lead(time: int | None, wanted: int | None, saves: float | None, lead: int | None, why: str) -> None:
    assert plan_stop_lead(time, wanted, saves) == lead
    assert why in explain_stop_lead(time, wanted, saves)
    assert f"planned: {'none' if lead is None else f'{lead} s'}" in explain_stop_lead(time, wanted, saves)


@given(saves=st.floats(0, 1e6), more=st.floats(0, 1e5), time=st.integers(180, 10**7))
def test_a_longer_save_never_has_a_shorter_lead(saves: float, more: float, time: int) -> None:
    assert lead_of(saves) >= 2 * saves + 30 and lead_of(saves) >= 120
    first, second = plan_stop_lead(time, None, saves), plan_stop_lead(time, None, saves + more)
    assert first is not None and second is not None
    assert first <= second <= time // 3


def test_a_range_reads_back_as_it_was_resolved(desk: Desk) -> None:
    resolved = desk.resolve(LM_JOB, nodes("2-4+1"), *BATCH)
    desk.write("again.yaml", job_yaml(resolved, plan_of(resolved, desk.project)))
    again = desk.resolve_file(desk.project / "again.yaml")
    assert again.job.resources.node_range == resolved.job.resources.node_range
    assert plan_of(again, desk.project).sbatch == plan_of(resolved, desk.project).sbatch
    over = desk.resolve_file(desk.project / "again.yaml", nodes("3"))
    assert plan_of(over, desk.project).nodes.max == 3 and not plan_of(over, desk.project).nodes.elastic
    assert desk.resolve(LM_JOB, SLURMDDP_RESOURCES__NODES="1-2").job.resources.node_range.max == 2


@pytest.mark.parametrize(
    ("site", "wanted", "option", "expedite"),
    [
        ("allowed", "true", "--requeue", False),
        ("expedite", "true", "--requeue=expedite", True),
        ("expedite", "false", "--no-requeue", False),
        ("chain", "true", "--no-requeue", False),
    ],
)
def test_an_expedited_requeue(desk: Desk, site: str, wanted: str, option: str, expedite: bool) -> None:
    desk.site(GPU_SITE.replace("name: gpus", "name: fast") + f"requeue: {site}\n")
    plan = desk.plan(LM_JOB.replace("gpus", "fast"), f"recovery.requeue={wanted}")
    assert [each for each in plan.sbatch if "requeue" in each] == [option] and plan.recovery.expedite == expedite
    assert ("Requeue=0" in job_script(plan)) == expedite


@pytest.mark.parametrize("key", ["heartbeats", "standby"])
@pytest.mark.parametrize(("nodes", "works"), [("2", False), ("1-2", True), ("2+1", True)])
def test_what_needs_a_job_that_may_lose_a_node(desk: Desk, key: str, nodes: str, works: bool) -> None:
    plan = desk.plan(LM_JOB, "recovery.heartbeats=true", f"recovery.{key}=true", f"resources.nodes={nodes}")
    assert any(f"recovery.{key} has no effect" in note.text for note in plan.notes) is not works
    assert (f"\n  {key}=yes " in job_script(plan)) is works


@pytest.mark.parametrize(
    ("heartbeats", "flags", "why"),
    [("false", "", "it needs recovery.heartbeats"), ("true", "--no-kill", "site s rejects --no-kill")],
)
def test_where_the_job_needs_the_node_of_its_batch_script(desk: Desk, heartbeats: str, flags: str, why: str) -> None:
    desk.site(
        f"name: s\ntitle: t\nunsupported_flags: [{flags}]\npartitions: {{p: {{gpus_per_node: 1}}}}\n"
        "job: {resources: {partition: p}, container: {runtime: none}}\n"
    )
    wanted = ("recovery.standby=true", f"recovery.heartbeats={heartbeats}", nodes("1-2"))
    plan = desk.plan("name: n\nsite: s\ntrain: {script: a.py}\n", *wanted)
    assert f"recovery.standby has no effect: {why}" in [note.text for note in plan.notes]
    assert "wait_for_lead" not in job_script(plan)


@pytest.mark.parametrize(
    ("job", "nodes", "fork", "why"),
    [
        ("site: cores\ntrain: {script: a.py}\n", "1-2", "true", ""),
        ("site: cores\ntrain: {script: a.py}\n", "2", "true", "this job cannot lose a node"),
        ("site: cores\ntrain: {script: a.py}\n", "1-2", "false", "it needs recovery.fork"),
        (LM_JOB, "1-2", "true", "only scripts of your own are forked"),
    ],
)
def test_warm_spares_need_forked_ranks_and_nodes_to_lose(desk: Desk, job: str, nodes: str, fork: str, why: str) -> None:
    sets = (f"recovery.fork={fork}", f"resources.nodes={nodes}")
    plan = desk.plan(job, "recovery.spares_warm=true", *sets)
    notes = [note.text for note in plan.notes if "spares_warm" in note.text]
    assert len(notes) == bool(why) and all(f"recovery.spares_warm has no effect: {why}" in note for note in notes)
    assert ["\n  warm=yes " in job_script(plan), "SLURMDDP_WARM=" in node_script(plan)] == [not why] * 2
    assert "SLURMDDP_WARM" not in node_script(desk.plan(job, *sets))
