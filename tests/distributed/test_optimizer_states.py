"""Moments in fewer bits train nearly as float32 ones do, and a run resumes with them, also on
another number of ranks."""

import shutil
from pathlib import Path

import pytest
from launching import read_losses, train_together
from matrix import STEPS

GATHERED = ["--float8.enable_float8_linear", "--float8.enable_fsdp_float8_all_gather"]

pytestmark = pytest.mark.timeout(300)


def test_low_bit_moments_are_sharded_saved_and_resumed(tmp_path: Path) -> None:
    common = ["--lr_scheduler.total_steps=8", "--checkpoint.enable"]
    runs = {}
    for dtype in ("int8", "bfloat16"):
        settings = [
            *common,
            *(GATHERED if dtype == "bfloat16" else []),
            f"--optimizer.state_dtype={dtype}",
        ]
        runs[f"{dtype} whole"] = [*settings, f"{STEPS}=8"]
        runs[f"{dtype} in parts"] = [*settings, f"{STEPS}=4"]
        runs[f"{dtype} resumed"] = [
            *settings,
            f"{STEPS}=8",
            f"--job.dump_folder={tmp_path}/{dtype} in parts",
        ]
    references = {
        "float32": [*common, f"{STEPS}=8"],
        "float32 gathered": [*common, *GATHERED, f"{STEPS}=8"],
    }
    train_together(tmp_path, references | runs, processes=2)
    for dtype in ("int8", "bfloat16"):
        whole = read_losses(tmp_path / f"{dtype} whole")
        assert read_losses(tmp_path / f"{dtype} in parts") == whole
        expected = read_losses(
            tmp_path / ("float32 gathered" if dtype == "bfloat16" else "float32")
        )
        assert whole == pytest.approx(expected, rel=5e-3) and whole != expected

    # On one rank, from what two had saved.
    alone = tmp_path / "on one rank"
    shutil.copytree(tmp_path / "int8 in parts", alone)
    shutil.rmtree(alone / "checkpoint" / "step-00000008")
    train_together(
        tmp_path, {alone.name: [*common, "--optimizer.state_dtype=int8", f"{STEPS}=8"]}, processes=1
    )
    assert read_losses(alone) == pytest.approx(read_losses(tmp_path / "int8 whole"), rel=5e-4)
