"""A run's model on PyTorch's meta device: converted to float8 and counted without a device, for
training and planning alike.
"""

import dataclasses
import math
from collections.abc import Collection, Iterable, Sequence
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
from torchtitan_lite.float8.selection import AUTO, LinearChoice, select_linears
from torchtitan_lite.logger import logger
from torchtitan_lite.metrics.devices import DeviceSpec
from torchtitan_lite.metrics.flops import FlopsLedger, Precision, count_flops
from torchtitan_lite.metrics.hardware import given_peaks, published_peaks
from torchtitan_lite.models.flavors import FLAVORS, OUTPUT, ModelArgs
from torchtitan_lite.models.llama3 import Transformer
from torchtitan_lite.parallel.activation_checkpoint import recomputed_modules

from .memory import Moment, Rank, reserved_bytes, step_memory
from .roofline import (
    DeviceRates,
    Prediction,
    Rest,
    Scheme,
    added_ratio,
    choose_linears,
    predict,
)

CHEAPEST_FIRST: tuple[Literal["none", "selective", "full"], ...] = ("none", "selective", "full")
"""Modes of activation checkpointing, by how much they recompute."""


@dataclasses.dataclass(frozen=True)
class MetaModel:
    """A model on meta, converted to float8 as configured and not yet sharded."""

    model: Transformer
    choices: list[LinearChoice]
    """The decision for every linear."""
    ledger: FlopsLedger
    recomputed: frozenset[str]
    """Modules whose forward the backward pass runs again."""

    @property
    def parameters(self) -> int:
        """Number of parameters of the whole model."""
        return sum(parameter.numel() for parameter in self.model.parameters())


def resolve_model_args(config: Config, tokenizer: Tokenizer) -> ModelArgs:
    """Return the flavor's dimensions for this run: the vocabulary is the flavor's or the
    tokenizer's, rotary tables have seq_len positions.

    Raises ConfigError for a tokenizer with more ids than the model's vocabulary."""
    flavor = FLAVORS[config.model.flavor]
    vocab_size = flavor.vocab_size or tokenizer.vocab_size
    if tokenizer.vocab_size > vocab_size:
        raise ConfigError(
            f"[model] tokenizer_path = {str(tokenizer.path)!r} has {tokenizer.vocab_size} ids, "
            f"more than the {vocab_size} of flavor {config.model.flavor}; use a tokenizer with at "
            "most that many, or another flavor."
        )
    return dataclasses.replace(
        flavor,
        vocab_size=vocab_size,
        max_seq_len=config.training.seq_len,
        document_bos_id=tokenizer.bos_id if config.training.document_mask else None,
    )


def device_rates(device: DeviceSpec | None, metrics: MetricsConfig) -> DeviceRates | None:
    """Return the device's rates, from its data sheet or the peaks in the config; None if one is
    unknown."""
    peaks = {**published_peaks(device), **given_peaks(metrics)}
    if device is None or not {"bf16", "fp8"} <= peaks.keys():
        return None
    return DeviceRates(peaks["bf16"] * 1e12, peaks["fp8"] * 1e12, device.bandwidth_tb_s * 1e12)


def bf16_rates(device: DeviceSpec, tflops: float) -> DeviceRates:
    """Return the rates of a device that reaches `tflops` in bf16, for a model without float8."""
    return DeviceRates(tflops * 1e12, math.nan, device.bandwidth_tb_s * 1e12)


def float8_scheme(config: Config) -> Scheme:
    """Return the settings that decide how fast float8 is."""
    float8 = config.float8
    compiled = config.compile.covers("model")
    return Scheme(float8.recipe_name, compiled, float8.enable_fsdp_float8_all_gather)


def _with_recomputed(
    choices: Iterable[LinearChoice], recomputed: Collection[str]
) -> list[LinearChoice]:
    """Note in each of `choices` how many of its linears are `recomputed`."""
    return [
        dataclasses.replace(choice, recomputed=sum(name in recomputed for name in choice.names))
        for choice in choices
    ]


