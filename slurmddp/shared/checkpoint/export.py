"""Write the tensors of a checkpoint to one plain file, model.safetensors or model.pt. No torch.

The format of safetensors (github.com/huggingface/safetensors, README, "Format"): the header's length as 8 bytes,
little-endian; the header, a JSON object of name to {dtype, shape, data_offsets}, padded with spaces to a multiple of 8;
then the tensors' bytes, row-major and little-endian, without holes; offsets count from the header's end.
A file of torch.save is a zip archive: data.pkl, a pickle that names the storages, and each storage as data/NUMBER.
"""

import itertools
import json
import math
import pickle
import struct
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, NamedTuple

from slurmddp.shared.checkpoint import contents, layout, shards

#: Formats, each with its suffix, and which tensors may be exported.
FORMATS = {"pt": ".pt", "safetensors": ".safetensors"}
CONTENTS = ("model", "all")
MODEL = "model."
_ALIGNMENT = 64  # of tensors in a file of torch.save, so that it can be mapped
_METADATA = "__metadata__"

Tensors = Mapping[str, contents.Stored]
Content = bytearray | memoryview


class ExportError(Exception):
    """What cannot be exported, for people."""


class _Type(NamedTuple):
    """A torch.dtype: bytes of an element, its name in safetensors, its storage class in torch; empty: none."""

    width: int
    safetensors: str
    storage: str


_TYPES = {
    "float64": _Type(8, "F64", "DoubleStorage"),
    "float32": _Type(4, "F32", "FloatStorage"),
    "float16": _Type(2, "F16", "HalfStorage"),
    "bfloat16": _Type(2, "BF16", "BFloat16Storage"),
    "int64": _Type(8, "I64", "LongStorage"),
    "int32": _Type(4, "I32", "IntStorage"),
    "int16": _Type(2, "I16", "ShortStorage"),
    "int8": _Type(1, "I8", "CharStorage"),
    "uint8": _Type(1, "U8", "ByteStorage"),
    "bool": _Type(1, "BOOL", "BoolStorage"),
    "complex64": _Type(8, "C64", "ComplexFloatStorage"),
    "complex128": _Type(16, "", "ComplexDoubleStorage"),
    "float8_e4m3fn": _Type(1, "F8_E4M3", ""),
    "float8_e5m2": _Type(1, "F8_E5M2", ""),
    "float8_e4m3fnuz": _Type(1, "", ""),
    "float8_e5m2fnuz": _Type(1, "", ""),
    "uint16": _Type(2, "U16", ""),
    "uint32": _Type(4, "U32", ""),
    "uint64": _Type(8, "U64", ""),
}


def write(checkpoint: Path, stored: Tensors, output: Path, *, form: str, what: str = "model") -> int:
    """Write `stored`, the tensors of a checkpoint folder, to a file, and return how many they are.

    form: `pt` or `safetensors`. what: `model`, the weights and buffers by the model's own names; `all`, also the
    optimizer's state and the scaler's, by the names in the checkpoint (model.NAME, optimizer.NAME.KEY). All are whole
    tensors of the types that they were saved with, whatever the ranks and the mesh were; one at a time is in memory.
    The file has its name once it is whole. Raises ExportError, layout.Rejected, OSError.
    """
    tensors = {name if what == "all" else name.removeprefix(MODEL): item for name, item in stored.items()
               if what == "all" or name.startswith(MODEL)}  # fmt: skip
    if not tensors:
        raise ExportError(f"{checkpoint} has no model to export (no tensors named {MODEL}*)")
    for name, item in tensors.items():
        if item.dtype not in _TYPES:
            raise ExportError(f"{name} is of type {item.dtype}, which slurmddp cannot export: load it with torch")

    def read(name: str) -> Content:
        return _whole(checkpoint, name, tensors[name])

    if form == "safetensors":
        facts = {"format": "pt", "step": str(layout.step_of(checkpoint)), "what": what}
        header = _header(tensors, facts)
        with layout.durable(output) as file:
            _write_safetensors(file, header, read)
    else:
        with layout.durable(output) as file:
            _write_pt(file, tensors, read)
    return len(tensors)


def _whole(folder: Path, name: str, tensor: contents.Stored) -> Content:
    """Return the bytes of a tensor, put together from its blocks."""
    width = _TYPES[tensor.dtype].width
    size = math.prod(tensor.size) * width
    if len(tensor.chunks) == 1 and tensor.chunks[0].sizes == tensor.size:
        return shards.read(folder, tensor.chunks[0], width)
    content, filled = bytearray(size), 0
    for chunk in tensor.chunks:
        ends = [begin + length for begin, length in zip(chunk.offsets, chunk.sizes, strict=True)]
        if len(ends) != len(tensor.size) or any(end > limit for end, limit in zip(ends, tensor.size, strict=True)):
            raise layout.Rejected(folder, contents.FILE, f"lists a part of {name} that is not in it")
        block = shards.read(folder, chunk, width)
        at = 0
        for start, length in _runs(tensor.size, chunk):
            content[start * width : (start + length) * width] = block[at : at + length * width]
            at += length * width
        filled += at
    if filled != size:
        raise layout.Rejected(folder, contents.FILE, f"lists {filled} of the {size} bytes of {name}")
    return content


