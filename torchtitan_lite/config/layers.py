"""Read the layers of a config: a chain of TOML files, then the command line."""

from collections import deque
from pathlib import Path
from typing import Any

import tomli

from torchtitan_lite.errors import ConfigError

from .aliases import current_name
from .keys import KEYS, TABLES, Key, Layer, Setting, closest, show

CONFIG_FILE = "job.config_file"
COMMAND_LINE = "the command line"


def read_files(path: Path) -> list[Layer]:
    """Return the settings of a file and of its chain of `base` files, the last base first."""
    layers: list[Layer] = []
    chain: list[Path] = []
    while True:
        chain.append(path)
        content = _read_toml(path, chain)
        if path.resolve() in [seen.resolve() for seen in chain[:-1]]:
            raise ConfigError(
                f"base files form a cycle: {_show_chain(chain)}; remove one of these `base` lines"
            )
        base = content.pop("base", None)
        layers.insert(0, {name: Setting(value, str(path)) for name, value in _flatten(content)})
        if base is None:
            return layers
        if not isinstance(base, str):
            raise ConfigError(f"base = {show(base)} (from {path}): must be the path of a TOML file")
        path = path.parent / base


def _read_toml(path: Path, chain: list[Path]) -> dict[str, Any]:
    where = str(path) if len(chain) == 1 else f"{path} (base files: {_show_chain(chain)})"
    try:
        return tomli.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{where}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{where}: not valid TOML: {error}") from error


def _show_chain(chain: list[Path]) -> str:
    return " -> ".join(map(str, chain))


def _flatten(table: dict[str, Any], prefix: str = "") -> list[tuple[str, object]]:
    """Return (dotted name, value) for every value in a table and its sub-tables.

    An empty table is listed only if its name is unknown, so that a typing mistake is reported.
    """
    pairs: list[tuple[str, object]] = []
    for key, value in table.items():
        name = prefix + key
        if value != {} or current_name(name) not in TABLES:
            pairs += (
                _flatten(value, f"{name}.")
                if isinstance(value, dict) and value
                else [(name, value)]
            )
    return pairs


def read_command_line(argv: list[str]) -> tuple[Path, Layer, list[str]]:
    """Return the config file, the overrides, and a message for each word that is neither."""
    files: list[str] = []
    layer: Layer = {}
    problems: list[str] = []
    words = deque(argv)
    while words:
        word = words.popleft()
        name, equals, text = word.lstrip("-").partition("=")
        key = KEYS.get(current_name(name))
        if not word.startswith("--") or not name:
            near = closest(name, KEYS)
            hint = "write options as --table.key value, lists as a,b"
            if near:
                hint = f"did you mean --{near}?"
            problems.append(f"unexpected {show(word)} on the command line; {hint}")
            continue

        # The value is the rest of the word, or the next word; a bare name means true.
        bare = not equals and (not words or words[0].startswith("--"))
        if not equals and not bare:
            text = words.popleft()
        if name == CONFIG_FILE:
            files.append(text)
        elif bare and key and key.kind != "bool":
            problems.append(
                f"--{name} (from {COMMAND_LINE}): needs a value of type {key.type_text}"
            )
        else:
            layer[name] = Setting(True if bare else _parse(text, key), COMMAND_LINE)
    return _one_config_file(files), layer, problems


def _one_config_file(files: list[str]) -> Path:
    if len(files) > 1:
        raise ConfigError(
            f"--{CONFIG_FILE} is given {len(files)} times: {', '.join(files)}; give it once"
        )
    if not files or not files[0]:
        raise ConfigError(
            f"no config file; name one: --{CONFIG_FILE} train_configs/debug_model.toml"
        )
    return Path(files[0])


def _parse(text: str, key: Key | None) -> object:
    """Parse a word as TOML, but allow unquoted strings and unbracketed lists.

    Empty text unsets an optional key. Text that is not TOML is returned for validation to refuse.
    """
    if key and key.optional and not text:
        return None
    if key and key.kind == "str" and not text.startswith(('"', "'")):
        return text
    if key and key.kind == "list" and not text.startswith("["):
        return text.split(",") if text else []
    try:
        return tomli.loads(f"value = {text}")["value"]
    except ValueError:
        return text
