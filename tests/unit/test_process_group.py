"""Joining the process group: its store, what is refused before it, and how a GPU is set up."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from torchtitan_lite.base.collectives import on_all_ranks, on_rank0
from torchtitan_lite.base.errors import ConfigError
from torchtitan_lite.config import CommConfig, DebugConfig, ParallelDegrees
from torchtitan_lite.parallel.mesh import build_mesh, init_alone, set_determinism
from torchtitan_lite.run import process_group as distributed
from torchtitan_lite.run.process_group import connect_store, init_distributed

ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
BUFFER_SIZE = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")


def start_on(monkeypatch: pytest.MonkeyPatch, *, gpus: int, processes: int = 1) -> list[str]:
    """Call init_distributed on a host with `gpus`, up to its search for the other processes.
    Return the settings of the allocator."""
    for name, value in {"WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}.items():
        monkeypatch.setenv(name, str(value))
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    settings: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", settings.append)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(distributed, "connect_store", lambda timeout: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        init_distributed(CommConfig(trace_buf_size=7))
    return settings


# ----- init_distributed -----


def test_a_process_that_torchrun_did_not_start_is_refused(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "two" if name == "WORLD_SIZE" else "0")
    with pytest.raises(ConfigError, match="not started by torchrun .no number in .*'two'"):
        init_distributed(CommConfig())
    monkeypatch.delenv("RANK")
    with pytest.raises(ConfigError, match=r"'RANK'.*torchrun .* -m torchtitan_lite\.trai"):
        init_distributed(CommConfig())


def test_more_processes_than_gpus_are_refused(monkeypatch):
    with pytest.raises(ConfigError, match=r"^4 processes .* 2 GPUs.*NGPU=2"):
        start_on(monkeypatch, gpus=2, processes=4)


def test_gpus_that_torch_cannot_use_are_refused(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(Path, "exists", lambda path: str(path) == "/dev/nvidia0")
    with pytest.raises(ConfigError, match=r"NVIDIA GPUs that PyTorch .* cannot use.*CUDA_VISIBLE"):
        start_on(monkeypatch, gpus=0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    start_on(monkeypatch, gpus=0)


@pytest.mark.parametrize("variable", [None, *ALLOCATOR])
def test_a_gpus_allocator_and_trace_buffer(variable, monkeypatch):
    for name in (*ALLOCATOR, *BUFFER_SIZE):
        monkeypatch.delenv(name, raising=False)
    if variable:
        monkeypatch.setenv(variable, "max_split_size_mb:512")
    asked = start_on(monkeypatch, gpus=1)
    assert asked == ([] if variable else ["expandable_segments:True"])
    assert [os.environ.get(name) for name in BUFFER_SIZE] == ["7", None]


def test_connect_store_separates_the_keys_of_starts_and_attempts(monkeypatch):
    served = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(served.port), "RANK": "0"}
    env |= {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    env |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    first, also_first = connect_store(5), connect_store(5)
    first.set("address", "old")
    assert also_first.get("address") == b"old"
    for name in ("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_RUN_ID"):
        with monkeypatch.context() as patch:
            patch.setenv(name, "1")
            assert not connect_store(5).check(["address"])


# ----- init_alone -----


def listening() -> set[str]:
    """Return the inodes of this process's sockets that listen for TCP connections."""
    tables = [Path(f"/proc/self/net/{name}").read_text() for name in ("tcp", "tcp6")]
    rows = [line.split() for table in tables for line in table.splitlines()]
    listens = {row[9] for row in rows if row[3] == "0A"}
    files = (os.path.realpath(path) for path in Path("/proc/self/fd").iterdir())
    return listens & {file.rpartition("[")[2].strip("]") for file in files}


def test_a_process_alone_needs_no_network():
    before = listening()
    assert init_alone() == torch.device("cpu")
    assert on_rank0(lambda: 3) == 3 and on_all_ranks(lambda: 4) == [4]
    mesh = build_mesh(ParallelDegrees(1, 1, 1, 1), device_type="cpu")
    total = torch.ones(2)
    dist.all_reduce(total, group=mesh["tp"].get_group())
    assert total.tolist() == [1, 1] and listening() == before


def test_set_determinism_seeds_and_is_deterministic_only_if_asked(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    set_determinism(DebugConfig(seed=3))
    first = torch.rand(1)
    assert not torch.are_deterministic_algorithms_enabled()
    set_determinism(DebugConfig(seed=3, deterministic=True))
    assert torch.equal(torch.rand(1), first)
    assert torch.are_deterministic_algorithms_enabled()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"]
