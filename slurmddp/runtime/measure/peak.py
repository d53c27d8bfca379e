"""How much of what the machine can do a run makes use of: FLOPs of the model, and the peak to hold them against."""

import re
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from slurmddp.records.rank_events import Ready
from slurmddp.runtime import torch_private
from slurmddp.runtime.measure.cards import precision_in_use, sheet_tflops
from slurmddp.runtime.world import World

_SMALLEST, _LARGEST = 256, 8192
_BLOCK_SECONDS = 0.005
_NAMESPACES = ("aten", "prim", "prims", "c10d", "_c10d_functional", "_c10d_functional_autograd", "profiler")
_HEAVY = re.compile(
    r"(^|_)(mm|bmm|addmm|addbmm|baddbmm|addmv|mv|linear|matmul|bilinear|conv\w*|attention|lstm|gru|rnn)(_|$)"
)


@dataclass(frozen=True)
class Flops:
    """Floating point operations of a model, forward and backward.

    `total`: without what activation checkpointing computed a second time. `missing`: heavy operators that no formula
    counts; with any of them `total` is a lower bound.
    """

    total: int
    missing: tuple[str, ...] = ()


def count_flops(run: Callable[[], object], *, compiled: bool = False) -> Flops:
    """Count what `run` does, forward and backward: matrix products, convolutions and attention; the rest is small.

    Compiled parts run as they were before compiling. torch before 2.6 cannot do that: for `compiled` it counts nothing.
    """
    if compiled and not hasattr(torch.compiler, "set_stance"):
        run()
        return Flops(0, ("compiled models, before torch 2.6",))
    counter: Any = FlopCounterMode(display=False, custom_mapping=_cpu_attention())
    counter.mod_tracker = _NoModules()
    seen = _Seen(counter.flop_registry)
    with _eager(), seen, counter, _Local():
        run()
    missing = sorted(filter(_is_heavy, map(str, seen.operators - set(counter.flop_registry))))
    return Flops(counter.get_total_flops() - seen.recomputed, tuple(missing))


def matmul_peak(device: torch.device, precision: torch.dtype, *, seconds: float = 0.06) -> float | None:
    """FLOP/s of square matrix products in `precision` on `device`, the best block of about `seconds` of trying.

    None where the device cannot multiply in that precision, or has no memory left for it. Leaves the generators alone.
    """
    try:
        with torch.no_grad():
            return _fastest(device, precision, seconds)
    except RuntimeError:
        return None
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()


@dataclass(frozen=True)
class Utilisation:
    """Model FLOPs utilisation: the model's own FLOPs per second, divided by the peak of all ranks together.

    `flops_per_target`: forward and backward; None where nothing could be counted. `measured`, `sheet`: FLOP/s of all
    ranks, by matmul_peak and by the cards' data sheets; None where a rank has none. `missing`: see Flops.
    """

    flops_per_target: float | None
    measured: float | None
    sheet: float | None
    missing: tuple[str, ...] = ()

    def of(self, targets_per_second: float) -> dict[str, float]:
        """Shares by name, "mfu" against the measured peak and "mfu_sheet"; those that are not known left out.

        `targets_per_second`: of the whole run.
        """
        if self.flops_per_target is None:
            return {}
        rate = self.flops_per_target * targets_per_second
        peaks = {"mfu": self.measured, "mfu_sheet": self.sheet}
        return {name: rate / peak for name, peak in peaks.items() if peak}

    def event(self, step: int) -> Ready:
        """Return the event: TFLOP/s of all ranks, and what the count lacks. step: done before."""
        peaks = _tera(self.measured), _tera(self.sheet)
        return Ready(step, self.flops_per_target, *peaks, bool(self.missing), tuple(self.missing))


def utilisation(world: World, precision: torch.dtype, flops: Flops, targets: int) -> Utilisation:
    """Measure this rank's peak (about 0.1 s), and add up those of all ranks: a collective.

    `flops`: of one micro batch with so many `targets`, on this rank."""
    peaks = (matmul_peak(world.device, precision), sheet_peak(world.device, precision))
    ranks = world.gather((*peaks, flops.total, flops.missing, targets))
    counted = sum(total for _, _, total, _, _ in ranks)
    over = sum(count for *_, count in ranks)
    missing = sorted({name for _, _, _, names, _ in ranks for name in names})
    return Utilisation(
        flops_per_target=counted / over if counted and over else None,
        measured=_sum([peak for peak, *_ in ranks]),
        sheet=_sum([peak for _, peak, *_ in ranks]),
        missing=tuple(missing),
    )


