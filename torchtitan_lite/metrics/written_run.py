"""What writers say of a run."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from torchtitan_lite.catalog.run_files import RecordKind


@dataclass(frozen=True, kw_only=True)
class WrittenRun:
    """What the writers of a rank say of its run, beside the figures."""

    folder: Path
    """The run folder."""
    rank: int
    total_steps: int
    resume_step: int
    """The step after which the run goes on; 0: a new run."""
    config_toml: str
    changes_toml: str
    """The keys that differ from the defaults."""
    hparams: Mapping[str, bool | float | str]
    """Values by which runs are compared; each run has the same names."""
    records: Collection[RecordKind]
    """Those that the run writes."""
