"""TensorBoard curves, laid out for reading, with the run's config and the values to compare runs
by."""

import os
import re
from collections.abc import Mapping
from pathlib import Path

from .records import Numerics, Record, Summary, numerics_scalars

TAGS = {
    "tokens": "n_tokens_seen",
    "epochs": "data/epochs",
    "loss": "loss_metrics/global_avg_loss",
    "loss_max": "loss_metrics/global_max_loss",
    "grad_norm": "grad_norm",
    "lr": "lr",
    "skipped_steps": "skipped_steps",
    "tps": "throughput(tps)",
    "tflops": "tflops",
    "mfu": "mfu(%)",
    "mfu_bf16_peak": "mfu_bf16_peak(%)",
    "mfu_fp8_peak": "mfu_fp8_peak(%)",
    "mfu_achievable": "mfu_achievable(%)",
    "hfu": "hfu(%)",
    "step_time_s": "time_metrics/end_to_end(s)",
    "data_time_s": "time_metrics/data_loading(s)",
    "data_time_pct": "time_metrics/data_loading(%)",
    "memory_gib": "memory/max_reserved(GiB)",
    "memory_pct": "memory/max_reserved(%)",
    "validation_loss": "validation_metrics/global_avg_loss",
    "sqnr_db": "float8_sqnr_db",
    "amax": "float8_amax",
    "underflow": "float8_underflow",
    "saturation": "float8_saturation",
}
"""Tag of each figure, torchtitan's where it has one; what is told of each store or cast has its
name after it. A figure that is not here is a time, under time_metrics/."""

PAGES: dict[str, dict[str, tuple[str, ...]]] = {
    "loss": {
        "mean and validation, nat": ("loss", "validation_loss"),
        "mean and largest of the ranks, nat": ("loss", "loss_max"),
    },
    "throughput": {"tokens per second per device": ("tps",), "TFLOPS per device": ("tflops",)},
    "MFU": {
        "percent, without and with recompute": ("mfu", "hfu"),
        "percent of one peak or another": (
            "mfu",
            "mfu_bf16_peak",
            "mfu_fp8_peak",
            "mfu_achievable",
        ),
    },
    "memory": {"peak, GiB": ("memory_gib",)},
    "times": {
        "step, seconds": ("step_time_s", "data_time_s"),
        "outside of steps, seconds": (
            "compile_s",
            "checkpoint_s",
            "validation_s",
            "gc_s",
            "profiling_s",
        ),
    },
    "float8": {
        "SQNR of inputs, dB": ("sqnr_db/input/",),
        "SQNR of weights, dB": ("sqnr_db/weight/",),
        "SQNR of grad_outputs, dB": ("sqnr_db/grad_output/",),
        "share of inputs that became 0": ("underflow/input/",),
        "share of weights that became 0": ("underflow/weight/",),
        "share of grad_outputs that became 0": ("underflow/grad_output/",),
    },
}
"""Pages of the Custom Scalars tab: the charts of each, by title, and the figures in a chart; all
that begin with a name that ends with a slash."""

FINAL_LOSS, MEDIAN_TPS = "final/loss", "final/median_tps"
"""Tags of the outcome, by which the HParams tab compares runs."""


class TensorBoardWriter:
    """A run's TensorBoard folder. An unknown figure leaves no point.

    The pages, the config and the hparams stand there once, as the run began; a resumed one adds
    only points."""

    def __init__(
        self,
        folder: Path,
        *,
        resume_step: int,
        total_memory_gib: float | None,
        config_toml: str,
        hparams: Mapping[str, bool | float | str],
        numerics: bool,
    ) -> None:
        """Runs are compared by `hparams`, of which each should have the same names; `numerics` of
        casts may come."""
        # Loaded on the one rank that writes.
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams as hparam_summaries

        begun = any(folder.glob("events.out.tfevents.*"))
        # An earlier process may have gone on past the step that this one resumes from: TensorBoard
        # drops those points.
        self._events = SummaryWriter(str(folder), purge_step=resume_step + 1)
        self._file = self._events._get_file_writer()
        self._total_memory_gib = total_memory_gib
        # torch writes a truth value as 0 or 1.
        named = {
            name: str(value).lower() if isinstance(value, bool) else value
            for name, value in hparams.items()
        }
        *start, self._session_end = hparam_summaries(named, dict.fromkeys((FINAL_LOSS, MEDIAN_TPS)))
        if begun:
            return
        self._events.add_custom_scalars(_layout(numerics=numerics))
        self._events.add_text("config", f"```toml\n{config_toml}\n```", 0)
        for summary in start:
            self._file.add_summary(summary)
        self._events.flush()

    def write(self, record: Record) -> None:
        """Add a point to each curve."""
        figures = {
            name: value
            for name, value in record.figures().items()
            if name.partition("/")[0] in TAGS
        }
        figures["data_time_pct"] = record.data_time_pct
        if self._total_memory_gib is not None:
            figures["memory_pct"] = 100 * record.memory_gib / self._total_memory_gib
        self.write_scalars(record.step, figures)

    def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        """Add a point to each of their curves, and have it with the operating system."""
        from tensorboard.compat.proto.summary_pb2 import (
            Summary as Points,
        )  # loaded with SummaryWriter

        # As one event, which takes a fifth of the time that one for each curve does.
        points = [
            Points.Value(tag=tag, simple_value=y)
            for name, y in scalars.items()
            for tag in _tags(name)
        ]
        self._file.add_summary(Points(value=points), step)
        self._events.flush()

    def write_numerics(self, step: int, numerics: Numerics) -> None:
        """Add a point to each curve of each kind of linear."""
        self.write_scalars(step, numerics_scalars(numerics))

    def flush(self) -> None:
        """Have all points on disk."""
        for path in Path(self._events.log_dir).glob("events.out.tfevents.*"):
            with path.open("rb") as file:
                os.fsync(file.fileno())

    def close(self, summary: Summary | None) -> None:
        """Add the outcome beside the hparams, and close the event file."""
        if summary is not None:
            self._events.add_scalar(FINAL_LOSS, summary.loss, summary.step)
            if summary.tps is not None:
                self._events.add_scalar(MEDIAN_TPS, summary.tps, summary.step)
            self._file.add_summary(self._session_end)
        self._events.close()


def _tags(name: str) -> list[str]:
    """The tags of a figure, the one for PAGES last. A tag with a parenthesis would draw no curve
    there: the tab calls a curve "tag (run)", and takes all after the first parenthesis for the
    run."""
    figure, slash, of = name.partition("/")
    tag = TAGS.get(figure, f"time_metrics/{figure}") + slash + of
    return [tag, f"pages/{name}"] if "(" in tag else [tag]


def _layout(*, numerics: bool) -> dict[str, dict[str, list]]:
    """PAGES, that of float8 only with `numerics`, as torch takes them: with a regular expression
    for each tag."""

    def chart(names: tuple[str, ...]) -> list:
        return [
            "Multiline",
            [f"^{re.escape(_tags(name)[-1])}{'' if name.endswith('/') else '$'}" for name in names],
        ]

    return {
        page: {title: chart(names) for title, names in charts.items()}
        for page, charts in PAGES.items()
        if numerics or page != "float8"
    }