def _slower_linears(
    config: Config, choices: Sequence[LinearChoice], rates: DeviceRates | None
) -> dict[str, str]:
    """Return the kinds of linears that float8 would not make faster, each with the reason.

    Raises ConfigError if the device's rates are not known."""
    if not config.float8.enable_float8_linear:
        return {choice.kind: "float8 is off" for choice in choices}
    if rates is None:
        raise ConfigError(
            '[float8] filter_fqns = ["auto"] compares float8 with bf16 by the bf16 and fp8 peaks '
            "and the memory bandwidth of the device, and not all of them are known here; name the "
            'linears to keep, such as ["wk", "wv"].'
        )
    tokens, scheme = config.training.microbatch_tokens, float8_scheme(config)
    chosen = choose_linears(choices, rates, tokens=tokens, scheme=scheme)
    eager = "" if scheme.compiled else ", as eager casts are not fused"
    return {
        linear.kind: "auto: "
        f"{added_ratio(linear, chosen, rates, tokens=tokens, scheme=scheme):.2f}x the time of "
        f"bf16{eager}"
        for linear in choices
        if linear not in chosen
    }


def _select(
    config: Config, model: Transformer, *, tp_degree: int, rates: DeviceRates | None
) -> list[LinearChoice]:
    """Decide which linears of `model`, not yet converted, train in float8."""
    float8, training, ac = config.float8, config.training, config.activation_checkpoint
    compiled = config.compile.covers("model")
    recomputed = recomputed_modules(model, ac, compiled=compiled, fused_attention=True)
    any_tokens = float8.pad_inner_dim or not float8.recipe.divides_tokens
    return select_linears(
        model,
        filter_fqns=float8.filter_fqns if float8.enable_float8_linear else [AUTO],
        tp_degree=tp_degree,
        tokens=None if any_tokens else training.microbatch_tokens,
        convert_output=float8.convert_output,
        recipe=float8.recipe,
        slower=lambda left: _slower_linears(config, _with_recomputed(left, recomputed), rates),
    )


def build_meta_model(
    config: Config,
    args: ModelArgs,
    *,
    tp_degree: int,
    emulate: bool,
    fused_attention: bool,
    rates: DeviceRates | None,
) -> MetaModel:
    """Build the model of `config` on meta, with per-rank shapes for `tp_degree`.

    The device need not be present, but [float8] filter_fqns = ["auto"] needs its `rates`."""
    training, ac, float8 = config.training, config.activation_checkpoint, config.float8
    with torch.device("meta"):
        model = Transformer(args)
    choices = _select(config, model, tp_degree=tp_degree, rates=rates)
    if float8.enable_float8_linear:
        convert_linears(model, choices, float8=float8, emulate=emulate)
    recomputed = recomputed_modules(
        model, ac, compiled=config.compile.covers("model"), fused_attention=fused_attention
    )

    high_precision: Precision = "bf16" if training.mixed_precision_param == "bfloat16" else "fp32"
    converted = [name for choice in choices if choice.converted for name in choice.names]
    emulated = emulate and bool(converted)
    ledger = count_flops(
        model,
        n_layers=args.n_layers,
        n_heads=args.n_heads,
        head_dim=args.head_dim,
        seq_len=training.seq_len,
        high_precision=high_precision,
        float8_linears=converted,
        float8_matmuls=float8.recipe.matmuls,
        fp8_runs_in=(float8.recipe.emulated_in or high_precision) if emulated else "fp8",
        convention=config.metrics.flops_convention,
        recomputed=recomputed,
        # Under a memory budget the compiler decides what to recompute.
        recompute_is_known=ac.mode != "memory_budget",
    )
    return MetaModel(model, _with_recomputed(choices, recomputed), ledger, recomputed)


def estimate_memory(
    config: Config,
    args: ModelArgs,
    choices: Iterable[LinearChoice],
    *,
    degrees: ParallelDegrees,
    on_cpu: bool = False,
) -> list[Moment]:
    """Estimate what a rank holds at the moments of a step at which memory can peak."""
    # The group of `output` is estimated in high precision, which is slightly more than in float8.
    float8 = {choice.kind for choice in choices if choice.converted and choice.kind != OUTPUT}
    return step_memory(
        Rank(
            config=config,
            model=args,
            degrees=degrees,
            float8_linears=frozenset(float8),
            on_cpu=on_cpu,
        )
    )


