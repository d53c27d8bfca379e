"""Reads `.metadata`, the table of contents that torch.distributed.checkpoint (DCP) writes, without running any of it.

The file is a pickle, and a pickle names functions that a plain unpickler calls: whoever wrote the file runs code as
whoever reads it. This reader imports nothing that the file names. A class that DCP writes becomes an inert record of
its arguments; any other name is refused. Standard library only, so that a login node checks the same as a rank.
"""

import io
import pickle
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE = ".metadata"

_METADATA = "torch.distributed.checkpoint.metadata"
#: What DCP writes with torch 2.4 to 2.13, by module. pathlib: the folder that the checkpoint was written to.
_ALLOWED = {
    _METADATA: {
        "Metadata",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "MetadataIndex",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch": {"Size"},
    "builtins": {"getattr"},  # see _Member
    "torch.serialization": {"_get_layout"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath"},
    "pathlib._local": {"Path", "PosixPath", "PurePosixPath"},  # as Python 3.13 writes them
}
_DTYPE = re.compile(r"(bfloat|float|uint|int|complex|bool|quint|qint|bits)[0-9a-z_]*")


class Refused(Exception):
    """The file names what a checkpoint never holds, or is damaged. The text continues the file's name."""


@dataclass(frozen=True)
class Chunk:
    """One stored block of a tensor, and the bytes of the file that hold it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    bytes: int


@dataclass(frozen=True)
class Stored:
    """One tensor: the name of its torch.dtype, its shape, and its blocks."""

    dtype: str
    size: tuple[int, ...]
    chunks: tuple[Chunk, ...]


def read(path: Path) -> dict[str, Stored]:
    """Return the tensors of a checkpoint by name. Raises Refused, OSError."""
    content = path.read_bytes()
    try:
        return _tensors(Reader(io.BytesIO(content)).load())
    except Refused:
        raise
    except Exception as error:
        raise Refused(f"is damaged: {type(error).__name__}: {error}") from error


class _Record:
    """What the pickle says of one object: the arguments that it would be made with, and its state."""

    arguments: tuple[Any, ...]
    state: Any

    def __new__(cls, *arguments: Any) -> "_Record":
        made = object.__new__(cls)
        made.arguments, made.state = arguments, None
        return made

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Member(_Record):
    """getattr(ENUM, NAME): so Python 3.11.0 to 3.11.3 (Debian 12's) write an enum's member. Of no other object."""

    def __new__(cls, *arguments: Any) -> Any:
        if [getattr(item, "__name__", type(item)) for item in arguments] != ["_MEM_FORMAT_ENCODING", str]:
            raise _refused("builtins.getattr")
        return super().__new__(cls, *arguments)


def _refused(name: str) -> Refused:
    return Refused(
        f"names {name}, which no checkpoint of slurmddp contains: it was not executed. "
        "Do not load this checkpoint elsewhere"
    )


class Reader(pickle.Unpickler):
    """Makes records only."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._classes: dict[tuple[str, str], type] = {}

    def find_class(self, module: str, name: str) -> type:
        """Return a record's class that is used for nothing else. Raises Refused."""
        if not self.allows(module, name):
            raise _refused(f"{module}.{name}")
        kind = _Member if name == "getattr" else _Record
        return self._classes.setdefault((module, name), type(name, (kind,), {"__module__": module}))

    def allows(self, module: str, name: str) -> bool:
        return name in _ALLOWED.get(module, ()) or is_dtype(module, name)


def is_dtype(module: str, name: str) -> bool:
    """Return whether this is how torch names a data type: torch.float32."""
    return module == "torch" and _DTYPE.fullmatch(name) is not None


def _tensors(record: Any) -> dict[str, Stored]:
    """Raises Refused, or whatever a record that lacks something raises."""
    metadata = _state(record, "Metadata")
    locations = {}
    for index, info in metadata["storage_data"].items():
        key, storage = _state(index, "MetadataIndex"), _state(info, "_StorageInfo")
        if storage.get("transform_descriptors"):
            raise Refused("names transformations of its files, which slurmddp does not write")
        file = storage["relative_path"]
        if not isinstance(file, str) or file in ("", ".", "..") or "/" in file or "\0" in file:
            raise Refused(f"names the file {file!r}, which is not in the checkpoint's folder")
        offset = None if key["offset"] is None else size_of(key["offset"])
        locations[key["fqn"], offset] = (file, *_counts((storage["offset"], storage["length"])))
    return {_text(name): _stored(name, item, locations) for name, item in metadata["state_dict_metadata"].items()}


def _stored(name: str, item: Any, locations: dict[Any, Any]) -> Stored:
    if type(item).__name__ == "BytesStorageMetadata":
        raise Refused(f"holds {name}, which is not a tensor")
    tensor = _state(item, "TensorStorageMetadata")
    properties = tensor["properties"]
    dtype = properties.state[0]
    if type(properties).__name__ != "TensorProperties" or not (isinstance(dtype, type) and issubclass(dtype, _Record)):
        raise TypeError(f"{name} has no properties")
    chunks = []
    for chunk in tensor["chunks"]:
        fields = _state(chunk, "ChunkStorageMetadata")
        offsets = size_of(fields["offsets"])
        if (name, offsets) not in locations:
            raise Refused(f"does not say where {name} from {list(offsets)} on is stored")
        chunks.append(Chunk(offsets, size_of(fields["sizes"]), *locations[name, offsets]))
    return Stored(dtype.__name__, size_of(tensor["size"]), tuple(chunks))


def _state(record: Any, name: str) -> dict[str, Any]:
    if not isinstance(record, _Record) or type(record).__name__ != name or not isinstance(record.state, dict):
        raise TypeError(f"{name} expected, not {type(record).__name__}")
    return record.state


def size_of(record: Any) -> tuple[int, ...]:
    """Return the numbers of torch.Size((2, 3)), or of a bare tuple. Raises TypeError."""
    if isinstance(record, _Record) and type(record).__name__ == "Size":
        (record,) = record.arguments
    return _counts(record)


def _counts(values: Any) -> tuple[int, ...]:
    if not isinstance(values, tuple) or not all(type(value) is int and value >= 0 for value in values):
        raise TypeError(f"{values!r} is not a row of whole numbers")
    return values


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"a name is expected, not {type(value).__name__}")
    return value
