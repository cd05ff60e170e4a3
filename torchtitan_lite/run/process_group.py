"""The process group: how a process joins it, what ranks must agree on, time-outs, how it ends."""

import os
import socket
import sys
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from torchtitan_lite.base.collectives import on_all_ranks
from torchtitan_lite.base.errors import ConfigError
from torchtitan_lite.config import CommConfig

# NCCL aborts the process, while gloo, whose time-out should come first, raises an error.
NCCL_EXTRA_SECONDS = 30


def read_rank() -> tuple[int, int]:
    """Return this process's rank and the number of processes. Raises ConfigError outside torchrun,
    which sets them."""
    try:
        rank, world_size, *_ = (
            int(os.environ[name])
            for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        )
    except (KeyError, ValueError) as error:
        raise ConfigError(
            f"this process was not started by torchrun (no number in {error}); use torchrun "
            "--nproc-per-node 2 -m torchtitan_lite.train --job.config_file FILE, or ./run_train.sh."
        ) from error
    return rank, world_size


def local_world_size() -> int:
    """Return the number of the job's processes on this host, which torchrun sets."""
    return int(os.environ["LOCAL_WORLD_SIZE"])


def connect_store(timeout_s: float) -> dist.Store:
    """Connect to the store of torchrun's job, where ranks meet. An answer may take `timeout_s`, and
    never comes from a server that is stopped. One connection serves one thread at a time.

    Each start has keys of its own, and each of its attempts: those of the attempt before stay in
    the store. A process that was started alone, without MASTER_ADDR, gets one without a port."""
    if "MASTER_ADDR" not in os.environ and read_rank()[1] == 1:
        return dist.HashStore()
    start = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store, _, _ = next(dist.rendezvous("env://", timeout=timedelta(seconds=timeout_s)))
    return dist.PrefixStore(f"{start}/attempt-{attempt}", store)


def check_started_alike(facts: Mapping[str, str]) -> None:
    """Raise ConfigError on every rank unless all have the same `facts`, values by name: ranks that
    differ would train garbage, or hang. Collective.

    For each fact it names the value of rank 0, and of the first rank that has another one."""
    answers = on_all_ranks(lambda: (socket.gethostname(), facts))
    host0, facts0 = answers[0]
    lines: dict[str, str] = {}
    for rank, (host, found) in enumerate(answers):
        for name in {**facts0, **found}:
            value0, value = facts0.get(name, "none"), found.get(name, "none")
            if value != value0:
                other = f"{value0} (rank 0 on {host0}); {value} (rank {rank} on {host})"
                lines.setdefault(name, f"{name} differs between ranks: {other}")
    if lines:
        fix = "start every node with the same config, command line and installation."
        raise ConfigError("\n".join([*lines.values(), fix]))


def init_distributed(comm: CommConfig) -> torch.device:
    """Join the process group, NCCL for CUDA tensors and gloo for others, and return this process's
    device. Raises ConfigError outside torchrun, and if the host lacks GPUs that PyTorch can use."""
    rank, world_size = read_rank()
    if has_gpus():
        backend, device = "cpu:gloo,cuda:nccl", _set_up_gpu(comm)
    else:
        backend, device = "gloo", torch.device("cpu")

    # Ranks of one host meet where no other host reaches them.
    if local_world_size() == world_size:
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, "lo")
    store = connect_store(comm.init_timeout_seconds)
    timeout = timedelta(seconds=comm.init_timeout_seconds)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    set_timeouts(comm.init_timeout_seconds)
    return device


def has_gpus() -> bool:
    """Return whether there are GPUs. Raises ConfigError for some that PyTorch cannot use."""
    there = Path("/dev/nvidia0").exists() and os.environ.get("CUDA_VISIBLE_DEVICES") != ""
    if there and not torch.cuda.is_available():
        raise ConfigError(
            f"this host has NVIDIA GPUs that PyTorch {torch.__version__} cannot use: its build or "
            "the driver does not match; install one that does, or set "
            'CUDA_VISIBLE_DEVICES="" to compute on the CPU.'
        )
    return torch.cuda.is_available()


def _set_up_gpu(comm: CommConfig) -> torch.device:
    """Select this process's GPU and configure its allocator and NCCL's flight recorder."""
    processes, gpus = local_world_size(), torch.cuda.device_count()
    if processes > gpus:
        raise ConfigError(
            f"{processes} processes were started on a host with {gpus} GPUs; start at most one a "
            f"GPU (NGPU={gpus})."
        )
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)

    # Memory segments that can grow leave fewer unusable gaps. The environment takes precedence.
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(comm.trace_buf_size))
    return device


def set_timeouts(seconds: int, *, but_of: dist.ProcessGroup | None = None) -> None:
    """Set the time-out of all process groups except `but_of`."""
    timeout = timedelta(seconds=seconds)
    for group in dist.distributed_c10d._world.pg_map:
        if group is but_of:
            continue
        dist.distributed_c10d._set_pg_timeout(timeout, group)

        # Groups whose backend for CUDA tensors is gloo have no NCCL.
        if "cuda:nccl" in dist.get_backend_config(group):
            nccl = group._get_backend(torch.device("cuda"))
            nccl._set_default_timeout(timeout + timedelta(seconds=NCCL_EXTRA_SECONDS))


def end_process(exit_code: int) -> NoReturn:
    """End this process without the interpreter's teardown, in which gloo's threads can abort it and
    threads can wait for ranks that are lost."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)
