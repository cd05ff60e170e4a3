"""Build a run's model: on meta, where it is converted to float8 and counted without a device, for
planning too; then cut it into stages, and make them parallel."""

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention import SDPBackend

from torchtitan_lite.base.logger import logger
from torchtitan_lite.catalog.devices import Precision
from torchtitan_lite.catalog.flavors import OUTPUT, ModelArgs
from torchtitan_lite.config import AUTO, CROSS_ENTROPY
from torchtitan_lite.config.job import Job
from torchtitan_lite.float8.convert import convert_linears, must_emulate
from torchtitan_lite.float8.observe import Asked
from torchtitan_lite.float8.selection import (
    LinearChoice,
    converted_names,
    format_choices,
    select_linears,
)
from torchtitan_lite.metrics.flops import FlopsLedger, count_flops
from torchtitan_lite.models.init import init_weights
from torchtitan_lite.models.llama3 import Transformer
from torchtitan_lite.models.loss import CrossEntropy, OutsideLoss
from torchtitan_lite.parallel.activation_checkpoint import recomputed_modules
from torchtitan_lite.parallel.microbatches import ModelLoss, PlainMicrobatches, Timed
from torchtitan_lite.parallel.parallelize import parallelize
from torchtitan_lite.patches import tag_compiler_cache

if TYPE_CHECKING:
    from torchtitan_lite.parallel.pipeline import PipelinedMicrobatches

DTYPES: dict[Precision, str] = {"fp8": "float8", "bf16": "bfloat16", "fp32": "float32"}


@dataclass(frozen=True)
class MetaModel:
    """A model on meta, converted to float8 as configured and not yet sharded."""

    model: Transformer
    linears: list[str]  # names of those in float8
    ledger: FlopsLedger

    @property
    def parameters(self) -> int:
        """Number of parameters of the whole model."""
        return sum(parameter.numel() for parameter in self.model.parameters())


@dataclass(frozen=True)
class BuiltModel:
    """This rank's stages of the model, the model itself without pipeline parallelism."""

    stages: list[Transformer]
    model: nn.Module  # the parameters of these stages, by their names in the whole model
    ledger: FlopsLedger  # of the whole model, like `linears`
    linears: list[str]  # names of those in float8
    asked: Asked


def choose_linears(
    job: Job, *, slower: Callable[[Sequence[LinearChoice]], Mapping[str, str]] | None = None
) -> list[LinearChoice]:
    """Decide for every linear whether it trains in float8; for "auto", `slower` returns a reason
    against it by kind. Raises ConfigError."""
    float8 = job.config.float8
    if not float8.enable_float8_linear:
        off = float8.model_copy(update={"filter_fqns": (AUTO,)})
        float8, slower = off, lambda linears: {each.kind: "float8 is off" for each in linears}
    return select_linears(
        _on_meta(job.model_args),
        float8,
        tp_degree=job.degrees.tp,
        tokens=job.microbatch_tokens,
        slower=slower,
    )


def find_recomputed(
    job: Job, choices: Sequence[LinearChoice], *, fused_attention: bool = True
) -> frozenset[str]:
    """Return the names of the modules whose forward the backward pass runs again."""
    return recomputed_modules(
        job.config.activation_checkpoint,
        n_layers=job.model_args.n_layers,
        compiled=job.config.compile.covers("model"),
        fused_attention=fused_attention,
        in_float8=set(converted_names(choices)),
    )


@cache
def _on_meta(args: ModelArgs) -> Transformer:
    """Return a model on meta that nobody changes."""
    with torch.device("meta"):
        return Transformer(args)


def build_meta_model(
    job: Job, choices: list[LinearChoice], *, emulate: bool = False, fused_attention: bool = True
) -> MetaModel:
    """Build the model of `job` on meta, and convert it to float8 by `choices`."""
    config, float8 = job.config, job.config.float8
    with torch.device("meta"):
        model = Transformer(job.model_args).to(getattr(torch, config.training.dtype))
    if float8.enable_float8_linear:
        convert_linears(model, choices, float8=float8, emulate=emulate)
        model.tie_weights()  # to a weight that FSDP gathers in high precision, for the embedding

    # The FLOPs of each precision.
    param = config.training.mixed_precision_param
    high_precision = next(precision for precision, dtype in DTYPES.items() if dtype == param)
    converted = converted_names(choices)
    emulated = emulate and bool(converted)
    ledger = count_flops(
        model,
        n_layers=job.model_args.n_layers,
        q_dim=job.model_args.q_dim,
        seq_len=config.training.seq_len,
        high_precision=high_precision,
        float8_matmuls=dict.fromkeys(converted, float8.recipe.matmuls),
        fp8_runs_in=(float8.recipe.emulated_in or high_precision) if emulated else "fp8",
        convention=config.metrics.flops_convention,
        recomputed=find_recomputed(job, choices, fused_attention=fused_attention),
        # Under a memory budget the compiler decides what to recompute.
        recompute_is_known=config.activation_checkpoint.mode != "memory_budget",
    )
    return MetaModel(model, converted, ledger)


