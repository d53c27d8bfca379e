"""Task `lm`: a GPT on files of text (bytes are its tokens), of token ids, or of documents (one JSON object a line)."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from slurmddp.runtime.errors import UserError
from slurmddp.runtime.tasks.documents import Documents
from slurmddp.runtime.tasks.gpt import GPT
from slurmddp.runtime.tasks.options import checked
from slurmddp.runtime.tasks.protocol import Loss, Samples
from slurmddp.runtime.tasks.text import ByteStream, find_files
from slurmddp.runtime.tasks.tokens import SUFFIXES, TokenStream, token_files
from slurmddp.shared.task_options import BYTES

_ENDINGS = {"bytes": (), "tokens": SUFFIXES, "jsonl": (".jsonl", ".ndjson")}
_IGNORED = -100


class Part:
    """Which of `total` windows or documents are for training, and which for validation, by number.

    One of every total // validation is for validation, so that these come from all files alike. Which one is sample i
    is arithmetic: no list of indices is kept.
    """

    def __init__(self, total: int, validation: int, *, training: bool) -> None:
        self._total = total
        self._validation = validation
        self._training = training

    def __len__(self) -> int:
        return self._total - self._validation if self._training else self._validation

    def window(self, index: int) -> int:
        """Return the number among all of the one that is sample `index`."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        if self._validation == 0:
            return index
        group = self._total // self._validation
        if not self._training:
            return index * group + group - 1
        if index < self._validation * (group - 1):
            return index + index // (group - 1)
        return index + self._validation


