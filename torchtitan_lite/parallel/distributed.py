"""The process group: joining it, its time-outs, and the few agreements between ranks that are not about tensors."""

import os
import signal
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import NoReturn, TypeVar

import torch
import torch.distributed as dist

from torchtitan_lite.config import CommConfig
from torchtitan_lite.errors import ConfigError, RunError

T = TypeVar("T")


def init_distributed(comm: CommConfig) -> torch.device:
    """This process's device, after joining the process group that torchrun describes in the environment: NCCL for CUDA
    tensors and gloo for CPU tensors.

    Raises ConfigError outside torchrun, and where a host has more processes than GPUs."""
    if "RANK" not in os.environ:
        raise ConfigError(
            "this process was not started by torchrun (RANK is not set); use "
            "torchrun --nproc-per-node 2 -m torchtitan_lite.train --job.config_file FILE, or ./run_train.sh."
        )
    local_rank, local_size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if torch.cuda.is_available():
        if local_size > torch.cuda.device_count():
            raise ConfigError(
                f"{local_size} processes were started on a host with {torch.cuda.device_count()} GPUs; "
                f"start at most one a GPU (NGPU={torch.cuda.device_count()})."
            )
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(comm.trace_buf_size))
        os.environ.setdefault("TORCH_NCCL_TRACE_BUFFER_SIZE", str(comm.trace_buf_size))  # its name before torch 2.12
        backend = "cpu:gloo,cuda:nccl"
    else:
        if Path("/dev/nvidia0").exists() and os.environ.get("CUDA_VISIBLE_DEVICES") != "":
            raise ConfigError(
                f"this host has NVIDIA GPUs that PyTorch {torch.__version__} cannot use: its build or the driver does "
                'not fit; mend that, or set CUDA_VISIBLE_DEVICES="" to train on CPU.'
            )
        device = torch.device("cpu")
        backend = "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=comm.init_timeout_seconds))
    return device


def set_timeouts(seconds: int) -> None:
    """Let collectives of every process group take `seconds` from now on."""
    for group in dist.distributed_c10d._world.pg_map:
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)


def on_rank0(make: Callable[[], T]) -> T:
    """What `make` returned on rank 0, where alone it runs. A RunError that it raised is raised on every rank."""
    outcome: list[T | RunError | None] = [None]
    if dist.get_rank() == 0:
        try:
            outcome = [make()]
        except RunError as error:
            outcome = [error]
    dist.broadcast_object_list(outcome)
    if isinstance(outcome[0], RunError):
        raise outcome[0]
    return outcome[0]  # type: ignore[return-value]


def leave_distributed(exit_code: int) -> NoReturn:
    """End this process without tearing the interpreter down: gloo's threads may outlive the process group, and then
    abort the process after all its work is done."""
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


class StopSignal:
    """SIGTERM or SIGINT as a wish that all ranks share: a stop at the end of the step. SIGTERM may come again, as some
    schedulers signal every process and torchrun passes it on too; a second SIGINT ends this process at once."""

    def __init__(self) -> None:
        self._received = 0
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._received = number
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    def agreed(self, *, failed: bool) -> tuple[signal.Signals | None, bool]:
        """The signal that some rank has received, if any, and whether some rank has `failed`: the same answer on all
        ranks. A collective call on CPU."""
        said = torch.tensor([self._received, failed], dtype=torch.int32)
        dist.all_reduce(said, op=dist.ReduceOp.MAX)
        number, any_failed = said.tolist()
        return (signal.Signals(number) if number else None), bool(any_failed)
