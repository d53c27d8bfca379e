"""What `slurmddp tune` says of recorded measurements: the choice, its reasons, what is not known, the page."""

from __future__ import annotations

import pytest

from slurmddp.records.metrics import Metrics
from slurmddp.records.tuning import Point, Trial, Tuned
from slurmddp.report import tuning
from slurmddp.report.charts import figure

GIB = 2**30
TRIALS = (
    Trial(8, False, True, 391.0, 20 * GIB), Trial(16, False, True, 402.0, 40 * GIB), Trial(32, False, False),
    Trial(32, True, True, 310.0, 30 * GIB),
)  # fmt: skip
#: A GPT of 124 M parameters on nodes with 2 GPUs; the link between the nodes is slow.
SLOW_LINK = Tuned(
    "NVIDIA H100 80GB HBM3", 256, 0.1, 79 * GIB, 496_000_000, 992_000_000, {"off": 2 * GIB, "on": GIB}, TRIALS,
    (
        Point(1, 2, 760.0, "DDP", 16, 8, False, {"data": 0.01, "backward": 0.3, "network": 0.01}, 41 * GIB, 0.004),
        Point(2, 4, 510.0, "DDP", 16, 4, False, {"data": 0.01, "backward": 0.15, "network": 0.34}, 41 * GIB, 0.33),
        Point(2, 4, 200.0, "HSDP", 16, 4, False, {"data": 0.01, "backward": 0.15, "network": 1.1}, 39 * GIB, 0.33),
    ),
    loader=9000.0, noise=((5.0, 1.2), (5.2, 1.3), (4.9, 1.25)), noise_batches=(4, 128),
)  # fmt: skip


def test_over_a_slow_link_one_node_is_better() -> None:
    verdict = tuning.judge(SLOW_LINK, 0.5)
    assert (verdict.unit, verdict.beyond, verdict.limit) == ("node", 2, "compute")
    assert verdict.choice.options == {
        "resources.nodes": "1", "train.batch.global": "256", "train.batch.micro": "16",
        "train.batch.accumulation": "null", "parallel.replicate": "null", "parallel.shard": "1", "parallel.tensor": "1",
        "train.activation_checkpointing": "false",
    }  # fmt: skip
    text = "\n".join(verdict.choice.reasons)
    assert "1 node: each one more, up to 2, brings -33 % of one alone, less than 50 %" in text
    assert "global batch 256 = micro 16 x accumulation 8 x 2 ranks per node x 1 node" in text
    assert (
        "16 is the largest micro batch measured to fit 79.0 GiB of free memory without activation checkpointing" in text
    )
    assert verdict.noise is not None and verdict.noise.scale is not None
    assert f"gradient noise scale {figure(verdict.noise.scale)} +- " in text
    assert "does not tell whether 256 is too large later" in text


def test_a_search_that_the_global_batch_ended_says_so() -> None:
    ended = "so none was tried"
    assert ended not in "\n".join(tuning.judge(SLOW_LINK, 0.5).choice.reasons)
    small = SLOW_LINK._replace(batch=32, trials=TRIALS[:2])
    assert ended in "\n".join(tuning.judge(small, 0.5).choice.reasons)


def test_memory_is_estimated_beside_what_was_measured() -> None:
    verdict = tuning.judge(SLOW_LINK, 0.5)
    memory = tuning.estimate(SLOW_LINK, verdict.choice.point)
    assert memory == (496_000_000, 496_000_000, 992_000_000, 16 * 2 * GIB)
    sharded = tuning.estimate(SLOW_LINK, SLOW_LINK.points[2])
    assert sharded is not None and sharded.optimizer == 496_000_000  # over the 2 ranks of a node
    lines = tuning.lines(SLOW_LINK, verdict)
    (row,) = [line for line in lines if "33.8 GiB" in line]
    assert row.split()[-2:] == ["41.0", "GiB"]


def test_faster_shards_are_chosen_with_the_reason() -> None:
    points = (*SLOW_LINK.points[:2], SLOW_LINK.points[2]._replace(samples_per_second=1490.0, parallel="FSDP"))
    faster = SLOW_LINK._replace(points=(points[0], points[1]._replace(samples_per_second=1400.0), points[2]))
    verdict = tuning.judge(faster, 0.5)
    assert verdict.beyond is None and verdict.choice.options["parallel.shard"] == "4"
    assert "FSDP, not DDP: 1490 against 1400 samples/s with the same global batch" in verdict.choice.reasons
    assert "FSDP was measured with micro 16 only: the largest that fits was not searched" in verdict.choice.reasons
    assert verdict.choice.reasons[0].endswith("more are worth it is not known, because no more were measured")


def test_a_slow_loader_is_named() -> None:
    points = (SLOW_LINK.points[0]._replace(parts={"data": 0.4, "backward": 0.3}),)
    verdict = tuning.judge(SLOW_LINK._replace(points=points, loader=300.0), 0.5)
    assert verdict.limit == "data"
    (reason,) = [each for each in verdict.choice.reasons if "is the limit" in each]
    assert reason.startswith("the data loader is the limit: use more train.workers")
    assert "a loader alone gives 300 samples/s, and a rank uses 380" in reason


