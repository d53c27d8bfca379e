"""A checkpoint as one plain file: python -m slurmddp.runtime.export CHECKPOINT --output FILE. One process, no ranks."""

import argparse
import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any, NoReturn

from slurmddp.runtime.errors import UserError
from slurmddp.shared.checkpoint import layout

MODEL = "model."


def main(arguments: list[str]) -> None:
    """Write the file. Exit codes: 0 written, 1 something outside failed, 2 a mistake that one can put right."""
    options = _options(arguments)
    # Ended by a signal, too, the unfinished file is removed.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        # torch says so at import where numpy is not installed; nothing here needs it.
        warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
        if not options.verified:
            layout.verify(options.checkpoint)
        tensors, size = write(
            options.checkpoint, options.output, form=options.format, what=options.what, force=options.force
        )
    except (UserError, layout.Rejected) as error:
        _end(2, str(error))
    except OSError as error:
        _end(1, f"{error.filename or options.output}: {error.strerror or error}")
    except ImportError as error:
        _end(2, f"{sys.executable} cannot import torch ({error}): run this in the environment of the run")
    print(f"exported {tensors} tensors, {size} bytes, to {options.output}")


def write(checkpoint: Path, output: Path, *, form: str, what: str = "model", force: bool = False) -> tuple[int, int]:
    """Write the tensors of a checkpoint folder to a file of the form `pt` or `safetensors`: how many, and its bytes.

    what: `model`, the weights and buffers by the model's own names; `all`, also the optimizer's state and the scaler's,
    by the names in the checkpoint (model.NAME, optimizer.NAME.KEY). All are whole CPU tensors of the types that they
    were saved with, whatever the ranks and the mesh were. `pt` needs them in memory once, safetensors a group at a
    time. Raises UserError, OSError.
    """
    from slurmddp.runtime.checkpoint import plain, shards

    import torch  # isort: skip

    if output.exists() and not force:
        raise UserError(f"{output} exists: choose another file, or replace it with --force")
    metadata = shards.read_metadata(checkpoint)
    stored: dict[str, Any] = metadata.state_dict_metadata
    names = [name for name in stored if what == "all" or name.startswith(MODEL)]
    if not names:
        raise UserError(f"{checkpoint} has no model to export (no tensors named {MODEL}*)")
    outer = {name if what == "all" else name.removeprefix(MODEL): name for name in names}
    specs = {new: (tuple(stored[name].size), stored[name].properties.dtype) for new, name in outer.items()}

    def read(wanted: list[str]) -> dict[str, torch.Tensor]:
        tensors = {new: torch.empty(specs[new][0], dtype=specs[new][1]) for new in wanted}
        shards.read(checkpoint, metadata, {outer[new]: tensor for new, tensor in tensors.items()})
        return tensors

    if form == "safetensors":
        facts = {"format": "pt", "step": str(layout.step_of(checkpoint)), "what": what}
        plain.write_safetensors(output, specs, read, facts)
    else:
        plain.write_pt(output, read(list(outer)))
    return len(names), os.path.getsize(output)


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m slurmddp.runtime.export", description=__doc__)
    parser.add_argument("checkpoint", type=Path, help="a folder checkpoints/step-XXXXXXXX")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--format", choices=("pt", "safetensors"))
    parser.add_argument("--what", choices=("model", "all"), default="model")
    parser.add_argument("--force", action="store_true", help="replace the file if it exists")
    parser.add_argument("--verified", action="store_true", help="skip the hashes: the caller has just verified them")
    options = parser.parse_args(arguments)
    options.format = options.format or ("safetensors" if options.output.suffix == ".safetensors" else "pt")
    return options


def _end(code: int, message: str) -> NoReturn:
    print(f"slurmddp: error: {message}", file=sys.stderr, flush=True)
    sys.exit(code)


if __name__ == "__main__":
    main(sys.argv[1:])
