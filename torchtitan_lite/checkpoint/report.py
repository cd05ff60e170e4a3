"""The checkpoints of a run as a table, from manifests and file sizes. Does not import torch."""

import time
from dataclasses import dataclass
from pathlib import Path

import tomli

from torchtitan_lite.errors import CheckpointError
from torchtitan_lite.tables import format_columns

from .folders import find_problems, named_steps, step_folder
from .manifest import MANIFEST, STEP, BrokenCheckpoint, read_manifest


@dataclass(frozen=True)
class CheckpointSummary:
    """Figures of a checkpoint. Those that only the manifest has are None if it cannot be read."""

    path: str
    step: int
    problems: list[str]
    """What is wrong with its manifest, small files and sizes."""
    tokens: int | None = None
    time: float | None = None
    """When it was written, in Unix seconds."""
    size: int | None = None
    """Size of its files in bytes."""
    world_size: int | None = None
    mesh: dict[str, int] | None = None
    float8: str | None = None
    """Float8 recipe of the run; None in bfloat16."""


def step_folders(path: Path) -> list[Path]:
    """Return the checkpoint at `path`, or the checkpoints in it, by step, if it is a run folder or
    its folder of checkpoints. Raises CheckpointError if there is none."""
    if STEP.fullmatch(path.name) or (path / MANIFEST).is_file():
        return [path]
    children = sorted(child for child in path.iterdir() if child.is_dir()) if path.is_dir() else []
    for folder in (path, *children):
        if steps := named_steps(folder):
            return [step_folder(folder, step) for step in steps]
    raise CheckpointError(
        f"{path} has no checkpoints: name a run folder, its folder of checkpoints, or a step's."
    )


def summarize(path: Path) -> CheckpointSummary:
    """Return the figures of the checkpoint at `path`."""
    try:
        manifest = read_manifest(path)
    except BrokenCheckpoint as broken:
        named = STEP.fullmatch(path.name)
        return CheckpointSummary(str(path), int(named[1]) if named else 0, [str(broken)])
    float8 = tomli.loads(manifest.config).get("float8", {})
    return CheckpointSummary(
        path=str(path),
        step=manifest.progress.step,
        problems=find_problems(path, hashes=False),
        tokens=manifest.progress.tokens,
        time=(path / MANIFEST).stat().st_mtime,
        size=sum(entry.size for entry in manifest.files.values()),
        world_size=manifest.world_size,
        mesh=manifest.mesh,
        float8=float8.get("recipe_name") if float8.get("enable_float8_linear") else None,
    )


def format_summaries(summaries: list[CheckpointSummary]) -> str:
    """Return a table with one line for each checkpoint."""
    rows = [["step", "tokens", "written", "GiB", "ranks", "mesh", "float8", "state"]]
    for each in summaries:
        cells = ["-"] * 6
        if each.mesh is not None and each.size is not None:
            degrees = (f"{name}={degree}" for name, degree in each.mesh.items() if degree > 1)
            cells = [
                str(each.tokens),
                time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(each.time)),
                f"{each.size / 2**30:.3f}",
                str(each.world_size),
                " ".join(degrees) or "-",
                each.float8 or "no",
            ]
        state = f"broken: {each.problems[0]}" if each.problems else "ok"
        rows.append([str(each.step), *cells, state])
    return format_columns(rows)
