"""Every figure that a run logs: its name, meaning, unit and TensorBoard tag.

To add a figure of a step, add its line to `StepRecord`, and compute the value: a tensor on the
device in `Trainer.train_step`, which returns it in `StepValues`, anything else in
`MetricsProcessor`. metrics.jsonl, wandb and TensorBoard's curves follow from that line, and a test
holds docs/metrics.md to it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, get_type_hints


@dataclass(frozen=True)
class Figure:
    """How a figure is described and shown. Its name is the key in metrics.jsonl and on wandb."""

    meaning: str
    unit: str = ""
    tag: str = ""
    """TensorBoard tag, torchtitan's where it has one; empty: no curve."""


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """The figures of one logged step, in the order of metrics.jsonl. Rates and times are averages
    over the steps since the previous record. None means unknown."""

    # One figure after the other, as in a table.
    # fmt: off
    step: Annotated[int, Figure("number of the step, from 1")]
    tokens: Annotated[int, Figure(
        "trained on by all ranks since step 1, over resumes", "tokens", "n_tokens_seen")]
    epochs: Annotated[Mapping[str, float], Figure(
        "passes over each store of the training data, by its name, which ends the tag", "passes",
        "n_epochs")]
    loss: Annotated[float, Figure(
        "mean over all ranks' tokens of this step", "nat", "loss_metrics/global_avg_loss")]
    loss_max: Annotated[float, Figure(
        "largest of the ranks' own mean losses", "nat", "loss_metrics/global_max_loss")]
    grad_norm: Annotated[float, Figure("norm of the gradient before clipping", "", "grad_norm")]
    lr: Annotated[float, Figure("learning rate of this step", "", "lr")]
    skipped_steps: Annotated[int, Figure(
        "steps of the run without an update: loss or gradient not finite, or a loss spike", "steps",
        "skipped_steps")]
    tps: Annotated[float, Figure("tokens per second per device", "tokens/s", "throughput(tps)")]
    sequences_per_s: Annotated[float, Figure(
        "`tps` over `training.seq_len`, per device", "sequences/s", "sequences_per_s")]
    tflops: Annotated[float, Figure(
        "FLOPs per token times `tps`, per device", "TFLOPS", "tflops")]
    mfu: Annotated[float | None, Figure(
        "utilisation, each matmul at its own precision's peak", "%", "mfu(%)")]
    mfu_documents: Annotated[float | None, Figure(
        "`mfu` with attention within documents only, under `training.document_mask`", "%",
        "mfu_documents(%)")] = None
    mfu_bf16_peak: Annotated[float | None, Figure(
        "utilisation, all FLOPs at the bf16 peak", "%", "mfu_bf16_peak(%)")]
    mfu_fp8_peak: Annotated[float | None, Figure(
        "utilisation, all FLOPs at the fp8 peak", "%", "mfu_fp8_peak(%)")]
    hfu: Annotated[float | None, Figure(
        "`mfu` with the recomputation by activation checkpointing", "%",
        "utilisation/hfu(%)")]
    attention_imbalance: Annotated[float | None, Figure(
        "attention within documents of each microbatch's busiest rank, over the mean", "",
        "attention_imbalance")] = None
    bubble_pct: Annotated[float | None, Figure(
        "share of a pipeline's time in which a rank does not compute, mean of all ranks", "%",
        "pipeline/bubble_pct")] = None
    stage_time_s: Annotated[Mapping[int, float] | None, Figure(
        "computing of each pipeline stage in a step; the stage's number ends the tag", "s",
        "pipeline/stage_time_s")] = None
    stage_mfu: Annotated[Mapping[int, float] | None, Figure(
        "`mfu` of each pipeline stage while it computes; its number ends the tag", "%",
        "pipeline/stage_mfu")] = None
    step_time_s: Annotated[float, Figure(
        "from the end of the previous step to this one's, with the wait for data", "s",
        "time_metrics/end_to_end(s)")]
    data_time_s: Annotated[float, Figure(
        "wait for data, part of `step_time_s`", "s", "time_metrics/data_loading(s)")]
    memory_gib: Annotated[float, Figure(
        "rank 0's peak so far: reserved by torch on a GPU, resident on CPU", "GiB",
        "memory/max_reserved(GiB)")]
    memory_pct: Annotated[float | None, Figure(
        "`memory_gib` of a GPU's memory", "%", "memory/max_reserved(%)")]
    memory_max_gib: Annotated[float | None, Figure(
        "`memory_gib` of the rank with the highest, with pipelines", "GiB",
        "memory/max_of_ranks(GiB)")] = None
    memory_max_rank: Annotated[int | None, Figure(
        "which rank that is", "", "memory/max_rank")] = None
    data_time_pct: Annotated[float, Figure(
        "`data_time_s` of `step_time_s`", "%", "time_metrics/data_loading(%)")]
    time: Annotated[float, Figure("when the step was logged, Unix time", "s")]
    # fmt: on
    approximate_mfu: bool = False
    """Whether the utilisations rest on a CPU's measured peaks."""

    def to_json(self) -> dict[str, Any]:
        """Return the line of metrics.jsonl."""
        return {name: getattr(self, name) for name in STEP_FIGURES}

    def format_mfu(self, mfu: float | None) -> str:
        """Format a utilisation: 41.2%, ~41.2% if it is approximate, n/a if it is unknown."""
        return "n/a" if mfu is None else f"{'~' if self.approximate_mfu else ''}{mfu:.1f}%"


STEP_FIGURES: dict[str, Figure] = {
    name: hint.__metadata__[0]
    for name, hint in get_type_hints(StepRecord, include_extras=True).items()
    if hasattr(hint, "__metadata__")
}

BETWEEN_STEPS = {
    "validation_loss": Figure(
        "mean over the validation windows", "nat", "validation_metrics/global_avg_loss"
    ),
    "compile_s": Figure("compilation by torch.compile", "s", "time_metrics/compile_s"),
    "checkpoint_s": Figure("saving a checkpoint", "s", "time_metrics/checkpoint_s"),
    "validation_s": Figure("validation", "s", "time_metrics/validation_s"),
    "gc_s": Figure("garbage collection", "s", "time_metrics/gc_s"),
    "profiling_s": Figure("writing traces and snapshots", "s", "time_metrics/profiling_s"),
}
"""Figures that belong to no step. A time is written as NAME_s by `outside_step(NAME)`."""

CAST_FIGURES = {
    "sqnr_db": Figure("signal to quantization noise of the casts", "dB", "z_float8/sqnr_db"),
    "amax": Figure("largest magnitude", "", "z_float8/amax"),
    "underflow": Figure("share of the values that became 0", "", "z_float8/underflow"),
    "saturation": Figure("share of the values that were cut off", "", "z_float8/saturation"),
}
"""Figures of casts to float8; role and kind of linear follow the name: sqnr_db/weight/output."""

FIGURES = STEP_FIGURES | BETWEEN_STEPS | CAST_FIGURES

CastErrors = Mapping[str, Mapping[str, Mapping[str, float]]]
"""CAST_FIGURES by kind of linear and role (input, weight, grad_output). NAME_layer is the index of
the layer that the figure NAME comes from, if the linear is in a layer."""
