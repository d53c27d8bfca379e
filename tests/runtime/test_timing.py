"""What a run knows about itself: times of the parts, FLOPs, peaks, means, garbage."""

import doctest
import gc
import math
import time
import weakref
from collections.abc import Callable
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from slurmddp.runtime import housekeeping
from slurmddp.runtime.housekeeping import collector
from slurmddp.runtime.job import Ddp
from slurmddp.runtime.measure import cards, meter, peak, timing
from slurmddp.runtime.measure.meter import Meter
from slurmddp.runtime.measure.timing import DeviceClock, HostClock, StepTimer
from slurmddp.runtime.parallel.replicating import BucketSums, Replicated
from slurmddp.runtime.world import World

from .harness import Ranks


class Hand(HostClock):
    """A clock that a test moves by hand; its stamps are readable at once."""

    def __init__(self) -> None:
        self.now = 0.0

    def stamp(self) -> float:
        return self.now


@pytest.mark.parametrize("module", [timing, meter, housekeeping], ids=lambda module: module.__name__)
def test_the_examples_run(module: Any) -> None:
    result = doctest.testmod(module)
    assert (result.failed, result.attempted > 0) == (0, True)


class TestParts:
    def test_each_second_belongs_to_one_part(self) -> None:
        clock = Hand()
        timer = StepTimer(clock=clock)

        def passes(seconds: float, part: str) -> None:
            clock.now += seconds
            timer.mark(part)

        timer.begin()
        for _ in range(2):  # micro batches: only the last one's backward pass reduces
            passes(1, "data")
            passes(2, "forward")
            passes(4, "backward")
        passes(1, "data")
        passes(2, "forward")
        passes(8, "backward")
        passes(10, "network")
        passes(20, "optimizer")
        clock.now += 0.5
        timer.end()
        expected = {"data": 3, "forward": 6, "backward": 16, "network": 10, "optimizer": 20, "other": 0.5}
        window = timer.window()
        assert (window.steps, window.seconds, window.sums) == (1, 55.5, expected)
        assert window.mean("forward", "backward") == 22

    def test_windows_begin_where_the_last_ended_for_each_reader(self) -> None:
        clock = Hand()
        timer = StepTimer(clock=clock)
        reader = timer.reader()
        for step, seconds in enumerate((1, 2, 9), start=1):
            timer.begin()
            clock.now += seconds
            timer.mark("forward")
            if step == 3:
                clock.now += 5
                timer.mark("checkpoint")
            timer.end()
            clock.now += 100  # between steps: nobody's
        window = timer.window()
        assert window.sums["forward"] == 12
        assert window.sums["checkpoint"] == 5
        empty = timer.window()
        assert (empty.steps, empty.sums, empty.mean("forward")) == (0, {}, 0)
        assert reader.window() == window

    def test_a_window_of_many_steps_loses_none(self) -> None:
        clock = Hand()
        timer = StepTimer(clock=clock)
        for step in range(5000):
            timer.begin()
            clock.now += 1 if step < 4500 else 2
            timer.mark("forward")
            if step == 0:
                clock.now += 7
                timer.mark("checkpoint")
            timer.end()
        window = timer.window()
        assert (window.steps, window.seconds) == (5000, 5507)
        assert window.sums["forward"] == 5500
        assert window.sums["checkpoint"] == 7
        assert timer.window().steps == 0

    def test_outside_of_a_step_nothing_counts(self) -> None:
        clock = Hand()
        timer = StepTimer(clock=clock)
        timer.mark("forward")  # a pass to warm up
        timer.end()
        assert timer.window().steps == 0
        timer.begin()
        clock.now += 3
        timer.mark("backward")
        timer.end()
        assert timer.window().sums == {"backward": 3, "other": 0}

    def test_a_step_that_fails_is_forgotten(self) -> None:
        clock = Hand()
        timer = StepTimer(clock=clock)
        timer.begin()
        clock.now += 1
        timer.mark("data")
        timer.begin()
        clock.now += 2
        timer.end()
        assert timer.window().sums == {"other": 2}

    def test_the_host_clock_measures(self) -> None:
        timer = StepTimer()
        began = time.perf_counter()
        timer.begin()
        with timer.part("mine"):
            time.sleep(0.02)
        timer.end()
        whole = time.perf_counter() - began
        window = timer.window()
        assert 0.02 <= window.sums["mine"] <= window.seconds <= whole


