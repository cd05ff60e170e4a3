"""Joining the process group: its store, what is refused before it, and how a GPU is set up."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from torchtitan_lite.config import CommConfig
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.parallel import distributed
from torchtitan_lite.parallel.distributed import connect_store, init_distributed

ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
BUFFER_SIZE = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")


def start_on(monkeypatch: pytest.MonkeyPatch, *, gpus: int, processes: int = 1) -> None:
    """Call init_distributed on a host with `gpus`, up to its search for the other processes."""
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, str(processes))
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(distributed, "connect_store", lambda timeout: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        init_distributed(CommConfig(trace_buf_size=7))


def test_a_process_that_torchrun_did_not_start_is_refused_with_the_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(
        ConfigError, match=r"RANK is not set.*torchrun --nproc-per-node 2 -m torchtitan_lite\.train"
    ):
        init_distributed(CommConfig())


def test_more_processes_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ConfigError, match=r"4 processes were started on a host with 2 GPUs.*NGPU=2"
    ):
        start_on(monkeypatch, gpus=2, processes=4)


def test_gpus_that_torch_cannot_use_are_no_reason_to_train_on_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(Path, "exists", lambda path: str(path) == "/dev/nvidia0")
    with pytest.raises(
        ConfigError, match=r"has NVIDIA GPUs that PyTorch .* cannot use.*CUDA_VISIBLE_DEVICES="
    ):
        start_on(monkeypatch, gpus=0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    start_on(monkeypatch, gpus=0)


@pytest.mark.parametrize("variable", [None, *ALLOCATOR])
def test_a_gpus_memory_segments_can_grow_unless_the_environment_configures_the_allocator(
    variable: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ALLOCATOR:
        monkeypatch.delenv(name, raising=False)
    if variable:
        monkeypatch.setenv(variable, "max_split_size_mb:512")
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "7")  # so that it is restored afterwards
    asked: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", asked.append)
    start_on(monkeypatch, gpus=1)
    assert asked == ([] if variable else ["expandable_segments:True"])


def test_the_trace_buffer_has_its_size_by_the_name_that_is_not_deprecated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", lambda settings: None)
    for name in BUFFER_SIZE:
        monkeypatch.setenv(name, "")  # so that it is restored afterwards
        monkeypatch.delenv(name)
    start_on(monkeypatch, gpus=1)
    assert [os.environ.get(name) for name in BUFFER_SIZE] == ["7", None]


def test_attempts_do_not_see_each_others_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    served = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    env = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(served.port),
        "RANK": "0",
        "WORLD_SIZE": "2",
    }
    for name, value in {**env, "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
        monkeypatch.setenv(name, value)
    first, also_first = connect_store(5), connect_store(5)
    first.set("address", "old")
    assert also_first.get("address") == b"old"
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert not connect_store(5).check(["address"])
