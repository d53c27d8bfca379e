"""One plain file of tensors: model.pt as torch.load reads it with weights_only, and safetensors.

The format of safetensors (github.com/huggingface/safetensors, README, "Format"): the header's length as 8 bytes,
little-endian; the header, a JSON object of name to {dtype, shape, data_offsets}, padded with spaces to a multiple of 8;
then the tensors' bytes, row-major and little-endian, without holes; offsets count from the header's end.
"""

import ctypes
import json
import mmap
import os
import pickle
import secrets
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch

from slurmddp.runtime.checkpoint import tensorfile
from slurmddp.runtime.errors import UserError
from slurmddp.shared.checkpoint import layout

SAFETENSORS = ".safetensors"
_NAMES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool, "C64": torch.complex64, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
_DTYPES = {dtype: name for name, dtype in _NAMES.items()}
_METADATA = "__metadata__"
_MOST_DIMENSIONS = 64  # of a torch tensor
_LARGEST_HEADER = 100_000_000  # bytes; the limit of the safetensors library

#: What a file is going to hold: names with shapes and types, in no order.
Specs = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


def write_pt(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write a dict of CPU tensors. The file has its name once it is whole and on stable storage. Raises OSError."""
    with _whole(path) as file:
        torch.save(tensors, file)


def write_safetensors(
    path: Path, specs: Specs, read: Callable[[list[str]], Mapping[str, torch.Tensor]], metadata: Mapping[str, str]
) -> None:
    """Write the tensors of `specs` as `read` gives them, some at a time: never all of them are in memory.

    Like write_pt. Raises UserError for a type that the format does not have, OSError."""
    for name, (_, dtype) in specs.items():
        if dtype not in _DTYPES:
            raise UserError(f"{name} is of type {dtype}, which safetensors cannot store: use the format pt")
        if name == _METADATA:
            raise UserError(f"a tensor is named {name}, which safetensors reserves: use the format pt")
    # The largest elements first: every tensor is then aligned.
    names = sorted(specs, key=lambda name: (-specs[name][1].itemsize, name))
    header: dict[str, Any] = {_METADATA: dict(metadata)}
    end = 0
    for name in names:
        shape, dtype = specs[name]
        begin, end = end, end + _bytes(shape, dtype)
        header[name] = {"dtype": _DTYPES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with _whole(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for group in groups(names, specs):
            tensors = read(group)
            for name in group:
                _write_tensor(file, tensors[name])


def groups(names: Iterable[str], specs: Specs, limit: int = 1 << 28) -> Iterator[list[str]]:
    """Yield the names in order, in groups of at most `limit` bytes, or of one tensor that is larger."""
    group: list[str] = []
    size = 0
    for name in names:
        own = _bytes(*specs[name])
        if group and size + own > limit:
            yield group
            group, size = [], 0
        group.append(name)
        size += own
    if group:
        yield group


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


def _write_tensor(file: BinaryIO, tensor: torch.Tensor) -> None:
    """A tensor's bytes, without numpy and without a copy."""
    tensor = tensor.detach().cpu().contiguous()
    size = tensor.numel() * tensor.element_size()
    if size:
        file.write(memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())))


@contextmanager
def _whole(path: Path) -> Iterator[BinaryIO]:
    """A file that gets its name when all is written and on stable storage; else it is gone."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    layout.sync_folder(path.parent)
