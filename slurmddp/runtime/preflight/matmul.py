"""python -m slurmddp.runtime.preflight.matmul: multiply matrices on each GPU, and print how fast that was.

A program of its own: importing torch takes seconds, and a GPU that hangs cannot be interrupted.
"""

import json
from concurrent.futures import ThreadPoolExecutor

import torch

from slurmddp.runtime.measure.cards import precision_in_use, sheet_tflops
from slurmddp.runtime.measure.peak import matmul_peak

#: All cards have it, and all multiply it on their matrix units.
_PRECISION = torch.float16


def speeds(gpus: list[torch.device]) -> list[tuple[int, str, float, float | None]]:
    """Return index, name, TFLOP/s and the data sheet's TFLOP/s of each GPU. All compute at once, as in training.

    0: it cannot multiply matrices, or has no memory left for them. None: the card is not in our table.
    """
    with ThreadPoolExecutor(max(1, len(gpus))) as pool:
        measured = list(pool.map(lambda gpu: matmul_peak(gpu, _PRECISION), gpus))
    names = [torch.cuda.get_device_name(gpu) for gpu in gpus]
    sheets = [sheet_tflops(name).get(precision_in_use(_PRECISION)) for name in names]
    return [
        (index, name, (speed or 0.0) / 1e12, sheet)
        for index, (name, speed, sheet) in enumerate(zip(names, measured, sheets, strict=True))
    ]


if __name__ == "__main__":
    print(json.dumps(speeds([torch.device("cuda", index) for index in range(torch.cuda.device_count())])))
