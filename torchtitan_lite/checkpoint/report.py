"""The checkpoints of a run in a table, from their manifests and the sizes of their files. Imports
no torch."""

import time
from dataclasses import dataclass
from pathlib import Path

import tomli

from torchtitan_lite.checkpoint.folders import STEP, find_problems, named_steps, step_folder
from torchtitan_lite.checkpoint.manifest import MANIFEST, BrokenCheckpoint, Manifest, read_manifest
from torchtitan_lite.errors import CheckpointError
from torchtitan_lite.tables import format_columns


@dataclass(frozen=True)
class Row:
    """A checkpoint, in figures. Those that only its manifest knows are None where that cannot be
    read."""

    path: str
    step: int
    problems: list[str]
    """What is wrong with it, as far as sizes tell; empty for one that is sound."""
    tokens: int | None = None
    time: float | None = None
    """When it was written, in Unix seconds."""
    size: int | None = None
    """Of its files, in bytes."""
    world_size: int | None = None
    mesh: dict[str, int] | None = None
    float8: str | None = None
    """The recipe that it was trained with; None in bfloat16."""


def step_folders(path: Path) -> list[Path]:
    """The checkpoint at `path` or else those in it, by step: it may be a run folder, or its folder
    of checkpoints. Raises CheckpointError if there is none."""
    if STEP.fullmatch(path.name) or (path / MANIFEST).is_file():
        return [path]
    children = sorted(child for child in path.iterdir() if child.is_dir()) if path.is_dir() else []
    for folder in (path, *children):
        if steps := named_steps(folder):
            return [step_folder(folder, step) for step in steps]
    raise CheckpointError(
        f"{path} has no checkpoints: name a run folder, its folder of checkpoints, or a step's."
    )


def describe(path: Path) -> Row:
    """The row of the checkpoint at `path`."""
    try:
        manifest = read_manifest(path)
    except BrokenCheckpoint as broken:
        named = STEP.fullmatch(path.name)
        return Row(str(path), int(named[1]) if named else 0, [str(broken)])
    return Row(
        path=str(path),
        step=manifest.progress.step,
        problems=find_problems(path, hashes=False),
        tokens=manifest.progress.tokens,
        time=(path / MANIFEST).stat().st_mtime,
        size=sum(entry.size for entry in manifest.files.values()),
        world_size=manifest.world_size,
        mesh=manifest.mesh,
        float8=_float8_recipe(manifest),
    )


def _float8_recipe(manifest: Manifest) -> str | None:
    float8 = tomli.loads(manifest.config).get("float8", {})
    return float8.get("recipe_name") if float8.get("enable_float8_linear") else None


def format_rows(rows: list[Row]) -> str:
    """The rows as a table, a line each."""
    header = ("step", "tokens", "written", "GiB", "ranks", "mesh", "float8", "state")
    return format_columns([header, *map(_cells, rows)])


def _cells(row: Row) -> tuple[str, ...]:
    state = f"broken: {row.problems[0]}" if row.problems else "ok"
    if row.tokens is None or row.time is None or row.size is None or row.mesh is None:
        return (str(row.step), *["-"] * 6, state)
    mesh = " ".join(f"{name}={degree}" for name, degree in row.mesh.items() if degree > 1) or "-"
    written = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row.time))
    return (
        str(row.step),
        str(row.tokens),
        written,
        f"{row.size / 2**30:.3f}",
        str(row.world_size),
        mesh,
        row.float8 or "no",
        state,
    )