class FakeEvent:
    """An event of a device that has come as far as `device`; recorded at `at`."""

    device = 0.0
    made = 0

    def __init__(self) -> None:
        type(self).made += 1
        self.at = math.nan

    def record(self) -> None:
        self.at = Host.now

    def query(self) -> bool:
        return self.at <= FakeEvent.device

    def elapsed_time(self, later: "FakeEvent") -> float:
        assert self.query()
        assert later.query(), "read before the device has come past it"
        return 1000 * (later.at - self.at)


class Host:
    now = 0.0


class TestDevice:
    """The logic of events that become readable later, with events that are not a GPU's."""

    def steps(self, timer: StepTimer, count: int) -> None:
        for _ in range(count):
            timer.begin()
            Host.now += 1
            timer.mark("forward")
            Host.now += 1
            timer.mark("backward")
            Host.now += 1
            timer.mark("network")
            timer.end()

    def test_reads_late_reuses_events_and_never_waits(self) -> None:
        Host.now = FakeEvent.device = 0.0
        FakeEvent.made = 0
        timer = StepTimer(clock=DeviceClock(FakeEvent))
        self.steps(timer, 4)
        assert timer.window().steps == 0
        FakeEvent.device = 6.5  # in the third step
        window = timer.window()
        assert window.steps == 2
        assert window.sums == {"forward": 2, "backward": 2, "network": 2, "other": 0}
        for _ in range(50):
            FakeEvent.device = Host.now
            self.steps(timer, 3)
        FakeEvent.device = Host.now
        assert timer.window().steps == 152
        assert FakeEvent.made < 60

    def test_a_device_far_behind_leaves_steps_untimed(self) -> None:
        Host.now = FakeEvent.device = 0.0
        FakeEvent.made = 0
        timer = StepTimer(clock=DeviceClock(FakeEvent))
        self.steps(timer, 100)
        made = FakeEvent.made
        FakeEvent.device = Host.now
        self.steps(timer, 10)
        FakeEvent.device = Host.now
        assert timer.window().steps == 26
        assert FakeEvent.made == made


@pytest.mark.ranks(2)
def test_waits_split_the_backward_pass_whoever_exchanges_gradients(ranks: Ranks) -> None:
    for hooked, ddps_own in ranks(2, _both_exchanges):
        for parts, _ in (hooked, ddps_own):
            assert set(parts) == {"forward", "backward", "network", "other"}
            assert min(parts["backward"], parts["network"]) > 0
        for one, other in zip(hooked[1], ddps_own[1], strict=True):
            assert torch.equal(one, other)  # The sum of two ranks, and their mean of what is twice as large.


def _both_exchanges(world: World) -> list[tuple[dict[str, float], list[torch.Tensor]]]:
    found = []
    for hooked in (True, False):
        timer = StepTimer()
        torch.manual_seed(0)
        layers = nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)])
        parallel = Replicated(layers, world, Ddp(False, 0.02, "none"), timer.mark, hooked=hooked)
        for _ in range(3):
            timer.begin()
            parallel.clear_gradients()
            with parallel.exchanging(last=True):
                total = parallel.model(torch.full((5, 64), world.rank + 1.0)).square().sum()
                timer.mark("forward")
                with mock.patch.object(BucketSums, "begin", side_effect=BucketSums.begin, autospec=True) as begin:
                    parallel.backward(total * parallel.divides_by)
                assert bool(begin.called) == hooked, "no Python for a bucket"
            timer.end()
        gradients = [parameter.grad.clone() for parameter in layers.parameters() if parameter.grad is not None]
        found.append((timer.window().sums, gradients))
    return found


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(16, 48, bias=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        query, key, value = (part.view(2, 8, 4, 4).transpose(1, 2) for part in self.mix(rows).chunk(3, dim=-1))
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)


def both_ways(model: nn.Module, rows: torch.Tensor) -> Callable[[], None]:
    return lambda: model(rows).sum().backward()


