"""Checkpoints laid out as torchtitan's are read by any number of processes."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from launching import FOLDER, finish
from torchtitan_layout import save_torchtitan
from torchtitan_worker import LAYOUTS, make_weights

from torchtitan_lite.checkpoint.torchtitan_folder import load_torchtitan


# ----- initial_load_path: a folder of torchtitan -----
@pytest.mark.timeout(120)
def test_weights_arrive_bit_by_bit_on_other_numbers_of_processes(tmp_path: Path) -> None:
    """From two processes to two and one, and from one to two."""
    weights = make_weights()
    save_torchtitan(tmp_path / "alone", weights)
    finish(str(FOLDER / "torchtitan_worker.py"), str(tmp_path), processes=2)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for layout in LAYOUTS:
            state = {f"model.{name}": torch.zeros_like(each) for name, each in weights.items()}
            load_torchtitan(tmp_path / layout, state, stages=None, group=None)
            assert all(torch.equal(state[f"model.{name}"], each) for name, each in weights.items())
    finally:
        dist.destroy_process_group()
