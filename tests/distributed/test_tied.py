"""A model whose embedding and output share a matrix trains as on one process in every layout, and a
run goes on in another layout than the one that saved it."""

from collections.abc import Mapping
from pathlib import Path

import pytest
from launching import read_losses, train_together
from matrix import RECIPES, STEPS, TOLERANCE, TP, TWO

from torchtitan_lite.checkpoint.manifest import read_manifest

pytestmark = pytest.mark.timeout(300)
COMMON = ["--model.flavor=tied", "--lr_scheduler.total_steps=6", "--optimizer.lr=5e-4", TWO]
FLOAT8 = RECIPES["all_gather"]
SPLIT = [f"{TP}=2"]
GATHERED = "--parallelism.disable_loss_parallel"
RUNS = {
    "FSDP": [],
    "TP": SPLIT,
    "FSDP, float8": FLOAT8,
    "TP, logits gathered, float8": [*SPLIT, GATHERED, *FLOAT8],
    "TP, float8, compiled": [*SPLIT, *FLOAT8, "--compile.enable"],
}
"""Overrides of the runs on two processes."""


def parts(folder: Path, settings: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """Runs up to a step each, of one run in `folder`, by that step and their overrides."""
    run = [f"--job.dump_folder={folder}", "--checkpoint.enable", *COMMON, *FLOAT8]
    return {f"to {step}": [*run, f"{STEPS}={step}", *more] for step, more in settings.items()}


# ----- tie_embeddings -----
def test_tied_embeddings_train_and_resume_in_any_layout(tmp_path: Path) -> None:
    steps = f"{STEPS}=6"
    together = {name: [*COMMON, steps, *overrides] for name, overrides in RUNS.items()}
    moved = tmp_path / "moved"
    moved.mkdir()
    together |= parts(moved, {"2": SPLIT, "4": [], "5": SPLIT})
    train_together(tmp_path, together, processes=2)
    alone = {"bf16": [*COMMON, steps], "float8": [*COMMON, steps, *FLOAT8]}
    train_together(tmp_path, alone | parts(moved, {"6": []}), processes=1)

    expected = {name: read_losses(tmp_path / name) for name in alone}
    assert all(losses[-1] < losses[0] - 0.5 for losses in expected.values())
    assert expected["bf16"] != expected["float8"]
    for name in (*RUNS, "moved"):
        losses = expected["float8" if "float8" in name or name == "moved" else "bf16"]
        assert read_losses(tmp_path / name) == pytest.approx(losses, rel=TOLERANCE), name

    # The matrix and its moments are saved once.
    for step in (2, 4, 6):
        tensors = read_manifest(moved / "checkpoint" / f"step-{step:08d}").tensors
        ends = {name for name in tensors if "embed" in name or "output" in name}
        owners = {name.partition(".")[2].partition(".weight")[0] for name in ends}
        assert owners == {"tok_embeddings"} and len(ends) == 4
