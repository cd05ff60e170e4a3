"""What all tests share."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent / "distributed"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9):
        return
    for item in items:
        if item.get_closest_marker("gpu"):  # the keywords hold the names of folders too
            item.add_marker(pytest.mark.skip(reason="no CUDA GPU of compute capability 8.9 or newer"))
