"""Differences between two checkpoints, or between a checkpoint and the run that loads it."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchtitan_lite.base.errors import CheckpointError
from torchtitan_lite.config.differences import changes, config_changes

from .folders import naming
from .manifest import TENSORS_SUFFIX, BrokenCheckpoint, TensorEntry, broken_files
from .reading import SafeReader

MOST_LISTED = 8
"""Most differences that a message lists."""
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers of as many bytes, to compare bit by bit: NaN equals NaN, and 0.0 differs from -0.0."""


def listed(differences: list[str]) -> str:
    """Join the first differences for a message, and count the others."""
    more = len(differences) - MOST_LISTED
    others = [f"and {more} more"] if more > 0 else []
    return "; ".join(differences[:MOST_LISTED] + others)


def check_model(
    saved: Mapping[str, Any], wanted: Mapping[str, Any], *, path: Path, fix: str = ""
) -> None:
    """Raise CheckpointError, with the `fix`, unless the checkpoint's model has the dimensions of
    this run's model."""
    # The ignored keys depend on the text, not on the weights. 0.2 and earlier had no tied models.
    ignored = dict.fromkeys(("max_seq_len", "document_bos_id"))
    before, now = ({"tie_embeddings": False, **each, **ignored} for each in (saved, wanted))
    if differing := changes(before, now):
        fix = fix or "Set [model] flavor, or these keys of it, and tokenizer_path to the saved ones"
        if before.get("rope_scaling") is None and now.get("rope_scaling") is not None:
            fix += (
                " (rope_scaling = { factor = 1.0 } is none; the flavors 3-8B and 3-70B have none, "
                "which were 8B and 70B up to version 0.2)"
            )
        raise CheckpointError(
            f"[model] {path} is of another model: {'; '.join(differing)}. {fix}, or name another "
            "checkpoint or another [job] dump_folder."
        )


def check_tensors(
    saved: Mapping[str, TensorEntry], wanted: Mapping[str, TensorEntry], *, path: Path
) -> None:
    """Raise CheckpointError unless the checkpoint at `path` has the tensors of this run."""
    differing = changes(saved, wanted, absent="missing", text=str)
    if not differing:
        return
    shapes = [{name: entry.shape for name, entry in each.items()} for each in (saved, wanted)]
    if all(each.startswith("optimizer.") for each in differing):
        part, fix = "optimizer", "Set [optimizer] state_dtype to the saved run's, or [checkpoint] "
        fix += 'exclude_from_loading = ["optimizer"]'
    elif shapes[0] == shapes[1]:
        part, fix = "data type", "Set [training] dtype to the saved run's"
    else:
        part, fix = "model", "Set [model] flavor, or its other keys, to the saved model's"
    raise CheckpointError(
        f"[checkpoint] {path} is of another {part}: {len(differing)} tensors differ from this "
        f"run's: {listed(differing)}. {fix}, or name another checkpoint or another [job] "
        "dump_folder."
    )


@dataclass(frozen=True)
class ValueDifference:
    """How the values of a tensor differ between two checkpoints."""

    name: str
    elements: int
    different: int
    """Elements with other bits."""
    largest: float | None
    """Largest absolute difference of two elements; None if one is not a number."""

    def __str__(self) -> str:
        by = "not a number" if self.largest is None else f"{self.largest:.6g}"
        return f"{self.name}: {self.different} of {self.elements} elements differ, by {by} at most"


@dataclass(frozen=True)
class CheckpointDifference:
    """Differences between two checkpoints, one entry for each."""

    progress: list[str]
    config: list[str]
    model: list[str]
    tensors: list[str]
    """Tensors in one of them only, or of another data type or shape."""
    values: list[ValueDifference]
    equal_tensors: int
    """Tensors that are equal in every bit."""

    @property
    def same(self) -> bool:
        """Whether nothing differs."""
        return not any((self.progress, self.config, self.model, self.tensors, self.values))

    def __str__(self) -> str:
        lines = []
        for kind in ("progress", "config", "model", "tensors", "values"):
            if found := getattr(self, kind):
                lines += [f"{kind}:", *(f"  {each}" for each in found)]
        return "\n".join([*lines, f"{self.equal_tensors} tensors are equal in every bit"])


def compare(old: Path, new: Path) -> CheckpointDifference:
    """Compare two checkpoints; one tensor is in memory at a time. Raises CheckpointError if one of
    them is broken."""
    readers = {path: _open(path) for path in (old, new)}
    a, b = readers[old].manifest, readers[new].manifest
    shared = [name for name, entry in a.tensors.items() if b.tensors.get(name) == entry]

    values = []
    for name in shared:
        tensors: list[Tensor] = []
        for path, reader in readers.items():
            with naming(path):
                tensors += reader.read_whole([name]).values()
        # Comparing a checkpoint with itself reads it once.
        if found := _value_difference(name, tensors[0], tensors[-1]):
            values.append(found)

    before, after = ({**each.pop("data"), **each} for each in map(asdict, (a.progress, b.progress)))
    return CheckpointDifference(
        progress=changes(before, after),
        config=config_changes(a.config, b.config),
        model=changes(a.model, b.model),
        tensors=changes(a.tensors, b.tensors, absent="missing", text=str),
        values=values,
        equal_tensors=len(shared) - len(values),
    )


def _open(path: Path) -> SafeReader:
    """Open the checkpoint at `path` after checking the sizes of its tensor files."""
    with naming(path):
        reader = SafeReader(path)
        files = reader.manifest.files.items()
        large = {name: entry for name, entry in files if name.endswith(TENSORS_SUFFIX)}
        if problems := broken_files(path, large, hashes=False):
            raise BrokenCheckpoint(problems[0])
        return reader


def _value_difference(name: str, old: Tensor, new: Tensor) -> ValueDifference | None:
    bits = _BITS[old.element_size()]
    differs = old.view(bits) != new.view(bits)
    different = int(differs.sum())
    if not different:
        return None
    largest = float((old[differs].double() - new[differs].double()).abs().max())
    return ValueDifference(name, old.numel(), different, None if math.isnan(largest) else largest)