class TestFlops:
    def test_linear_forward_and_backward(self) -> None:
        found = peak.count_flops(both_ways(nn.Linear(16, 32), torch.ones(8, 16)))
        assert found == peak.Flops(2 * (2 * 8 * 16 * 32), ())  # no gradient for the rows
        found = peak.count_flops(both_ways(nn.Linear(16, 32), torch.ones(8, 16, requires_grad=True)))
        assert found.total == 3 * (2 * 8 * 16 * 32)

    def test_attention_counts_on_the_cpu_too(self) -> None:
        block, rows = Block(), torch.randn(2, 8, 16)
        found = peak.count_flops(both_ways(block, rows))
        linear = 2 * (2 * 16 * 16 * 48)
        scores = 2 * 2 * 4 * 8 * 8 * 4  # one product of queries and keys, of two sequences
        assert found.missing == ()
        assert found.total == linear + (2 + 5) * scores

    def test_convolutions(self) -> None:
        images = torch.ones(2, 3, 8, 8)
        found = peak.count_flops(both_ways(nn.Conv2d(3, 5, 3, padding=1), images))
        assert found == peak.Flops(2 * (2 * 2 * 8 * 8 * 3 * 5 * 9), ())

    def test_what_has_no_formula_is_named(self) -> None:
        @torch.library.custom_op("slurmddp_tests::secret", mutates_args=())
        def secret(rows: torch.Tensor) -> torch.Tensor:
            return rows @ rows

        found = peak.count_flops(lambda: secret(torch.ones(4, 4)))
        assert found.missing == ("slurmddp_tests.secret",)
        with torch.no_grad():
            assert peak.count_flops(lambda: torch.ones(4).addmv(torch.ones(4, 4), torch.ones(4))).missing

    @pytest.mark.parametrize("reentrant", [False, True])
    def test_what_activation_checkpointing_computes_again_is_not_the_models(self, reentrant: bool) -> None:
        layers = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
        rows = torch.ones(8, 16, requires_grad=True)
        once = peak.count_flops(both_ways(layers, rows))
        again = peak.count_flops(lambda: checkpoint(layers, rows, use_reentrant=reentrant).sum().backward())
        assert again.total == once.total

    @pytest.mark.ranks(2)
    def test_under_ddp(self, ranks: Ranks) -> None:
        for found, utilisation in ranks(2, _utilised):
            assert found == peak.Flops(2 * (2 * 8 * 16 * 32), ())
            assert utilisation.flops_per_target == 2 * (2 * 16 * 32)
            assert utilisation.sheet is None
            shares = utilisation.of(1000.0)
            assert list(shares) == ["mfu"]
            assert shares["mfu"] == pytest.approx(utilisation.flops_per_target * 1000 / utilisation.measured)
            assert not utilisation.event(0).lower_bound


def _utilised(world: World) -> tuple[peak.Flops, peak.Utilisation]:
    model = DistributedDataParallel(nn.Linear(16, 32))
    found = peak.count_flops(both_ways(model, torch.ones(8, 16)))
    return found, peak.utilisation(world, torch.float32, found, targets=8)


class TestPeak:
    def test_measures_and_leaves_the_generators_alone(self) -> None:
        before = torch.get_rng_state()
        found = peak.matmul_peak(torch.device("cpu"), torch.float32, seconds=0.02)
        assert found is not None
        assert 1e7 < found < 1e14
        assert torch.equal(torch.get_rng_state(), before)

    def test_a_precision_that_the_device_lacks(self) -> None:
        assert peak.matmul_peak(torch.device("cpu"), torch.bool, seconds=0.01) is None

    def test_unknown_figures_give_no_share(self) -> None:
        assert peak.Utilisation(None, 1e12, 1e12).of(100.0) == {}
        assert peak.Utilisation(1e9, None, None).of(100.0) == {}
        assert peak.Utilisation(1e9, 1e12, 2e12).of(100.0) == {"mfu": 0.1, "mfu_sheet": 0.05}

    @pytest.mark.parametrize(
        ("device", "precision", "tflops"),
        [
            ("Tesla V100-SXM2-32GB", "fp16", 125),
            ("Tesla V100-PCIE-16GB", "fp16", 112),
            ("NVIDIA A100-SXM4-80GB", "bf16", 312),
            ("NVIDIA A100 80GB PCIe", "tf32", 156),
            ("NVIDIA A10", "bf16", 125),
            ("NVIDIA A30", "bf16", 165),
            ("NVIDIA H100 80GB HBM3", "bf16", 989),
            ("NVIDIA H100 PCIe", "bf16", 756),
            ("NVIDIA H200", "bf16", 989),
            ("NVIDIA GH200 480GB", "fp32", 67),
            ("NVIDIA GH200 120GB", "bf16", 989),
            ("NVIDIA B200", "bf16", 2250),
            ("NVIDIA GB200", "bf16", 2500),
            ("NVIDIA L40S", "bf16", 362),
            ("NVIDIA L40", "bf16", 181),
            ("NVIDIA GeForce RTX 4090", "bf16", 165.2),
            ("AMD Instinct MI250X", "bf16", 191.5),
            ("AMD Instinct MI300X", "bf16", 1307.4),
        ],
    )
    def test_the_sheet(self, device: str, precision: str, tflops: float) -> None:
        assert cards.sheet_tflops(device)[precision] == tflops

    def test_cards_that_are_not_in_the_table(self) -> None:
        for device in ("NVIDIA GeForce GTX 1080", "NVIDIA GeForce RTX 4090 D", "NVIDIA A10G", "Some Device"):
            assert cards.sheet_tflops(device) == {}
        assert list(cards.sheet_tflops("Tesla V100-SXM2-32GB")) == ["fp16", "fp32"]


