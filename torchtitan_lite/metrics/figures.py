"""Every figure that a run logs: its name, meaning, unit, TensorBoard tag, charts, console text.

To add a figure of a step, add its line to `StepRecord`, and compute the value: a tensor on the
device in `Trainer.train_step`, which returns it in `StepValues`, anything else in
`MetricsProcessor`. metrics.jsonl, wandb,
TensorBoard with its charts, the console and the tables in docs/metrics.md, which
`python -m torchtitan_lite.metrics.figures` prints, follow from that line.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, get_type_hints

CHARTS = {
    "loss": ("loss", "mean and validation, nat"),
    "loss_max": ("loss", "mean and largest of the ranks, nat"),
    "tps": ("throughput", "tokens per second per device"),
    "tflops": ("throughput", "TFLOPS per device"),
    "hfu": ("MFU", "percent; with recompute; of documents"),
    "peaks": ("MFU", "percent of one peak or another"),
    "memory": ("memory", "peak, GiB"),
    "step": ("times", "step, seconds"),
    "outside": ("times", "outside of steps, seconds"),
}
"""Page and title of each chart of TensorBoard's Custom Scalars tab, in the order shown."""

CAST_CHARTS = {
    "sqnr_db/input/": ("float8", "SQNR of inputs, dB"),
    "sqnr_db/weight/": ("float8", "SQNR of weights, dB"),
    "sqnr_db/grad_output/": ("float8", "SQNR of grad_outputs, dB"),
    "underflow/input/": ("float8", "share of inputs that became 0"),
    "underflow/weight/": ("float8", "share of weights that became 0"),
    "underflow/grad_output/": ("float8", "share of grad_outputs that became 0"),
}
"""Charts of casts to float8, by prefix of the figures' names: one curve per kind of linear."""


@dataclass(frozen=True)
class Figure:
    """How a figure is described and shown. Its name is the key in metrics.jsonl and on wandb."""

    meaning: str
    unit: str = ""
    tag: str = ""
    """TensorBoard tag, torchtitan's where it has one; empty: no curve."""
    charts: tuple[str, ...] = ()
    """Keys of CHARTS."""
    console: Callable[[Any], str] | None = None
    """Its part of the step's console line, from the record; an empty part is left out."""
    in_json: bool = True
    """Whether metrics.jsonl and wandb have it; if not, only TensorBoard and the console do."""
    optional: bool = False
    """Whether metrics.jsonl leaves it out, instead of writing null, where it is unknown."""


def format_mfu(mfu: float | None, *, approximate: bool) -> str:
    """Format a utilisation: 41.2%, ~41.2% if it is approximate, n/a if it is unknown."""
    return "n/a" if mfu is None else f"{'~' if approximate else ''}{mfu:.1f}%"


def _console_mfu(record: "StepRecord") -> str:
    text = f"mfu {format_mfu(record.mfu, approximate=record.approximate_mfu)}"
    if record.mfu_documents is None:
        return text
    documents = format_mfu(record.mfu_documents, approximate=record.approximate_mfu)
    return f"{text} (documents {documents})"


def _console_bubble(record: "StepRecord") -> str:
    return "" if record.bubble_pct is None else f"bubble {record.bubble_pct:.1f}%"


