"""Where these tests run: with a CUDA build of PyTorch, and without a GPU."""

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.version.cuda is None:
        reason = "this PyTorch has no CUDA build"
    elif torch.cuda.is_available():
        reason = "there is a real GPU"
    else:
        return
    for item in items:
        if item.get_closest_marker("deviceless"):
            item.add_marker(pytest.mark.skip(reason=reason))
