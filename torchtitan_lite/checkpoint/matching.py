"""Check that a checkpoint is of the model and the optimizer of the run that loads it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchtitan_lite.base.errors import CheckpointError
from torchtitan_lite.config.differences import changes

from .manifest import TensorEntry

MOST_LISTED = 8
"""Most differences that a message lists."""


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
        raise CheckpointError(
            f"[model] {path} is of another model: {'; '.join(differing)}. {fix}, or name another "
            "checkpoint or another [job] dump_folder."
        )


def check_tensors(
    saved: Mapping[str, TensorEntry], wanted: Mapping[str, TensorEntry], *, path: Path
) -> None:
    """Raise CheckpointError unless the checkpoint at `path` has the tensors of this run."""
    differing = changes(saved, wanted, absent="missing", text=str)
    if differing:
        raise CheckpointError(
            f"[checkpoint] {path} does not fit this run, as {len(differing)} tensors differ: "
            f"{listed(differing)}. Set [model], [training] dtype and [optimizer] state_dtype to "
            "the saved run's, or for new moments [checkpoint] exclude_from_loading = "
            '["optimizer"]; or name another checkpoint or another [job] dump_folder.'
        )
