"""Prepare a run on this device: derive its job, resolve "auto", and predict what float8 gains."""

import torch
import torch.distributed as dist

from torchtitan_lite.base.collectives import on_all_ranks
from torchtitan_lite.base.errors import ConfigError
from torchtitan_lite.base.logger import logger
from torchtitan_lite.catalog.devices import DeviceSpec, lookup_device
from torchtitan_lite.checkpoint.resume import Resume
from torchtitan_lite.config import Config, keep_batch
from torchtitan_lite.config.job import Job, build_job
from torchtitan_lite.data.tokenizer import Tokenizer, build_tokenizer
from torchtitan_lite.metrics.hardware import given_peaks, total_memory_gib
from torchtitan_lite.metrics.writers import check_writers_installed
from torchtitan_lite.run.process_group import local_world_size
from torchtitan_lite.training.model import find_attention

from .auto import resolve_auto
from .constants import CONTEXT_GIB
from .memory import step_memory
from .share import Share
from .workload import build_workload


def prepare_job(
    config: Config, *, device: torch.device, resume: Resume | None = None
) -> tuple[Job, Tokenizer]:
    """Derive the job and its tokenizer, and choose "auto" values for this device. Log what float8
    is predicted to gain.

    A run that resumes keeps its global batch size. A collective call. Raises ConfigError or
    DataError."""
    world_size = dist.get_world_size()
    if resume is not None and resume.manifest.progress.step:
        mesh = resume.manifest.mesh
        saved, dp = resume.manifest.config, mesh.get("dp_replicate", 1) * mesh.get("dp_shard", 1)
        config = keep_batch(config, saved=saved, saved_dp=dp, world_size=world_size)
    on_all_ranks(lambda: check_writers_installed(config.metrics))
    if config.profiling.enable_memory_snapshot and device.type != "cuda":
        raise ConfigError(
            "[profiling] enable_memory_snapshot = true records CUDA memory, and this run is on "
            "CPU; set it to false."
        )
    tokenizer = build_tokenizer(config.model.tokenizer_path)
    job = build_job(config, world_size=world_size, tokenizer=tokenizer.values)

    # The smallest memory of any rank decides for all.
    memory_gib = on_all_ranks(lambda: total_memory_gib(device, sharing=local_world_size()))
    check_states(job, sum(memory_gib) / world_size)
    spec = planned_device(device, config)
    usable_gib = min(memory_gib) - (CONTEXT_GIB if device.type == "cuda" else 0.0)
    job = resolve_auto(job, memory_gib=usable_gib, device=spec)
    logger.info(f"{job.layout()}, on {device.type}")

    # What float8 should gain, before the run begins.
    if spec is not None and job.config.float8.enable_float8_linear:
        attention = find_attention(job, device=device)
        work = build_workload(job, fused_attention=attention != "MATH")
        logger.info(f"predicted: {work.gain(spec).verdict()}")
    return job, tokenizer


def check_states(job: Job, memory_gib: float) -> None:
    """Raise ConfigError if weights, gradients and optimizer states alone need more than
    `memory_gib`, both as the mean over ranks: the ranks of a host share it in any way."""
    last = [step_memory(Share(job, (), rank=rank))[-1] for rank in range(job.degrees.pp)]
    states = sum(each.parameters + each.gradients + each.optimizer_states for each in last)
    needed_gib = states / len(last) / 2**30
    if needed_gib > memory_gib:
        raise ConfigError(
            f"[model] {job.model_name}: weights, gradients and optimizer states need at least "
            f"{needed_gib:.1f} GiB of each rank, which has {memory_gib:.1f}; use more nodes, a "
            "smaller model, or on GPUs [training] enable_cpu_offload = true"
        )


def planned_device(device: torch.device, config: Config) -> DeviceSpec | None:
    """Return the device's data sheet for planning. None on CPU, for an unknown GPU, and if float8
    is on and its peak is unknown."""
    on_gpu = device.type == "cuda"
    spec = lookup_device(torch.cuda.get_device_name(device)) if on_gpu else None
    spec = spec and spec.with_peaks(given_peaks(config.metrics))
    in_bf16 = not config.float8.enable_float8_linear
    return spec if spec and (in_bf16 or spec.fp8_tflops) else None
