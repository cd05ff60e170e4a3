"""What a run will cost and gain, told before it is paid for: on meta, without a GPU and without a
process group."""

import dataclasses
from typing import Any

import torch

from torchtitan_lite.config import (
    BatchSizes,
    Config,
    ParallelDegrees,
    resolve_batch,
    resolve_degrees,
)
from torchtitan_lite.data.tokenizer import build_tokenizer
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.float8.selection import AUTO, LinearChoice, size_multiple
from torchtitan_lite.metrics.devices import DEVICES, DeviceSpec, lookup_device
from torchtitan_lite.metrics.flops import FlopsLedger
from torchtitan_lite.metrics.formulas import list_formulas
from torchtitan_lite.metrics.hardware import Peaks, given_peaks, published_peaks
from torchtitan_lite.metrics.operators import count_operators
from torchtitan_lite.metrics.rates import compute_rates, effective_peak
from torchtitan_lite.models.flavors import ModelArgs

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
    resolve_model_args,
    roofline_linears,
)
from .roofline import DeviceRates, added_ratio, time_linears

SECONDS_PER_DAY = 86_400


def resolve_device(name: str | None) -> DeviceSpec:
    """The data sheet of the device called `name`, by default of the GPU at hand. Raises ConfigError
    for one that is not known, and where there is neither."""
    if name is None and torch.cuda.is_available():
        name = torch.cuda.get_device_name()
    known = ", ".join(device.name for device in DEVICES)
    if name is None:
        raise ConfigError(f"--device is needed where there is no GPU; use one of {known}.")
    if (device := lookup_device(name)) is None:
        raise ConfigError(f'--device "{name}" is not known; use one of {known}.')
    return device


@dataclasses.dataclass(frozen=True)
class _Request:
    """What is planned, resolved."""

    config: Config
    device: DeviceSpec
    args: ModelArgs
    degrees: ParallelDegrees
    batch: BatchSizes
    peaks: Peaks
    rates: DeviceRates | None
    """None where a device has no float8 peak."""

    def build(self, config: Config) -> MetaModel:
        """The model on meta, as `config` would train it on the device."""
        return build_meta_model(
            config,
            self.args,
            tp_degree=self.degrees.tp,
            emulate=False,
            fused_attention=True,
            rates=self.rates,
        )


def make_plan(
    config: Config, *, world_size: int, device: DeviceSpec, tps: float | None = None
) -> dict[str, Any]:
    """The plan, in plain values that JSON can hold; docs/plan.md documents each. `tps` are tokens
    per second per device that were reached, None: predicted.

    Raises ConfigError where the config does not fit `world_size`, computes in float32, of whose
    matmul rates nothing is known here, or asks for float8, or names MXFP8, on a device that has
    none."""
    if config.training.mixed_precision_param != "bfloat16":
        raise ConfigError(
            f'[training] mixed_precision_param = "{config.training.mixed_precision_param}" cannot be planned: only '
            'bf16 and fp8 rates are known; plan with "bfloat16".'
        )
    if config.float8.enable_float8_linear and device.fp8_tflops is None:
        raise ConfigError(
            f"[float8] enable_float8_linear = true, but the {device.name} has no float8 matrix units; "
            "plan another --device, or set it to false."
        )
    if config.float8.recipe_name == "mxfp8" and not device.mxfp8:
        having = ", ".join(known.name for known in DEVICES if known.mxfp8)
        raise ConfigError(
            f'[float8] recipe_name = "mxfp8", but torchao has no MXFP8 for the {device.name}, only for {having}; plan '
            "another --device or recipe."
        )
    degrees = resolve_degrees(config.parallelism, world_size=world_size)
    request = _Request(
        config=config,
        device=device,
        args=resolve_model_args(config, build_tokenizer(config.model.tokenizer_path)),
        degrees=degrees,
        batch=resolve_batch(config.training, dp_degree=degrees.dp),
        peaks=Peaks(
            device.name, published=published_peaks(device), given=given_peaks(config.metrics)
        ),
        rates=device_rates(device, config.metrics),
    )
    config, meta = resolve_checkpointing(
        config, request.args, request.build, degrees=degrees, memory_gib=device.memory_gib
    )
    request = dataclasses.replace(request, config=config)
    in_float8 = meta
    if not config.float8.enable_float8_linear and request.rates is not None:
        in_float8 = request.build(_with_float8(config))
    peaks = _plan_peaks(request, meta.ledger)
    return {
        "request": _plan_request(request),
        "model": _plan_model(request.args, config.model.flavor, meta.parameters),
        "flops_per_token": _plan_flops(meta.ledger),
        "formulas": _plan_formulas(request, meta.parameters),
        "operators": _plan_operators(request, meta),
        "linears": _plan_linears(request, in_float8),
        "peaks": peaks,
        "prediction": _plan_prediction(request, in_float8),
        "memory": _plan_memory(request, meta),
        "schedule": _plan_schedule(request, meta, arithmetic_peak=peaks["arithmetic"], tps=tps),
    }


