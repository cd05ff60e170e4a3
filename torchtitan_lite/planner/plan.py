"""Plan a run: what a config will cost and gain, computed on meta without a GPU or a process group.

Each `_plan_x` computes one section in plain values; docs/plan.md documents every key.
"""

import dataclasses
from typing import Any

import torch

from torchtitan_lite.config import Config
from torchtitan_lite.data.tokenizer import build_tokenizer
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.float8.selection import AUTO
from torchtitan_lite.job import Job, build_job
from torchtitan_lite.metrics.devices import DEVICES, DeviceSpec, lookup_device
from torchtitan_lite.metrics.flops import FlopsLedger
from torchtitan_lite.metrics.hardware import Peaks, given_peaks, published_peaks
from torchtitan_lite.metrics.rates import compute_rates, effective_peak

from .memory import MOMENT_WIDTHS, reserved_bytes
from .meta_model import (
    MetaModel,
    bf16_rates,
    build_meta_model,
    device_rates,
    estimate_memory,
    float8_scheme,
    predict_step,
    resolve_checkpointing,
)
from .roofline import DeviceRates, StepTime, added_ratio, time_linears

SECONDS_PER_DAY = 86_400


def resolve_device(name: str | None) -> DeviceSpec:
    """Return the data sheet of the device called `name`, by default of the GPU at hand.

    Raises ConfigError for an unknown name, and without a name if there is no GPU."""
    if name is None and torch.cuda.is_available():
        name = torch.cuda.get_device_name()
    known = ", ".join(device.name for device in DEVICES)
    if name is None:
        raise ConfigError(f"--device is needed where there is no GPU; use one of {known}.")
    if (device := lookup_device(name)) is None:
        raise ConfigError(f'--device "{name}" is not known; use one of {known}.')
    return device


@dataclasses.dataclass(frozen=True)
class _Run:
    """A run to plan, on a device that need not be present."""

    job: Job
    device: DeviceSpec
    peaks: Peaks
    rates: DeviceRates | None
    """None for a device without a float8 peak."""


def make_plan(
    config: Config, *, world_size: int, device: DeviceSpec, tps: float | None = None
) -> dict[str, Any]:
    """Return the plan as plain values for JSON.

    `tps` are tokens per second per device that a run reached; None: predicted. Raises ConfigError
    if the config does not fit `world_size`, computes in float32, whose matmul rates are not known,
    or uses float8 or a recipe that the device does not have.
    """
    _check_device(config, device)
    tokenizer = build_tokenizer(config.model.tokenizer_path).values
    job = build_job(config, world_size=world_size, tokenizer=tokenizer)
    rates = device_rates(device, config.metrics)
    run = _Run(
        job=resolve_checkpointing(job, rates=rates, memory_gib=device.memory_gib),
        device=device,
        peaks=Peaks(
            device.name, published=published_peaks(device), given=given_peaks(config.metrics)
        ),
        rates=rates,
    )
    # "auto" in filter_fqns is left in place, so that the plan shows the reason for each linear.
    meta = in_float8 = build_meta_model(run.job, emulate=False, fused_attention=True, rates=rates)

    # Without float8 the linears and the prediction show what it would gain, wherever it pays.
    if not config.float8.enable_float8_linear and rates is not None:
        filters = (*config.float8.filter_fqns, AUTO)
        tried = run.job.choose("float8", enable_float8_linear=True, filter_fqns=filters)
        in_float8 = build_meta_model(tried, emulate=False, fused_attention=True, rates=rates)

    peaks = _plan_peaks(run, meta.ledger)
    return {
        "request": _plan_request(run),
        "model": _plan_model(run, meta.parameters),
        "flops_per_token": _plan_flops(meta.ledger),
        "linears": _plan_linears(run, in_float8),
        "peaks": peaks,
        "prediction": _plan_prediction(run, in_float8),
        "memory": _plan_memory(run, meta),
        "schedule": _plan_schedule(run, meta, arithmetic_peak=peaks["arithmetic"], tps=tps),
    }