def _console_memory(record: "StepRecord") -> str:
    if record.memory_max_gib is None:
        return f"mem {record.memory_gib:.1f}GiB"
    return f"mem {record.memory_max_gib:.1f}GiB (rank {record.memory_max_rank})"


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """The figures of one logged step, in the order of metrics.jsonl and of the console line.

    Rates and times are averages over the steps since the previous record. None means unknown.
    """

    # One figure after the other, as in a table.
    # fmt: off
    step: Annotated[int, Figure("number of the step, from 1")]
    tokens: Annotated[int, Figure(
        "trained on by all ranks since step 1, over resumes", "tokens", "n_tokens_seen")]
    epochs: Annotated[Mapping[str, float], Figure(
        "passes over each store of the training data, by its name, which ends the tag", "passes",
        "data/epochs")]
    loss: Annotated[float, Figure(
        "mean over all ranks' tokens of this step", "nat", "loss_metrics/global_avg_loss",
        ("loss", "loss_max"), lambda r: f"loss {r.loss:.4f}")]
    loss_max: Annotated[float, Figure(
        "largest of the ranks' own mean losses", "nat", "loss_metrics/global_max_loss",
        ("loss_max",))]
    grad_norm: Annotated[float, Figure(
        "norm of the gradient before clipping", "", "grad_norm",
        (), lambda r: f"grad_norm {r.grad_norm:.3g}")]
    lr: Annotated[float, Figure("learning rate of this step", "", "lr")]
    skipped_steps: Annotated[int, Figure(
        "steps of the run without an update: loss or gradient not finite, or a loss spike", "steps",
        "skipped_steps", (), lambda r: f"skipped {r.skipped_steps}" if r.skipped_steps else "")]
    tps: Annotated[float, Figure(
        "tokens per second per device", "tokens/s", "throughput(tps)",
        ("tps",), lambda r: f"tps {r.tps:,.0f}")]
    tflops: Annotated[float, Figure(
        "FLOPs per token times `tps`, per device", "TFLOPS", "tflops",
        ("tflops",), lambda r: f"tflops {r.tflops:,.2f}")]
    mfu: Annotated[float | None, Figure(
        "utilisation, each matmul at its own precision's peak", "%", "mfu(%)",
        ("hfu", "peaks"), _console_mfu)]
    mfu_documents: Annotated[float | None, Figure(
        "`mfu` with attention within documents only, under `training.document_mask`", "%",
        "mfu_documents(%)", ("hfu",), optional=True)] = None
    mfu_bf16_peak: Annotated[float | None, Figure(
        "utilisation, all FLOPs at the bf16 peak", "%", "mfu_bf16_peak(%)", ("peaks",))]
    mfu_fp8_peak: Annotated[float | None, Figure(
        "utilisation, all FLOPs at the fp8 peak", "%", "mfu_fp8_peak(%)", ("peaks",))]
    mfu_achievable: Annotated[float | None, Figure(
        "`mfu` against measured peaks; unknown if none were measured", "%", "mfu_achievable(%)",
        ("peaks",))]
    hfu: Annotated[float | None, Figure(
        "`mfu` with the recomputation by activation checkpointing", "%", "hfu(%)", ("hfu",))]
    attention_imbalance: Annotated[float | None, Figure(
        "attention within documents of each microbatch's busiest rank, over the mean", "",
        "attention_imbalance", optional=True)] = None
    bubble_pct: Annotated[float | None, Figure(
        "share of a pipeline's time in which a rank does not compute, mean of all ranks", "%",
        "pipeline/bubble_pct", (), _console_bubble, optional=True)] = None
    stage_time_s: Annotated[Mapping[int, float] | None, Figure(
        "computing of each pipeline stage in a step; the stage's number ends the tag", "s",
        "pipeline/stage_time_s", optional=True)] = None
    stage_mfu: Annotated[Mapping[int, float] | None, Figure(
        "`mfu` of each pipeline stage while it computes; its number ends the tag", "%",
        "pipeline/stage_mfu", optional=True)] = None
    step_time_s: Annotated[float, Figure(
        "from the end of the previous step to this one's, with the wait for data", "s",
        "time_metrics/end_to_end(s)", ("step",))]
    data_time_s: Annotated[float, Figure(
        "wait for data, part of `step_time_s`", "s", "time_metrics/data_loading(s)", ("step",))]
    memory_gib: Annotated[float, Figure(
        "rank 0's peak so far: reserved by torch on a GPU, resident on CPU", "GiB",
        "memory/max_reserved(GiB)", ("memory",), _console_memory)]
    memory_pct: Annotated[float | None, Figure(
        "`memory_gib` of a GPU's memory", "%", "memory/max_reserved(%)", in_json=False)]
    memory_max_gib: Annotated[float | None, Figure(
        "`memory_gib` of the rank with the highest, with pipelines", "GiB",
        "memory/max_of_ranks(GiB)", optional=True)] = None
    memory_max_rank: Annotated[int | None, Figure(
        "which rank that is", "", "memory/max_rank", optional=True)] = None
    data_time_pct: Annotated[float, Figure(
        "`data_time_s` of `step_time_s`", "%", "time_metrics/data_loading(%)", (),
        lambda r: f"time {r.step_time_s:.3f}s (data {r.data_time_pct:.1f}%)", in_json=False)]
    time: Annotated[float, Figure("when the step was logged, Unix time", "s")]
    # fmt: on
    approximate_mfu: bool = False
    """Whether the utilisations rest on a CPU's measured peaks."""

    def to_json(self) -> dict[str, Any]:
        """Return the line of metrics.jsonl."""
        values = {name: getattr(self, name) for name, fig in STEP_FIGURES.items() if fig.in_json}
        return {
            name: value
            for name, value in values.items()
            if value is not None or not STEP_FIGURES[name].optional
        }

    def known(self) -> dict[str, float]:
        """Return the figures that are known, by name; of those with several values, such as the
        passes over each store, each as epochs/STORE."""
        known: dict[str, float] = {}
        for name in STEP_FIGURES:
            value = getattr(self, name)
            if isinstance(value, Mapping):
                known |= {f"{name}/{key}": x for key, x in value.items()}
            elif value is not None:
                known[name] = value
        return known


STEP_FIGURES: dict[str, Figure] = {
    name: hint.__metadata__[0]
    for name, hint in get_type_hints(StepRecord, include_extras=True).items()
    if hasattr(hint, "__metadata__")
}

