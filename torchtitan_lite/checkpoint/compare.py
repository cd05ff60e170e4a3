"""Checkpoints read through, every byte: whether one is as it was written, and what differs between
two."""

import math
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from torchtitan_lite.checkpoint.changes import (
    config_changes,
    progress_changes,
    tensor_changes,
    value_changes,
)
from torchtitan_lite.checkpoint.folders import find_problems
from torchtitan_lite.checkpoint.manifest import (
    TENSORS_SUFFIX,
    BrokenCheckpoint,
    broken_files,
    naming,
)
from torchtitan_lite.checkpoint.reading import SafeReader

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Whole numbers of as many bytes, to compare bit by bit: NaN equals NaN, and 0.0 is not -0.0."""


@dataclass(frozen=True)
class ValueChange:
    """How a tensor's values differ between two checkpoints."""

    name: str
    elements: int
    """Of the tensor."""
    different: int
    """Of them, those with other bits."""
    largest: float | None
    """Absolute difference of two elements; None if one is not a number."""

    def __str__(self) -> str:
        largest = "not a number" if self.largest is None else f"{self.largest:.6g}"
        return f"{self.name}: {self.different} of {self.elements} elements differ, by {largest} at most"


@dataclass(frozen=True)
class Comparison:
    """What differs between two checkpoints, a line or an entry for each difference."""

    progress: list[str]
    config: list[str]
    model: list[str]
    tensors: list[str]
    """In one of them only, or of another dtype or shape."""
    values: list[ValueChange]
    equal_tensors: int
    """Equal in every bit."""

    @property
    def same(self) -> bool:
        """Whether nothing differs."""
        return not any((self.progress, self.config, self.model, self.tensors, self.values))


def verify_checkpoint(path: Path, *, hashes: bool) -> list[str]:
    """What is wrong with the checkpoint at `path`, a line each: its files, or else its table of
    tensors."""
    if problems := find_problems(path, hashes=hashes):
        return problems
    try:
        SafeReader(path)
    except BrokenCheckpoint as broken:
        return [str(broken)]
    return []


def compare(old: Path, new: Path) -> Comparison:
    """What differs between two checkpoints. Tensors are read one by one. Raises CheckpointError if
    one is broken."""
    old_reader, new_reader = _open(old), _open(new)
    a, b = old_reader.manifest, new_reader.manifest
    shared = [name for name, entry in a.tensors.items() if b.tensors.get(name) == entry]
    values = []
    for name in shared:
        with naming(old):
            before = old_reader.read_whole([name])[name]
        with naming(new):
            after = new_reader.read_whole([name])[name]
        if change := _value_change(name, before, after):
            values.append(change)
    return Comparison(
        progress=progress_changes(a.progress, b.progress),
        config=config_changes(a.config, b.config),
        model=value_changes(a.model, b.model),
        tensors=tensor_changes(a.tensors, b.tensors),
        values=values,
        equal_tensors=len(shared) - len(values),
    )


def _open(path: Path) -> SafeReader:
    """Open the checkpoint at `path` after checking the sizes of its tensor files."""
    with naming(path):
        reader = SafeReader(path)
        data = {
            name: entry
            for name, entry in reader.manifest.files.items()
            if name.endswith(TENSORS_SUFFIX)
        }
        if problems := broken_files(path, replace(reader.manifest, files=data), hashes=False):
            raise BrokenCheckpoint(problems[0])
        return reader


def _value_change(name: str, old: Tensor, new: Tensor) -> ValueChange | None:
    bits = _BITS[old.element_size()]
    differs = old.view(bits) != new.view(bits)
    different = int(differs.sum())
    if not different:
        return None
    largest = float((old[differs].double() - new[differs].double()).abs().max())
    return ValueChange(name, old.numel(), different, None if math.isnan(largest) else largest)


def format_comparison(comparison: Comparison) -> str:
    """The differences, a section each, and how many tensors are equal."""
    sections = {
        "progress": comparison.progress,
        "config": comparison.config,
        "model": comparison.model,
        "tensors": comparison.tensors,
        "values": [str(change) for change in comparison.values],
    }
    lines = [
        line
        for title, found in sections.items()
        if found
        for line in (f"{title}:", *(f"  {x}" for x in found))
    ]
    return "\n".join([*lines, f"{comparison.equal_tensors} tensors are equal in every bit"])
