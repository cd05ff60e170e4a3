"""A run's model on PyTorch's meta device: converted to float8 and counted without a device, for
training and planning alike.
"""

import dataclasses
from collections.abc import Collection, Iterable, Sequence

import torch

from torchtitan_lite.config import Config, MetricsConfig
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.float8.convert import convert_linears
from torchtitan_lite.float8.selection import AUTO, LinearChoice, select_linears
from torchtitan_lite.job import Job
from torchtitan_lite.logger import logger
from torchtitan_lite.metrics.devices import DeviceSpec, Precision
from torchtitan_lite.metrics.flops import FlopsLedger, count_flops
from torchtitan_lite.metrics.hardware import given_peaks, published_peaks
from torchtitan_lite.models.flavors import OUTPUT
from torchtitan_lite.models.llama3 import Transformer
from torchtitan_lite.parallel.activation_checkpoint import recomputed_modules

from .memory import Moment, Rank, reserved_bytes, step_memory
from .roofline import DeviceRates, Prediction, Rest, Roofline, predict

CHEAPEST_FIRST = ("none", "selective", "full")
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


def device_rates(device: DeviceSpec | None, metrics: MetricsConfig) -> DeviceRates | None:
    """Return the device's rates, from its data sheet or the peaks in the config; None if one is
    unknown."""
    peaks = {**published_peaks(device), **given_peaks(metrics)}
    if device is None or not {"bf16", "fp8"} <= peaks.keys():
        return None
    return DeviceRates(peaks["bf16"] * 1e12, peaks["fp8"] * 1e12, device.bandwidth_tb_s * 1e12)


def config_roofline(config: Config, rates: DeviceRates) -> Roofline:
    """Return the roofline of a device that trains by `config`."""
    return Roofline(
        rates,
        tokens=config.training.microbatch_tokens,
        recipe=config.float8.recipe_name,
        compiled=config.compile.covers("model"),
        float8_all_gather=config.float8.enable_fsdp_float8_all_gather,
    )


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
    """Return the kinds of linears that float8 would not make faster, each with the reason."""
    if not config.float8.enable_float8_linear:
        return {choice.kind: "float8 is off" for choice in choices}
    if rates is None:
        raise ConfigError(
            '[float8] filter_fqns = ["auto"] compares float8 with bf16 by the bf16 and fp8 peaks '
            "and the memory bandwidth of the device, and not all of them are known here; name the "
            'linears to keep, such as ["wk", "wv"].'
        )
    roofline = config_roofline(config, rates)
    chosen = roofline.choose(choices)
    eager = "" if roofline.compiled else ", as eager casts are not fused"
    return {
        choice.kind: f"auto: {roofline.ratio(choice, chosen):.2f}x the time of bf16{eager}"
        for choice in choices
        if choice not in chosen
    }


def _select(job: Job, model: Transformer, *, rates: DeviceRates | None) -> list[LinearChoice]:
    """Decide which linears of `model`, not yet converted, train in float8."""
    config, float8, ac = job.config, job.config.float8, job.config.activation_checkpoint
    compiled = config.compile.covers("model")
    recomputed = recomputed_modules(model, ac, compiled=compiled, fused_attention=True)
    any_tokens = float8.pad_inner_dim or not float8.recipe.divides_tokens
    return select_linears(
        model,
        filter_fqns=float8.filter_fqns if float8.enable_float8_linear else [AUTO],
        tp_degree=job.degrees.tp,
        tokens=None if any_tokens else config.training.microbatch_tokens,
        convert_output=float8.convert_output,
        recipe=float8.recipe,
        slower=lambda left: _slower_linears(config, _with_recomputed(left, recomputed), rates),
    )


def build_meta_model(
    job: Job, *, emulate: bool, fused_attention: bool, rates: DeviceRates | None = None
) -> MetaModel:
    """Build the model of `job` on meta, and decide which linears train in float8.

    The device need not be present. Only [float8] filter_fqns = ["auto"] needs its `rates`.
    """
    config, args = job.config, job.model_args
    training, ac, float8 = config.training, config.activation_checkpoint, config.float8
    with torch.device("meta"):
        model = Transformer(args)
    choices = _select(job, model, rates=rates)
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
        args,
        seq_len=training.seq_len,
        high_precision=high_precision,
        float8_matmuls=dict.fromkeys(converted, float8.recipe.matmuls),
        fp8_runs_in=(float8.recipe.emulated_in or high_precision) if emulated else "fp8",
        convention=config.metrics.flops_convention,
        recomputed=recomputed,
        # Under a memory budget the compiler decides what to recompute.
        recompute_is_known=ac.mode != "memory_budget",
    )
    return MetaModel(model, _with_recomputed(choices, recomputed), ledger, recomputed)


