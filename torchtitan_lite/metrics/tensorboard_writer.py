"""TensorBoard curves and their pages, the run's config, and values to compare runs by."""

import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .base_writer import Writer, WrittenRun
from .figures import figure_of
from .summary import OUTCOME, Summary

PAGES: dict[str, dict[str, tuple[str, ...]]] = {
    "loss": {
        "mean and validation, nat": ("loss", "validation_loss"),
        "mean and largest of the ranks, nat": ("loss", "loss_max"),
    },
    "throughput": {
        "tokens per second per device": ("tps",),
        "TFLOPS per device": ("tflops",),
    },
    "MFU": {
        "percent; with recompute; of documents": ("mfu", "mfu_documents", "hfu"),
        "percent of one peak or another": (
            *("mfu", "mfu_bf16_peak", "mfu_fp8_peak", "mfu_achievable"),
        ),
    },
    "memory": {"peak, GiB": ("memory_gib",)},
    "times": {
        "step, seconds": ("step_time_s", "data_time_s"),
        "outside of steps, seconds": (
            *("compile_s", "checkpoint_s", "validation_s", "gc_s", "profiling_s"),
        ),
    },
}
"""Figures of each chart of each page of TensorBoard's Custom Scalars tab."""
CASTS_PAGE = {"sqnr_db": "SQNR of {role}s, dB", "underflow": "share of {role}s that became 0"}
"""Titles of the charts of casts to float8, by figure, with a curve per kind of linear."""


def tensorboard_command(folder: Path | str) -> str:
    """Return the shell command that shows the curves of all runs in a folder."""
    return shlex.join([sys.executable, "-m", "tensorboard.main", "--logdir", str(folder)])


class TensorBoardWriter(Writer):
    """A run's TensorBoard folder. An unknown figure leaves no point.

    Pages, config and hparams are written once, when the run begins; a resumed run adds only points.
    """

    spare = "TensorBoard"

    def __init__(self, run: WrittenRun, *, folder: str, own: str) -> None:
        """`folder` is in the run folder, `own` a rank's folder in that, or ""."""
        # Slow to import, and needed only on the rank that writes.
        from torch.utils.tensorboard import SummaryWriter, summary

        path = run.folder / folder / own
        is_resumed = any(path.glob("events.out.tfevents.*"))
        # An earlier process may have trained past that step: TensorBoard drops those points.
        self._curves: Any = SummaryWriter(str(path), purge_step=run.resume_step + 1)

        # SummaryWriter.add_hparams would need the outcome, which is known at the end.
        outcome = dict.fromkeys(f"z_final/{name}" for name in OUTCOME)
        experiment, session, self._session_end = summary.hparams(dict(run.hparams), outcome)
        if not is_resumed:
            self._curves.add_custom_scalars(_layout(numerics="numerics" in run.records))
            self._curves.add_text("config", f"```toml\n{run.config_toml}\n```")
            self._add_summaries(experiment, session)
        self.flush()

    def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        for name, value in scalars.items():
            for tag in _tags(name):
                self._curves.add_scalar(tag, value, step)

    def write_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        texts = [f"**{each['prompt']}**\n\n```text\n{each['text']}\n```" for each in samples]
        self._curves.add_text("samples", "\n\n".join(texts), step)

    def flush(self) -> None:
        """Write all points, which a thread does meanwhile, and raise the error if it failed."""
        self._curves.flush()

    def close(self, summary: Summary | None) -> None:
        if summary is not None:
            for name, value in summary.outcome().items():
                self._curves.add_scalar(f"z_final/{name}", value, summary.last.step)
            self._add_summaries(self._session_end)
        self.flush()
        self._curves.close()

    def _add_summaries(self, *summaries: Any) -> None:
        for each in summaries:
            self._curves.file_writer.add_summary(each)


def _tags(name: str) -> list[str]:
    """Return the tags of a figure, last the one that charts use; none if it has no curve.

    The Custom Scalars tab calls a curve "tag (run)", and takes everything after the first
    parenthesis for the run. So a tag with a parenthesis would draw no curve there."""
    _, slash, suffix = name.partition("/")
    tag = figure_of(name).tag
    if "(" in tag:
        return [tag, f"z_pages/{name}"]
    return [tag + slash + suffix] if tag else []


def _layout(*, numerics: bool) -> dict[str, dict[str, list[Any]]]:
    """Return the pages in torch's format: per chart a regular expression for each curve."""
    layout: dict[str, dict[str, list[Any]]] = {
        page: {
            title: ["Multiline", [f"^{re.escape(_tags(name)[-1])}$" for name in names]]
            for title, names in charts.items()
        }
        for page, charts in PAGES.items()
    }
    if numerics:
        layout["float8"] = {
            title.format(role=role): ["Multiline", [f"^{_tags(figure)[-1]}/{role}/"]]
            for figure, title in CASTS_PAGE.items()
            for role in ("input", "weight", "grad_output")
        }
    return layout
