"""Reads one plain file of tensors: model.pt with weights_only, and model.safetensors (shared/checkpoint/export.py)."""

import json
import mmap
import os
import pickle
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from slurmddp.runtime.checkpoint import tensorfile
from slurmddp.runtime.errors import UserError

SAFETENSORS = ".safetensors"
_NAMES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool, "C64": torch.complex64, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
_METADATA = "__metadata__"
_MOST_DIMENSIONS = 64  # of a torch tensor
_LARGEST_HEADER = 100_000_000  # bytes; the limit of the safetensors library


def read(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a .safetensors file, or of what torch.save wrote: a state dict, or one in `model` or
    `state_dict`.

    They are mapped from the file where that is possible, and read when they are used. Raises UserError for a file that
    is not there, is damaged, or holds something else.
    """
    try:
        if path.suffix == SAFETENSORS:
            return _read_safetensors(path)
        found = _load(path)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    for key in ("model", "state_dict"):
        if isinstance(found, Mapping) and isinstance(found.get(key), Mapping):
            found = found[key]
            break
    if not isinstance(found, Mapping):
        raise UserError(f"{path} contains a {type(found).__name__} instead of a dict of tensors")
    for name, value in found.items():
        if not isinstance(value, torch.Tensor):
            raise UserError(f"{path} contains {name!r}, a {type(value).__name__} instead of a tensor")
    return {str(name): value for name, value in found.items()}


def _load(path: Path) -> Any:
    def load() -> Any:
        if tarfile.is_tarfile(path):  # of torch 0.1: torch before 2.6 unpacks one wherever its members say
            raise pickle.UnpicklingError("a tar archive")
        try:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:  # written by torch before 1.6, or with the old format: it cannot be mapped
            return torch.load(path, map_location="cpu", weights_only=True)

    return tensorfile.guarded(path, load, "save the model's state_dict() alone")


def _read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _LARGEST_HEADER):
            raise UserError(f"{path} is damaged, or not a safetensors file: its header is incomplete")
        # A private mapping: nothing that is done to the tensors reaches the file.
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    try:
        header = json.loads(content[8 : 8 + length])
        header.pop(_METADATA, None)
        return {name: _mapped(content, 8 + length, size, **facts) for name, facts in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RuntimeError) as error:
        why = (str(error) or repr(error)).splitlines()[0][:300]
        raise UserError(f"{path} is damaged, or not a safetensors file: {why}") from error


def _mapped(
    content: mmap.mmap, data: int, size: int, *, dtype: str, shape: list[int], data_offsets: list[int]
) -> torch.Tensor:
    kind, (begin, end) = _NAMES[dtype], data_offsets
    if len(shape) > _MOST_DIMENSIONS:  # their product would take minutes
        raise ValueError(f"a shape has {len(shape)} dimensions")
    if not all(type(number) is int and number >= 0 for number in (*shape, begin, end)):
        raise ValueError(f"shape {shape} and offsets {data_offsets} must be whole numbers from 0 up")
    if not 0 <= begin <= end <= size - data or end - begin != _bytes(shape, kind):
        raise ValueError(f"offsets {begin} to {end} do not fit {dtype} {shape} in {size - data} bytes of tensors")
    if begin == end:
        return torch.empty(shape, dtype=kind)
    if (data + begin) % kind.itemsize:  # other writers need not align
        return torch.frombuffer(bytearray(content[data + begin : data + end]), dtype=kind).reshape(shape)
    count = (end - begin) // kind.itemsize
    return torch.frombuffer(content, dtype=kind, count=count, offset=data + begin).reshape(shape)


def _bytes(shape: Iterable[int], dtype: torch.dtype) -> int:
    count = 1
    for length in shape:
        count *= length
    return count * dtype.itemsize
