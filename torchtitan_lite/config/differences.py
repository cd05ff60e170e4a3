"""Differences between two configs, or between other facts that have names."""

from collections.abc import Callable, Mapping
from typing import Any

from torchtitan_lite.base.jsonfile import parse_toml

from .keys import show


def changes(
    old: Mapping[str, Any],
    new: Mapping[str, Any],
    *,
    absent: str = "unset",
    text: Callable[[Any], str] = show,
) -> list[str]:
    """Return `key: old -> new` for each key with different values: first the keys of `old`, then
    those only in `new`. `text` formats a value."""
    texts = {
        key: tuple(text(values[key]) if key in values else absent for values in (old, new))
        for key in (*old, *new)
    }
    return [f"{key}: {a} -> {b}" for key, (a, b) in texts.items() if a != b]


def flat_config(tables: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the values of a config by `[table] key`. What is in no table is left out."""
    return {
        f"[{table}] {key}": value
        for table, keys in tables.items()
        if isinstance(keys, Mapping)
        for key, value in keys.items()
    }


def config_changes(old: str, new: str) -> list[str]:
    """Return `[table] key: old -> new` for each key that differs between two configs in TOML."""
    before, now = (flat_config(parse_toml(text.encode())) for text in (old, new))
    return changes(before, now)
