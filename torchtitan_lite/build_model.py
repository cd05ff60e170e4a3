"""Build a run's model: convert it to float8, cut it into stages, make them parallel."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch
from torch.distributed.device_mesh import DeviceMesh

from torchtitan_lite.config import CompileConfig, zero_bubble
from torchtitan_lite.float8.convert import must_emulate
from torchtitan_lite.float8.graph_passes import add_passes
from torchtitan_lite.float8.observe import Asked
from torchtitan_lite.float8.selection import format_choices
from torchtitan_lite.job import Job
from torchtitan_lite.logger import logger
from torchtitan_lite.metrics.flops import FlopsLedger
from torchtitan_lite.models.flavors import OUTPUT
from torchtitan_lite.models.init import init_weights
from torchtitan_lite.models.llama3 import Transformer, attention_backend
from torchtitan_lite.models.loss import CrossEntropy
from torchtitan_lite.parallel.microbatches import Microbatches, ModelLoss, PlainMicrobatches
from torchtitan_lite.parallel.parallelize import parallelize
from torchtitan_lite.parallel.pipeline import PipelinedMicrobatches, Timed, cut_stage
from torchtitan_lite.parallel.tensor_parallel import float8_gathers
from torchtitan_lite.patches import tag_compiler_cache
from torchtitan_lite.planner.meta_model import build_meta_model, planned_device
from torchtitan_lite.planner.prediction import format_verdict


@dataclass(frozen=True)
class BuiltModel:
    """This rank's stages of the model, the model itself without pipeline parallelism."""

    stages: list[Transformer]
    indices: Sequence[int]
    """Which stages of the pipeline they are."""
    ledger: FlopsLedger
    """FLOPs per token of the whole model."""
    linears: list[str]
    """Names of the whole model's linears in float8."""
    asked: Asked
    """Float8 operations expected of this rank in each step, and compiled graphs."""


def build_model(job: Job, mesh: DeviceMesh, *, device: torch.device) -> BuiltModel:
    """Build the model on meta, convert it to float8, cut it into stages, shard them, then
    initialise their weights."""
    config, float8, training = job.config, job.config.float8, job.config.training
    args, dtype = job.model_args, getattr(torch, training.mixed_precision_param)
    attention = attention_backend(
        args, cp_degree=job.degrees.cp, tp_degree=job.degrees.tp, dtype=dtype, device=device
    )
    meta = build_meta_model(
        job,
        emulate=float8.enable_float8_linear and must_emulate(float8, device=device),
        fused_attention=attention != "MATH",
    )

    # Report the model, its float8 linears, and its FLOPs.
    logger.info(
        f"model {job.model_name}: {meta.parameters:,} parameters, vocabulary "
        f"{args.vocab_size}{', tied' if args.tie_embeddings else ''}; attention by {attention}"
    )
    if float8.enable_float8_linear:
        logger.info(f"float8, {float8.recipe_name}:\n{format_choices(meta.choices)}")
        if (spec := planned_device(device, config)) is not None:
            logger.info(f"predicted: {format_verdict(meta.predict(spec))}")
    log_flops(meta.ledger, document_mask=training.document_mask)

    # Parallelize the model, then allocate and initialise its shards.
    if config.compile.enable:
        tag_compiler_cache(attention)  # the cache key does not include the attention backend
    if float8.enable_float8_linear and config.compile.covers("model"):
        add_passes()
    indices = job.rank_stages(mesh["pp"].get_local_rank())
    stages = [meta.model]
    if job.degrees.pp > 1:
        stages = [cut_stage(meta.model, job.stages[index]) for index in indices]
    linears = [name for choice in meta.converted for name in choice.names]
    own = {name for stage in stages for name, _ in stage.named_modules()} & set(linears)
    graphs = graphs_of_step(config.compile, stages, has_loss=len(job.stages) - 1 in indices)
    asked = replace(asked_of_step(job, own, ledger=meta.ledger), graphs=graphs)
    parallelize(
        stages,
        mesh,
        parallelism=config.parallelism,
        activation_checkpoint=config.activation_checkpoint,
        compile=config.compile,
        training=training,
        # The operator of a GPU, which parts of a sequence use, does not pad heads.
        flash=device.type == "cuda" and attention == "FLASH_ATTENTION" and args.head_dim % 8 == 0,
    )
    for stage in stages:
        stage.to_empty(device="cpu" if training.enable_cpu_offload else device)
        init_weights(stage, seed=config.debug.seed, buffer_device=device)

    return BuiltModel(stages, indices, meta.ledger, linears, asked)


