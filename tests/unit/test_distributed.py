"""Joining the process group: what is refused before it. Agreements between ranks are tested with
real processes."""

import os
from pathlib import Path
from unittest import mock

import pytest
import torch

from torchtitan_lite.config import CommConfig
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.parallel import distributed
from torchtitan_lite.parallel.distributed import init_distributed


def test_a_process_that_torchrun_did_not_start_is_told_how_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(
        ConfigError, match=r"RANK is not set.*torchrun --nproc-per-node 2 -m torchtitan_lite\.train"
    ):
        init_distributed(CommConfig())


def start_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Call init_distributed as on a host with a GPU, up to where it looks for the other
    processes."""
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(distributed, "connect_store", lambda timeout: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        init_distributed(CommConfig(trace_buf_size=7))


def test_more_processes_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "4",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(
        ConfigError, match=r"4 processes were started on a host with 2 GPUs.*NGPU=2"
    ):
        init_distributed(CommConfig())


def test_gpus_that_torch_cannot_use_are_no_reason_to_train_on_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(Path, "exists", lambda path: str(path) == "/dev/nvidia0")
    with pytest.raises(
        ConfigError, match=r"has NVIDIA GPUs that PyTorch .* cannot use.*CUDA_VISIBLE_DEVICES="
    ):
        init_distributed(CommConfig())


@pytest.mark.parametrize("variable", [None, "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_the_memory_of_a_gpu_is_taken_in_segments_that_grow_unless_told_otherwise(
    variable: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    if variable:
        monkeypatch.setenv(variable, "max_split_size_mb:512")
    asked: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", asked.append)
    start_on_a_gpu(monkeypatch)
    assert asked == ([] if variable else ["expandable_segments:True"])


def test_the_trace_buffer_has_its_size_by_the_name_that_is_not_deprecated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", lambda settings: None)
    with mock.patch.dict(os.environ):
        for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"):
            os.environ.pop(name, None)
        start_on_a_gpu(monkeypatch)
        assert {name: value for name, value in os.environ.items() if "BUFFER_SIZE" in name} == {
            "TORCH_FR_BUFFER_SIZE": "7"
        }
