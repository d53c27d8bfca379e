"""In which numbers a model computes."""

from contextlib import AbstractContextManager, nullcontext

import torch

#: By the job's word for it.
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(device: torch.device, precision: torch.dtype) -> AbstractContextManager[object]:
    """Return the context in which a model runs in `precision`; for fp32 it does nothing."""
    return nullcontext() if precision == torch.float32 else torch.autocast(device.type, dtype=precision)