class TestMeter:
    values = [0.1 * number**2 for number in range(23)]

    @pytest.mark.ranks(3)
    @pytest.mark.parametrize("size", [1, 2, 3])
    @pytest.mark.parametrize("cuts", [(5, 9), (0, 23), (23, 23), (1, 22)])
    def test_any_split_gives_the_mean_over_all(self, ranks: Ranks, size: int, cuts: tuple[int, int]) -> None:
        edges = [0, *cuts, len(self.values)] if size == 3 else [0, cuts[0], len(self.values)][: size + 1]
        edges[-1] = len(self.values)
        parts = [self.values[a:b] for a, b in pairwise(edges)]
        expected = math.fsum(self.values) / len(self.values)
        for means, again in ranks(size, _metered, parts):
            assert means["square"] == pytest.approx(expected, rel=1e-14)
            assert means["sparse"] == 10.0
            assert math.isnan(again["square"])

    @pytest.mark.ranks(2)
    def test_counts_are_exact(self, ranks: Ranks) -> None:
        assert ranks(2, _counted) == [(2**52 - 1) / (2**53 - 2)] * 2

    def test_names(self) -> None:
        for names in ((), ("a", "a")):
            with pytest.raises(ValueError, match="names"):
                Meter(*names)
        with pytest.raises(KeyError):
            Meter("loss").add("accuracy", 1, 1)


def _metered(world: World, parts: list[list[float]]) -> tuple[dict[str, float], dict[str, float]]:
    meter = Meter("square", "sparse")
    for number, value in enumerate(parts[world.rank]):
        if number % 2:
            meter.add("square", torch.tensor(value, dtype=torch.float64), torch.tensor(1))
        else:
            meter.add("square", value, 1)
    if world.is_main:
        meter.add("sparse", 20, 2)
    return meter.reduce(), meter.reduce()


def _counted(world: World) -> float:
    meter = Meter("part")
    meter.add("part", 2**51 - world.rank, 2**52 - 1)
    return meter.reduce()["part"]


@pytest.fixture
def kept_garbage_settings() -> Any:
    yield
    gc.unfreeze()
    gc.enable()


class Node:
    def __init__(self) -> None:
        self.me = self


class TestCollector:
    def test_collects_at_its_steps_and_at_no_other_time(self, kept_garbage_settings: Any) -> None:
        gone = []
        with collector(every=3) as collect:
            assert not gc.isenabled()
            for step in range(1, 8):
                node = Node()
                watcher = weakref.finalize(node, gone.append, step)
                watcher.atexit = False
                del node
                before = list(gone)
                assert collect(step) == (step in (3, 6))
                assert gone == (list(range(1, step + 1)) if step in (3, 6) else before)
        assert gc.isenabled()
        assert gc.get_freeze_count() == 0

    def test_without_a_number_python_keeps_its_way(self, kept_garbage_settings: Any) -> None:
        with collector(None) as collect:
            assert gc.isenabled()
            assert not collect(100)
        assert gc.isenabled()

    def test_who_had_it_switched_off_gets_it_back_switched_off(self, kept_garbage_settings: Any) -> None:
        gc.disable()
        with collector(2):
            pass
        assert not gc.isenabled()
