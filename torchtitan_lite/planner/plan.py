"""Plan a run: what a config will cost and gain, computed on meta without a GPU or a process group.

Each `_plan_x` computes one section in plain values; docs/plan.md documents every key.
"""

import dataclasses
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

from .auto import find_fitting, resolve_auto, turn_on_float8
from .communication import Network, rings_of
from .constants import constants_of, rates_of
from .pipeline_report import plan_pipeline
from .prediction import Prediction, format_verdict
from .rank import state_widths
from .refusals import check_planned
from .roofline import Roofline
from .workload import Workload, build_workload, tokenizer_values

SECONDS_PER_DAY = 86_400
MEASURED = ("name", "value", "source")
RATES = ("tps", "tflops", "mfu", "mfu_bf16_peak", "mfu_fp8_peak")


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
    return dataclasses.replace(device, **given).with_peaks(peaks)


def make_plan(
    config: Config,
    *,
    world_size: int,
    device: DeviceSpec,
    tps: float | None = None,
    attention_kernel: str = "",
) -> dict[str, Any]:
    """Return the plan as plain values for JSON.

    `tps` are tokens per second per device that a run reached; None: predicted. `attention_kernel`
    is cudnn, flash or flex; "": what PyTorch takes on the device. Raises ConfigError if the
    config does not fit `world_size`, computes in float32, whose matmul rates are not known, or uses
    float8 or a recipe that the device does not have.
    """
    device = device.with_peaks(given_peaks(config.metrics))
    check_planned(config, device, attention_kernel)
    job = build_job(config, world_size=world_size, tokenizer=tokenizer_values(config.model))
    job = resolve_auto(job, device=device, memory_gib=device.memory_gib)
    work = in_float8 = build_workload(job)
    meta = counted = build_meta_model(job, choices=work.choices)

    # With "auto", and without float8, linears and prediction show what "auto" would choose.
    filters, on = config.float8.filter_fqns, config.float8.enable_float8_linear
    if device.fp8_tflops is not None and (AUTO in filters or not on):
        job = turn_on_float8(job, filter_fqns=filters)
        in_float8 = build_workload(job, device=device)
        counted = build_meta_model(job, choices=in_float8.choices)

    roofline = work.roofline(device, attention_kernel)
    gain = predicted = work.predict(device, attention_kernel)
    if in_float8 is not work:
        gain = in_float8.predict(device, attention_kernel)
    return {
        "request": _plan_request(roofline, on=on),
        "model": _plan_model(work.job, meta),
        "flops_per_token": _plan_flops(meta.ledger),
        "linears": _plan_linears(in_float8, counted.ledger, device),
        "peaks": _plan_peaks(meta.ledger, device),
        "prediction": _plan_prediction(gain, device, on=on),
        "communication": _plan_communication(work, device, predicted),
        "memory": _plan_memory(work, device),
        "pipeline": plan_pipeline(work, meta.ledger, roofline),
        "schedule": _plan_schedule(work.job, meta, device, predicted, tps),
        "assumed": _plan_assumed(device, predicted),
        "measured": [dict(zip(MEASURED, row, strict=True)) for row in device.measured],
    }


def _plan_request(roofline: Roofline, *, on: bool) -> dict[str, Any]:
    job, config = roofline.job, roofline.job.config
    return {
        "model": job.model_name,
        "flavor": config.model.flavor,
        "device": roofline.device.name,
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
        "attention_kernel": roofline.runs_attention_in,
        "compile": config.compile.enable,
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
        "recompute_by_precision": ledger.recompute,
        "with_recompute": ledger.total + recompute,
    }


def _plan_linears(work: Workload, ledger: FlopsLedger, device: DeviceSpec) -> list[dict[str, Any]]:
    """A row for each kind of linear and reason to keep it."""
    roofline, converted = work.roofline(device), work.converted
    multiple = work.job.config.float8.recipe.size_multiple

    rows = []
    for choice in work.choices:
        precision = ledger.precisions[choice.names[0]]
        m, (n, k) = roofline.tokens, choice.local_shape
        shapes = {"output": (m, n, k), "grad_input": (m, k, n), "grad_weight": (n, k, m)}
        same_input = [each.kind for each in converted if each.reads == choice.reads]
        shares = roofline.compiled and choice.converted
        rows.append(
            {
                "kind": choice.kind,
                "count": len(choice.names),
                "gemms": {
                    name: dict(zip("mnk", shape, strict=True)) | {"precision": precision[name]}
                    for name, shape in shapes.items()
                },
                "divisible_by_16": not any(size % multiple for size in (m, n, k)),
                "time_ratio": roofline.ratio(choice, converted) if device.fp8_tflops else None,
                "shares_cast_with": [kind for kind in same_input if shares and kind != choice.kind],
                "converted": choice.converted,
                "kept_because": choice.kept_because,
            }
        )
    return rows


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


