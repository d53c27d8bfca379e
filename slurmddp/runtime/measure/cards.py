"""What the makers say their cards can do: dense matrix TFLOP/s, without sparsity, by precision."""

import re

import torch

_PRECISIONS = ("fp16", "bf16", "tf32", "fp32")

#: A pattern of the device's name as torch gives it, then TFLOP/s in _PRECISIONS; None if the card lacks one. The first
#: pattern that matches counts. fp16 and bf16 add up in fp32. fp32 uses AMD's matrix cores, but no tensor cores.
_CARDS: tuple[tuple[str, float, float | None, float | None, float], ...] = (
    # NVIDIA's data sheet of each card. GB200: of the GB200 NVL72, per GPU. B200: an eighth of the HGX B200.
    (r"GB200", 2500, 2500, 1250, 80),
    (r"B200", 2250, 2250, 1125, 75),
    (r"GH200", 989, 989, 494, 67),
    (r"H200 NVL", 835, 835, 417, 60),
    (r"H200", 989, 989, 494, 67),
    (r"H100 NVL", 835, 835, 417, 60),
    (r"H100 PCIe", 756, 756, 378, 51),
    (r"H100", 989, 989, 494, 67),
    (r"A100", 312, 312, 156, 19.5),
    (r"A40\b", 149.7, 149.7, 74.8, 37.4),
    (r"A30\b", 165, 165, 82, 10.3),
    (r"A10\b", 125, 125, 62.5, 31.2),
    (r"L40S", 362, 362, 183, 91.6),
    (r"L40\b", 181, 181, 90.5, 90.5),
    (r"L4\b", 121, 121, 60, 30.3),
    (r"V100S", 130, None, None, 16.4),
    (r"V100.*PCIE", 112, None, None, 14),
    (r"V100", 125, None, None, 15.7),
    (r"T4\b", 65, None, None, 8.1),
    # NVIDIA's whitepapers of Ampere GA102 and Ada.
    (r"RTX A6000", 154.8, 154.8, 77.4, 38.7),
    (r"RTX 3090(?! Ti)", 71, 71, 35.6, 35.6),
    (r"RTX 4090(?! [DL])", 165.2, 165.2, 82.6, 82.6),
    # AMD's data sheet of each card.
    (r"MI325X", 1307.4, 1307.4, 653.7, 163.4),
    (r"MI300X", 1307.4, 1307.4, 653.7, 163.4),
    (r"MI300A", 980.6, 980.6, 490.3, 122.6),
    (r"MI210", 181, 181, None, 45.3),
    # Half of AMD's data sheet: each of the two dies is a device of its own.
    (r"MI250X", 191.5, 191.5, None, 47.9),
    (r"MI250\b", 181, 181, None, 45.3),
)


def sheet_tflops(name: str) -> dict[str, float]:
    """Return TFLOP/s by precision for a device's name (torch.cuda.get_device_name); empty if it is not in the table."""
    for pattern, *tflops in _CARDS:
        if re.search(rf"\b{pattern}", name):
            return {word: value for word, value in zip(_PRECISIONS, tflops, strict=True) if value is not None}
    return {}


def precision_in_use(precision: torch.dtype) -> str:
    """Return the table's word for how matrices are multiplied in `precision`: fp32 may be tf32 in truth."""
    words = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
    if precision == torch.float32 and torch.backends.cuda.matmul.allow_tf32:
        return "tf32"
    return words[precision]
