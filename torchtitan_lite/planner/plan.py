"""Plan a run: what a config will cost and gain, computed on meta without a GPU or a process group.

Each `_plan_x` computes one section in plain values; docs/plan.md documents every key.
"""

import dataclasses
import math
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
    build_meta_model,
    config_roofline,
    device_rates,
    estimate_memory,
    predict_step,
    resolve_auto,
)
from .roofline import DeviceRates, StepTime

SECONDS_PER_DAY = 86_400


def find_device(name: str | None) -> DeviceSpec:
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
    meta: MetaModel
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
    published, given = published_peaks(device), given_peaks(config.metrics)
    peaks = Peaks(device.name, published=published, given=given)
    rates = device_rates(device, config.metrics)
    job = resolve_auto(job, rates=rates, memory_gib=device.memory_gib)
    meta = build_meta_model(job, emulate=False, fused_attention=True)
    run = in_float8 = _Run(job, meta, device, peaks, rates)

    # Without float8, or if "auto" has switched it off, the linears and the prediction show what it
    # would gain, wherever it pays.
    if not job.config.float8.enable_float8_linear and rates is not None:
        filters = (*config.float8.filter_fqns, AUTO)
        job = job.choose("float8", enable_float8_linear=True, filter_fqns=filters)
        meta = build_meta_model(job, emulate=False, fused_attention=True, rates=rates)
        in_float8 = _Run(job, meta, device, peaks, rates)

    plan: dict[str, Any] = {
        "request": _plan_request(run),
        "model": _plan_model(run),
        "flops_per_token": _plan_flops(run.meta.ledger),
        "linears": _plan_linears(in_float8),
        "peaks": _plan_peaks(run),
        "prediction": _plan_prediction(in_float8),
        "memory": _plan_memory(run),
    }
    return plan | {"schedule": _plan_schedule(run, plan["peaks"]["arithmetic"], tps)}


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
    job, config = run.job, run.job.config
    return {
        "flavor": config.model.flavor,
        "device": run.device.name,
        "world_size": job.degrees.world_size,
        **dataclasses.asdict(job.degrees),
        **dataclasses.asdict(job.batch),
        "seq_len": config.training.seq_len,
        "document_mask": config.training.document_mask,
        "steps": config.training.steps,
        "float8_recipe": config.float8.recipe_name if config.float8.enable_float8_linear else None,
        "float8_all_gather": config.float8.enable_fsdp_float8_all_gather,
        "activation_checkpoint": config.activation_checkpoint.mode,
        "compile": config.compile.enable,
    }


def _plan_model(run: _Run) -> dict[str, Any]:
    args, parameters = run.job.model_args, run.meta.parameters
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


def _plan_linears(run: _Run) -> list[dict[str, Any]]:
    """A row for each kind of linear and reason to keep it."""
    config, choices = run.job.config, run.meta.choices
    tokens, multiple = config.training.microbatch_tokens, config.float8.recipe.size_multiple
    roofline = config_roofline(config, run.rates) if run.rates else None
    converted = [choice for choice in choices if choice.converted]

    rows = []
    for choice in choices:
        precision, (n, k) = run.meta.ledger.precisions[choice.names[0]], choice.local_shape
        shapes = {
            "output": (tokens, n, k),
            "grad_input": (tokens, k, n),
            "grad_weight": (n, k, tokens),
        }
        gemms = {
            name: dict(zip("mnk", shape, strict=True)) | {"precision": precision[name]}
            for name, shape in shapes.items()
        }
        rows.append(
            {
                "kind": choice.kind,
                "count": len(choice.names),
                "gemms": gemms,
                "divisible_by_16": not any(size % multiple for size in (tokens, n, k)),
                "time_ratio": roofline.ratio(choice, converted) if roofline else None,
                "converted": choice.converted,
                "kept_because": choice.kept_because,
            }
        )
    return rows


def _plan_peaks(run: _Run) -> dict[str, Any]:
    known, flops = run.peaks.tflops, run.meta.ledger.by_precision
    effective, arithmetic = effective_peak(flops, known), None
    if effective is not None:
        weighted = sum(count * known[name] for name, count in flops.items() if count)
        arithmetic = weighted / run.meta.ledger.total
    return {
        "device": run.device.name,
        "bf16": known.get("bf16"),
        "fp8": known.get("fp8"),
        "effective": effective,
        "arithmetic": arithmetic,
        "memory_gib": run.device.memory_gib,
        "bandwidth_tb_s": run.device.bandwidth_tb_s,
    }


def _plan_prediction(run: _Run) -> dict[str, Any]:
    """The gain of `run`, which is in float8, over bf16."""
    if run.rates is None:
        return {
            "step_speedup": None,
            "verdict": f"the {run.device.name} has no float8 matrix units.",
            "converted": [],
            "better_kept": [],
            "bf16": None,
            "float8": None,
        }
    found = predict_step(run.job, run.meta, rates=run.rates)
    return {
        "step_speedup": found.step_speedup,
        "verdict": found.verdict,
        "converted": list(found.converted),
        "better_kept": list(found.better_kept),
        "bf16": _plan_step(found.bf16),
        "float8": _plan_step(found.float8),
    }


def _plan_step(step: StepTime) -> dict[str, Any]:
    return {"microbatch_s": step.seconds, "host_s": step.host, "device_parts_s": step.parts}


def _plan_memory(run: _Run) -> dict[str, Any]:
    moments = estimate_memory(run.job, run.meta.choices)
    peak, reserved = max(moments, key=lambda moment: moment.total), reserved_bytes(moments)
    device_bytes = round(run.device.memory_gib * 2**30)
    return {
        "peak": dataclasses.asdict(peak) | {"total": peak.total},
        "reserved": round(reserved),
        "device_bytes": device_bytes,
        "fits": reserved <= device_bytes,
        "moments": [{"name": moment.name, "total": moment.total} for moment in moments],
    }


def _plan_schedule(run: _Run, arithmetic_peak: float | None, tps: float | None) -> dict[str, Any]:
    """Rates at `tps`, or as predicted, and the time that the run takes at them."""
    training, degrees, origin = run.job.config.training, run.job.degrees, "given"
    if tps is None:
        # Without an fp8 peak no linear is in float8.
        bf16, bandwidth = run.peaks.tflops["bf16"] * 1e12, run.device.bandwidth_tb_s * 1e12
        rates = run.rates or DeviceRates(bf16, math.nan, bandwidth)
        step = predict_step(run.job, run.meta, rates=rates).float8
        tps, origin = training.microbatch_tokens / step.seconds / degrees.tp, "predicted"
    at = compute_rates(tps, ledger=run.meta.ledger, peaks=run.peaks)

    tokens_per_step = run.job.batch.global_batch_size * training.seq_len
    tokens_per_second = tps * degrees.world_size
    run_tokens = training.steps * tokens_per_step
    # A checkpoint holds each weight in float32 and its two moments.
    moment_width = MOMENT_WIDTHS[run.job.config.optimizer.state_dtype]
    checkpoint_bytes = round((4 + 2 * moment_width) * run.meta.parameters)
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
        "run_tokens": run_tokens,
        "run_days": run_tokens / tokens_per_second / SECONDS_PER_DAY,
        "days_per_trillion_tokens": 1e12 / tokens_per_second / SECONDS_PER_DAY,
        "checkpoint_bytes": checkpoint_bytes,
        "checkpoint_s": checkpoint_bytes / degrees.world_size / 1e9,
    }
