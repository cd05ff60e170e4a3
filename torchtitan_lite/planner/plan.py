"""Plan a run: what a config will cost and gain, computed on meta without a GPU or a process group.

`plan` returns plain values, section by section; docs/plan.md documents every key.
"""

import math
from dataclasses import asdict, replace
from typing import Any

import torch

from torchtitan_lite.base.errors import ConfigError, DataError
from torchtitan_lite.catalog.devices import DEVICES, DeviceSpec, lookup_device
from torchtitan_lite.catalog.flavors import block_linear_shapes
from torchtitan_lite.config import Config, MetricsConfig, ModelConfig, resolve_model
from torchtitan_lite.config.job import Job, TokenizerValues, build_job
from torchtitan_lite.data.tokenizer import build_tokenizer
from torchtitan_lite.metrics.flops import MATMULS, FlopsLedger, compute_rates
from torchtitan_lite.metrics.hardware import Peaks, given_peaks, published_peaks
from torchtitan_lite.training.model import MetaModel, build_meta_model

from .auto import resolve_auto
from .constants import CONTEXT_GIB, RATE_RANGE, SPLIT_RATE_RANGE, USABLE_MEMORY
from .share import state_widths
from .workload import Workload, build_workload

RATES = ("tflops", "mfu", "mfu_bf16_peak", "mfu_fp8_peak", "hfu")


def find_device(name: str | None, metrics: MetricsConfig | None = None, **given: Any) -> DeviceSpec:
    """Return the data sheet of the device called `name`, by default of the GPU at hand, with the
    peaks in `metrics` and the fields `given`, unless None, and the usable part of its memory.

    Raises ConfigError without a name and a GPU, and for an unknown name unless a bf16 peak,
    bandwidth_tb_s and memory_gib are given."""
    given = {field: value for field, value in given.items() if value is not None}
    at_hand = name is None and torch.cuda.is_available()
    name = torch.cuda.get_device_name() if at_hand else name

    # A device without a data sheet is described by what is given.
    device, peaks = lookup_device(name or ""), given_peaks(metrics) if metrics else {}
    if name and "bf16" in peaks and given.keys() >= {"bandwidth_tb_s", "memory_gib"}:
        device = device or DeviceSpec(name, peaks["bf16"], None, **given)
    if device is None:
        problem = f'"{name}" is not known' if name else "is needed where there is no GPU"
        raise ConfigError(
            f"--device {problem}; use one of {', '.join(each.name for each in DEVICES)}; plan any "
            "other by --device and any name, with --bandwidth (TB/s), --memory (GiB) and "
            "--metrics.peak_tflops_bf16 (and _fp8)."
        )

    device = replace(device, **given).with_peaks(peaks)

    # torch knows the memory of the GPU at hand better than a data sheet does.
    usable_gib = USABLE_MEMORY * device.memory_gib
    if at_hand and "memory_gib" not in given:
        usable_gib = torch.cuda.mem_get_info()[1] / 2**30 - CONTEXT_GIB
    return replace(device, memory_gib=round(usable_gib, 1))


def check_planned(config: Config, device: DeviceSpec) -> None:
    """Raise ConfigError for types without known rates, and for kernels that `device` lacks."""
    float8, recipe, training = config.float8, config.float8.recipe, config.training
    if training.mixed_precision_param != "bfloat16":
        raise ConfigError(
            f'[training] mixed_precision_param = "{training.mixed_precision_param}" cannot be '
            'planned: only bf16 and fp8 rates are known; plan with "bfloat16".'
        )
    known = device.fp8_tflops and recipe.capability_major in (None, device.capability_major)
    if float8.enable_float8_linear and not known:
        raise ConfigError(
            f'[float8] recipe_name = "{recipe.name}", but the {device.name} has no float8 kernels '
            "of it with a known peak; plan another --device or recipe, give [metrics] "
            "peak_tflops_fp8, or set enable_float8_linear = false."
        )


def tokenizer_values(model: ModelConfig) -> TokenizerValues:
    """Return the values of the tokenizer, or stand-ins where it is missing and the model has a
    vocabulary."""
    try:
        return build_tokenizer(model.tokenizer_path).values
    except DataError:
        vocab_size = resolve_model(model).vocab_size
        if not vocab_size:
            raise
        return TokenizerValues(model.tokenizer_path, vocab_size, bos_id=0, fingerprint="")


def plan(
    config: Config, *, world_size: int, device: DeviceSpec, tps: float | None = None
) -> dict[str, Any]:
    """Return the plan as plain values for JSON. `tps` are tokens per second per device that a run
    reached; None: predicted. Raises ConfigError for what does not fit `world_size` or the
    device."""
    check_planned(config, device)
    job = build_job(config, world_size=world_size, tokenizer=tokenizer_values(config.model))
    job = resolve_auto(job, device=device, memory_gib=device.memory_gib)
    work = build_workload(job)
    meta = build_meta_model(job, choices=work.choices)

    # The rate, and a given one that no device can reach.
    schedule = plan_schedule(work, work.time(device).step_s, tps=tps)
    schedule |= _plan_rates(schedule["tps"], meta.ledger, device)
    if tps is not None and (mfu := schedule["mfu"]) > 100:
        raise ConfigError(
            f"--tps {tps:g} is an MFU of {mfu:,.0f} %; give the tokens per second of one "
            f"{device.name}, at most {int(100 * tps / mfu):,} with this model"
        )
    return {
        "request": plan_request(work, device),
        "device": asdict(device) | {"data_sheet": lookup_device(device.name) is not None},
        "model": _plan_model(job, meta),
        "flops_per_token": _plan_flops(meta.ledger),
        "linears": _plan_linears(work, device),
        "prediction": _plan_prediction(work, device),
        "memory": {
            "peak": asdict(work.peak) | {"total": work.peak.total},
            "reserved": round(work.reserved_gib * 2**30),
            "fits": work.reserved_gib <= device.memory_gib,
        },
        "schedule": schedule,
    }