def _runs(whole: tuple[int, ...], chunk: contents.Chunk) -> Iterator[tuple[int, int]]:
    """Yield where each contiguous run of a block begins in the whole tensor, and its length, in elements."""
    strides = [math.prod(whole[dimension + 1 :]) for dimension in range(len(whole))]
    split, length = len(whole), 1  # from dimension `split` on, the block's elements are neighbours in the whole
    while split and chunk.sizes[split:] == whole[split:]:
        split -= 1
        length *= chunk.sizes[split]
    first = sum(begin * stride for begin, stride in zip(chunk.offsets[split:], strides[split:], strict=True))
    outer = zip(chunk.offsets[:split], chunk.sizes[:split], strict=True)
    for index in itertools.product(*(range(begin, begin + count) for begin, count in outer)):
        yield first + sum(map(int.__mul__, index, strides)), length


def _header(tensors: Tensors, facts: Mapping[str, str]) -> dict[str, object]:
    """Return the header of a safetensors file, in the order of the tensors in it."""
    header: dict[str, object] = {_METADATA: facts}
    end = 0
    # The largest elements first: every tensor is then aligned.
    for name, item in sorted(tensors.items(), key=lambda pair: (-_TYPES[pair[1].dtype].width, pair[0])):
        kind = _TYPES[item.dtype]
        if not kind.safetensors:
            raise ExportError(f"{name} is of type {item.dtype}, which safetensors cannot store: use the format pt")
        if name == _METADATA:
            raise ExportError(f"a tensor is named {name}, which safetensors reserves: use the format pt")
        begin, end = end, end + math.prod(item.size) * kind.width
        header[name] = {"dtype": kind.safetensors, "shape": list(item.size), "data_offsets": [begin, end]}
    return header


def _write_safetensors(file: BinaryIO, header: dict[str, object], read: Callable[[str], Content]) -> None:
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for name in header:
        if name != _METADATA:
            file.write(read(name))


def _write_pt(file: BinaryIO, tensors: Tensors, read: Callable[[str], Content]) -> None:
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", _pickled(tensors))
        archive.writestr("archive/byteorder", "little")
        for number, name in enumerate(tensors):
            member = zipfile.ZipInfo(f"archive/data/{number}")
            # Behind a header of 30 bytes and the name come this field of 4 or more, and one of 20 for large files.
            begin = file.tell() + 30 + len(member.filename) + 4 + 20
            padding = -begin % _ALIGNMENT
            member.extra = struct.pack("<2sH", b"FB", padding) + b"Z" * padding
            with archive.open(member, "w", force_zip64=True) as part:
                part.write(read(name))
        archive.writestr("archive/version", "3\n")


def _pickled(tensors: Tensors) -> bytes:
    """Return the pickle of a dict of tensors: the opcodes that torch.save writes."""
    parts = [pickle.PROTO + b"\x02" + pickle.EMPTY_DICT + pickle.MARK]
    for number, (name, item) in enumerate(tensors.items()):
        kind, count = _TYPES[item.dtype], math.prod(item.size)
        storage, size = _global("torch", kind.storage), count
        rebuild, dtype = "_rebuild_tensor_v2", b""
        if not kind.storage:
            storage, size = _global("torch.storage", "UntypedStorage"), count * kind.width
            rebuild, dtype = "_rebuild_tensor_v3", _global("torch", item.dtype)
        strides = tuple(math.prod(item.size[dimension + 1 :]) for dimension in range(len(item.size)))
        parts += [
            _value(name), _global("torch._utils", rebuild), pickle.MARK,
            pickle.MARK, _value("storage"), storage, _value(str(number)), _value("cpu"), _value(size), pickle.TUPLE,
            pickle.BINPERSID, _value(0), _value(tuple(item.size)), _value(strides), _value(False),
            _global("collections", "OrderedDict"), pickle.EMPTY_TUPLE, pickle.REDUCE, dtype,
            pickle.TUPLE, pickle.REDUCE,
        ]  # fmt: skip
    return b"".join([*parts, pickle.SETITEMS, pickle.STOP])


def _global(module: str, name: str) -> bytes:
    return pickle.GLOBAL + f"{module}\n{name}\n".encode()


def _value(value: object) -> bytes:
    """Return the opcodes of a plain value, without the first and last of a pickle."""
    return pickle.dumps(value, 2)[2:-1]
