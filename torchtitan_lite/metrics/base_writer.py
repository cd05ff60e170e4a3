"""What every writer is given: the run that it writes about, its records, and the outcome."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .figures import CAST_FIGURES, CastErrors, StepRecord
from .summary import Summary


@dataclass(frozen=True, kw_only=True)
class WrittenRun:
    """What the writers of a rank say of its run, beside the figures."""

    folder: Path
    rank: int
    total_steps: int
    resume_step: int
    """The step after which the run goes on; 0: a new run."""
    config_toml: str


class Writer:
    """Base of the writers. Each overrides the methods for what it writes."""

    spare = ""
    """Name of a writer that a run leaves out, with a warning, once it fails."""

    def write(self, record: StepRecord) -> None:
        """Write the record of a step; by default the figures that are known, one with several
        values as epochs/STORE."""
        known: dict[str, float] = {}
        for name, value in record.to_json().items():
            if isinstance(value, Mapping):
                known |= {f"{name}/{key}": x for key, x in value.items()}
            elif name != "step" and value is not None:
                known[name] = value
        self.write_scalars(record.step, known)

    def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        """Write named figures, such as a validation loss, which belongs to no record."""

    def write_numerics(self, step: int, casts: CastErrors) -> None:
        """Write the errors of a step's casts; by default as NAME/ROLE/KIND, without layers."""
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