def _check_device(config: Config, device: DeviceSpec) -> None:
    """Raise ConfigError for what cannot be planned on `device`."""
    float8, dtype = config.float8, config.training.mixed_precision_param
    if dtype != "bfloat16":
        raise ConfigError(
            f'[training] mixed_precision_param = "{dtype}" cannot be planned: only bf16 and fp8 '
            'rates are known; plan with "bfloat16".'
        )
    if float8.enable_float8_linear and device.fp8_tflops is None:
        raise ConfigError(
            f"[float8] enable_float8_linear = true, but the {device.name} has no float8 matrix "
            "units; plan another --device, or set it to false."
        )
    if float8.recipe.capability_major is not None and not device.mxfp8:
        having = ", ".join(known.name for known in DEVICES if known.mxfp8)
        raise ConfigError(
            f'[float8] recipe_name = "{float8.recipe_name}", but torchao has no kernels of it for '
            f"the {device.name}, only for {having}; plan another --device or recipe."
        )


def _plan_request(run: _Run) -> dict[str, Any]:
    training, float8 = run.job.config.training, run.job.config.float8
    return {
        "flavor": run.job.config.model.flavor,
        "device": run.device.name,
        "world_size": run.job.degrees.world_size,
        **dataclasses.asdict(run.job.degrees),
        **dataclasses.asdict(run.job.batch),
        "seq_len": training.seq_len,
        "document_mask": training.document_mask,
        "steps": training.steps,
        "float8_recipe": float8.recipe_name if float8.enable_float8_linear else None,
        "float8_all_gather": float8.enable_fsdp_float8_all_gather,
        "activation_checkpoint": run.job.config.activation_checkpoint.mode,
        "compile": run.job.config.compile.enable,
    }


def _plan_model(run: _Run, parameters: int) -> dict[str, Any]:
    args = run.job.model_args
    sizes = ("dim", "n_layers", "n_heads", "n_kv_heads", "ffn_dim", "vocab_size")
    return {
        "flavor": run.job.config.model.flavor,
        "parameters": parameters,
        "parameters_without_embedding": parameters - args.vocab_size * args.dim,
        **{size: getattr(args, size) for size in sizes},
    }


def _plan_flops(ledger: FlopsLedger) -> dict[str, Any]:
    recompute = sum(ledger.recompute.values())
    return {
        "total": ledger.total,
        **{str(name): count for name, count in ledger.by_precision.items()},
        "block_linears": ledger.total - ledger.output - ledger.attention,
        "output": ledger.output,
        "attention": ledger.attention,
        "recompute": recompute,
        "recompute_by_precision": ledger.recompute,
        "with_recompute": ledger.total + recompute,
    }


def _plan_linears(run: _Run, meta: MetaModel) -> list[dict[str, Any]]:
    """A row for each kind of linear and reason to keep it."""
    tokens, scheme = run.job.config.training.microbatch_tokens, float8_scheme(run.job.config)
    multiple = run.job.config.float8.recipe.size_multiple

    # Linears that are in float8 together share casts; a kept one is timed as if it were added.
    ratios: dict[tuple[str, ...], float] = {}
    if (rates := run.rates) is not None:
        converted = [choice for choice in meta.choices if choice.converted]
        times = time_linears(converted, rates, tokens=tokens, scheme=scheme)
        ratios = {
            choice.names: time.ratio for choice, time in zip(converted, times, strict=True)
        } | {
            kept.names: added_ratio(kept, converted, rates, tokens=tokens, scheme=scheme)
            for kept in meta.choices
            if not kept.converted
        }

    rows = []
    for choice in meta.choices:
        precisions, (n, k) = meta.ledger.precisions[choice.names[0]], choice.local_shape
        gemms = {
            "output": (tokens, n, k, precisions["output"]),
            "grad_input": (tokens, k, n, precisions["grad_input"]),
            "grad_weight": (n, k, tokens, precisions["grad_weight"]),
        }
        keys = ("m", "n", "k", "precision")
        rows.append(
            {
                "kind": choice.kind,
                "count": len(choice.names),
                "gemms": {name: dict(zip(keys, gemm, strict=True)) for name, gemm in gemms.items()},
                "divisible_by_16": not any(size % multiple for size in (tokens, n, k)),
                "time_ratio": ratios.get(choice.names),
                "converted": choice.converted,
                "kept_because": choice.kept_because,
            }
        )
    return rows


