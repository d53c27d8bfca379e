"""One GPU: ours over a bare loop with nccl, bf16, torch.compile and fused AdamW, and the use that both make of it.

    python -m benchmarks.gpu [--pairs N] [--no-compile]

Blocks of steps in turn in one process. MFU is against a measured matrix product in bf16 and against the card's sheet.
Exit code 1 where the target is missed, 2 where there is no GPU.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks import page
from benchmarks.measure import Comparison
from benchmarks.step import make_job, measured

TARGET = 1.03
#: With a small batch the host launches kernels as slowly as the GPU runs them, so all that the host does shows.
#: With the large one it does not.
SIZES = {
    "124M": {"model": {"layers": 12, "heads": 12, "width": 768}, "context": 1024, "micro": 16, "block": 10},
    "124M-large-batch": {"model": {"layers": 12, "heads": 12, "width": 768}, "context": 1024, "micro": 96, "block": 4},
    "350M": {"model": {"layers": 24, "heads": 16, "width": 1024}, "context": 1024, "micro": 8, "block": 10},
}


def main() -> int:
    import torch

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--sizes", nargs="*", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--no-compile", action="store_true")
    page.options(parser)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("there is no GPU here: nothing to measure")
        return 2
    about = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}"
    figures = []
    for size in options.sizes:
        job = make_job(SIZES[size], 1, precision="bf16", compile=not options.no_compile, workers=4)
        wanted = {"pairs": options.pairs, "block": SIZES[size]["block"], "loops": ["ours", "bare"]}
        found = measured(Path(sys.executable), job, wanted, 1)
        result = Comparison(f"a step of GPT {size}", "ms", found["times"]["ours"], found["times"]["bare"], TARGET)
        figures.append(page.Figure.of(result.title, result))
        last = found["metrics"][-1]
        shown = {name: last[name] for name in ("mfu", "mfu_sheet", "seconds") if name in last}
        print(f"  ours    {shown}, at most {found['device'] / 2**30:.1f} GiB on the device (both loops)")
    return page.finish("gpu", figures, f"{about}; {options.pairs} pairs", write=options.write)


if __name__ == "__main__":
    sys.exit(main())