class Windows(Part):
    """Windows of context + 1 bytes or tokens of a stream, without overlap: the inputs and, one on, the targets."""

    def __init__(
        self,
        stream: ByteStream | TokenStream,
        context: int,
        validation: int,
        *,
        training: bool,
        vocabulary: int = BYTES,
    ) -> None:
        """`vocabulary`: ids of a TokenStream have to be below it."""
        self._stream = stream
        self._width = context + 1
        self._vocabulary = vocabulary
        super().__init__(len(stream) // self._width, validation, training=training)

    def __getitem__(self, index: int) -> torch.Tensor:
        """uint8 [context + 1] of bytes, int32 of token ids. Raises UserError for an id beyond the vocabulary."""
        start = self.window(index) * self._width
        if isinstance(self._stream, ByteStream):
            return torch.frombuffer(self._stream.read(start, self._width), dtype=torch.uint8)
        tokens = self._stream.read(start, self._width)
        index = int(tokens.argmax())
        if tokens[index] >= self._vocabulary:
            raise UserError(
                f"{self._stream.name_at(start + index)}: the token id {int(tokens[index])} is not below "
                f"train.model.vocabulary ({self._vocabulary}): check it and train.data.dtype"
            )
        return tokens.int()


class Texts(Part):
    """Documents, each at most context + 1 tokens of its beginning."""

    def __init__(self, documents: Documents, context: int, validation: int, *, training: bool) -> None:
        self._documents = documents
        self._most = context + 1
        super().__init__(len(documents), validation, training=training)

    def __getitem__(self, index: int) -> torch.Tensor:
        """uint8 [2 to context + 1]."""
        return self._documents.read(self.window(index), self._most)

    def lengths(self) -> torch.Tensor:
        """About how long each is: int32 [samples]."""
        numbers = torch.arange(self._total)
        if self._validation:
            group = self._total // self._validation
            out = (numbers % group == group - 1) & (numbers < group * self._validation)
            numbers = numbers[~out if self._training else out]
        return self._documents.lengths(self._most)[numbers]


class LanguageModel:
    """Windows of a stream of bytes or token ids, all of the same length."""

    unit = "tokens"
    metrics: Sequence[str] = ()

    def __init__(self, data: Mapping[str, Any], model: Mapping[str, Any]) -> None:
        """`data` and `model`: all options, checked."""
        self._format, self._context = data["format"], data["context"]
        self._model = {**model, "vocabulary": model["vocabulary"] or BYTES}
        paths = [data["path"]] if isinstance(data["path"], str) else data["path"]
        endings = _ENDINGS[self._format] if data["glob"] is None else ()
        self._open(find_files(paths, data["glob"] or "**/*", data["exclude"], endings), data)
        total = self._total()
        fraction = data["validation_fraction"]
        self._validation = max(1, int(total * fraction)) if fraction > 0 else 0
        if total - self._validation < 1 or (self._validation and total // self._validation < 2):
            raise UserError(
                f"train.data: {self._size()}, too few for training and validation: use more text or a shorter context"
            )
        self.targets_per_sample = self._targets_per_sample()

    def _open(self, files: list[Any], data: Mapping[str, Any]) -> None:
        self._stream: ByteStream | TokenStream = (
            TokenStream(token_files(files, data["dtype"])) if self._format == "tokens" else ByteStream(files)
        )

    def _total(self) -> int:
        return len(self._stream) // int(self._context + 1)

    def _size(self) -> str:
        kind = "tokens" if self._format == "tokens" else "bytes"
        return f"{len(self._stream)} {kind} make {self._total()} windows of context {self._context} + 1"

    def _targets_per_sample(self) -> int:
        return int(self._context)

    def _samples(self, training: bool) -> Samples:
        vocabulary = self._model["vocabulary"]
        return Windows(self._stream, self._context, self._validation, training=training, vocabulary=vocabulary)

    def build_model(self) -> nn.Module:
        """Return a GPT over the vocabulary: 256 byte values where there is none."""
        return GPT(context=self._context, **self._model)

    def train_samples(self) -> Samples:
        return self._samples(training=True)

    def validation_samples(self) -> Samples:
        return self._samples(training=False)

    def fingerprint(self) -> str:
        """Hash the files, and how they are cut into samples."""
        return f"{self._format}/{self._stream.fingerprint()}/{self._context}/{self._validation}"

    def collate(self, samples: list[torch.Tensor]) -> Any:
        """uint8 or int32 [batch, context + 1]: less to move than int64."""
        return torch.stack(samples)

    def loss(self, model: Callable[..., Any], batch: Any) -> Loss:
        """Cross entropy in nats, summed over batch * context tokens."""
        tokens = batch.long()
        targets = tokens[:, 1:]
        logits = model(tokens[:, :-1])
        total = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum")
        return Loss(total, targets.numel())

    def report(self, means: Mapping[str, float]) -> dict[str, float]:
        """Return the loss in bits per byte, or for token ids as perplexity."""
        if self._format == "tokens":
            return {"perplexity": math.exp(min(means["loss"], 700.0))}
        return {"bits_per_byte": means["loss"] / math.log(2)}


class DocumentModel(LanguageModel):
    """Documents of variable length, padded to the longest of their micro batch."""

    def _open(self, files: list[Any], data: Mapping[str, Any]) -> None:
        super()._open(files, data)
        assert isinstance(self._stream, ByteStream)
        self._key = data["key"]
        self._documents = Documents(self._stream, self._key)

    def _total(self) -> int:
        return len(self._documents)

    def _size(self) -> str:
        return f"{self._total()} documents"

    def _targets_per_sample(self) -> int:
        # In integers: every rank has to come to the same.
        lengths = self._documents.lengths(self._context + 1)
        return max(1, int(lengths.sum()) // len(lengths) - 1)

    def _samples(self, training: bool) -> Texts:
        return Texts(self._documents, self._context, self._validation, training=training)

    def lengths(self) -> torch.Tensor:
        """About how many tokens each training sample has: int32 [samples]."""
        return self._samples(training=True).lengths()

    def fingerprint(self) -> str:
        return f"{super().fingerprint()}/{self._key}"

    def collate(self, samples: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """uint8 [batch, longest], padded at the end, and the documents' lengths, int64 [batch]."""
        return nn.utils.rnn.pad_sequence(samples, batch_first=True), torch.tensor([len(sample) for sample in samples])

    def filling(self, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[int, int]:
        """Return the number of real targets, and of targets that the model computes, padding included."""
        tokens, lengths = batch
        return int(lengths.sum()) - len(lengths), tokens[:, 1:].numel()

    def loss(self, model: Callable[..., Any], batch: tuple[torch.Tensor, torch.Tensor]) -> Loss:
        """Cross entropy in nats, summed over all tokens but each document's first.

        Padding counts nothing: it comes last, so causal attention does not see it, and has no target."""
        tokens, lengths = batch[0].long(), batch[1]
        positions = torch.arange(1, tokens.shape[1], device=tokens.device)
        targets = tokens[:, 1:].masked_fill(positions >= lengths[:, None], _IGNORED)
        logits = model(tokens[:, :-1])
        total = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=_IGNORED)
        return Loss(total, (lengths - 1).sum())


def create(data: Mapping[str, Any], model: Mapping[str, Any]) -> LanguageModel:
    options = checked("lm", "data", data)
    kind = DocumentModel if options["format"] == "jsonl" else LanguageModel
    return kind(options, checked("lm", "model", model, options))
