"""Build a run's model: on meta, in float8, sharded, initialised; and log what it is."""

from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh

from torchtitan_lite.config import MetricsConfig
from torchtitan_lite.float8.convert import resolve_emulate
from torchtitan_lite.float8.observe import Asked
from torchtitan_lite.float8.selection import LinearChoice, format_choices
from torchtitan_lite.job import Job
from torchtitan_lite.logger import logger
from torchtitan_lite.metrics.devices import DeviceSpec, lookup_device
from torchtitan_lite.metrics.flops import FlopsLedger
from torchtitan_lite.models.init import init_weights
from torchtitan_lite.models.llama3 import Transformer, attention_backend
from torchtitan_lite.parallel.parallelize import parallelize
from torchtitan_lite.parallel.tensor_parallel import float8_gathers
from torchtitan_lite.patches import keep_shared_casts, tag_compiler_cache
from torchtitan_lite.planner.meta_model import build_meta_model


def build_model(
    job: Job, *, mesh: DeviceMesh, device: torch.device
) -> tuple[Transformer, FlopsLedger, Asked]:
    """Build the model: on meta, in float8, sharded, then initialised.

    Returns the model, its FLOPs per token, and the float8 operations that a step must show.
    """
    config, args, float8 = job.config, job.model_args, job.config.float8
    attention = attention_backend(
        args,
        tp_degree=job.degrees.tp,
        dtype=getattr(torch, config.training.mixed_precision_param),
        device=device,
    )
    meta = build_meta_model(
        job,
        emulate=float8.enable_float8_linear and resolve_emulate(float8, device=device),
        fused_attention=attention != "MATH",
    )
    model, ledger = meta.model, meta.ledger
    asked = asked_of_step(job, meta.choices, ledger=ledger)

    # Report the model, its float8 linears, and its FLOPs.
    logger.info(
        f"Llama 3 {config.model.flavor}: {meta.parameters:,} parameters, "
        f"vocabulary {args.vocab_size}; attention by {attention}"
    )
    if float8.enable_float8_linear:
        log_float8(job, meta.choices, asked)
        if (spec := planned_device(device, config.metrics)) is not None:
            logger.info(f"predicted: {meta.predict(spec).verdict}")
    log_flops(job, ledger)

    if config.compile.enable:
        tag_compiler_cache(attention)  # its key does not contain the backend
    if float8.enable_float8_linear and config.compile.covers("model"):
        keep_shared_casts()
    parallelize(
        model,
        mesh,
        parallelism=config.parallelism,
        activation_checkpoint=config.activation_checkpoint,
        compile=config.compile,
        training=config.training,
    )
    model.to_empty(device="cpu" if config.training.enable_cpu_offload else device)
    init_weights(model, seed=config.debug.seed, buffer_device=device)
    return model, ledger, asked


def asked_of_step(job: Job, choices: Sequence[LinearChoice], *, ledger: FlopsLedger) -> Asked:
    """Return the float8 operations that each rank must run in a step."""
    float8, degrees, microbatches = job.config.float8, job.degrees, job.batch.grad_accum_steps
    converted = {name for choice in choices if choice.converted for name in choice.names}
    fsdp_groups = {tuple(name.split(".")[:2]) for name in converted}  # blocks, or the last group
    gathers_weights = float8.enable_fsdp_float8_all_gather and degrees.dp_shard > 1
    gathers_activations = float8.recipe.gathers_activations and degrees.tp > 1
    fuses = job.config.parallelism.enable_async_tensor_parallel
    return Asked(
        linears=len(converted),
        matmuls=microbatches * len(converted) * len(float8.recipe.matmuls),
        matmuls_run_in={"fp8": "float8", "bf16": "bfloat16", "fp32": "float32"}[ledger.fp8_runs_in],
        fsdp_gathers=len(fsdp_groups) if gathers_weights else 0,
        tp_gathers=microbatches * float8_gathers(converted) if gathers_activations else 0,
        # At least one fusion a block: the compiler chooses which collectives it fuses.
        fused=microbatches * job.model_args.n_layers if fuses else 0,
    )


def log_float8(job: Job, choices: Sequence[LinearChoice], asked: Asked) -> None:
    """Log which linears train in float8, and how tensor parallelism gathers activations."""
    dtype = job.config.training.mixed_precision_param
    logger.info(f"float8, {job.config.float8.recipe_name}:\n{format_choices(choices)}")
    if asked.tp_gathers:
        logger.info(
            f"tensor parallelism gathers {asked.tp_gathers} activations and gradients a step in "
            f"float8, the others in {dtype}"
        )
    elif job.degrees.tp > 1:
        logger.info(
            f"tensor parallelism gathers all activations in {dtype}: only a recipe with one scale "
            "per tensor gathers them in float8"
        )


def log_flops(job: Job, ledger: FlopsLedger) -> None:
    """Log the FLOPs per token by precision, and how they were counted."""
    parts = [
        f"{count / ledger.total:.2%} {name}" for name, count in ledger.by_precision.items() if count
    ]
    line = f"{ledger.total:,} FLOPs per token: {', '.join(parts)}"
    if ledger.emulated:
        line += f" (float8, emulated, counts as {ledger.fp8_runs_in})"
    if recomputed := sum(ledger.recompute.values()):
        line += f"; {recomputed / ledger.total:.2%} more are recomputed"
    if job.config.training.document_mask:
        line += "; attention counts as if documents were one"
    logger.info(line)


def planned_device(device: torch.device, metrics: MetricsConfig) -> DeviceSpec | None:
    """Return the data sheet that float8 is planned by; None on CPU, for an unknown GPU and for one
    whose float8 peak is not known."""
    on_gpu = device.type == "cuda"
    spec = lookup_device(torch.cuda.get_device_name(device)) if on_gpu else None
    spec = spec and spec.with_given(metrics)
    return spec if spec and spec.fp8_tflops else None
