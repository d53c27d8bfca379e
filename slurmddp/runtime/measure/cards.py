"""What the makers say their cards can do: dense matrix TFLOP/s, without sparsity, by precision."""

import re
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Card:
    """One card. `tflops`: by "fp32" (no tensor cores on NVIDIA, matrix cores on AMD), "tf32", "bf16" and "fp16" (both
    adding up in fp32). `source`: where the figures stand.
    """

    name: str
    tflops: dict[str, float]
    source: str


def _card(name: str, source: str, *, half: float, fp32: float, tf32: float | None = None, bf16: bool = True) -> Card:
    tflops = {"fp16": half, "fp32": fp32}
    if bf16:
        tflops["bf16"] = half
    if tf32 is not None:
        tflops["tf32"] = tf32
    return Card(name, tflops, source)


_NVIDIA = "NVIDIA's data sheet of the "
_GRACE = "NVIDIA's GH200 Grace Hopper Superchip data sheet"

#: A pattern of the device's name as torch gives it, and the card. The first that matches counts.
CARDS: tuple[tuple[str, Card], ...] = (
    (r"GB200", _card("GB200", "NVIDIA's GB200 NVL72 data sheet, one GPU", half=2500, tf32=1250, fp32=80)),
    (r"B200", _card("B200", "NVIDIA's HGX B200 data sheet, an eighth", half=2250, tf32=1125, fp32=75)),
    (r"GH200", _card("GH200", _GRACE, half=989, tf32=494, fp32=67)),
    (r"H200 NVL", _card("H200 NVL", _NVIDIA + "H200", half=835, tf32=417, fp32=60)),
    (r"H200", _card("H200 SXM", _NVIDIA + "H200", half=989, tf32=494, fp32=67)),
    (r"H100 NVL", _card("H100 NVL", _NVIDIA + "H100", half=835, tf32=417, fp32=60)),
    (r"H100 PCIe", _card("H100 PCIe", _NVIDIA + "H100", half=756, tf32=378, fp32=51)),
    (r"H100", _card("H100 SXM", _NVIDIA + "H100", half=989, tf32=494, fp32=67)),
    (r"A100", _card("A100", _NVIDIA + "A100", half=312, tf32=156, fp32=19.5)),
    (r"A40\b", _card("A40", _NVIDIA + "A40", half=149.7, tf32=74.8, fp32=37.4)),
    (r"A30\b", _card("A30", _NVIDIA + "A30", half=165, tf32=82, fp32=10.3)),
    (r"A10\b", _card("A10", _NVIDIA + "A10", half=125, tf32=62.5, fp32=31.2)),
    (r"L40S", _card("L40S", _NVIDIA + "L40S", half=362, tf32=183, fp32=91.6)),
    (r"L40\b", _card("L40", _NVIDIA + "L40", half=181, tf32=90.5, fp32=90.5)),
    (r"L4\b", _card("L4", _NVIDIA + "L4", half=121, tf32=60, fp32=30.3)),
    (r"V100S", _card("V100S", _NVIDIA + "V100", half=130, fp32=16.4, bf16=False)),
    (r"V100.*PCIE", _card("V100 PCIe", _NVIDIA + "V100", half=112, fp32=14, bf16=False)),
    (r"V100", _card("V100 SXM2", _NVIDIA + "V100", half=125, fp32=15.7, bf16=False)),
    (r"T4\b", _card("T4", _NVIDIA + "T4", half=65, fp32=8.1, bf16=False)),
    (r"RTX A6000", _card("RTX A6000", "NVIDIA's Ampere GA102 whitepaper", half=154.8, tf32=77.4, fp32=38.7)),
    (r"RTX 3090(?! Ti)", _card("RTX 3090", "NVIDIA's Ampere GA102 whitepaper", half=71, tf32=35.6, fp32=35.6)),
    (r"RTX 4090(?! [DL])", _card("RTX 4090", "NVIDIA's Ada GPU whitepaper", half=165.2, tf32=82.6, fp32=82.6)),
    (r"MI325X", _card("MI325X", "AMD's data sheet of the MI325X", half=1307.4, tf32=653.7, fp32=163.4)),
    (r"MI300X", _card("MI300X", "AMD's data sheet of the MI300X", half=1307.4, tf32=653.7, fp32=163.4)),
    (r"MI300A", _card("MI300A", "AMD's data sheet of the MI300A", half=980.6, tf32=490.3, fp32=122.6)),
    # Each of the two dies is a device of its own.
    (r"MI250X", _card("MI250X, one of two dies", "half of AMD's data sheet of the MI250X", half=191.5, fp32=47.9)),
    (r"MI250\b", _card("MI250, one of two dies", "half of AMD's data sheet of the MI250", half=181, fp32=45.3)),
    (r"MI210", _card("MI210", "AMD's data sheet of the MI210", half=181, fp32=45.3)),
)


def card(name: str) -> Card | None:
    """The card of a device's name (torch.cuda.get_device_name); None for one that is not in the table."""
    return next((found for pattern, found in CARDS if re.search(rf"\b{pattern}", name)), None)


def precision_in_use(precision: torch.dtype) -> str:
    """The table's word for how matrices are multiplied in `precision`: fp32 may be tf32 in truth."""
    words = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
    if precision == torch.float32 and torch.backends.cuda.matmul.allow_tf32:
        return "tf32"
    return words[precision]
