"""A table of checkpoints. Does not import torch."""

import time
from pathlib import Path

from torchtitan_lite.base.jsonfile import parse_toml
from torchtitan_lite.base.tables import format_columns

from .manifest import MANIFEST, BrokenCheckpoint, broken_files, read_manifest

COLUMNS = ["step", "tokens", "written", "GiB", "ranks", "mesh", "float8", "state"]


def format_checkpoints(paths: list[Path]) -> str:
    """Return a table with one line for each checkpoint."""
    return format_columns([COLUMNS, *map(_row, paths)])


def _row(path: Path) -> list[str]:
    try:
        manifest = read_manifest(path)
    except BrokenCheckpoint as broken:
        step = path.name.removeprefix("step-").lstrip("0")
        return [step, *6 * ["-"], f"broken: {broken}"]

    size = sum(entry.size for entry in manifest.files.values())
    degrees = (f"{name}={degree}" for name, degree in manifest.mesh.items() if degree > 1)
    float8 = parse_toml(manifest.config.encode()).get("float8", {})
    sound = "ok, weights only" if manifest.has_weights_only else "ok"
    problems = broken_files(path, manifest.files, hashes=False)
    return [
        str(manifest.progress.step),
        str(manifest.progress.tokens),
        time.strftime("%Y-%m-%d %H:%M:%S", time.localtime((path / MANIFEST).stat().st_mtime)),
        f"{size / 2**30:.3f}",
        str(manifest.world_size),
        " ".join(degrees) or "-",
        str(float8.get("recipe_name")) if float8.get("enable_float8_linear") else "no",
        f"broken: {problems[0]}" if problems else sound,
    ]
