"""A memory budget does not change the losses of an eager run, also under tensor parallelism."""

from pathlib import Path

import pytest
from launching import read_losses, train_together
from matrix import RECIPES, STEPS, TOLERANCE, TP

BUDGET = (
    "--compile.enable",
    "--activation_checkpoint.mode=memory_budget",
    "--activation_checkpoint.memory_budget=0.3",
)


@pytest.mark.timeout(600)
def test_a_memory_budget_trains_as_no_checkpointing_does_under_tensor_parallelism(
    tmp_path: Path,
) -> None:
    common = [
        f"{TP}=2",
        "--training.local_batch_size=4",
        "--model.flavor=vocab-2256",
        f"{STEPS}=3",
    ]
    runs = {}
    for recipe in ("bf16", "tensorwise"):
        runs[recipe] = [*common, *RECIPES[recipe]]
        runs[f"{recipe}, budget"] = [*common, *RECIPES[recipe], *BUDGET]
    train_together(tmp_path, runs, processes=2)
    for recipe in ("bf16", "tensorwise"):
        expected = read_losses(tmp_path / recipe)
        found = read_losses(tmp_path / f"{recipe}, budget")
        assert found == pytest.approx(expected, rel=TOLERANCE)
