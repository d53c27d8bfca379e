"""Reads what torch.save wrote, tensors and plain values only: nothing that the file names is run.

Always weights_only, and only the zip form for files of our own: torch before 2.6 unpacks a tar archive even with
weights_only, wherever its members say (CVE-2025-32434).
"""

import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import torch

from slurmddp.runtime import torch_private
from slurmddp.runtime.errors import UserError

_ZIP = b"PK\x03\x04"
#: How torch names what it refused: 2.4 "Unsupported class os.system", later "GLOBAL os.system was not an allowed".
_NAME = re.compile(r"(?:GLOBAL|class|operand) ([A-Za-z_][\w.]*\.\w+)")


def load(path: Path) -> Any:
    """Return the content of a file of ours. Raises UserError that names the file and what was refused."""
    with path.open("rb") as file:
        return load_part(file, 0, path.stat().st_size)


def load_part(file: BinaryIO, start: int, size: int) -> Any:
    """Return the content of one part of an open file, on the CPU. Raises as `load`."""
    part = torch_private.file_view(file, start, size)
    if part.read(len(_ZIP)) != _ZIP:
        raise UserError(f"{file.name} is damaged: torch.save did not write what is at byte {start}")
    part.seek(0)
    return guarded(Path(file.name), lambda: torch.load(part, map_location="cpu", weights_only=True))


def guarded(path: Path, action: Callable[[], Any], todo: str = "take another checkpoint") -> Any:
    """Return the result of torch.load(weights_only=True) on `path`. Raises UserError that says what to do, OSError."""
    try:
        return action()
    except pickle.UnpicklingError as error:
        named = _NAME.search(str(error))
        what = f"names {named[1]}: it holds more than tensors" if named else "holds more than tensors, or is damaged"
        raise UserError(f"{path} {what}, and is not loaded (it could run code): {todo}") from error
    except OSError:
        raise
    except Exception as error:  # the unpickler takes any bytes for instructions, and fails in many ways
        why = (str(error) or repr(error)).splitlines()[0]
        raise UserError(f"{path} is damaged, or not a file of torch.save: {why}") from error
