"""What all tests share."""

import sys
from collections.abc import Generator
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from torchtitan_lite.errors import ConfigError

sys.path.insert(0, str(Path(__file__).parent / "distributed"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9):
        return
    for item in items:
        if item.get_closest_marker("gpu"):  # the keywords hold the names of folders too
            item.add_marker(
                pytest.mark.skip(reason="no CUDA GPU of compute capability 8.9 or newer")
            )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, None, None]:
    """Skip a test that the product refuses to run with a torchao that has no MXFP8."""
    try:
        return (yield)
    except ConfigError as error:
        if version("torchao").startswith("0.17.") and "needs torchao 0.18" in str(error):
            pytest.skip(f"torchao {version('torchao')} has no MXFP8")
        raise