def _plan_peaks(run: _Run, ledger: FlopsLedger) -> dict[str, Any]:
    known, flops = run.peaks.tflops, ledger.by_precision
    effective, arithmetic = effective_peak(flops, known), None
    if effective is not None:
        weighted = sum(count * known[name] for name, count in flops.items() if count)
        arithmetic = weighted / ledger.total
    return {
        "device": run.device.name,
        "bf16": known.get("bf16"),
        "fp8": known.get("fp8"),
        "effective": effective,
        "arithmetic": arithmetic,
        "memory_gib": run.device.memory_gib,
        "bandwidth_tb_s": run.device.bandwidth_tb_s,
    }


def _plan_prediction(run: _Run, meta: MetaModel) -> dict[str, Any]:
    """The gain over bf16 of `meta`, which is in float8."""
    if run.rates is None:
        return {
            "step_speedup": None,
            "verdict": f"the {run.device.name} has no float8 matrix units.",
            "converted": [],
            "better_kept": [],
            "bf16": None,
            "float8": None,
        }
    found = predict_step(run.job, meta, rates=run.rates)

    def as_dict(step: StepTime) -> dict[str, Any]:
        times = {"microbatch_s": step.seconds, "host_s": step.host}
        return times | {"device_parts_s": dict(step.parts)}

    return {
        "step_speedup": found.step_speedup,
        "verdict": found.verdict,
        "converted": list(found.converted),
        "better_kept": list(found.better_kept),
        "bf16": as_dict(found.bf16),
        "float8": as_dict(found.float8),
    }


def _plan_memory(run: _Run, meta: MetaModel) -> dict[str, Any]:
    moments = estimate_memory(run.job, meta.choices)
    peak, reserved = max(moments, key=lambda moment: moment.total), reserved_bytes(moments)
    device_bytes = round(run.device.memory_gib * 2**30)
    return {
        "peak": dataclasses.asdict(peak) | {"total": peak.total},
        "reserved": round(reserved),
        "device_bytes": device_bytes,
        "fits": reserved <= device_bytes,
        "moments": [{"name": moment.name, "total": moment.total} for moment in moments],
    }


def _plan_schedule(
    run: _Run, meta: MetaModel, *, arithmetic_peak: float | None, tps: float | None
) -> dict[str, Any]:
    """Rates at `tps`, or as predicted, and the time that the run takes at them."""
    training, degrees, ledger = run.job.config.training, run.job.degrees, meta.ledger
    origin = "given"
    if tps is None:
        # Without an fp8 peak no linear is in float8.
        rates = run.rates or bf16_rates(run.device, run.peaks.tflops["bf16"])
        step = predict_step(run.job, meta, rates=rates).float8
        tps, origin = training.microbatch_tokens / step.seconds / degrees.tp, "predicted"
    at = compute_rates(tps, ledger=ledger, peaks=run.peaks)

    tokens_per_step = run.job.batch.global_batch_size * training.seq_len
    tokens_per_second = tps * degrees.world_size
    # A checkpoint holds each weight in float32 and its two moments.
    moment_width = MOMENT_WIDTHS[run.job.config.optimizer.state_dtype]
    checkpoint_bytes = round((4 + 2 * moment_width) * meta.parameters)
    return {
        "origin": origin,
        "tps": tps,
        "tflops": at.tflops,
        "mfu": at.mfu,
        "mfu_bf16_peak": at.mfu_bf16_peak,
        "mfu_fp8_peak": at.mfu_fp8_peak,
        "mfu_arithmetic_peak": arithmetic_peak and 100 * at.tflops / arithmetic_peak,
        "hfu": at.hfu,
        "step_s": tokens_per_step / tokens_per_second,
        "tokens_per_step": tokens_per_step,
        "tokens_per_day": tokens_per_second * SECONDS_PER_DAY,
        "run_tokens": training.steps * tokens_per_step,
        "run_days": training.steps * tokens_per_step / tokens_per_second / SECONDS_PER_DAY,
        "days_per_trillion_tokens": 1e12 / tokens_per_second / SECONDS_PER_DAY,
        "checkpoint_bytes": checkpoint_bytes,
        "checkpoint_s": checkpoint_bytes / degrees.world_size / 1e9,
    }
