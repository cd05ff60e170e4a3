"""Compare the tensors of two checkpoints."""

from pathlib import Path

import torch
from torch import Tensor

from .folders import naming
from .reading import SafeReader, open_checkpoint

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers of as many bytes, to compare bit by bit: NaN equals NaN, and 0.0 differs from -0.0."""


def compare(old: Path, new: Path) -> dict[str, str]:
    """Return how each tensor that is not the same in every bit differs, by its name. One tensor of
    each checkpoint is in memory at a time. Raises CheckpointError if one of them is broken."""
    readers: dict[Path, SafeReader] = {}
    for path in (old, new):
        with naming(path):
            readers[path] = open_checkpoint(path, hashes=False)

    differences = {}
    before, after = readers[old].tensors, readers[new].tensors
    for name in before | after:
        if before.get(name) != after.get(name):
            differences[name] = f"{before.get(name, 'missing')} -> {after.get(name, 'missing')}"
            continue
        tensors: list[Tensor] = []
        for path in (old, new):
            with naming(path):
                tensors += readers[path].read_whole([name]).values()
        if difference := _difference(*tensors):
            differences[name] = difference
    return differences


def _difference(old: Tensor, new: Tensor) -> str | None:
    """Return how the values of two tensors of one shape and type differ, or None."""
    bits = _BITS[old.element_size()]
    differs = old.view(bits) != new.view(bits)
    if not (different := int(differs.sum())):
        return None
    largest = float((old[differs].double() - new[differs].double()).abs().max())
    return f"{different} of {old.numel()} elements differ, by {largest:.6g} at most"