def sheet_peak(device: torch.device, precision: torch.dtype) -> float | None:
    """FLOP/s by the card's data sheet; None for a CPU, and for a card or precision that is not in the table."""
    if device.type != "cuda":
        return None
    tflops = sheet_tflops(torch.cuda.get_device_name(device)).get(precision_in_use(precision))
    return tflops * 1e12 if tflops else None


class _NoModules(nullcontext[None]):
    """Counts all modules as one. The tracker of torch 2.4 fails under reentrant checkpointing."""

    parents = frozenset({"Global"})


class _Local(torch_private.dispatch_mode()):  # type: ignore[misc]
    """Shows what a DTensor's operators do on this rank, in place of the whole operators."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(hasattr(kind, "to_local") for kind in types):
            return NotImplemented
        return func(*args, **(kwargs or {}))


class _Seen(torch_private.dispatch_mode()):  # type: ignore[misc]
    """Remembers which operators ran, and adds up what was computed a second time.

    The formulas of a backward pass run without gradients. What runs with them in the middle of one is a forward pass
    that activation checkpointing repeats.
    """

    def __init__(self, formulas: Mapping[Any, Callable[..., int]]) -> None:
        super().__init__()
        self._formulas = formulas
        self.operators: set[Any] = set()
        self.recomputed = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        operator, out = torch_private.operator_of(func), func(*args, **kwargs)
        self.operators.add(operator)
        if operator in self._formulas and torch.is_grad_enabled() and torch_private.in_backward():
            self.recomputed += int(self._formulas[operator](*args, **kwargs, out_val=out))
        return out


def _is_heavy(operator: str) -> bool:
    """By its name ("aten.addmm"): aten's own by what they are called, and whatever a library has registered."""
    namespace, _, name = operator.partition(".")
    return namespace not in _NAMESPACES or _HEAVY.search(name) is not None


def _cpu_attention() -> dict[Any, Any]:
    """Formulas for attention on the CPU, which torch counts as nothing."""

    def forward(query: Any, key: Any, value: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
        batch, heads, rows, width = query
        return int(2 * batch * heads * rows * key[2] * (width + value[3]))

    def backward(grad: Any, query: Any, key: Any, value: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
        batch, heads, rows, width = query
        return int(2 * batch * heads * rows * key[2] * (3 * width + 2 * value[3]))  # scores once more, four gradients

    name = "_scaled_dot_product_flash_attention_for_cpu"
    formulas = {name: forward, f"{name}_backward": backward}
    found = {getattr(torch.ops.aten, each, None): formula for each, formula in formulas.items()}
    return {operator: formula for operator, formula in found.items() if operator and operator not in flop_registry}


def _eager() -> AbstractContextManager[Any]:
    """Runs what is compiled as if it were not."""
    set_stance = getattr(torch.compiler, "set_stance", None)
    return set_stance("force_eager") if set_stance is not None else nullcontext()


def _fastest(device: torch.device, precision: torch.dtype, seconds: float) -> float:
    size, once = _SMALLEST, 0.0
    while True:
        left, right, out = _matrices(size, device, precision)
        _time(1, left, right, out)  # the library picks its kernel
        once = _time(1, left, right, out)
        if size >= _LARGEST or once >= _BLOCK_SECONDS / 4:
            break
        size *= 2
    repeats = max(1, round(_BLOCK_SECONDS / once))
    best, until = once, time.perf_counter() + seconds
    while time.perf_counter() < until:
        best = min(best, _time(repeats, left, right, out) / repeats)
    return float(2 * size**3 / best)


def _matrices(size: int, device: torch.device, precision: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator(device).manual_seed(0)  # zeros would draw less power, and run faster
    values = torch.rand(3, size, size, device=device, dtype=torch.float32, generator=generator)
    return list(values.to(precision).unbind(0))


def _time(repeats: int, left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> float:
    _wait(left.device)
    began = time.perf_counter()
    for _ in range(repeats):
        torch.mm(left, right, out=out)
    _wait(left.device)
    return max(time.perf_counter() - began, 1e-9)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _sum(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def _tera(value: float | None) -> float | None:
    return None if value is None else round(value / 1e12, 3)