BETWEEN_STEPS = {
    "validation_loss": Figure(
        "mean over the validation windows", "nat", "validation_metrics/global_avg_loss", ("loss",)
    )
} | {
    name: Figure(meaning, "s", f"time_metrics/{name}", ("outside",))
    for name, meaning in {
        "compile_s": "compilation by torch.compile",
        "checkpoint_s": "saving a checkpoint",
        "validation_s": "validation",
        "gc_s": "garbage collection",
        "profiling_s": "writing traces and snapshots",
    }.items()
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


def figure_of(name: str) -> Figure:
    """Return the figure of a curve such as `loss` or `epochs/STORE`."""
    return FIGURES[name.partition("/")[0]]


CastErrors = Mapping[str, Mapping[str, Mapping[str, float]]]
"""CAST_FIGURES by kind of linear and role (input, weight, grad_output). NAME_layer is the index of
the layer that the figure NAME comes from, if the linear is in a layer."""


FINAL_STEPS = 20
"""A final loss is the mean of so many logged steps, the last ones."""
OUTCOME = ("loss", "validation_loss", "median_tps", "median_mfu")
"""Figures by which runs are compared: final/NAME on wandb, z_final/NAME in TensorBoard."""


@dataclass(frozen=True, kw_only=True)
class Summary:
    """A run's outcome. Medians are over this process's records but the first."""

    last: StepRecord
    """The last step's record."""
    losses: Sequence[float]
    """Of the last FINAL_STEPS logged steps, also of those before a resume, nat."""
    validation_loss: float | None
    """Of the last validation of this process, nat."""
    tps: float | None
    """Median tokens per second per device; None if there is only one record."""
    mfu: float | None
    """Median percent; None also if a peak is unknown."""
    times_s: Mapping[str, float]
    """Seconds that this process spent on training, data, compile, checkpoint, validation."""
    bubble_pct: float | None = None
    """Of this process's steps but the first; None without pipelines."""

    @property
    def final_loss(self) -> float:
        """Mean of `losses`."""
        return statistics.fmean(self.losses)

    def outcome(self) -> dict[str, float]:
        """Return the figures of OUTCOME that are known."""
        values = (self.final_loss, self.validation_loss, self.tps, self.mfu)
        figures = dict(zip(OUTCOME, values, strict=True))
        return {name: value for name, value in figures.items() if value is not None}


def summary_lines(summary: Summary, *, unigram_entropy: float | None) -> list[str]:
    """Describe how a run went. `unigram_entropy`, nat, is the loss of a model that knows only how
    often each training token occurs."""
    last, times_s = summary.last, summary.times_s
    loss = f"final loss {summary.final_loss:.2f} nat"
    if unigram_entropy is not None:
        gain = unigram_entropy - summary.final_loss
        loss += f", {abs(gain):.2f} {'below' if gain >= 0 else 'above'} the unigram entropy "
        loss += f"{unigram_entropy:.2f} of the training tokens"

    tps = "n/a" if summary.tps is None else f"{summary.tps:,.0f}"
    mfu = format_mfu(summary.mfu, approximate=last.approximate_mfu)
    total_s = sum(times_s.values())
    shares = [f"{name} {time_s / total_s:.1%}" for name, time_s in times_s.items() if time_s]
    memory = f"peak memory {last.memory_gib:.1f}GiB per device"
    if last.memory_max_gib is not None:
        memory = f"peak memory {last.memory_max_gib:.1f}GiB, on rank {last.memory_max_rank}"
    validation = summary.validation_loss
    held_out = [] if validation is None else [f"validation loss {validation:.2f} nat"]
    bubble = summary.bubble_pct
    pipeline = [] if bubble is None else [f"pipeline bubble {bubble:.1f}%, without the first step"]
    return [
        f"{last.step:,} steps, {last.tokens:,} tokens",
        f"{loss}; mean of the last {len(summary.losses)} logged steps",
        *held_out,
        f"median tps {tps} per device, median mfu {mfu}, without the first step",
        f"of {total_s:,.1f}s: {', '.join(shares)}",
        *pipeline,
        memory,
    ]


class Writer:
    """Base of the writers. Each overrides the methods for what it writes."""

    spare = ""
    """Name of a writer that a run leaves out, with a warning, once it fails."""

    def write(self, record: StepRecord) -> None:
        """Write the record of a step; by default the figures that are known."""
        self.write_scalars(record.step, record.known())

    def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        """Write named figures, such as a validation loss, which belongs to no record."""

    def write_numerics(self, step: int, casts: CastErrors) -> None:
        """Write the errors of a step's casts to float8; by default as NAME/ROLE/KIND, without the
        layers' indices."""
        scalars = {
            f"{name}/{role}/{kind}": value
            for kind, roles in casts.items()
            for role, figures in roles.items()
            for name, value in figures.items()
            if name in CAST_FIGURES
        }
        self.write_scalars(step, scalars)

    def write_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Write texts that the model generated after a step, each with its prompt."""

    def flush(self) -> None:
        """Put everything written so far on disk."""

    def close(self, summary: Summary | None) -> None:
        """Write the run's outcome, None if no step was trained, and put everything on disk."""


def reference(figures: Mapping[str, Figure]) -> str:
    """Return the table of docs/metrics.md about `figures`, in Markdown."""
    rows = [
        (f"`{name}`", figure.meaning, figure.unit, f"`{figure.tag}`" if figure.tag else "")
        for name, figure in figures.items()
    ]
    cells = [("figure", "meaning", "unit", "TensorBoard"), ("---",) * 4, *rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


if __name__ == "__main__":
    print(*map(reference, (STEP_FIGURES, BETWEEN_STEPS, CAST_FIGURES)), sep="\n\n")
