"""The workload of a job's step, from which its time and memory follow, and what float8 gains."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial

from torchtitan_lite.base.errors import ConfigError
from torchtitan_lite.catalog.devices import DeviceSpec
from torchtitan_lite.config.job import Job
from torchtitan_lite.float8.selection import LinearChoice
from torchtitan_lite.training.model import choose_linears, find_recomputed

from .constants import SPEEDUP_RANGE, rates_of
from .memory import RESERVED_RATIO, RESERVED_RATIO_WITHOUT_FSDP, Moment, step_memory
from .share import Share, without_fsdp
from .time import Roofline, StepTime, time_step


@dataclass(frozen=True)
class Gain:
    """Times of a step in bf16, and in float8 with the linears that are converted."""

    recipe: str
    bf16: StepTime
    float8: StepTime

    @property
    def speedup(self) -> float:
        """Time in bf16 over time in float8: above 1 float8 pays."""
        return self.bf16.step_s / self.float8.step_s

    @property
    def speedup_range(self) -> tuple[float, float]:
        """The range of the speedup by the errors of published runs."""
        return self.speedup * SPEEDUP_RANGE[0], self.speedup * SPEEDUP_RANGE[1]

    def verdict(self) -> str:
        """Return the gain in one sentence. Float8 helps or hurts where the whole range says so."""
        if self.float8 == self.bf16:
            return "no linear is in float8: it is off, or filters or predictions keep all in bf16."
        low, high = self.speedup_range
        effect = "helps" if low > 1 else "hurts" if high < 1 else "may help or hurt"
        return (
            f"{self.recipe} float8 {effect}: a step runs at {self.speedup:.2f}x the speed of bf16 "
            f"({low:.2f} to {high:.2f})."
        )


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

    def roofline(self, device: DeviceSpec) -> Roofline:
        """Return the times of kernels on `device`."""
        return Roofline(device, rates_of(device), self.job, self.recomputed)

    def time(self, device: DeviceSpec) -> StepTime:
        """Time a step as converted."""
        return time_step(self.roofline(device), self.choices, self.converted)

    def gain(self, device: DeviceSpec) -> Gain:
        """Predict what float8 gains over bf16."""
        bf16 = time_step(self.roofline(device), self.choices, [])
        return Gain(self.job.config.float8.recipe_name, bf16, self.time(device))

    @cached_property
    def peak(self) -> Moment:
        """The moment of a step at which a rank holds the most memory."""
        kinds = {each.kind for each in self.converted}
        shares = [Share(self.job, kinds, rank=rank) for rank in range(self.job.degrees.pp)]
        moments = [moment for share in shares for moment in step_memory(share)]
        return max(moments, key=lambda moment: moment.total)

    @property
    def reserved_gib(self) -> float:
        """Memory that a GPU reserves in a step, in GiB."""
        ratio = RESERVED_RATIO_WITHOUT_FSDP if without_fsdp(self.job) else RESERVED_RATIO
        return ratio * self.peak.total / 2**30


def build_workload(
    job: Job,
    *,
    fused_attention: bool = True,
    device: DeviceSpec | None = None,
    choices: list[LinearChoice] | None = None,
) -> Workload:
    """Decide which linears train in float8, and what is recomputed. The device need not be present;
    only [float8] filter_fqns = ["auto"] needs its data sheet. `choices`, if any, are taken over."""
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

    # Reductions of scales and gathers in float8 can make all linears faster together, or none.
    chosen = min(
        (roofline.choose(linears), linears, ()),
        key=lambda each: time_step(roofline, linears, each).step_s,
    )
    return {
        linear.kind: f"auto: {roofline.ratio(linear):.2f}x the time of bf16"
        for linear in linears
        if linear not in chosen
    }
