"""What all tests of several processes share."""

from collections.abc import Iterator

import pytest
from launching import ENV


@pytest.fixture(scope="module", autouse=True)
def without_gpus() -> Iterator[None]:
    """Processes train on CPU, also where there are GPUs, which may be fewer than they are."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        monkeypatch.setitem(ENV, "CUDA_VISIBLE_DEVICES", "")
        yield
