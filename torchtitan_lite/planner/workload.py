"""The workload of a job's step, from which its time and its memory follow."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from torchtitan_lite.base.errors import ConfigError, DataError
from torchtitan_lite.catalog.devices import DeviceSpec
from torchtitan_lite.config import ModelConfig, resolve_model
from torchtitan_lite.config.job import Job, TokenizerValues
from torchtitan_lite.data.tokenizer import build_tokenizer
from torchtitan_lite.float8.selection import LinearChoice
from torchtitan_lite.training.model import choose_linears, find_recomputed

from .constants import rates_of
from .memory import Moment, rank_moments
from .pipeline_time import time_step
from .prediction import Prediction, predict
from .rank import without_fsdp
from .roofline import Roofline
from .step import StepTime

RESERVED_RATIO = 1.26
"""Reserved memory over the estimated peak: the highest of eight measurements, 1.18 to 1.26, that
torchtitan published for Llama 3 8B and 70B on 8 to 256 GPUs. It is not a bound: memory that one of
FSDP's streams frees cannot be used by the others. Where a rank has few tokens, such fragmentation
adds up to 4 % (4,096 tokens: 1.30) or 11 % (2,048: 1.40), counted on a fake H100 for two layers of
8B."""
RESERVED_RATIO_WITHOUT_FSDP = 1.1
"""The same without FSDP: 1.095 for 2 and 4 layers of 8B, 1.11 for two stages with tensor
parallelism, counted on a fake H100."""


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
    choices = choices or choose_linears(job, slower=partial(_slower_linears, job, device))
    recomputed = find_recomputed(job, choices, fused_attention=fused_attention)
    return Workload(job, choices, recomputed)


def _slower_linears(
    job: Job, device: DeviceSpec | None, linears: Sequence[LinearChoice]
) -> dict[str, str]:
    """Return the kinds that float8 would not make faster, each with the reason."""
    if device is None:
        raise ConfigError(
            '[float8] filter_fqns = ["auto"] compares float8 with bf16 by the bf16 and fp8 peaks '
            "and the memory bandwidth of the device, and not all of them are known here; name the "
            'linears to keep, such as ["wk", "wv"].'
        )
    # What is recomputed depends on the linears in float8: "auto" compares what bf16 recomputes.
    roofline = Roofline(device, rates_of(device), job, find_recomputed(job, []))

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
