"""TensorBoard curves and their pages, the run's config, and values to compare runs by."""

import os
import re
import shlex
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .figures import CAST_CHARTS, CHARTS, FIGURES, OUTCOME, Summary, Writer, figure_of
from .written_run import WrittenRun

OVERVIEW = ("loss", "validation_loss", "tps", "mfu")
"""Figures of the first group of cards. TensorBoard sorts groups by name, capital letters first, so
that groups named z_... come last."""
SHOWN_HPARAMS = 5
"""How many hparams TensorBoard shows by default."""
EVENT_FILES = "events.out.tfevents.*"


def tensorboard_command(folder: Path | str) -> str:
    """Return the shell command that shows the curves of all runs in a folder."""
    return shlex.join([sys.executable, "-m", "tensorboard.main", "--logdir", str(folder)])


class TensorBoardWriter(Writer):
    """A run's TensorBoard folder. An unknown figure leaves no point.

    Pages, config and hparams are written once, when the run begins; a resumed run adds only points.
    Of the hparams, the HParams page shows the first five by default.
    """

    spare = "TensorBoard"

    def __init__(self, run: WrittenRun, *, folder: str, own: str) -> None:
        """`folder` is in the run folder, `own` a rank's folder in that, or ""."""
        # Slow to import, and needed only on the rank that writes.
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter
        from torch.utils.tensorboard import summary

        # TensorBoard reads the files of a folder in the order of their names.
        path = run.folder / folder / own
        is_resumed = any(path.glob(EVENT_FILES))
        path.mkdir(parents=True, exist_ok=True)
        name = EVENT_FILES.replace("*", f"{time.time():.6f}.{socket.gethostname()}.{os.getpid()}")
        self._file = (path / name).open("wb")
        self._records = RecordWriter(self._file)
        self._write_event(file_version="brain.Event:2")
        # An earlier process may have trained past that step: TensorBoard drops those points.
        purge = SessionLog(status=SessionLog.START)
        self._write_event(step=run.resume_step + 1, session_log=purge)

        # torch would write a bool as 0 or 1.
        shown = {
            name: str(value).lower() if isinstance(value, bool) else value
            for name, value in run.hparams.items()
        }
        outcome = dict.fromkeys(f"z_final/{name}" for name in OUTCOME)
        experiment, session, self._session_end = summary.hparams(shown, outcome)
        if not is_resumed:
            _show_first(experiment, list(run.hparams)[:SHOWN_HPARAMS])
            config = summary.text(
                "config",
                f"Differs from the defaults:\n\n```toml\n{run.changes_toml}\n```\n\n"
                f"All keys:\n\n```toml\n{run.config_toml}\n```",
            )
            pages = summary.custom_scalars(_layout(numerics="numerics" in run.records))
            for first in (pages, config, experiment, session):
                self._write_event(summary=first)

    def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        self._write_points(step, {tag: x for name, x in scalars.items() for tag in _tags(name)})

    def write_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        from torch.utils.tensorboard import summary  # loaded by the constructor

        texts = [f"**{each['prompt']}**\n\n```text\n{each['text']}\n```" for each in samples]
        self._write_event(step=step, summary=summary.text("samples", "\n\n".join(texts)))

    def flush(self) -> None:
        os.fsync(self._file.fileno())

    def close(self, summary: Summary | None) -> None:
        if summary is not None:
            outcome = {f"z_final/{name}": x for name, x in summary.outcome().items()}
            self._write_points(summary.last.step, outcome)
            self._write_event(summary=self._session_end)
        self._file.close()

    def _write_points(self, step: int, points: Mapping[str, float]) -> None:
        # Loaded by the constructor.
        from tensorboard.compat.proto.summary_pb2 import Summary as Points

        # One event for all points takes a fifth of the time of an event for each.
        values = [Points.Value(tag=tag, simple_value=value) for tag, value in points.items()]
        self._write_event(step=step, summary=Points(value=values))

    def _write_event(self, **event: Any) -> None:
        """Write an event; the operating system has it when this returns. torch's SummaryWriter
        would write in a thread, and print a traceback there if the disk is full."""
        from tensorboard.compat.proto.event_pb2 import Event

        self._records.write(Event(wall_time=time.time(), **event).SerializeToString())
        self._file.flush()


def _tags(name: str) -> list[str]:
    """Return the tags of a figure, last the one that charts use; none if it has no curve.

    The Custom Scalars tab calls a curve "tag (run)", and takes everything after the first
    parenthesis for the run. So a tag with a parenthesis would draw no curve there.
    """
    _, slash, suffix = name.partition("/")
    tag = figure_of(name).tag
    if name in OVERVIEW:
        return [tag, f"Overview/{name}"]
    if "(" in tag:
        return [tag, f"z_pages/{name}"]
    return [tag + slash + suffix] if tag else []


def _show_first(experiment: Any, names: Sequence[str]) -> None:
    """Put the hparams `names` first on the HParams page, which is sorted by whether an hparam
    differs between runs, and by name. Changes the summary `experiment`."""
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    plugin = experiment.value[0].metadata.plugin_data
    data = HParamsPluginData.FromString(plugin.content)
    for hparam in data.experiment.hparam_infos:
        hparam.differs = hparam.name in names
    for metric in data.experiment.metric_infos:
        metric.display_name = metric.name.tag.removeprefix("z_")
    plugin.content = data.SerializeToString()


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