def resolve_checkpointing(
    config: Config,
    args: ModelArgs,
    *,
    degrees: ParallelDegrees,
    rates: DeviceRates | None,
    memory_gib: float,
    on_cpu: bool = False,
) -> Config:
    """Replace activation_checkpoint.mode = "auto" by the cheapest mode whose step should fit in
    `memory_gib`, or by "full" if none does."""
    if config.activation_checkpoint.mode != "auto":
        return config
    with torch.device("meta"):
        model = Transformer(args)

    for mode in CHEAPEST_FIRST:
        ac = ActivationCheckpointConfig(mode=mode)
        tried = config.model_copy(update={"activation_checkpoint": ac})
        choices = _select(tried, model, tp_degree=degrees.tp, rates=rates)
        moments = estimate_memory(tried, args, choices, degrees=degrees, on_cpu=on_cpu)
        reserved_gib = reserved_bytes(moments) / 2**30
        if reserved_gib <= memory_gib:
            break

    fits = "the cheapest that fits" if reserved_gib <= memory_gib else "and even that may not fit"
    logger.info(
        f'[activation_checkpoint] mode = "auto" is "{mode}" here, {fits}: '
        f"{reserved_gib:.1f} GiB of {memory_gib:.1f}"
    )
    return tried


def resolve_auto(
    config: Config,
    args: ModelArgs,
    *,
    degrees: ParallelDegrees,
    rates: DeviceRates | None,
    memory_gib: float,
    on_cpu: bool = False,
) -> Config:
    """Replace each "auto" in `config` by the values chosen for these devices, and log the reasons.

    Models built from the result select the same linears, without `rates`. If float8 would make no
    linear faster, it is off in the result. Raises ConfigError if [float8] filter_fqns = ["auto"]
    needs rates that are not known."""
    config = resolve_checkpointing(
        config, args, degrees=degrees, rates=rates, memory_gib=memory_gib, on_cpu=on_cpu
    )
    float8 = config.float8
    if not float8.enable_float8_linear or AUTO not in float8.filter_fqns:
        return config

    with torch.device("meta"):
        model = Transformer(args)
    choices = _select(config, model, tp_degree=degrees.tp, rates=rates)
    patterns = tuple(pattern for pattern in float8.filter_fqns if pattern != AUTO)
    kept = {
        choice.kind: choice.kept_because
        for choice in choices
        if choice.kept_because and not choice.kept_because.startswith("filter_fqns")
    }
    reasons = ", ".join(f"{kind} ({reason})" for kind, reason in kept.items())
    logger.info(f'[float8] filter_fqns = ["auto"] keeps in high precision: {reasons or "nothing"}')
    changes = {
        "enable_float8_linear": any(choice.converted for choice in choices),
        "filter_fqns": (*patterns, *(kind for kind in kept if kind != OUTPUT)),
        "convert_output": float8.convert_output and OUTPUT not in kept,
    }
    return config.model_copy(update={"float8": float8.model_copy(update=changes)})


def predict_step(
    config: Config,
    args: ModelArgs,
    meta: MetaModel,
    *,
    degrees: ParallelDegrees,
    rates: DeviceRates,
) -> Prediction:
    """Predict the time of a microbatch of `meta` in bf16, and in float8 as converted."""
    # An unconverted projection to the vocabulary is no linear to the roofline.
    converted = [choice for choice in meta.choices if choice.converted]
    converts_output = any(choice.kind == OUTPUT for choice in converted)
    kept = [
        choice
        for choice in meta.choices
        if not choice.converted and (choice.kind != OUTPUT or converts_output)
    ]
    parameters = meta.parameters // degrees.tp
    accum_steps = resolve_batch(config.training, dp_degree=degrees.dp).grad_accum_steps
    rest = Rest(
        args=args,
        tp=degrees.tp,
        tokens=config.training.microbatch_tokens,
        gathered_parameters=parameters,
        sharded_parameters=parameters // degrees.dp_shard // accum_steps,  # updated once a step
        recomputed_layers=len(config.activation_checkpoint.checkpointed_layers(args.n_layers)),
        recomputed_attention=sum(name.endswith(".attention") for name in meta.recomputed),
    )
    return predict([*converted, *kept], rest, rates, scheme=float8_scheme(config))
