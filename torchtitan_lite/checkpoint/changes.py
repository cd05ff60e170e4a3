"""What differs between two checkpoints, or between a checkpoint and the run that resumes from it,
as far as their manifests tell: a line each. Imports no torch."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import tomli

from torchtitan_lite.checkpoint.manifest import Progress, TensorEntry
from torchtitan_lite.config.keys import show
from torchtitan_lite.errors import CheckpointError


def config_changes(old: str, new: str) -> list[str]:
    """`[table] key: old -> new` for each key of two resolved configs, in TOML, that differs."""
    return value_changes(_config_keys(old), _config_keys(new))


def _config_keys(text: str) -> dict[str, Any]:
    return {
        f"[{table}] {key}": value
        for table, keys in tomli.loads(text).items()
        for key, value in keys.items()
    }


def progress_changes(old: Progress, new: Progress) -> list[str]:
    """`key: old -> new` for each number of two runs' progress, and each property of their data,
    that differs."""
    return value_changes(*({**fields.pop("data"), **fields} for fields in map(asdict, (old, new))))


def value_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """`key: old -> new` for each key whose value differs, values as in TOML: of models' dimensions,
    and of data."""
    return _changes(*({key: show(value) for key, value in each.items()} for each in (old, new)))


def check_model(saved: Mapping[str, Any], wanted: Mapping[str, Any], *, path: Path) -> None:
    """Raise CheckpointError unless a checkpoint's model has the dimensions of this run's, but for
    what follows from the text rather than the weights."""
    of_the_text = ("max_seq_len", "document_bos_id")
    before, now = (
        {key: v for key, v in each.items() if key not in of_the_text} for each in (saved, wanted)
    )
    if changes := value_changes(before, now):
        raise CheckpointError(
            f"[model] {path} is of another model: {'; '.join(changes)}. Use its [model] flavor and tokenizer_path, or "
            "name another checkpoint or another [job] dump_folder."
        )


def tensor_changes(old: Mapping[str, TensorEntry], new: Mapping[str, TensorEntry]) -> list[str]:
    """`name: old -> new` for each tensor that is missing from one of two checkpoints, or of another
    dtype or shape."""
    return _changes(
        *({name: str(entry) for name, entry in each.items()} for each in (old, new)),
        absent="missing",
    )


def _changes(old: Mapping[str, str], new: Mapping[str, str], *, absent: str = "unset") -> list[str]:
    """`key: old -> new` for each key that differs, in the order of `old` and then of `new`."""
    texts = {key: (old.get(key, absent), new.get(key, absent)) for key in (*old, *new)}
    return [
        f"{key}: {before} -> {after}" for key, (before, after) in texts.items() if before != after
    ]
