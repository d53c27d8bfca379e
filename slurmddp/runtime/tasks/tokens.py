"""Files of token ids as one long stream: data larger than memory, read window by window."""

import ast
from bisect import bisect_right
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import torch

from slurmddp.runtime.errors import UserError
from slurmddp.runtime.tasks.text import ByteStream

SUFFIXES = (".bin", ".npy")
_MAGIC = b"\x93NUMPY"
_LONGEST_HEADER = 1 << 16


class Kind(NamedTuple):
    """How token ids lie in a file: the tensor type of the same width, and the bits to keep as an unsigned id."""

    dtype: torch.dtype
    mask: int


#: By numpy's name of the type. torch has signed types alone in all versions, so ids are masked after widening.
KINDS = {
    "u1": Kind(torch.uint8, 0xFF),
    "u2": Kind(torch.int16, 0xFFFF),
    "u4": Kind(torch.int32, 0xFFFFFFFF),
    "i2": Kind(torch.int16, 0xFFFF),
    "i4": Kind(torch.int32, 0xFFFFFFFF),
    "i8": Kind(torch.int64, (1 << 63) - 1),
}


class TokenFile(NamedTuple):
    """One file: its name (for the fingerprint), path, bytes, where the tokens begin, how many, and of what kind."""

    name: str
    path: Path
    bytes: int
    start: int
    tokens: int
    kind: str


class TokenStream:
    """The tokens of many files, one after the other, addressed by number."""

    def __init__(self, files: list[TokenFile]) -> None:
        self._files = files
        self._ends = list(accumulate(file.tokens for file in files))
        self._bytes = ByteStream([(file.name, file.path, file.bytes) for file in files])

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def read(self, start: int, count: int) -> torch.Tensor:
        """Return `count` token ids from number `start` on, int64 [count]. Raises OSError as ByteStream does."""
        parts = []
        number = bisect_right(self._ends, start)
        while count:
            file = self._files[number]
            kind = KINDS[file.kind]
            first = start - (self._ends[number] - file.tokens)
            taken = min(count, file.tokens - first)
            width = kind.dtype.itemsize
            # A copy of the few kilobytes of one window: torch wants memory that may be written to.
            data = bytearray(self._bytes.read_file(number, file.start + first * width, taken * width))
            parts.append(torch.frombuffer(data, dtype=kind.dtype).long().bitwise_and_(kind.mask))
            start, count, number = start + taken, count - taken, number + 1
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def name_at(self, token: int) -> str:
        """Return the path of the file that a token comes from, and its number there, for messages."""
        number = bisect_right(self._ends, token)
        file = self._files[number]
        return f"{file.path}, token {token - (self._ends[number] - file.tokens)}"

    def fingerprint(self) -> str:
        """Hash as ByteStream does, and how the files are read."""
        kinds = dict.fromkeys((file.kind, file.start) for file in self._files)
        return f"{self._bytes.fingerprint()}/{','.join(f'{kind}+{start}' for kind, start in kinds)}"


def token_files(files: list[tuple[str, Path, int]], dtype: str) -> list[TokenFile]:
    """Return the token files among `files` (name, path, bytes). What .npy holds, it says itself; all else is raw
    little-endian `dtype`, uint16 or uint32. Raises UserError for a file that holds something else.
    """
    try:
        return [_npy(*file) if file[1].suffix == ".npy" else _raw(*file, dtype) for file in files]
    except OSError as error:
        raise UserError(f"train.data.path: cannot read {error.filename}: {error.strerror}") from error


def _raw(name: str, path: Path, size: int, dtype: str) -> TokenFile:
    kind = {"uint16": "u2", "uint32": "u4"}[dtype]
    width = KINDS[kind].dtype.itemsize
    if size % width:
        raise UserError(f"{path}: {size} bytes are not a whole number of {dtype} tokens: check train.data.dtype")
    return TokenFile(name, path, size, 0, size // width, kind)


def _npy(name: str, path: Path, size: int) -> TokenFile:
    """The header of numpy.save: https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html"""
    with open(path, "rb") as file:
        head = file.read(12)
        wide = head[6:7] != b"\x01"
        if head[:6] != _MAGIC or len(head) < 12:
            raise UserError(f"{path}: its name ends with .npy, but numpy.save did not write it")
        start = 12 if wide else 10
        length = int.from_bytes(head[8:start], "little")
        file.seek(start)
        text = file.read(min(length, _LONGEST_HEADER))
    try:
        header = ast.literal_eval(text.decode("latin-1").strip())
        descr, shape = header["descr"], header["shape"]
    except (ValueError, SyntaxError, KeyError, TypeError) as error:
        raise UserError(f"{path}: its header is not one of numpy.save: {text[:80]!r}") from error
    kind = descr[1:] if isinstance(descr, str) else ""
    if kind not in KINDS or descr[:1] == ">" or not isinstance(shape, tuple) or len(shape) != 1:
        raise UserError(
            f"{path}: contains an array of type {descr!r} and shape {shape}; token ids must be one row of "
            f"little-endian {', '.join(KINDS)}"
        )
    start += length
    if start + shape[0] * KINDS[kind].dtype.itemsize != size:
        raise UserError(f"{path}: has {size} bytes, but its header says {shape[0]} tokens of {descr}")
    return TokenFile(name, path, size, start, shape[0], kind)
