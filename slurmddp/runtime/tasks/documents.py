"""Documents, one JSON object a line, in any number of files: found by offset, never held in memory."""

import json
from array import array

import torch

from slurmddp.runtime.errors import UserError
from slurmddp.runtime.tasks.text import ByteStream

#: Stands before and after each document. Text hardly ever has this byte.
BOUNDARY = b"\0"


class Documents:
    """Documents by number, as bytes between two boundaries: the byte-level tokens of a language model.

    The index is an array of 8 bytes a document, made by reading all files once; forked workers share it.
    """

    def __init__(self, stream: ByteStream, key: str) -> None:
        """Reads all files. `key`: under which the text stands in each line."""
        self._stream = stream
        self._key = key
        self._starts = _starts(stream)

    def __len__(self) -> int:
        return len(self._starts) - 1

    def read(self, number: int, most: int) -> torch.Tensor:
        """Return the first tokens of a document, at most `most`, at least 2: uint8 [n].

        Raises UserError for a line that is no such object.
        """
        start, end = self._starts[number], self._starts[number + 1]
        line = bytes(self._stream.read(start, end - start))
        try:
            text = json.loads(line)[self._key]
        except (ValueError, KeyError, TypeError, RecursionError):
            text = None
        if not isinstance(text, str):
            raise UserError(
                f"{self._stream.name_at(start)}: is not a line of JSON with text under {self._key!r} (train.data.key): "
                f"{line[:60].decode('utf-8', 'replace')!r}"
            )
        # A lone surrogate, which JSON may hold, has no UTF-8.
        encoded = text[:most].encode("utf-8", "surrogatepass")
        return torch.frombuffer(bytearray((BOUNDARY + encoded + BOUNDARY)[:most]), dtype=torch.uint8)

    def lengths(self, most: int) -> torch.Tensor:
        """About how many tokens `read` gives for each document, int32 [documents].

        From the lengths of the lines: exact for lines with nothing but a text without escapes. Exact lengths would
        cost reading every line.
        """
        starts = torch.frombuffer(self._starts, dtype=torch.int64)
        frame = len(f'{{"{self._key}": ""}}\n'.encode()) - 2 * len(BOUNDARY)
        return ((starts[1:] - starts[:-1]) - frame).clamp_(2, max(2, most)).int()


def _starts(stream: ByteStream) -> "array[int]":
    """Offsets of all lines that are not blank, and at last the stream's length. Blank ones belong to the one before."""
    starts = array("Q")
    offset = 0
    for _, path, size in stream.files:
        before = offset
        try:
            with open(path, "rb", buffering=1 << 20) as file:
                for line in file:
                    if not line.isspace():
                        starts.append(offset)
                    offset += len(line)
        except OSError as error:
            raise UserError(f"train.data.path: cannot read {path}: {error.strerror}") from error
        if offset - before != size:
            raise UserError(
                f"{path} had {size} bytes a moment ago, and now has {offset - before}: is another program writing it?"
            )
    starts.append(offset)
    return starts
