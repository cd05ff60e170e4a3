"""Plan a run: what a config will cost and gain, computed on meta without a GPU or a process group.

Each `_plan_x` computes one section in plain values; docs/plan.md documents every key.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

import torch

from torchtitan_lite.base.errors import ConfigError
from torchtitan_lite.catalog.devices import DEVICES, DeviceSpec, lookup_device
from torchtitan_lite.config import Config, MetricsConfig
from torchtitan_lite.config.job import Job, build_job
from torchtitan_lite.float8.selection import AUTO
from torchtitan_lite.metrics.flops import FlopsLedger, compute_rates, effective_peak
from torchtitan_lite.metrics.hardware import Peaks, given_peaks, published_peaks
from torchtitan_lite.training.model import MetaModel, build_meta_model

from .auto import resolve_auto
from .share import state_widths
from .step import StepTime
from .workload import Gain, Workload, build_workload, predict_gain, tokenizer_values

SECONDS_PER_DAY = 86_400
RATES = ("tps", "tflops", "mfu", "mfu_bf16_peak", "mfu_fp8_peak", "hfu")
MOST_SHARDS = 2**16


def find_device(name: str | None, metrics: MetricsConfig | None = None, **given: Any) -> DeviceSpec:
    """Return the data sheet of the device called `name`, by default of the GPU at hand. The fields
    of DeviceSpec that are `given`, and not None, replace its own. A data sheet of an unknown device
    is made of the bf16 peak in `metrics` and of bandwidth_tb_s and memory_gib.

    Raises ConfigError for an unknown name without these, and without a name if there is no GPU."""
    given = {field: value for field, value in given.items() if value is not None}
    if name is None and torch.cuda.is_available():
        name = torch.cuda.get_device_name()
    names = [device.name for device in DEVICES]
    if name is None:
        raise ConfigError(
            f"--device is needed where there is no GPU; use one of {', '.join(names)}."
        )

    device, peaks = lookup_device(name), given_peaks(metrics) if metrics else {}
    if device is None and "bf16" in peaks and given.keys() >= {"bandwidth_tb_s", "memory_gib"}:
        device = DeviceSpec(name, peaks["bf16"], None, **given)
    if device is None:
        near = [each for each in names if name.casefold() in each.casefold()]
        near = near or get_close_matches(name, names) or names
        raise ConfigError(
            f'--device "{name}" is not known; use one of {", ".join(near)}. Plan '
            "any other by --bandwidth, --memory and --metrics.peak_tflops_bf16 (and _fp8)."
        )
    return replace(device, **given).with_peaks(peaks)


def check_planned(config: Config, device: DeviceSpec) -> None:
    """Raise ConfigError for types without known rates, and for kernels that `device` lacks."""
    float8, recipe, training = config.float8, config.float8.recipe, config.training
    refused = [
        (
            training.mixed_precision_param != "bfloat16",
            f'[training] mixed_precision_param = "{training.mixed_precision_param}" cannot be '
            'planned: only bf16 and fp8 rates are known; plan with "bfloat16".',
        ),
        (
            float8.enable_float8_linear and device.fp8_tflops is None,
            f"[float8] enable_float8_linear = true, but the {device.name} has no float8 matrix "
            "units with a known peak; plan another --device, give [metrics] peak_tflops_fp8, or "
            "set it to false.",
        ),
        (
            recipe.capability_major is not None and not device.mxfp8,
            f'[float8] recipe_name = "{recipe.name}", but torchao has no kernels of it for the '
            f"{device.name}, only for {', '.join(each.name for each in DEVICES if each.mxfp8)}; "
            "plan another --device or recipe.",
        ),
        (
            float8.scale_gradients_in_matmul
            and recipe.scales_in_matmul
            and device.architecture != "Hopper",
            "[float8] scale_gradients_in_matmul = true needs a GPU of compute capability 9.x, and "
            f"{device.name} is none; plan another --device, or set it to false.",
        ),
    ]
    for holds, problem in refused:
        if holds:
            raise ConfigError(problem)


def make_plan(
    config: Config, *, world_size: int, device: DeviceSpec, tps: float | None = None
) -> dict[str, Any]:
    """Return the plan as plain values for JSON. `tps` are tokens per second per device that a run
    reached; None: predicted. Raises ConfigError if the config does not fit `world_size`, or for
    what cannot be planned on the device."""
    device = device.with_peaks(given_peaks(config.metrics))
    check_planned(config, device)
    job = build_job(config, world_size=world_size, tokenizer=tokenizer_values(config.model))
    job = resolve_auto(job, device=device, memory_gib=device.memory_gib)
    work = in_float8 = build_workload(job)
    meta = counted = build_meta_model(job, choices=work.choices)

    # With "auto", and without float8, linears and prediction show what "auto" would choose.
    on = config.float8.enable_float8_linear
    if device.fp8_tflops is not None and (AUTO in config.float8.filter_fqns or not on):
        in_float8 = build_workload(_turn_on_float8(job, config.float8.filter_fqns), device=device)
        counted = build_meta_model(in_float8.job, choices=in_float8.choices)

    step = work.time(device)
    gain = predict_gain(in_float8, device)
    return {
        "request": _plan_request(work, device, on=on),
        "model": _plan_model(work.job, meta),
        "flops_per_token": _plan_flops(meta.ledger),
        "linears": _plan_linears(in_float8, counted.ledger, device),
        "peaks": _plan_peaks(meta.ledger, device),
        "prediction": _plan_prediction(gain, device, on=on),
        "memory": _plan_memory(work, device),
        "schedule": _plan_schedule(work, meta, device, step, tps),
        "measured": [
            dict(zip(("name", "value", "source"), row, strict=True)) for row in device.measured
        ],
    }


def _turn_on_float8(job: Job, filter_fqns: Sequence[str]) -> Job:
    """Turn float8 on where it pays, beside the filters given. Keys that the recipe excludes have no
    effect while float8 is off, and are dropped."""
    float8, recipe = job.config.float8, job.config.float8.recipe
    gathers = float8.enable_fsdp_float8_all_gather and recipe.gathers_float8
    return job.choose(
        "float8",
        enable_float8_linear=True,
        enable_fsdp_float8_all_gather=gathers,
        scale_gradients_in_matmul=float8.scale_gradients_in_matmul and recipe.scales_in_matmul,
        filter_fqns=(*filter_fqns, AUTO),
    )


def _plan_request(work: Workload, device: DeviceSpec, *, on: bool) -> dict[str, Any]:
    job, config = work.job, work.job.config
    return {
        "model": job.model_name,
        "flavor": config.model.flavor,
        "device": device.name,
        "world_size": job.degrees.world_size,
        **dataclasses.asdict(job.degrees),
        **dataclasses.asdict(job.batch),
        "seq_len": config.training.seq_len,
        "document_mask": config.training.document_mask,
        "steps": config.training.steps,
        "float8_recipe": config.float8.recipe_name if on else None,
        "float8_all_gather": config.float8.enable_fsdp_float8_all_gather,
        "activation_checkpoint": config.activation_checkpoint.label,
        "fsdp_reshard_after_forward": config.parallelism.fsdp_reshard_after_forward,
        "attention_kernel": work.roofline(device).runs_attention_in,
        "compile": config.compile.enable,
        "link_gb_s": device.link_gb_s,
        "node_devices": device.node_devices,
        "network_gb_s": device.network_gb_s,
    }


def _plan_model(job: Job, meta: MetaModel) -> dict[str, Any]:
    args = job.model_args
    looked_up = 0 if args.tie_embeddings else args.vocab_size * args.dim
    sizes = ("dim", "n_layers", "n_heads", "n_kv_heads", "ffn_dim", "vocab_size", "tie_embeddings")
    return {
        "flavor": job.config.model.flavor,
        "parameters": meta.parameters,
        "parameters_without_embedding": meta.parameters - looked_up,
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
        "with_recompute": ledger.total + recompute,
    }


def _plan_linears(work: Workload, ledger: FlopsLedger, device: DeviceSpec) -> list[dict[str, Any]]:
    """A row for each kind of linear and reason to keep it."""
    roofline = work.roofline(device)
    return [
        {
            "kind": choice.kind,
            "count": len(choice.names),
            "m": roofline.tokens,
            "n": choice.local_shape[0],
            "k": choice.local_shape[1],
            "precisions": ledger.precisions[choice.names[0]],
            "time_ratio": roofline.ratio(choice, work.converted) if device.fp8_tflops else None,
            "converted": choice.converted,
            "kept_because": choice.kept_because,
        }
        for choice in work.choices
    ]


def _plan_peaks(ledger: FlopsLedger, device: DeviceSpec) -> dict[str, Any]:
    flops, known = ledger.by_precision, published_peaks(device)
    effective = effective_peak(flops, known)
    weighted = sum(count * known.get(name, 0) for name, count in flops.items())
    return {
        "device": device.name,
        "data_sheet": lookup_device(device.name) is not None,
        "bf16": device.bf16_tflops,
        "fp8": device.fp8_tflops,
        "effective": effective,
        "arithmetic": weighted / ledger.total if effective else None,
        "memory_gib": device.memory_gib,
        "bandwidth_tb_s": device.bandwidth_tb_s,
    }


def _plan_prediction(gain: Gain, device: DeviceSpec, *, on: bool) -> dict[str, Any]:
    """The gain over bf16 of a model in float8, or its time in bf16 alone."""

    def plain(step: StepTime) -> dict[str, Any]:
        return dataclasses.asdict(step) | {"step_s": step.step_s}

    bf16 = plain(gain.bf16)
    if device.fp8_tflops is None:
        verdict = f"the {device.name} has no float8 matrix units with a known peak."
        missing = ("recipe", "better_kept", "speedup", "speedup_range", "float8")
        return {"bf16": bf16, "verdict": verdict} | dict.fromkeys(missing)
    return {
        "bf16": bf16,
        "recipe": gain.recipe,
        "better_kept": gain.better_kept,
        "speedup": gain.speedup,
        "speedup_range": gain.speedup_range,
        "float8": plain(gain.float8),
        "verdict": gain.verdict(on=on),
    }


def _plan_memory(work: Workload, device: DeviceSpec) -> dict[str, Any]:
    peak, device_bytes = work.peak, round(device.memory_gib * 2**30)
    reserved = round(work.reserved_gib * 2**30)
    fits = reserved <= device_bytes
    return {
        "peak": dataclasses.asdict(peak) | {"total": peak.total},
        "reserved": reserved,
        "device_bytes": device_bytes,
        "fits": fits,
        "would_fit": None if fits else find_fewest_gpus(work, device.memory_gib),
    }


def find_fewest_gpus(work: Workload, memory_gib: float) -> int | None:
    """Return the number of GPUs from which on the layout fits with full activation checkpointing
    and more shards; None if no number is enough."""
    job, shards = work.job.choose("activation_checkpoint", mode="full"), work.job.degrees.dp_shard
    while shards <= MOST_SHARDS:
        degrees = replace(job.degrees, dp_shard=shards)
        if replace(work, job=replace(job, degrees=degrees)).reserved_gib <= memory_gib:
            return degrees.world_size
        shards *= 2
    return None


def _plan_schedule(
    work: Workload, meta: MetaModel, device: DeviceSpec, step: StepTime, tps: float | None
) -> dict[str, Any]:
    """Rates at `tps`, or as predicted, and the time that the run takes at them."""
    job, training = work.job, work.job.config.training
    tokens_per_step = job.batch.global_batch_size * training.seq_len
    world_size = job.degrees.world_size
    origin, tps_range = "given", None
    if tps is None:
        origin, tps = "predicted", tokens_per_step / world_size / step.step_s
        tps_range = [tps * each for each in work.rate_range]
    at = compute_rates(tps, ledger=meta.ledger, peaks=Peaks(device.name, published_peaks(device)))
    arithmetic_peak = _plan_peaks(meta.ledger, device)["arithmetic"]
    run_tokens = training.steps * tokens_per_step
    return {
        "origin": origin,
        **{name: at[name] for name in RATES},
        "mfu_arithmetic_peak": arithmetic_peak and 100 * at["tflops"] / arithmetic_peak,
        "tps_range": tps_range,
        "step_s": tokens_per_step / tps / world_size,
        "tokens_per_step": tokens_per_step,
        "run_tokens": run_tokens,
        "run_days": run_tokens / tps / world_size / SECONDS_PER_DAY,
        "run_gpu_hours": run_tokens / tps / 3600,
        "days_per_trillion_tokens": 1e12 / tps / world_size / SECONDS_PER_DAY,
        "gpu_hours_per_trillion_tokens": 1e12 / tps / 3600,
        "checkpoint_bytes": sum(state_widths(job.config)) * meta.parameters,
    }