def build_microbatches(
    job: Job, built: BuiltModel, mesh: DeviceMesh, *, device: torch.device, timed: Timed
) -> Microbatches:
    """Build what runs forward and backward passes, on this rank alone or through a pipeline."""
    config, degrees = job.config, job.degrees
    cross_entropy = CrossEntropy(
        compiled=config.compile.covers("loss"), repeatable=zero_bubble(config.parallelism)
    )
    gathers_logits = degrees.tp > 1 and config.parallelism.disable_loss_parallel
    losses = [
        ModelLoss(stage, cross_entropy, gathers_logits=gathers_logits) for stage in built.stages
    ]
    if degrees.pp == 1:
        return PlainMicrobatches(losses[0], config.parallelism)

    seq_len = config.training.seq_len // (degrees.cp * degrees.tp)
    hidden = torch.empty(
        (job.batch.local_batch_size, seq_len, job.model_args.dim),
        dtype=getattr(torch, config.training.mixed_precision_param),
        device="meta",
        requires_grad=True,
    )
    return PipelinedMicrobatches(
        losses,
        built.indices,
        schedule=config.parallelism.pipeline_parallel_schedule,
        n_stages=len(job.stages),
        n_microbatches=job.batch.grad_accum_steps,
        hidden=hidden,
        group=mesh["pp"].get_group(),
        device=device,
        timed=timed,
    )


def asked_of_step(job: Job, converted: Collection[str], *, ledger: FlopsLedger) -> Asked:
    """Return the float8 operations that a rank must run in a step, which has the linears
    `converted` to float8."""
    float8, degrees, microbatches = job.config.float8, job.degrees, job.batch.grad_accum_steps
    # Blocks, or the last group, whose weight the embedding reads too if the two are tied.
    in_high_precision = {OUTPUT} if job.model_args.tie_embeddings else set()
    fsdp_groups = {tuple(name.split(".")[:2]) for name in set(converted) - in_high_precision}
    blocks = fsdp_groups - {(OUTPUT,)}
    gathers_weights = float8.enable_fsdp_float8_all_gather and degrees.fsdp > 1
    gathers_activations = float8.recipe.gathers_float8 and degrees.tp > 1
    fuses = job.config.parallelism.enable_async_tensor_parallel
    return Asked(
        linears=len(converted),
        matmuls=microbatches * len(converted) * len(float8.recipe.matmuls),
        matmuls_run_in={"fp8": "float8", "bf16": "bfloat16", "fp32": "float32"}[ledger.fp8_runs_in],
        fsdp_gathers=len(fsdp_groups) if gathers_weights else 0,
        tp_gathers=microbatches * float8_gathers(converted) if gathers_activations else 0,
        # At least one fusion per block: the compiler chooses which collectives it fuses.
        fused=microbatches * len(blocks) if fuses else 0,
    )


def graphs_of_step(compile: CompileConfig, stages: Sequence[Transformer], *, has_loss: bool) -> int:
    """Return the least number of graphs that a rank with these stages compiles: equal blocks share
    one."""
    has_blocks = any(stage.layers for stage in stages)
    parts = (compile.covers("model") and has_blocks, compile.covers("loss") and has_loss)
    return parts.count(True)


def log_flops(ledger: FlopsLedger, *, document_mask: bool) -> None:
    """Log the FLOPs per token by precision, and what the count assumes."""
    shares = (f"{n / ledger.total:.2%} {name}" for name, n in ledger.by_precision.items() if n)
    line = f"{ledger.total:,} FLOPs per token: {', '.join(shares)}"
    if ledger.emulated:
        line += f" (float8, emulated, counts as {ledger.fp8_runs_in})"
    if recomputed := sum(ledger.recompute.values()):
        line += f"; {recomputed / ledger.total:.2%} more are recomputed"
    if document_mask:
        line += "; mfu_documents counts attention within documents only"
    logger.info(line)