def estimate_memory(
    job: Job, choices: Iterable[LinearChoice], *, on_cpu: bool = False
) -> list[Moment]:
    """Estimate what a rank holds at the moments of a step at which memory can peak."""
    # The group of `output` is estimated in high precision, which is slightly more than in float8.
    float8 = {choice.kind for choice in choices if choice.converted and choice.kind != OUTPUT}
    return step_memory(Rank(job, float8, on_cpu=on_cpu))


def resolve_auto(
    job: Job, *, rates: DeviceRates | None, memory_gib: float, on_cpu: bool = False
) -> Job:
    """Replace each "auto" of the config by values chosen for these devices, and log the reasons.

    Models built from the result select the same linears, without `rates`. If float8 would make no
    linear faster, it is off in the result. Raises ConfigError if [float8] filter_fqns = ["auto"]
    needs rates that are not known.
    """
    float8, ac = job.config.float8, job.config.activation_checkpoint
    chooses_linears = float8.enable_float8_linear and AUTO in float8.filter_fqns
    if ac.mode != "auto" and not chooses_linears:
        return job
    with torch.device("meta"):
        model = Transformer(job.model_args)

    # The cheapest activation checkpointing whose step should fit, or the last.
    if ac.mode == "auto":
        for mode in CHEAPEST_FIRST:
            tried = job.choose("activation_checkpoint", mode=mode, selective_ac_option="op")
            moments = estimate_memory(tried, _select(tried, model, rates=rates), on_cpu=on_cpu)
            reserved_gib = reserved_bytes(moments) / 2**30
            if fits := reserved_gib <= memory_gib:
                break
        logger.info(
            f'[activation_checkpoint] mode = "auto" is "{mode}" here, '
            f"{'the cheapest that fits' if fits else 'and even that may not fit'}: "
            f"{reserved_gib:.1f} GiB of {memory_gib:.1f}"
        )
        job = tried

    return _choose_linears(job, _select(job, model, rates=rates)) if chooses_linears else job


def _choose_linears(job: Job, choices: Sequence[LinearChoice]) -> Job:
    """Name the linears that float8 would make slower in filter_fqns, in place of "auto"."""
    float8 = job.config.float8
    kept = {
        choice.kind: choice.kept_because
        for choice in choices
        if choice.kept_because and not choice.kept_because.startswith("filter_fqns")
    }
    reasons = ", ".join(f"{kind} ({reason})" for kind, reason in kept.items())
    logger.info(f'[float8] filter_fqns = ["auto"] keeps in high precision: {reasons or "nothing"}')

    patterns = [pattern for pattern in float8.filter_fqns if pattern != AUTO]
    return job.choose(
        "float8",
        filter_fqns=(*patterns, *(kind for kind in kept if kind != OUTPUT)),
        enable_float8_linear=any(choice.converted for choice in choices),
        convert_output=float8.convert_output and OUTPUT not in kept,
    )


def predict_step(job: Job, meta: MetaModel, *, rates: DeviceRates) -> Prediction:
    """Predict the time of a microbatch of `meta` in bf16, and in float8 as converted."""
    args, degrees = job.model_args, job.degrees
    converted = [choice for choice in meta.choices if choice.converted]
    # Unless converted, the projection to the vocabulary is no linear to the roofline.
    kept = [choice for choice in meta.choices if not choice.converted and choice.kind != OUTPUT]
    parameters = meta.parameters // degrees.tp
    updates = degrees.dp_shard * job.batch.grad_accum_steps  # the optimizer runs once a step
    rest = Rest(
        args=args,
        tp=degrees.tp,
        gathered_parameters=parameters,
        sharded_parameters=parameters // updates,
        recomputed_layers=len(job.config.activation_checkpoint.checkpointed_layers(args.n_layers)),
        recomputed_attention=sum(name.endswith(".attention") for name in meta.recomputed),
    )
    return predict(config_roofline(job.config, rates), [*converted, *kept], rest)
