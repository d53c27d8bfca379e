"""Random number generators: seeded per rank, saved, and put back."""

import hashlib
import random
import sys
from typing import Any

import torch


def derive(*parts: object) -> int:
    """Return a seed of 63 bits from anything that prints the same everywhere."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def seed_all(seed: int) -> None:
    """Seed python, torch (all devices), and numpy where something has imported it."""
    random.seed(seed)
    torch.manual_seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


def states(device: torch.device) -> dict[str, Any]:
    """Return the state of every generator of this rank, of types that torch.load(weights_only=True) takes."""
    version, words, gauss = random.getstate()
    found: dict[str, Any] = {"python": [version, list(words), gauss], "torch": torch.get_rng_state()}
    if device.type == "cuda":
        found["cuda"] = torch.cuda.get_rng_state(device)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, *rest = numpy.random.get_state()
        found["numpy"] = [
            name,
            [int(key) for key in keys],
            *[float(x) if isinstance(x, float) else int(x) for x in rest],
        ]
    return found


def restore(found: dict[str, Any], device: torch.device) -> None:
    """Put back what `states` gave. A generator that was not there then keeps its present state."""
    version, words, gauss = found["python"]
    random.setstate((version, tuple(words), gauss))
    torch.set_rng_state(found["torch"])
    if device.type == "cuda" and "cuda" in found:
        torch.cuda.set_rng_state(found["cuda"], device)
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in found:
        name, keys, *rest = found["numpy"]
        numpy.random.set_state((name, keys, *rest))
