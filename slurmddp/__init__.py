"""slurmddp: from a training script to a finished multi-node PyTorch run under Slurm and Apptainer.

This file is part of every run's code snapshot and is imported inside the container:
standard library only. There, `slurmddp.api` does not exist.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slurmddp.api import Run, Status, submit

__version__ = "0.1.0"
__all__ = ["Run", "Status", "__version__", "submit"]


def __getattr__(name: str) -> Any:
    """Import the Python API at its first use, so that `import slurmddp` stays cheap."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from slurmddp import api

    return getattr(api, name)
