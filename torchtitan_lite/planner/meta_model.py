"""A run's model on PyTorch's meta device: converted to float8 and counted without a device, for
training and planning alike.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

import torch

from torchtitan_lite.config import Config, ModelConfig, resolve_model
from torchtitan_lite.data.tokenizer import build_tokenizer
from torchtitan_lite.errors import ConfigError, DataError
from torchtitan_lite.float8.convert import convert_linears
from torchtitan_lite.float8.selection import AUTO, LinearChoice, select_linears
from torchtitan_lite.job import Job, TokenizerValues
from torchtitan_lite.metrics.devices import DeviceSpec, Precision, lookup_device
from torchtitan_lite.metrics.flops import FlopsLedger, count_flops
from torchtitan_lite.models.flavors import ModelArgs
from torchtitan_lite.models.llama3 import Transformer
from torchtitan_lite.parallel.activation_checkpoint import recomputed_modules

from .constants import rates_of
from .memory import Moment, rank_moments
from .pipeline import time_step
from .prediction import Prediction, predict
from .rank import without_fsdp
from .roofline import Roofline
from .step import StepTime

HIGH_PRECISION: dict[str, Precision] = {"bfloat16": "bf16", "float32": "fp32"}
RESERVED_RATIO = 1.26
"""Reserved memory over the estimated peak: the highest of eight measurements, 1.18 to 1.26, that
torchtitan published for Llama 3 8B and 70B on 8 to 256 GPUs. It is not a bound: memory that one of
FSDP's streams frees cannot be used by the others. Where a rank has few tokens, such fragmentation
adds up to 4 % (4,096 tokens: 1.30) or 11 % (2,048: 1.40), counted on a fake H100 for two layers of
8B."""
RESERVED_RATIO_WITHOUT_FSDP = 1.1
"""The same without FSDP: 1.095 for 2 and 4 layers of 8B, 1.11 for two stages with tensor
parallelism, counted on a fake H100."""


def planned_device(device: torch.device, config: Config) -> DeviceSpec | None:
    """Return the device's data sheet for planning. None on CPU, for an unknown GPU, and if float8
    is on and its peak is unknown."""
    on_gpu = device.type == "cuda"
    spec = lookup_device(torch.cuda.get_device_name(device)) if on_gpu else None
    spec = spec and spec.with_given(config.metrics)
    in_bf16 = not config.float8.enable_float8_linear
    return spec if spec and (in_bf16 or spec.fp8_tflops) else None


@dataclass(frozen=True)
class Workload:
    """What decides the time and the memory of a job's step, apart from the device."""

    job: Job
    choices: list[LinearChoice]  # the decision for every linear
    recomputed: frozenset[str]  # modules whose forward the backward pass runs again

    @property
    def converted(self) -> list[LinearChoice]:
        """The linears that train in float8."""
        return [choice for choice in self.choices if choice.converted]

    def roofline(self, device: DeviceSpec, attention_kernel: str = "") -> Roofline:
        """Return the costs of a microbatch on `device`."""
        return Roofline(device, rates_of(device), self.job, self.recomputed, attention_kernel)

    def predict(self, device: DeviceSpec, attention_kernel: str = "") -> Prediction:
        """Predict the time of a step in bf16, and in float8 as converted."""
        return predict(self.roofline(device, attention_kernel), self.choices)

    def time(self, device: DeviceSpec, attention_kernel: str = "") -> StepTime:
        """Time a step as converted. Faster than `predict`, which also has the band."""
        return time_step(self.roofline(device, attention_kernel), self.choices, self.converted)

    def moments(self, *, on_cpu: bool = False) -> list[Moment]:
        """Estimate what a rank holds at the moments of a step at which memory can peak; of a
        pipeline's ranks, the one with the largest peak."""
        return max(self.rank_moments(on_cpu=on_cpu), key=peak_bytes)

    def rank_moments(self, *, on_cpu: bool = False) -> list[list[Moment]]:
        """Estimate the same for each rank of a pipeline; else one list."""
        return rank_moments(self.job, {each.kind for each in self.converted}, on_cpu=on_cpu)

    @property
    def reserved_ratio(self) -> float:
        """Memory that a GPU reserves in a step, over the largest moment."""
        return RESERVED_RATIO_WITHOUT_FSDP if without_fsdp(self.job) else RESERVED_RATIO

    def reserved_gib(self, *, on_cpu: bool = False) -> float:
        """Return the memory that a GPU reserves in a step, in GiB, by `reserved_ratio`."""
        return self.reserved_ratio * peak_bytes(self.moments(on_cpu=on_cpu)) / 2**30


def peak_bytes(moments: Sequence[Moment]) -> int:
    """Return the most memory of some moments."""
    return max(moment.total for moment in moments)