def _with_float8(config: Config) -> Config:
    """`config` with float8 on wherever it pays."""
    filters = (*config.float8.filter_fqns, AUTO)
    float8 = config.float8.model_copy(update={"enable_float8_linear": True, "filter_fqns": filters})
    return config.model_copy(update={"float8": float8})


def _plan_request(request: _Request) -> dict[str, Any]:
    training, degrees, float8 = request.config.training, request.degrees, request.config.float8
    return {
        "flavor": request.config.model.flavor,
        "device": request.device.name,
        "world_size": degrees.world_size,
        **dataclasses.asdict(degrees),
        **dataclasses.asdict(request.batch),
        "seq_len": training.seq_len,
        "document_mask": training.document_mask,
        "steps": training.steps,
        "float8_recipe": float8.recipe_name if float8.enable_float8_linear else None,
        "float8_all_gather": float8.enable_fsdp_float8_all_gather,
        "activation_checkpoint": request.config.activation_checkpoint.mode,
        "compile": request.config.compile.enable,
    }


def _plan_model(args: ModelArgs, flavor: str, parameters: int) -> dict[str, Any]:
    return {
        "flavor": flavor,
        "parameters": parameters,
        "parameters_without_embedding": parameters - args.vocab_size * args.dim,
        "dim": args.dim,
        "n_layers": args.n_layers,
        "n_heads": args.n_heads,
        "n_kv_heads": args.n_kv_heads,
        "ffn_dim": args.ffn_dim,
        "vocab_size": args.vocab_size,
    }


def _plan_flops(ledger: FlopsLedger) -> dict[str, Any]:
    return {
        "total": ledger.total,
        **{str(precision): count for precision, count in ledger.by_precision.items()},
        "block_linears": ledger.total - ledger.output - ledger.attention,
        "output": ledger.output,
        "attention": ledger.attention,
        "recompute": sum(ledger.recompute.values()),
        "recompute_by_precision": ledger.recompute,
        "with_recompute": ledger.total + sum(ledger.recompute.values()),
    }


def _plan_formulas(request: _Request, parameters: int) -> list[dict[str, Any]]:
    seq_len = request.config.training.seq_len
    formulas = list_formulas(request.args, parameters=parameters, seq_len=seq_len)
    return [dataclasses.asdict(formula) for formula in formulas]


def _plan_operators(request: _Request, meta: MetaModel) -> dict[str, Any]:
    seq_len, ledger = request.config.training.seq_len, meta.ledger
    rows = count_operators(meta.model, seq_len=seq_len, high_precision=ledger.high_precision)
    forward = sum(row.flops_per_token for row in rows)
    # The ledger may hold half of attention; PyTorch counts it in full.
    full_attention = (
        4 * request.args.n_layers * request.args.n_heads * request.args.head_dim * seq_len
    )
    expected = sum(linear.flops_per_matmul for linear in ledger.linears) + full_attention
    assert forward == expected, (
        f"PyTorch counts {forward} forward FLOPs per token, the ledger {expected}"
    )
    shares = {
        precision: sum(row.flops_per_token for row in rows if row.precision == precision) / forward
        for precision in sorted({row.precision for row in rows})
    }
    return {
        "forward": forward,
        "ledger_forward": expected,
        "shares": shares,
        "rows": [
            dataclasses.asdict(row) | {"share": row.flops_per_token / forward} for row in rows
        ],
    }


def _plan_linears(request: _Request, meta: MetaModel) -> list[dict[str, Any]]:
    """A row for each kind of linear and reason to keep it."""
    tokens, scheme = request.config.training.microbatch_tokens, float8_scheme(request.config)
    converted = roofline_linears(
        [choice for choice in meta.choices if choice.converted], recomputed=meta.recomputed
    )
    precisions = {row.name: row for row in meta.ledger.linears}
    multiple = size_multiple(scheme.recipe)
    groups: dict[tuple[str, str], list[LinearChoice]] = {}
    for choice in meta.choices:
        groups.setdefault((choice.kind, choice.kept_because), []).append(choice)
    ratios: dict[str, float] = {}
    if request.rates is not None:
        # Linears that are in float8 together share casts.
        times = time_linears(converted, request.rates, tokens=tokens, scheme=scheme)
        ratios = {time.kind: time.ratio for time in times}
    rows = []
    for (kind, reason), choices in groups.items():
        flops = precisions[choices[0].name]
        n, k = choices[0].local_shape
        ratio = ratios.get(kind)
        if reason and request.rates is not None:
            (kept,) = roofline_linears(choices, recomputed=meta.recomputed)
            ratio = added_ratio(kept, converted, request.rates, tokens=tokens, scheme=scheme)
        rows.append(
            {
                "kind": kind,
                "count": len(choices),
                "gemms": {
                    "output": {"m": tokens, "n": n, "k": k, "precision": flops.output},
                    "grad_input": {"m": tokens, "n": k, "k": n, "precision": flops.grad_input},
                    "grad_weight": {"m": n, "n": k, "k": tokens, "precision": flops.grad_weight},
                },
                "divisible_by_16": not any(size % multiple for size in (tokens, n, k)),
                "time_ratio": ratio,
                "converted": not reason,
                "kept_because": reason,
            }
        )
    return rows


