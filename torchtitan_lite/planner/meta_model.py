"""A run's model on meta, converted to float8 and counted, without a device: what training and
planning share. A hub."""

import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Literal

import torch

from torchtitan_lite.config import (
    ActivationCheckpointConfig,
    Config,
    MetricsConfig,
    ParallelDegrees,
    resolve_batch,
)
from torchtitan_lite.data.tokenizer import Tokenizer
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.float8.convert import convert_linears
from torchtitan_lite.float8.selection import (
    AUTO,
    OUTPUT,
    LinearChoice,
    select_linears,
    size_multiple,
)
from torchtitan_lite.logger import logger
from torchtitan_lite.metrics.devices import DeviceSpec
from torchtitan_lite.metrics.flops import FlopsLedger, count_flops
from torchtitan_lite.metrics.hardware import given_peaks, published_peaks
from torchtitan_lite.models.flavors import ModelArgs, find_flavor
from torchtitan_lite.models.llama3 import CPU_FLOAT32_HEAD_DIM, Transformer
from torchtitan_lite.models.loss import CHUNK_LOGITS, PIECE_LOGITS
from torchtitan_lite.parallel.activation_checkpoint import recomputed_modules
from torchtitan_lite.parallel.tensor_parallel import COLUMN_SPLIT, SHARDED_DIMS

from .memory import Moment, Rank, reserved_bytes, step_memory
from .roofline import (
    DeviceRates,
    Linear,
    Prediction,
    Rest,
    Scheme,
    added_ratio,
    choose_linears,
    predict,
)


def resolve_model_args(config: Config, tokenizer: Tokenizer) -> ModelArgs:
    """The flavor's dimensions for this run: its own vocabulary or the tokenizer's, rotary tables of
    seq_len positions, and what begins a document where attention is not to leave it.

    Raises ConfigError for a tokenizer with more ids than the model's vocabulary."""
    flavor = find_flavor(config.model.flavor)
    assert flavor is not None, "the config is checked"
    vocab_size = flavor.vocab_size or tokenizer.vocab_size
    if tokenizer.vocab_size > vocab_size:
        raise ConfigError(
            f"[model] tokenizer_path = {str(tokenizer.path)!r} has {tokenizer.vocab_size} ids, more than the "
            f"{vocab_size} of flavor {config.model.flavor}; use a tokenizer with at most that many, or another flavor."
        )
    return dataclasses.replace(
        flavor,
        vocab_size=vocab_size,
        max_seq_len=config.training.seq_len,
        document_bos_id=tokenizer.bos_id if config.training.document_mask else None,
    )


def device_rates(device: DeviceSpec | None, metrics: MetricsConfig) -> DeviceRates | None:
    """What the roofline needs of a device: its data sheet, or the peaks that the config gives; None
    where some of it is not known."""
    peaks = {**published_peaks(device), **given_peaks(metrics)}
    if device is None or not {"bf16", "fp8"} <= peaks.keys():
        return None
    return DeviceRates(peaks["bf16"] * 1e12, peaks["fp8"] * 1e12, device.bandwidth_tb_s * 1e12)


def bf16_rates(device: DeviceSpec, tflops: float) -> DeviceRates:
    """The same of a device that reaches `tflops` in bf16, for a model of which nothing is in
    float8."""
    return DeviceRates(tflops * 1e12, math.nan, device.bandwidth_tb_s * 1e12)


CHEAPEST_FIRST: tuple[Literal["none", "selective", "full"], ...] = ("none", "selective", "full")
"""Modes of activation checkpointing, by what they compute again."""


@dataclasses.dataclass(frozen=True)
class MetaModel:
    """A model on meta, converted to float8 where asked for and not yet sharded, and what is known
    of it."""

    model: Transformer
    choices: list[LinearChoice]
    """Of every linear."""
    ledger: FlopsLedger
    recomputed: frozenset[str]
    """Modules whose forward the backward pass runs again."""

    @property
    def parameters(self) -> int:
        """Of the whole model."""
        return sum(parameter.numel() for parameter in self.model.parameters())


