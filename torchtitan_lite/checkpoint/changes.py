"""What differs between two checkpoints, or between a checkpoint and the run that resumes from it, as far as their
manifests tell: a line each. Imports no torch."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import tomli

from torchtitan_lite.checkpoint.manifest import Progress, TensorEntry
from torchtitan_lite.config.keys import show


def config_changes(old: str, new: str) -> list[str]:
    """`[table] key: old -> new` for each key of two resolved configs, in TOML, that differs."""
    return value_changes(_config_keys(old), _config_keys(new))


def _config_keys(text: str) -> dict[str, Any]:
    return {f"[{table}] {key}": value for table, keys in tomli.loads(text).items() for key, value in keys.items()}


def progress_changes(old: Progress, new: Progress) -> list[str]:
    """`key: old -> new` for each number of two runs' progress, and each property of their data, that differs."""
    return value_changes(*({**fields.pop("data"), **fields} for fields in map(asdict, (old, new))))


def value_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """`key: old -> new` for each key whose value differs, values as in TOML: of models' dimensions, and of data."""
    return _changes(*({key: show(value) for key, value in each.items()} for each in (old, new)))


def tensor_changes(old: Mapping[str, TensorEntry], new: Mapping[str, TensorEntry]) -> list[str]:
    """`name: old -> new` for each tensor that is missing from one of two checkpoints, or of another dtype or shape."""
    return _changes(*({name: str(entry) for name, entry in each.items()} for each in (old, new)), absent="missing")


def _changes(old: Mapping[str, str], new: Mapping[str, str], *, absent: str = "unset") -> list[str]:
    """`key: old -> new` for each key that differs, in the order of `old` and then of `new`."""
    texts = {key: (old.get(key, absent), new.get(key, absent)) for key in (*old, *new)}
    return [f"{key}: {before} -> {after}" for key, (before, after) in texts.items() if before != after]