def find_attention(job: Job, *, device: torch.device) -> str:
    """Return what computes attention on `device`: FLEX_ATTENTION or the name of an SDPA backend, of
    which MATH stores all scores."""
    args, seq_len = job.model_args, job.model_args.max_seq_len
    masked, on_gpu = args.document_bos_id is not None, device.type == "cuda"
    if masked and on_gpu:
        return "FLEX_ATTENTION"

    # Tensors as the model passes them: [1, heads, S, Q], with S before the heads in memory.
    dtype = getattr(torch, job.config.training.mixed_precision_param)
    q, k, v = (
        torch.empty(1, seq_len, heads // job.degrees.tp, args.head_dim, dtype=dtype, device=device)
        .transpose(1, 2)
        .requires_grad_()
        for heads in (args.n_heads, args.n_kv_heads, args.n_kv_heads)
    )

    # Only flash attention aligns a causal mask with the last keys, as parts of a sequence need it.
    if job.degrees.cp > 1 and on_gpu:
        params = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, True, True)
        if torch.backends.cuda.can_use_flash_attention(params):
            return SDPBackend.FLASH_ATTENTION.name

    mask = torch.ones(1, 1, seq_len, seq_len, dtype=torch.bool, device=device) if masked else None
    chosen = torch._fused_sdp_choice(q, k, v, attn_mask=mask, is_causal=not masked, enable_gqa=True)
    return SDPBackend(chosen).name


def cut_stage(model: Transformer, names: Collection[str]) -> Transformer:
    """Return the stage of `model`, on meta, that has the modules `names`."""
    stage = copy.deepcopy(model)
    for end in ("tok_embeddings", "norm", "output"):
        if end not in names:
            setattr(stage, end, None)
    for i in model.layers:
        if f"layers.{i}" not in names:
            del stage.layers[i]
    return stage


def join_stages(stages: Sequence[Transformer]) -> nn.Module:
    """Return a module, which cannot be called, with the parameters of all `stages` by their names
    in the model."""
    if len(stages) == 1:
        return stages[0]
    joined = nn.Module()
    for stage in stages:
        for name, module in stage.named_children():
            joined.add_module(name, module)
    layers = {i: layer for stage in stages for i, layer in stage.layers.items()}
    joined.layers = nn.ModuleDict(layers)
    return joined


def build_model(job: Job, mesh: DeviceMesh, *, device: torch.device) -> BuiltModel:
    """Build the model on meta, convert it to float8, cut it into stages, shard them, then
    initialise their weights."""
    config, float8, training = job.config, job.config.float8, job.config.training
    args, attention = job.model_args, find_attention(job, device=device)
    choices = choose_linears(job)
    meta = build_meta_model(
        job,
        choices,
        emulate=float8.enable_float8_linear and must_emulate(float8, device=device),
        fused_attention=attention != "MATH",
    )

    # Report the model, its float8 linears, and its FLOPs.
    logger.info(
        f"model {job.model_name}: {meta.parameters:,} parameters, vocabulary "
        f"{args.vocab_size}{', tied' if args.tie_embeddings else ''}; attention by {attention}"
    )
    if float8.enable_float8_linear:
        logger.info(f"float8, {float8.recipe_name}:\n{format_choices(choices)}")
    log_flops(meta.ledger)

    # Parallelize the model, then allocate and initialise its shards.
    if config.compile.enable:
        tag_compiler_cache(attention)  # the cache key does not include the attention backend
    if float8.enable_float8_linear and config.compile.covers("model"):
        from torchtitan_lite.float8.graph_passes import add_passes

        add_passes()
    indices = job.rank_stages(mesh["pp"].get_local_rank())
    stages = [meta.model]
    if job.degrees.pp > 1:
        stages = [cut_stage(meta.model, job.stages[index]) for index in indices]
    asked = asked_of_step(job, meta, stages=indices)
    parallelize(
        stages,
        mesh,
        parallelism=config.parallelism,
        activation_checkpoint=config.activation_checkpoint,
        compile=config.compile,
        training=training,
        microbatches=job.batch.grad_accum_steps,
        # The operator of a GPU, which parts of a sequence use, does not pad heads.
        flash=device.type == "cuda" and attention == "FLASH_ATTENTION" and args.head_dim % 8 == 0,
    )
    for stage in stages:
        stage.to_empty(device="cpu" if training.enable_cpu_offload else device)
        init_weights(stage, seed=config.debug.seed, buffer_device=device)

    return BuiltModel(stages, join_stages(stages), meta.ledger, meta.linears, asked)