def _plan_peaks(request: _Request, ledger: FlopsLedger) -> dict[str, Any]:
    known, flops = request.peaks.tflops, ledger.by_precision
    arithmetic = None
    if effective_peak(flops, known) is not None:
        arithmetic = (
            sum(count * known[name] for name, count in flops.items() if count) / ledger.total
        )
    return {
        "device": request.device.name,
        "bf16": known.get("bf16"),
        "fp8": known.get("fp8"),
        "effective": effective_peak(flops, known),
        "arithmetic": arithmetic,
        "memory_gib": request.device.memory_gib,
        "bandwidth_tb_s": request.device.bandwidth_tb_s,
    }


def _plan_prediction(request: _Request, meta: MetaModel) -> dict[str, Any]:
    """Float8's gain over bf16 on `meta`, which is in float8; without one where the device has
    none."""
    if request.rates is None:
        verdict = f"the {request.device.name} has no float8 matrix units."
        return {
            "step_speedup": None,
            "verdict": verdict,
            "converted": [],
            "better_kept": [],
            "bf16": None,
            "float8": None,
        }
    found = predict_step(
        request.config, request.args, meta, degrees=request.degrees, rates=request.rates
    )
    steps = {
        name: {
            "microbatch_s": step.seconds,
            "host_s": step.host,
            "device_parts_s": dict(step.parts),
        }
        for name, step in (("bf16", found.bf16), ("float8", found.float8))
    }
    return {
        "step_speedup": found.step_speedup,
        "verdict": found.verdict,
        "converted": list(found.converted),
        "better_kept": list(found.better_kept),
        **steps,
    }


def _plan_memory(request: _Request, meta: MetaModel) -> dict[str, Any]:
    moments = estimate_memory(request.config, request.args, meta.choices, degrees=request.degrees)
    peak, reserved = max(moments, key=lambda moment: moment.total), reserved_bytes(moments)
    device_bytes = round(request.device.memory_gib * 2**30)
    return {
        "peak": dataclasses.asdict(peak) | {"total": peak.total},
        "reserved": round(reserved),
        "device_bytes": device_bytes,
        "fits": reserved <= device_bytes,
        "moments": [{"name": moment.name, "total": moment.total} for moment in moments],
    }


def _plan_schedule(
    request: _Request, meta: MetaModel, *, arithmetic_peak: float | None, tps: float | None
) -> dict[str, Any]:
    """Rates at `tps`, or else as predicted, and what follows from them."""
    training, degrees, ledger = request.config.training, request.degrees, meta.ledger
    origin = "given"
    if tps is None:
        # Without an fp8 peak nothing is in float8.
        rates = request.rates or bf16_rates(request.device, request.peaks.tflops["bf16"])
        step = predict_step(request.config, request.args, meta, degrees=degrees, rates=rates).float8
        tps, origin = (
            request.config.training.microbatch_tokens / step.seconds / degrees.tp,
            "predicted",
        )
    at = compute_rates(tokens=tps, seconds=1.0, n_devices=1, ledger=ledger, peaks=request.peaks)
    tokens_per_step = request.batch.global_batch_size * training.seq_len
    tokens_per_second = tps * degrees.world_size
    moment_width = MOMENT_WIDTHS[request.config.optimizer.state_dtype]
    checkpoint_bytes = round(
        (4 + 2 * moment_width) * meta.parameters
    )  # a weight in fp32 and its two moments
    return {
        "origin": origin,
        "tps": tps,
        "tflops": at.tflops,
        "mfu": at.mfu,
        "mfu_bf16_peak": at.mfu_bf16_peak,
        "mfu_fp8_peak": at.mfu_fp8_peak,
        "mfu_arithmetic_peak": None
        if arithmetic_peak is None
        else 100 * at.tflops / arithmetic_peak,
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