def _plan_prediction(gain: Prediction, device: DeviceSpec, *, on: bool) -> dict[str, Any]:
    """The gain over bf16 of a model in float8, or its time in bf16 alone."""
    found, verdict = dataclasses.asdict(gain), format_verdict(gain, on=on)
    del found["float8_s_ends"]  # the section "assumed" has them
    if device.fp8_tflops is None:
        in_float8 = ("step_speedup", "speedup_band", "float8_s_band", "float8", "recipe")
        verdict = f"the {device.name} has no float8 matrix units with a known peak."
        found |= dict.fromkeys(in_float8)
    return found | {"verdict": verdict}


def _plan_communication(
    work: Workload, device: DeviceSpec, predicted: Prediction
) -> dict[str, Any]:
    """Collectives of the run as configured."""
    network, step = Network(device, rates_of(device)), predicted.float8
    return {
        "link_gb_s": device.link_gb_s,
        "node_devices": device.node_devices,
        "network_gb_s": device.network_gb_s,
        "collectives": [
            {
                "kind": kind,
                "ring_size": ring.size,
                "crosses_nodes": network.crosses_nodes(ring),
                "gb_s": network.bandwidth_gb_s(ring),
                "exposed_s": step.exposed_s[kind],
                "hidden_s": step.hidden_s[kind],
            }
            for kind, ring in rings_of(work.job.degrees).items()
            if ring.size > 1
        ],
    }


def _plan_assumed(device: DeviceSpec, predicted: Prediction) -> list[dict[str, Any]]:
    """The uncertain constants that the step depends on, and how much."""
    assumed, constants = [], constants_of(device)
    keys = ("name", "value", "between", "guessed", "source")
    for name, ends in predicted.float8_s_ends.items():
        ratios = [seconds / predicted.float8.step_s for seconds in ends]
        if set(ratios) - {1.0}:
            constant = {key: getattr(constants[name], key) for key in keys}
            assumed.append(constant | {"step_ratio": ratios})
    return assumed


def _plan_memory(work: Workload, device: DeviceSpec) -> dict[str, Any]:
    moments, device_bytes = work.moments(), round(device.memory_gib * 2**30)
    peak = max(moments, key=lambda moment: moment.total)
    reserved = work.reserved_ratio * peak.total
    return {
        "peak": dataclasses.asdict(peak) | {"total": peak.total},
        "reserved": round(reserved),
        "device_bytes": device_bytes,
        "fits": reserved <= device_bytes,
        "would_fit": [] if reserved <= device_bytes else find_fitting(work, device.memory_gib),
        "moments": [{"name": moment.name, "total": moment.total} for moment in moments],
    }


def _plan_schedule(
    job: Job, meta: MetaModel, device: DeviceSpec, predicted: Prediction, tps: float | None
) -> dict[str, Any]:
    """Rates at `tps`, or as predicted, and the time that the run takes at them."""
    training = job.config.training
    tokens_per_step = job.batch.global_batch_size * training.seq_len
    origin, step_s_band, tps_band = "given", None, None
    if tps is None:
        tokens = tokens_per_step / job.degrees.world_size
        origin, step_s_band = "predicted", predicted.float8_s_band
        fast, slow = step_s_band
        tps, tps_band = tokens / predicted.float8.step_s, (tokens / slow, tokens / fast)
    at = compute_rates(tps, ledger=meta.ledger, peaks=Peaks(device.name, published_peaks(device)))
    arithmetic_peak = _plan_peaks(meta.ledger, device)["arithmetic"]

    tokens_per_second = tps * job.degrees.world_size
    run_tokens = training.steps * tokens_per_step
    checkpoint_bytes = sum(state_widths(job.config)) * meta.parameters
    return {
        "origin": origin,
        **{name: at[name] for name in RATES},
        "mfu_arithmetic_peak": arithmetic_peak and 100 * at["tflops"] / arithmetic_peak,
        "hfu": at["hfu"],
        "tps_band": tps_band,
        "step_s": tokens_per_step / tokens_per_second,
        "step_s_band": step_s_band,
        "tokens_per_step": tokens_per_step,
        "tokens_per_day": tokens_per_second * SECONDS_PER_DAY,
        "run_tokens": run_tokens,
        "run_days": run_tokens / tokens_per_second / SECONDS_PER_DAY,
        "run_gpu_hours": run_tokens / tps / 3600,
        "days_per_trillion_tokens": 1e12 / tokens_per_second / SECONDS_PER_DAY,
        "gpu_hours_per_trillion_tokens": 1e12 / tps / 3600,
        "checkpoint_bytes": checkpoint_bytes,
        "checkpoint_s": checkpoint_bytes / job.degrees.world_size / 1e9,
    }