def float8_scheme(config: Config) -> Scheme:
    """What of the config decides how fast float8 is."""
    float8 = config.float8
    return Scheme(
        float8.recipe_name, config.compile.covers("model"), float8.enable_fsdp_float8_all_gather
    )


def roofline_linears(
    choices: Iterable[LinearChoice], *, recomputed: Collection[str]
) -> list[Linear]:
    """`choices` by kind, as the roofline takes them."""
    kinds: dict[str, list[LinearChoice]] = {}
    for choice in choices:
        kinds.setdefault(choice.kind, []).append(choice)
    linears = []
    for kind, members in kinds.items():
        module, _, name = kind.partition(".")
        linears.append(
            Linear(
                kind,
                *members[0].local_shape,
                count=len(members),
                reads=module if name in COLUMN_SPLIT.get(module, ()) else kind,
                recomputed=sum(member.name in recomputed for member in members),
            )
        )
    return linears


def build_meta_model(
    config: Config,
    args: ModelArgs,
    *,
    tp_degree: int,
    emulate: bool,
    fused_attention: bool,
    rates: DeviceRates | None,
) -> MetaModel:
    """The model of `config`, of which each rank will hold a `tp_degree`-th; the device need not be
    there, but `rates` are needed for [float8] filter_fqns = ["auto"]."""
    training, ac, float8 = config.training, config.activation_checkpoint, config.float8
    with torch.device("meta"):
        model = Transformer(args)
    recompute = partial(
        recomputed_modules,
        model,
        ac,
        compiled=config.compile.covers("model"),
        fused_attention=fused_attention,
    )

    def slower(converted: Sequence[LinearChoice]) -> dict[str, str]:
        if not float8.enable_float8_linear:
            return {choice.kind: "float8 is off" for choice in converted}
        if rates is None:
            raise ConfigError(
                '[float8] filter_fqns = ["auto"] weighs float8 by the bf16 and fp8 peaks and the memory bandwidth of '
                'the device, and not all of them are known here; name the linears to keep, such as ["wk", "wv"].'
            )
        linears = roofline_linears(converted, recomputed=recompute())
        tokens, scheme = config.training.microbatch_tokens, float8_scheme(config)
        chosen = choose_linears(linears, rates, tokens=tokens, scheme=scheme)
        eager = "" if scheme.compiled else ", as eager casts are not fused"
        return {
            linear.kind: f"auto: {added_ratio(linear, chosen, rates, tokens=tokens, scheme=scheme):.2f}x the time of "
            f"bf16{eager}"
            for linear in linears
            if linear not in chosen
        }

    any_tokens = float8.pad_inner_dim or float8.recipe_name == "rowwise_with_gw_hp"
    choices = select_linears(
        model,
        filter_fqns=float8.filter_fqns if float8.enable_float8_linear else [AUTO],
        sharded_dims=SHARDED_DIMS,
        tp_degree=tp_degree,
        tokens=None if any_tokens else training.microbatch_tokens,
        convert_output=float8.convert_output,
        multiple=size_multiple(float8.recipe_name),
        slower=slower,
    )
    if float8.enable_float8_linear:
        convert_linears(model, choices, float8=float8, emulate=emulate)
    recomputed = recompute()
    ledger = count_flops(
        model,
        n_layers=args.n_layers,
        n_heads=args.n_heads,
        head_dim=args.head_dim,
        seq_len=training.seq_len,
        high_precision=getattr(torch, training.mixed_precision_param),
        convention=config.metrics.flops_convention,
        recomputed=recomputed,
        recompute_is_known=ac.mode != "memory_budget",  # by which the compiler decides
    )
    return MetaModel(model, choices, ledger, recomputed)