def test_what_is_not_known_is_said() -> None:
    points = (Point(1, 1, 10.0, "DDP", 4, 16, False, {"backward": 6.4}),)
    little = Tuned("cpu", 64, 0.1, trials=(Trial(4, False, True, 10.0, None),), points=points, notes=("no limit",))
    verdict = tuning.judge(little, 0.5)
    text = "\n".join(tuning.lines(little, verdict))
    assert "1 rank: whether more are worth it is not known" in text
    assert "the largest micro batch that fits is not known" in text
    assert "note: no limit" in text
    assert tuning.estimate(little, points[0]) is None and "ESTIMATED" not in text
    noisy = little._replace(noise=((5.0, 0.6), (5.0, 0.7)), noise_batches=(1, 8))
    assert "noise scale is not known" in "\n".join(tuning.judge(noisy, 0.5).choice.reasons)


def test_the_page_has_charts_tables_and_reasons() -> None:
    page = tuning.html(SLOW_LINK, tuning.judge(SLOW_LINK, 0.5), "Tuning of <gpt>")
    assert "Tuning of &lt;gpt&gt;" in page
    assert page.count("<svg") == 2 and "Samples per second over nodes" in page
    assert "Nodes 1 to 2, values 510 to 1520." in page and "linear: 760 to 1520" in page
    assert "CHECKPOINTING" in page and "brings -33 % of one alone" in page


def test_json_has_the_measurement_and_what_follows_from_it() -> None:
    answer = tuning.judge(SLOW_LINK, 0.5).as_dict(SLOW_LINK)
    assert [row["nodes"] for row in answer["scaling"]] == [1, 2]
    assert (answer["beyond"], answer["limited_by"], answer["batch"]) == (2, "compute", 256)
    assert answer["memory"]["total"] == sum(
        answer["memory"][part] for part in ("parameters", "gradients", "optimizer", "activations")
    )
    assert answer["choice"]["options"]["resources.nodes"] == "1"


def lines_of_a_script(*steps: int, **parts: float) -> list[Metrics]:
    """What the observer writes: a line at the first step, then one every ten seconds; parts: seconds per step."""
    return [
        Metrics(step, 100.0 + 10 * number, 0, 99.0, {part: step * spent for part, spent in parts.items()})
        for number, step in enumerate(steps)
    ]


def test_of_a_script_the_observer_tells_steps_and_waits_and_the_rest_is_not_claimed() -> None:
    alone = tuning.observed(lines_of_a_script(1, 30, 130, 230, data=0.08, compute=0.02), 1)
    two = tuning.observed(lines_of_a_script(1, 20, 110, 200, data=0.09, compute=0.02), 2)
    assert alone is not None and two is not None
    assert (alone.samples_per_second, two.samples_per_second) == (10.0, 18.0)  # steps per second, times ranks
    assert alone.parts == pytest.approx({"data": 0.08, "compute": 0.02})
    tuned = Tuned("", None, points=(alone, two), notes=("not measured of a script: memory",))
    verdict = tuning.judge(tuned, 0.5)
    assert (verdict.limit, verdict.choice.options) == ("data", {"resources.ranks_per_node": "2"})
    text = "\n".join(tuning.lines(tuned, verdict))
    assert "STEPS/S x RANKS" in text and "the data loader is the limit" in text
    assert "if it divides a fixed batch among them, compare the steps per second: 10 on 1, 9 on 2" in text
    assert "note: not measured of a script: memory" in text and "ESTIMATED" not in text
    assert tuning.observed(lines_of_a_script(1, 5), 1) is None


@pytest.mark.parametrize(("speed", "doubted"), [(21.0, False), (26.0, True)])
def test_a_speed_beyond_linear_is_doubted(speed: float, doubted: bool) -> None:
    tuned = Tuned("", None, points=(Point(1, 1, 10.0, ""), Point(1, 2, speed, "")))
    assert any("Measure again" in each for each in tuning.judge(tuned, 0.5).choice.reasons) == doubted


def test_a_single_rank_waits_for_no_network() -> None:
    point = tuning.observed(lines_of_a_script(1, 30, 130, 230, compute=0.02, network=0.08), 1)
    assert point is not None
    tuned = Tuned("", None, points=(point,))
    verdict = tuning.judge(tuned, 0.5)
    assert verdict.limit == "compute" and "the computation is the limit" in "\n".join(tuning.lines(tuned, verdict))


def test_of_a_script_on_a_gpu_computation_is_not_named_where_nothing_tells_it_from_the_network() -> None:
    point = tuning.observed(lines_of_a_script(1, 30, 130, 230, data=0.005, unmeasured=0.095), 1)
    assert point is not None
    reasons = tuning.judge(Tuned("", None, points=(point,)), 0.5).choice.reasons
    assert any(each.startswith("neither the data loader nor the network is seen to be the limit") for each in reasons)