@dataclass(frozen=True)
class MetaModel(Workload):
    """A model on meta, converted to float8 as configured and not yet sharded."""

    model: Transformer
    ledger: FlopsLedger

    @property
    def parameters(self) -> int:
        """Number of parameters of the whole model."""
        return sum(parameter.numel() for parameter in self.model.parameters())


@cache
def _model_of(args: ModelArgs) -> Transformer:
    with torch.device("meta"):
        return Transformer(args)


def build_workload(
    job: Job,
    *,
    fused_attention: bool = True,
    device: DeviceSpec | None = None,
    choices: list[LinearChoice] | None = None,
) -> Workload:
    """Decide which linears train in float8, and what is recomputed.

    The device need not be present. Only [float8] filter_fqns = ["auto"] needs its data sheet.
    `choices` for the linears, if any, are taken over.
    """
    config, float8 = job.config, job.config.float8
    # One model serves all lengths and masks: its linears are the same.
    model = _model_of(replace(job.model_args, max_seq_len=1, document_bos_id=None))
    repeated = partial(
        recomputed_modules,
        model,
        config.activation_checkpoint,
        compiled=config.compile.covers("model"),
    )

    # What is recomputed depends on the linears in float8, and "auto" on what bf16 recomputes.
    in_bf16 = repeated(fused_attention=True)
    any_tokens = float8.pad_inner_dim or not float8.recipe.divides_tokens
    choices = choices or select_linears(
        model,
        filter_fqns=float8.filter_fqns if float8.enable_float8_linear else [AUTO],
        tp_degree=job.degrees.tp,
        tokens=None if any_tokens else job.microbatch_tokens,
        convert_output=float8.convert_output,
        recipe=float8.recipe,
        slower=lambda linears: _slower_linears(linears, job, in_bf16, device),
    )
    converted = {name for choice in choices if choice.converted for name in choice.names}
    recomputed = repeated(fused_attention=fused_attention, in_float8=converted)
    return Workload(job, choices, recomputed)


def build_meta_model(
    job: Job,
    *,
    emulate: bool = False,
    fused_attention: bool = True,
    device: DeviceSpec | None = None,
) -> MetaModel:
    """Build the model of `job` on meta, and convert it to float8 as `build_workload` decides."""
    config, float8 = job.config, job.config.float8
    with torch.device("meta"):
        model = Transformer(job.model_args).to(getattr(torch, config.training.dtype))
    work = build_workload(job, fused_attention=fused_attention, device=device)
    if float8.enable_float8_linear:
        convert_linears(model, work.choices, float8=float8, emulate=emulate)
        model.tie_weights()  # to a weight that FSDP gathers in high precision, for the embedding

    # The FLOPs of each precision.
    high_precision = HIGH_PRECISION[config.training.mixed_precision_param]
    converted = [name for choice in work.converted for name in choice.names]
    emulated = emulate and bool(converted)
    ledger = count_flops(
        model,
        job.model_args,
        seq_len=config.training.seq_len,
        high_precision=high_precision,
        float8_matmuls=dict.fromkeys(converted, float8.recipe.matmuls),
        fp8_runs_in=(float8.recipe.emulated_in or high_precision) if emulated else "fp8",
        convention=config.metrics.flops_convention,
        recomputed=work.recomputed,
        # Under a memory budget the compiler decides what to recompute.
        recompute_is_known=config.activation_checkpoint.mode != "memory_budget",
    )
    return MetaModel(job, work.choices, work.recomputed, model, ledger)


def _slower_linears(
    linears: Sequence[LinearChoice],
    job: Job,
    recomputed: frozenset[str],
    device: DeviceSpec | None,
) -> dict[str, str]:
    """Return the kinds that float8 would not make faster, each with the reason."""
    if not job.config.float8.enable_float8_linear:
        return {linear.kind: "float8 is off" for linear in linears}
    if device is None:
        raise ConfigError(
            '[float8] filter_fqns = ["auto"] compares float8 with bf16 by the bf16 and fp8 peaks '
            "and the memory bandwidth of the device, and not all of them are known here; name the "
            'linears to keep, such as ["wk", "wv"].'
        )
    roofline = Roofline(device, rates_of(device), job, recomputed)

    # Device time alone chooses. Launches on the host, reductions of scales and gathers in float8
    # can make a step shorter with all linears, or with none.
    def step_s(in_float8: Sequence[LinearChoice]) -> float:
        return time_step(roofline, linears, in_float8).step_s

    chosen = min((roofline.choose(linears), linears, ()), key=step_s)
    eager = "" if roofline.compiled else ", as eager casts are not fused"

    def reason(ratio: float) -> str:
        if ratio < 1:
            return f"auto: {ratio:.2f}x the time of bf16, but launches and reductions cost more"
        return f"auto: {ratio:.2f}x the time of bf16{eager}"

    return {
        linear.kind: reason(roofline.ratio(linear, chosen))
        for linear in linears
        if linear not in chosen
    }


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
