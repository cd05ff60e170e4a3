"""TensorBoard curves, generated texts, and the config."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from .base_writer import Writer, WrittenRun
from .figures import FIGURES
from .summary import Summary


class TensorBoardWriter(Writer):
    """A run's TensorBoard folder, opened by its first point."""

    spare = "TensorBoard"

    def __init__(self, run: WrittenRun, *, folder: Path) -> None:
        self._run, self._folder = run, folder

    @cached_property
    def _curves(self) -> Any:
        """The open folder, with the config."""
        from torch.utils.tensorboard import SummaryWriter  # slow: the first step does not wait

        # An earlier process may have trained past the step: TensorBoard drops those points.
        run = self._run
        curves: Any = SummaryWriter(str(self._folder), purge_step=run.resume_step + 1)
        curves.add_text("config", f"```toml\n{run.config_toml}\n```", run.resume_step)
        curves.flush()
        return curves

    def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary as Points
        from torch.utils.tensorboard.summary import scalar

        points = Points()  # one event: each one waits for the thread that writes
        for name, value in scalars.items():
            if tag := _tag(name):
                points.MergeFrom(scalar(tag, value))
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


def _tag(name: str) -> str:
    """Return the tag of a figure, or "" if it has no curve."""
    figure, slash, suffix = name.partition("/")
    if figure not in FIGURES:  # of a user's own
        return name
    tag = FIGURES[figure].tag
    return tag and tag + slash + suffix