def estimate_memory(
    config: Config,
    args: ModelArgs,
    choices: Iterable[LinearChoice],
    *,
    degrees: ParallelDegrees,
    on_cpu: bool = False,
) -> list[Moment]:
    """What a rank holds at the moments of a step of `config` at which memory can peak, its linears
    as chosen."""
    return step_memory(
        Rank(
            model=args,
            degrees=degrees,
            training=config.training,
            parallelism=config.parallelism,
            activation_checkpoint=config.activation_checkpoint,
            compile=config.compile,
            optimizer=config.optimizer,
            float8=config.float8,
            # The group of `output` is estimated in high precision, which is a little more than it
            # takes in float8.
            float8_linears={
                choice.kind for choice in choices if choice.converted and choice.name != OUTPUT
            },
            grad_accum_steps=resolve_batch(config.training, dp_degree=degrees.dp).grad_accum_steps,
            chunk_logits=CHUNK_LOGITS,
            piece_logits=PIECE_LOGITS,
            float32_attention=on_cpu and args.head_dim <= CPU_FLOAT32_HEAD_DIM,
            on_cpu=on_cpu,
        )
    )


def resolve_checkpointing(
    config: Config,
    args: ModelArgs,
    build: Callable[[Config], MetaModel],
    *,
    degrees: ParallelDegrees,
    memory_gib: float,
    on_cpu: bool = False,
) -> tuple[Config, MetaModel]:
    """`config`, and what `build` makes of it, with activation_checkpoint.mode = "auto" replaced by
    the cheapest mode whose step should fit `memory_gib`; by "full" if none does."""
    if config.activation_checkpoint.mode != "auto":
        return config, build(config)
    for mode in CHEAPEST_FIRST:
        tried = config.model_copy(
            update={"activation_checkpoint": ActivationCheckpointConfig(mode=mode)}
        )
        meta = build(tried)
        moments = estimate_memory(tried, args, meta.choices, degrees=degrees, on_cpu=on_cpu)
        reserved_gib = reserved_bytes(moments) / 2**30
        if reserved_gib <= memory_gib:
            break
    fits = "the cheapest that fits" if reserved_gib <= memory_gib else "and even that may not fit"
    logger.info(
        f'[activation_checkpoint] mode = "auto" is "{mode}" here, {fits}: {reserved_gib:.1f} GiB of {memory_gib:.1f}'
    )
    return tried, meta


def predict_step(
    config: Config,
    args: ModelArgs,
    meta: MetaModel,
    *,
    degrees: ParallelDegrees,
    rates: DeviceRates,
) -> Prediction:
    """How long a microbatch of `meta` takes on a device with `rates`, in bf16 and in float8 as
    converted."""
    converts_output = any(choice.converted and choice.name == OUTPUT for choice in meta.choices)
    converted, kept = (
        roofline_linears(
            [
                choice
                for choice in meta.choices
                if choice.converted == in_float8 and (choice.name != OUTPUT or converts_output)
            ],
            recomputed=meta.recomputed,
        )
        for in_float8 in (True, False)
    )
    # A kind may be in float8 in some layers only.
    in_bf16 = [dataclasses.replace(linear, kind=f"{linear.kind} in bf16") for linear in kept]
    parameters = meta.parameters // degrees.tp
    accum_steps = resolve_batch(config.training, dp_degree=degrees.dp).grad_accum_steps
    rest = Rest(
        tokens=config.training.microbatch_tokens,
        seq_len=config.training.seq_len,
        n_layers=args.n_layers,
        dim=args.dim,
        q_dim=args.n_heads * args.head_dim // degrees.tp,
        kv_dim=args.n_kv_heads * args.head_dim // degrees.tp,
        ffn_dim=args.ffn_dim // degrees.tp,
        vocab_size=args.vocab_size // degrees.tp,
        gathered_parameters=parameters,
        sharded_parameters=parameters // degrees.dp_shard // accum_steps,  # updated once a step
        recomputed_layers=len(config.activation_checkpoint.checkpointed_layers(args.n_layers)),
        recomputed_attention=sum(name.endswith(".attention") for name in meta.recomputed),
        output_among_linears=converts_output,
        sequence_shards=degrees.tp,
    )
    return predict(
        [*converted, *in_bf16],
        rest,
        rates,
        scheme=float8_scheme(config),
        converted=[linear.kind for linear in converted],
    )
