"""Moments, and weights, in bfloat16 train nearly as float32 ones do, and a run resumes with them,
also on another number of ranks."""

import shutil
from pathlib import Path

import pytest
from launching import read_losses, train_together
from matrix import STEPS, whole_and_in_parts

GATHERED = ["--float8.enable_float8_linear", "--float8.enable_fsdp_float8_all_gather"]

pytestmark = pytest.mark.timeout(300)


# ----- state_dtype -----
def test_bfloat16_moments_are_sharded_saved_and_resumed(tmp_path: Path) -> None:
    common = ["--lr_scheduler.total_steps=8", "--checkpoint.enable"]
    bfloat16 = [*common, "--optimizer.state_dtype=bfloat16"]
    runs = {}
    weights = [*GATHERED, "--training.dtype=bfloat16", "--optimizer.state_dtype="]
    variants = {"plain": [], "gathered": GATHERED, "weights": weights}
    for name, settings in variants.items():
        if name != "weights":
            runs[f"{name} float32"] = [*common, *settings, f"{STEPS}=8"]
        runs |= whole_and_in_parts(name, [*bfloat16, *settings], folder=tmp_path)
    train_together(tmp_path, runs, processes=2)
    for name in variants:
        whole = read_losses(tmp_path / f"{name} whole")
        assert read_losses(tmp_path / f"{name} in parts") == whole
        expected = read_losses(tmp_path / f"{name.replace('weights', 'gathered')} float32")
        assert whole == pytest.approx(expected, rel=5e-3) and whole != expected

    # On one rank, from what two had saved.
    alone = tmp_path / "on one rank"
    shutil.copytree(tmp_path / "plain in parts", alone)
    shutil.rmtree(alone / "checkpoint" / "step-00000008")
    train_together(tmp_path, {alone.name: [*bfloat16, f"{STEPS}=8"]}, processes=1)
    assert read_losses(alone) == pytest.approx(read_losses(tmp_path / "plain whole"), rel=5e-4)
