"""The tensors of a training state by name: what the shards of a checkpoint hold.

Weights and the optimizer's moments, and the gradient scaler's scale. Learning rate, betas and the like are
not here: they follow from the job and the step.
"""

import io
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from slurmddp.runtime.errors import UserError

_SHOWN = 5

Shapes = Mapping[str, tuple[int, ...]]


class Stateful(Protocol):
    """A learning-rate scheduler, or anything else with a state that is the same on all ranks."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state: tensors and plain values."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Continue from a state."""


@dataclass(frozen=True)
class Trained:
    """What training changes. `model` is the bare module, without DDP around it."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    scheduler: Stateful | None = None


def collect(trained: Trained) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for name, value in trained.model.state_dict().items():
        if not isinstance(value, torch.Tensor):
            raise UserError(
                f"the model's state contains {name}, a {type(value).__name__}; checkpoints can contain only tensors"
            )
        tensors[f"model.{name}"] = value
    for name, parameter in trained.model.named_parameters():
        for key, value in trained.optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):  # SGD without momentum keeps None.
                tensors[f"optimizer.{name}.{key}"] = value
    return tensors | _scaler_tensors(trained.scaler)


def pack_scheduler(trained: Trained) -> bytes:
    """Return the scheduler's state as a file of torch.save; empty if there is none.

    Raises UserError for one that could not be loaded again, such as with a function in it.
    """
    if trained.scheduler is None:
        return b""
    file = io.BytesIO()
    try:
        torch.save(trained.scheduler.state_dict(), file)
        torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    except (pickle.PickleError, AttributeError, TypeError) as error:
        name = type(trained.scheduler).__name__
        raise UserError(
            f"the state of {name} is not only tensors and plain values: give Checkpointer no such scheduler, and save "
            f"what you need of it in `extra` ({str(error).splitlines()[0]})"
        ) from error
    return file.getvalue()


def check(trained: Trained, stored: Mapping[str, Any]) -> None:
    """Compare names and shapes with the metadata of a checkpoint (name to an object with `size`).

    Raises UserError that names the first differences.
    """
    ours = {name: tuple(value.shape) for name, value in trained.model.state_dict().items()}
    weights = {name: item for name, item in stored.items() if name.startswith("model.")}
    theirs = {name.removeprefix("model."): tuple(item.size) for name, item in weights.items()}
    found = differences(ours, theirs, there="in the checkpoint", here="now")
    if found:
        raise UserError(f"it is of another model: {found}")


def differences(ours: Shapes, theirs: Shapes, *, there: str, here: str) -> str:
    """Return the first tensors whose shapes differ, `theirs` being `there` and `ours` `here`; empty if none do."""
    found = [
        f"{name}: {_shape(theirs.get(name))} {there}, {_shape(ours.get(name))} {here}"
        for name in [*ours, *(name for name in theirs if name not in ours)]
        if ours.get(name) != theirs.get(name)
    ]
    more = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return "; ".join(found[:_SHOWN]) + more


def prepare(trained: Trained, stored: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors to load into, those of a checkpoint's metadata. Makes optimizer states that do not exist yet.

    Call `check` before, and `adopt` with the result after loading."""
    for name, parameter in trained.model.named_parameters():
        prefix = f"optimizer.{name}."
        state = trained.optimizer.state[parameter]
        for key in (item.removeprefix(prefix) for item in stored if item.startswith(prefix)):
            size = tuple(stored[prefix + key].size)
            same = size == tuple(parameter.shape)
            # A step counter sits on the parameter's device only for fused optimizers, which need it there.
            device = parameter.device if trained.optimizer.defaults.get("fused") else torch.device("cpu")
            state[key] = torch.zeros_like(parameter) if same and key != "step" else torch.zeros(size, device=device)
    return {name: tensor for name, tensor in collect(trained).items() if name in stored}


def adopt(trained: Trained, loaded: Mapping[str, torch.Tensor]) -> None:
    """Take over what does not load in place: the gradient scaler's numbers."""
    if "scaler.scale" in loaded and trained.scaler.is_enabled():
        state = trained.scaler.state_dict()
        state["scale"] = float(loaded["scaler.scale"])
        state["_growth_tracker"] = int(loaded["scaler.growth_tracker"])
        trained.scaler.load_state_dict(state)


def _scaler_tensors(scaler: torch.amp.GradScaler) -> dict[str, torch.Tensor]:
    state = scaler.state_dict()  # Empty where the scaler is disabled.
    if not state:
        return {}
    return {
        "scaler.scale": torch.tensor(state["scale"], dtype=torch.float64),
        "scaler.growth_tracker": torch.tensor(state["_growth_tracker"], dtype=torch.int64),
    }


def _shape(shape: tuple[int, ...] | None) -> str:
    return "not there" if shape is None else str(list(shape))
