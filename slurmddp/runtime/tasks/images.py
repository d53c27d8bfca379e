"""Task `images`: classification of an .npz file's arrays, or of a folder that holds one folder a class.

The only module of the runtime that needs numpy, and PIL for folders; both are imported when they are used.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset, Subset

from slurmddp.runtime.data.order import keys, permute
from slurmddp.runtime.errors import UserError
from slurmddp.runtime.tasks.options import checked
from slurmddp.runtime.tasks.protocol import Loss, Samples
from slurmddp.runtime.tasks.text import fingerprint

SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm"}


class Arrays(Dataset[tuple[torch.Tensor, int]]):
    """Images of an .npz file: `images` or `x` [n, height, width(, channels)] or [n, features], `labels` or
    `y` [n].

    Standardised by the mean and standard deviation of all values, whatever range they come in.
    """

    def __init__(self, path: Path) -> None:
        numpy = _needed("numpy")
        try:
            with numpy.load(path, allow_pickle=False) as content:
                values, labels = (_array(content, path, names) for names in (("images", "x"), ("labels", "y")))
        except (OSError, ValueError) as error:
            raise UserError(f"train.data.path: cannot read {path}: {error}") from error
        if len(values) != len(labels) or labels.ndim != 1:
            raise UserError(f"{path}: {len(values)} images, but labels of shape {labels.shape}")
        self.content = hashlib.sha256(values.tobytes() + labels.tobytes()).hexdigest()
        images = torch.from_numpy(values.astype("float32"))
        self.images = _channels_first((images - images.mean()) / images.std().clamp_min(1e-6))
        self.classes, numbers = numpy.unique(labels, return_inverse=True)
        self.labels = numbers.tolist()

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.images.shape[1:])

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.images[index], self.labels[index]


class Folder(Dataset[tuple[torch.Tensor, int]]):
    """Image files in one folder per class, read when asked for, scaled to size x size, RGB from -1 to 1."""

    def __init__(self, path: Path, size: int) -> None:
        _needed("PIL")
        self._size = size
        self.classes = sorted(item.name for item in path.iterdir() if item.is_dir())
        self._files = [
            (file, number)
            for number, name in enumerate(self.classes)
            for file in sorted((path / name).rglob("*"))
            if file.suffix.lower() in SUFFIXES
        ]
        listing = [(str(file.relative_to(path)), file.stat().st_size) for file, _ in self._files]
        self.content = f"{fingerprint(listing, self._bytes)}/{size}"
        self.labels = [number for _, number in self._files]

    @property
    def shape(self) -> tuple[int, ...]:
        return (3, self._size, self._size)

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        from PIL import Image

        file, label = self._files[index]
        with Image.open(file) as image:
            scaled = image.convert("RGB").resize((self._size, self._size), Image.Resampling.BILINEAR)
        pixels = torch.frombuffer(bytearray(scaled.tobytes()), dtype=torch.uint8)
        return pixels.view(self._size, self._size, 3).permute(2, 0, 1).float() / 127.5 - 1.0, label

    def _bytes(self, number: int, start: int, count: int) -> bytes:
        with open(self._files[number][0], "rb") as file:
            file.seek(start)
            return file.read(count)


class Augment:
    """Random changes that keep an image's class: mirrored half of the time, moved by up to an eighth of its size."""

    def __init__(self, kind: str) -> None:
        """`kind`: flip, crop or crop+flip."""
        self._flip, self._crop = "flip" in kind, "crop" in kind

    def __call__(self, sample: tuple[torch.Tensor, int], generator: torch.Generator) -> tuple[torch.Tensor, int]:
        """An image [channels, height, width] and its label. What is moved in is 0, about the mean of all pixels."""
        image, label = sample
        _, height, width = image.shape
        if self._crop:
            down, right = max(1, height // 8), max(1, width // 8)
            padded = F.pad(image, (right, right, down, down))
            top = int(torch.randint(2 * down + 1, (), generator=generator))
            left = int(torch.randint(2 * right + 1, (), generator=generator))
            image = padded[:, top : top + height, left : left + width]
        if self._flip and torch.rand((), generator=generator) < 0.5:
            image = image.flip(2)
        return image, label


class Images:
    """See the module."""

    targets_per_sample = 1
    unit = "samples"
    metrics: Sequence[str] = ("accuracy",)

    def __init__(self, data: Mapping[str, Any], model: Mapping[str, Any]) -> None:
        data = checked("images", "data", data)
        self._model = checked("images", "model", model)
        path = Path(data["path"])
        if not path.exists():
            raise UserError(f"train.data.path: {path} does not exist")
        self._whole = Folder(path, data["size"]) if path.is_dir() else Arrays(path)
        total = len(self._whole)
        validation = int(total * data["validation_fraction"])
        if len(self._whole.classes) < 2 or validation >= total:
            raise UserError(f"train.data.path: {path} has {total} images of {len(self._whole.classes)} classes")
        self.augment = None if data["augment"] == "none" else Augment(data["augment"])
        if self.augment is not None and self._whole.shape[1] == 1:
            raise UserError(
                f"train.data.augment is {data['augment']}, but {path} contains rows of {self._whole.shape[2]} "
                f"features, not images: remove it"
            )
        # A fixed permutation, not a stride: labels often come in a regular order.
        mixed = permute(torch.arange(total), total, keys(0, -1)).tolist()
        self._train: Samples = Subset(self._whole, mixed[validation:])
        self._validation: Samples = Subset(self._whole, mixed[:validation])

    def build_model(self) -> nn.Module:
        """Return a perceptron over all values, or a small convolutional network."""
        build = _perceptron if self._model["kind"] == "mlp" else _convolutions
        hidden, layers, dropout = self._model["hidden"], self._model["layers"], self._model["dropout"]
        return build(self._whole.shape, len(self._whole.classes), hidden, layers, dropout)

    def train_samples(self) -> Samples:
        return self._train

    def validation_samples(self) -> Samples:
        return self._validation

    def fingerprint(self) -> str:
        """Hash all images' content (.npz) or names and sizes (folder), and the size of the validation set."""
        return f"{self._whole.content}/{len(self._validation)}"

    def collate(self, samples: list[tuple[torch.Tensor, int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Images [batch, channels, height, width] and labels int64 [batch]."""
        return torch.stack([image for image, _ in samples]), torch.tensor([label for _, label in samples])

    def loss(self, model: Callable[..., Any], batch: tuple[torch.Tensor, torch.Tensor]) -> Loss:
        """Cross entropy in nats, summed over images; how many were right."""
        images, labels = batch
        logits = model(images).float()
        right = (logits.detach().argmax(1) == labels).sum()
        return Loss(F.cross_entropy(logits, labels, reduction="sum"), len(labels), {"accuracy": (right, len(labels))})

    def report(self, means: Mapping[str, float]) -> dict[str, float]:
        return {"accuracy": means["accuracy"]}


def create(data: Mapping[str, Any], model: Mapping[str, Any]) -> Images:
    return Images(data, model)


def _perceptron(shape: tuple[int, ...], classes: int, hidden: int, layers: int, dropout: float) -> nn.Module:
    """`layers` linear layers with ReLU between them."""
    widths = [torch.Size(shape).numel()] + [hidden] * (layers - 1)
    modules: list[nn.Module] = [nn.Flatten()]
    for before, after in pairwise(widths):
        modules += [nn.Linear(before, after), nn.ReLU(), nn.Dropout(dropout)]
    return nn.Sequential(*modules, nn.Linear(widths[-1], classes))


def _convolutions(shape: tuple[int, ...], classes: int, hidden: int, layers: int, dropout: float) -> nn.Module:
    """`layers` 3x3 convolutions of `hidden` channels, each but the first halving the image; then their mean."""
    modules: list[nn.Module] = []
    channels = shape[0]
    for number in range(layers):
        modules += [
            nn.Conv2d(channels, hidden, 3, stride=1 if number == 0 else 2, padding=1, bias=False),
            nn.BatchNorm2d(hidden),
            nn.ReLU(),
        ]
        channels = hidden
    return nn.Sequential(
        *modules, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(dropout), nn.Linear(channels, classes)
    )


def _channels_first(images: torch.Tensor) -> torch.Tensor:
    """[n, channels, height, width] from [n, features], [n, height, width] or [n, height, width, channels]."""
    if images.ndim == 4:
        return images.permute(0, 3, 1, 2).contiguous()
    return images.unsqueeze(1) if images.ndim == 3 else images[:, None, None, :]


def _array(content: Any, path: Path, names: tuple[str, ...]) -> Any:
    for name in names:
        if name in content:
            return content[name]
    raise UserError(f"{path} has no array {' or '.join(names)}; it has: {', '.join(content.files)}")


def _needed(name: str) -> Any:
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UserError(f"the task images needs {name}: install it in the image or environment of the run") from error