# ----- Sections of a plan; the first two are of the layouts of a search, too -----


def plan_request(work: Workload, device: DeviceSpec) -> dict[str, Any]:
    """Return the settings of a run that decide its time and memory."""
    job, config = work.job, work.job.config
    return {
        "model": job.model_name,
        "device": device.name,
        "world_size": job.degrees.world_size,
        "layout": job.layout(),
        **asdict(job.degrees),
        **asdict(job.batch),
        "seq_len": config.training.seq_len,
        "steps": config.training.steps,
        "activation_checkpoint": config.activation_checkpoint.label,
        "fsdp_reshard_after_forward": config.parallelism.fsdp_reshard_after_forward,
        "float8_recipe": config.float8.recipe_name if work.converted else None,
        "attention_kernel": work.roofline(device).runs_attention_in,
    }


def plan_schedule(work: Workload, step_s: float, *, tps: float | None = None) -> dict[str, Any]:
    """Return the rate `tps` that a run reached, else that of the predicted `step_s`, and the hours
    and GPU-hours of this run and of 10^12 tokens at it."""
    training, degrees = work.job.config.training, work.job.degrees
    tokens = work.job.batch.global_batch_size * training.seq_len / degrees.world_size  # of a device
    origin, tps_range = "given", None
    if tps is None:
        origin, tps = "predicted", tokens / step_s
        # The errors of published runs of its kind.
        errors = SPLIT_RATE_RANGE if degrees.cp * degrees.pp > 1 else RATE_RANGE
        tps_range = [tps * each for each in errors]
    run_hours = training.steps * tokens / tps / 3600
    return {
        "origin": origin,
        "tps": tps,
        "tps_range": tps_range,
        "step_s": tokens / tps,
        "run_hours": run_hours,
        "run_gpu_hours": run_hours * degrees.world_size,
        "gpu_hours_per_trillion_tokens": 1e12 / tps / 3600,
    }


def _plan_model(job: Job, meta: MetaModel) -> dict[str, Any]:
    args = job.model_args
    matrices = args.n_layers * sum(map(math.prod, block_linear_shapes(args).values()))
    widths = state_widths(job.config, matrices / meta.parameters)
    return asdict(args) | {
        "parameters": meta.parameters,
        "checkpoint_bytes": round(sum(widths) * meta.parameters),
    }


def _plan_flops(ledger: FlopsLedger) -> dict[str, Any]:
    return {
        "total": ledger.total,
        **{str(name): count for name, count in ledger.by_precision.items()},
        "output": sum(ledger.by_module["output"].values()),
        "attention": ledger.attention,
        "recompute": sum(ledger.recompute.values()),
    }


def _plan_linears(work: Workload, device: DeviceSpec) -> list[dict[str, Any]]:
    """An item for each kind of linear and reason to keep it."""
    roofline, matmuls = work.roofline(device), work.job.config.float8.recipe.matmuls
    return [
        asdict(choice)
        | {
            "tokens": work.job.microbatch_tokens,
            "precisions": {
                each: "fp8" if choice.converted and each in matmuls else "bf16" for each in MATMULS
            },
            "time_ratio": roofline.ratio(choice) if device.fp8_tflops else None,
        }
        for choice in work.choices
    ]


def _plan_prediction(work: Workload, device: DeviceSpec) -> dict[str, Any]:
    """The time of a step in bf16 and in float8, which are the same if no linear is in float8."""
    gain = work.gain(device)
    found = asdict(gain) | {"speedup": gain.speedup, "speedup_range": gain.speedup_range}
    found["bf16"]["step_s"], found["float8"]["step_s"] = gain.bf16.step_s, gain.float8.step_s
    return found | {"verdict": gain.verdict()}


def _plan_rates(tps: float, ledger: FlopsLedger, device: DeviceSpec) -> dict[str, Any]:
    """Utilisations at a rate, and the peaks in TFLOPS by which they divide."""
    known = published_peaks(device)
    at = compute_rates(tps, ledger=ledger, peaks=Peaks(device.name, known))
    weighted = sum(count * known.get(name, 0) for name, count in ledger.by_precision.items())
    arithmetic = weighted / ledger.total
    return {name: at[name] for name in RATES} | {
        "mfu_arithmetic_peak": 100 * at["tflops"] / arithmetic,
        "effective_peak": 100 * at["tflops"] / at["mfu"],
        "arithmetic_peak": arithmetic,
    }
