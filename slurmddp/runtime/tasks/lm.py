"""Task `lm`: a byte-level GPT on files or folders of text."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from slurmddp.runtime.errors import UserError
from slurmddp.runtime.tasks.gpt import GPT
from slurmddp.runtime.tasks.options import checked
from slurmddp.runtime.tasks.protocol import Loss, Samples
from slurmddp.runtime.tasks.text import ByteStream, find_files


class Windows:
    """Windows of context + 1 bytes of a stream, none of which overlap: the inputs and, one on, the targets.

    `held_out` windows are taken one of every group of total // held_out, so that they come from all files
    alike. Which window is sample i is arithmetic: no list of indices is kept.
    """

    def __init__(self, stream: ByteStream, context: int, held_out: int, *, training: bool) -> None:
        self._stream = stream
        self._width = context + 1
        self._total = len(stream) // self._width
        self._held_out = held_out
        self._training = training

    def __len__(self) -> int:
        return self._total - self._held_out if self._training else self._held_out

    def window(self, index: int) -> int:
        """The number of the window in the stream that sample `index` is."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        if self._held_out == 0:
            return index
        group = self._total // self._held_out
        if not self._training:
            return index * group + group - 1
        if index < self._held_out * (group - 1):
            return index + index // (group - 1)
        return index + self._held_out

    def __getitem__(self, index: int) -> torch.Tensor:
        """uint8 [context + 1]."""
        data = self._stream.read(self.window(index) * self._width, self._width)
        return torch.frombuffer(data, dtype=torch.uint8)


class LanguageModel:
    """See the module."""

    unit = "tokens"
    metrics: Sequence[str] = ()

    def __init__(self, data: Mapping[str, Any], model: Mapping[str, Any]) -> None:
        data = checked("lm", "data", data)
        self._model = checked("lm", "model", model)
        self._context = self.targets_per_sample = data["context"]
        paths = [data["path"]] if isinstance(data["path"], str) else data["path"]
        self._stream = ByteStream(find_files(paths, data["glob"], data["exclude"]))
        total = len(self._stream) // (self._context + 1)
        self._held_out = max(1, int(total * data["held_out"])) if data["held_out"] > 0 else 0
        if total - self._held_out < 1 or (self._held_out and total // self._held_out < 2):
            raise UserError(
                f"train.data: {len(self._stream)} bytes make {total} windows of context {self._context} + "
                "1, too few "
                "to train on and hold some out: take more text or a shorter context"
            )

    def build_model(self) -> nn.Module:
        """A GPT over 256 byte values."""
        return GPT(context=self._context, **self._model)

    def train_samples(self) -> Samples:
        """Windows to train on."""
        return Windows(self._stream, self._context, self._held_out, training=True)

    def held_out_samples(self) -> Samples:
        """Windows to evaluate on."""
        return Windows(self._stream, self._context, self._held_out, training=False)

    def fingerprint(self) -> str:
        """Of the files, and of how they are cut into windows."""
        return f"{self._stream.fingerprint()}/{self._context}/{self._held_out}"

    def collate(self, samples: list[torch.Tensor]) -> torch.Tensor:
        """uint8 [batch, context + 1]: a quarter of the transfer of anything wider."""
        return torch.stack(samples)

    def loss(self, model: Callable[..., Any], batch: torch.Tensor) -> Loss:
        """Cross entropy in nats, summed over batch * context tokens."""
        tokens = batch.long()
        targets = tokens[:, 1:]
        logits = model(tokens[:, :-1])
        total = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum")
        return Loss(total, targets.numel())

    def report(self, means: Mapping[str, float]) -> dict[str, float]:
        """The loss in bits per byte."""
        return {"bits_per_byte": means["loss"] / math.log(2)}


def create(data: Mapping[str, Any], model: Mapping[str, Any]) -> LanguageModel:
    """The task from train.data and train.model. Raises UserError for what the user can put right."""
    return LanguageModel(data, model)
