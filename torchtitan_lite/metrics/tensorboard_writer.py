"""TensorBoard curves and pages, generated texts, and the config."""

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from .base_writer import Writer, WrittenRun
from .figures import FIGURES
from .summary import Summary

CHARTS = {
    "Loss: training and validation (nat)": ("loss", "validation_loss"),
    "Loss: mean and largest of the ranks (nat)": ("loss", "loss_max"),
    "Tokens per second per device": ("tps",),
    "TFLOPS per device": ("tflops",),
    "MFU, MFU within documents, and HFU (%)": ("mfu", "mfu_documents", "hfu"),
    "MFU by choice of peak (%)": ("mfu", "mfu_bf16_peak", "mfu_fp8_peak", "mfu_achievable"),
    "Peak memory (GiB)": ("memory_gib",),
    "Time of a step, and of its wait for data (s)": ("step_time_s", "data_time_s"),
    "Time between steps (s)": ("compile_s", "checkpoint_s", "validation_s", "gc_s", "profiling_s"),
}
"""Figures of each chart of TensorBoard's Custom Scalars tab."""
CAST_CHARTS = {"sqnr_db": "SQNR of {role}s (dB)", "underflow": "Share of {role}s that became 0"}
"""Titles of the charts of casts to float8, by figure, with a curve per kind of linear."""


class TensorBoardWriter(Writer):
    """A run's TensorBoard folder, opened by its first point."""

    spare = "TensorBoard"

    def __init__(self, run: WrittenRun, *, folder: Path) -> None:
        self._run, self._folder = run, folder
        self._described: set[str] = set()

    @cached_property
    def _curves(self) -> Any:
        """The open folder, with the config and the pages."""
        from torch.utils.tensorboard import SummaryWriter  # slow: the first step does not wait

        # An earlier process may have trained past the step: TensorBoard drops those points.
        run = self._run
        curves: Any = SummaryWriter(str(self._folder), purge_step=run.resume_step + 1)
        curves.add_custom_scalars(_layout(numerics=run.has_numerics))
        curves.add_text("config", f"```toml\n{run.config_toml}\n```", run.resume_step)
        curves.flush()
        return curves

    def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.summary_pb2 import DATA_CLASS_SCALAR, Summary
        from torch.utils.tensorboard.summary import scalar

        points = Summary()  # one event: each one waits for the thread that writes
        for name, value in scalars.items():
            for tag in _tags(name):
                points.MergeFrom(scalar(tag, value))
                figure = FIGURES.get(name.partition("/")[0])
                if figure and tag not in self._described:
                    self._described.add(tag)  # the first point has what the Scalars tab shows
                    metadata = points.value[-1].metadata
                    metadata.plugin_data.plugin_name = "scalars"
                    metadata.data_class = DATA_CLASS_SCALAR
                    unit = f" ({figure.unit})" if figure.unit else ""
                    metadata.summary_description = f"{figure.meaning}{unit}"
        self._curves.file_writer.add_summary(points, step)

    def write_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        texts = [f"**{each['prompt']}**\n\n```text\n{each['text']}\n```" for each in samples]
        self._curves.add_text("samples", "\n\n".join(texts), step)

    def flush(self) -> None:
        """Wait until a thread has written all points, and raise its error if it failed."""
        self._curves.flush()

    def close(self, summary: Summary | None) -> None:
        self.flush()
        self._curves.close()


def _tags(name: str) -> list[str]:
    """Return the tags of a figure, last the one that charts use; none if it has no curve.

    A tag with a parenthesis draws nothing in Custom Scalars, which calls a curve "tag (run)"."""
    figure, slash, suffix = name.partition("/")
    if figure not in FIGURES:  # of a user's own
        return [name]
    tag = FIGURES[figure].tag
    if "(" in tag:
        return [tag, f"z_pages/{name}"]
    return [tag + slash + suffix] if tag else []


def _layout(*, numerics: bool) -> dict[str, dict[str, list[Any]]]:
    """Return the pages in torch's format: per chart a regular expression for each curve."""
    charts: dict[str, list[Any]] = {
        title: ["Multiline", [f"^{re.escape(_tags(name)[-1])}$" for name in names]]
        for title, names in CHARTS.items()
    }
    if not numerics:
        return {"run": charts}
    casts: dict[str, list[Any]] = {
        title.format(role=role): ["Multiline", [f"^{_tags(figure)[-1]}/{role}/"]]
        for figure, title in CAST_CHARTS.items()
        for role in ("input", "weight", "grad_output")
    }
    return {"run": charts, "float8": casts}
