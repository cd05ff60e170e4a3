"""The process group: joining it, its time-outs, its end."""

import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from torchtitan_lite.config import CommConfig
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.logger import logger
from torchtitan_lite.parallel.store import connect_store

NCCL_EXTRA_SECONDS = 30
"""That NCCL waits longer than gloo: at its time-out NCCL aborts the process, where gloo raises an
error."""


def read_rank() -> tuple[int, int]:
    """This process's rank and the number of processes, from the environment. Raises ConfigError
    outside torchrun."""
    if "RANK" not in os.environ:
        raise ConfigError(
            "this process was not started by torchrun (RANK is not set); use "
            "torchrun --nproc-per-node 2 -m torchtitan_lite.train --job.config_file FILE, or ./run_train.sh."
        )
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def local_world_size() -> int:
    """Processes of the job on this host, as torchrun started them."""
    return int(os.environ["LOCAL_WORLD_SIZE"])


def init_distributed(comm: CommConfig) -> torch.device:
    """This process's device, after joining the process group that torchrun describes in the
    environment: NCCL for CUDA tensors and gloo for CPU tensors.

    Raises ConfigError outside torchrun, and where a host has more processes than GPUs."""
    rank, world_size = read_rank()
    local_rank = int(os.environ["LOCAL_RANK"])
    if torch.cuda.is_available():
        if local_world_size() > torch.cuda.device_count():
            raise ConfigError(
                f"{local_world_size()} processes were started on a host with {torch.cuda.device_count()} GPUs; "
                f"start at most one a GPU (NGPU={torch.cuda.device_count()})."
            )
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        _let_segments_grow()
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(comm.trace_buf_size))
        backend = "cpu:gloo,cuda:nccl"
    else:
        if Path("/dev/nvidia0").exists() and os.environ.get("CUDA_VISIBLE_DEVICES") != "":
            raise ConfigError(
                f"this host has NVIDIA GPUs that PyTorch {torch.__version__} cannot use: its build or the driver does "
                'not fit; mend that, or set CUDA_VISIBLE_DEVICES="" to train on CPU.'
            )
        device = torch.device("cpu")
        backend = "gloo"
        if rank == 0 and torch.get_num_threads() > 1 and "OMP_WAIT_POLICY" not in os.environ:
            logger.info(
                f"OMP_WAIT_POLICY is not set, so the {torch.get_num_threads()} OpenMP threads of a process spin while "
                "they wait, which on a busy machine can slow training down many times; set OMP_WAIT_POLICY=PASSIVE."
            )
    timeout = comm.init_timeout_seconds
    store = connect_store(timeout)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout)
    )
    set_timeouts(timeout)
    return device


def _let_segments_grow() -> None:
    """Have the GPU's memory taken in segments that grow, so that less of it lies idle in gaps that
    nothing fits; unless the environment says how the allocator is to work."""
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


def set_timeouts(seconds: int, *, but_of: dist.ProcessGroup | None = None) -> None:
    """Let collectives of every process group but one take `seconds` from now on."""
    for group in dist.distributed_c10d._world.pg_map:
        if group is not but_of:
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)
            if "cuda:nccl" in dist.get_backend_config(
                group
            ):  # gloo alone is there for CUDA tensors too
                group._get_backend(torch.device("cuda"))._set_default_timeout(
                    timedelta(seconds=seconds + NCCL_EXTRA_SECONDS)
                )


def end_process(exit_code: int) -> NoReturn:
    """End this process without tearing the interpreter down: gloo's threads may outlive the process
    group, and then abort the process after all its work is done; and a thread may wait for ranks
    that are lost."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)