def build_microbatches(
    job: Job, built: BuiltModel, mesh: DeviceMesh, *, device: torch.device, timed: Timed
) -> "PlainMicrobatches | PipelinedMicrobatches":
    """Build what runs forward and backward passes, on this rank alone or through a pipeline."""
    config, degrees, compile = job.config, job.degrees, job.config.compile
    loss: CrossEntropy | OutsideLoss
    gathers_logits = degrees.tp > 1 and config.parallelism.disable_loss_parallel
    if config.training.loss == CROSS_ENTROPY:
        loss = CrossEntropy(compiled=compile.covers("loss"), backend=compile.backend)
    else:
        loss = OutsideLoss(config.training.loss)
        gathers_logits = True
    losses = [ModelLoss(stage, loss, gathers_logits=gathers_logits) for stage in built.stages]
    if degrees.pp == 1:
        return PlainMicrobatches(losses[0], config.parallelism)

    from torchtitan_lite.parallel.pipeline import PipelinedMicrobatches

    seq_len = config.training.seq_len // (degrees.cp * degrees.tp)
    shape = (job.batch.local_batch_size, seq_len, job.model_args.dim)
    dtype = getattr(torch, config.training.mixed_precision_param)
    hidden = torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)
    return PipelinedMicrobatches(
        losses,
        job.rank_stages(mesh["pp"].get_local_rank()),
        schedule=config.parallelism.pipeline_parallel_schedule,
        n_stages=len(job.stages),
        n_microbatches=job.batch.grad_accum_steps,
        hidden=hidden,
        group=mesh["pp"].get_group(),
        device=device,
        timed=timed,
    )


def asked_of_step(job: Job, meta: MetaModel, *, stages: Collection[int]) -> Asked:
    """Return the float8 operations that a rank with these stages must run in a step, and the least
    number of graphs that it compiles: equal blocks share one."""
    float8, degrees, microbatches = job.config.float8, job.degrees, job.batch.grad_accum_steps
    parts = {name for stage in stages for name in job.stages[stage]}  # such as layers.0
    part_of = {name: ".".join(name.split(".")[:2]) for name in meta.linears}
    converted = [name for name, part in part_of.items() if part in parts]
    gathered = {part_of[name] for name in converted}
    if job.model_args.tie_embeddings:
        gathered -= {OUTPUT}  # in high precision, for the embedding
    gathers_weights = float8.enable_fsdp_float8_all_gather and degrees.fsdp > 1
    tp_gathers = 0
    if float8.recipe.gathers_float8 and degrees.tp > 1:
        from torchtitan_lite.parallel.tensor_parallel import float8_gathers

        tp_gathers = microbatches * float8_gathers(converted)
    fuses, compile = job.config.parallelism.enable_async_tensor_parallel, job.config.compile
    has_blocks = any(part.startswith("layers.") for part in parts)
    own_loss = job.config.training.loss == CROSS_ENTROPY
    with_loss = compile.covers("loss") and own_loss and OUTPUT in parts
    return Asked(
        linears=len(converted),
        matmuls=microbatches * len(converted) * len(float8.recipe.matmuls),
        matmuls_run_in=DTYPES[meta.ledger.fp8_runs_in],
        fsdp_gathers=len(gathered) if gathers_weights else 0,
        tp_gathers=tp_gathers,
        # At least one fusion per block: the compiler chooses which collectives it fuses.
        fused=microbatches * len(gathered - {OUTPUT}) if fuses else 0,
        graphs=(compile.covers("model") and has_blocks, with_loss).count(True),
    )


def log_flops(ledger: FlopsLedger) -> None:
    """Log the FLOPs per token by precision."""
    shares = (f"{n / ledger.total:.2%} {name}" for name, n in ledger.by_precision.items() if n)
    line = f"{ledger.total:,} FLOPs per token: {', '.join(shares)}"
    if ledger.fp8_runs_in != "fp8":
        line += f" (float8, emulated, counts as {ledger.fp8_runs_in})"
    if recomputed := sum(ledger.recompute.values()):
        line += f"; {recomputed / ledger.total:.2%} more are recomputed"
    logger.info(line)
