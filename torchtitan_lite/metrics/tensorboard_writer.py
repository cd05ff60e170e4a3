"""TensorBoard curves and their pages, the run's config, and values to compare runs by."""

import os
import re
from collections.abc import Mapping
from pathlib import Path

from .figures import CAST_CHARTS, CHARTS, FIGURES, Summary, Writer, figure_of

FINAL_LOSS, MEDIAN_TPS = "final/loss", "final/median_tps"
"""Tags of the outcome, by which the HParams tab compares runs."""
EVENT_FILES = "events.out.tfevents.*"


class TensorBoardWriter(Writer):
    """A run's TensorBoard folder. An unknown figure leaves no point.

    Pages, config and hparams are written once, when the run begins; a resumed run adds only points.
    """

    def __init__(
        self,
        folder: Path,
        *,
        resume_step: int,
        config_toml: str,
        hparams: Mapping[str, bool | float | str],
        numerics: bool,
    ) -> None:
        """Open `folder` to continue after `resume_step`. `numerics` says whether casts to float8
        will be measured."""
        # Slow to import, and needed only on the rank that writes.
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams as hparam_summaries

        # An earlier process may have trained past `resume_step`: TensorBoard drops those points.
        is_resumed = any(folder.glob(EVENT_FILES))
        self._events = SummaryWriter(str(folder), purge_step=resume_step + 1)
        self._file = self._events._get_file_writer()

        # torch would write a bool as 0 or 1.
        shown = {
            name: str(value).lower() if isinstance(value, bool) else value
            for name, value in hparams.items()
        }
        *start, self._session_end = hparam_summaries(shown, dict.fromkeys((FINAL_LOSS, MEDIAN_TPS)))
        if is_resumed:
            return
        self._events.add_custom_scalars(_layout(numerics=numerics))
        self._events.add_text("config", f"```toml\n{config_toml}\n```", 0)
        for summary in start:
            self._file.add_summary(summary)
        self._events.flush()

    def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        # Loaded with SummaryWriter.
        from tensorboard.compat.proto.summary_pb2 import Summary as Points

        # One event for all points takes a fifth of the time of an event for each.
        points = [
            Points.Value(tag=tag, simple_value=value)
            for name, value in scalars.items()
            for tag in _tags(name)
        ]
        self._file.add_summary(Points(value=points), step)
        self._events.flush()

    def flush(self) -> None:
        for path in Path(self._events.log_dir).glob(EVENT_FILES):
            with path.open("rb") as file:
                os.fsync(file.fileno())

    def close(self, summary: Summary | None) -> None:
        if summary is not None:
            step = summary.last.step
            self._events.add_scalar(FINAL_LOSS, summary.last.loss, step)
            if summary.tps is not None:
                self._events.add_scalar(MEDIAN_TPS, summary.tps, step)
            self._file.add_summary(self._session_end)
        self._events.close()


def _tags(name: str) -> list[str]:
    """Return the tags of a figure, last the one that charts use; none if it has no curve.

    The Custom Scalars tab calls a curve "tag (run)", and takes everything after the first
    parenthesis for the run. So a tag with a parenthesis would draw no curve there.
    """
    _, slash, suffix = name.partition("/")
    tag = figure_of(name).tag
    tags = [tag, f"pages/{name}"] if "(" in tag else [tag + slash + suffix]
    return tags if tag else []


def _layout(*, numerics: bool) -> dict[str, dict[str, list]]:
    """Return the pages in torch's format: per chart a regular expression for each curve."""
    layout: dict[str, dict[str, list]] = {}
    for chart, (page, title) in CHARTS.items():
        names = [name for name, figure in FIGURES.items() if chart in figure.charts]
        patterns = [f"^{re.escape(_tags(name)[-1])}$" for name in names]
        layout.setdefault(page, {})[title] = ["Multiline", patterns]

    for prefix, (page, title) in CAST_CHARTS.items() if numerics else ():
        pattern = f"^{re.escape(_tags(prefix)[-1])}"
        layout.setdefault(page, {})[title] = ["Multiline", [pattern]]
    return layout
