"""Read the layers of a config: a chain of TOML files, then the command line. Key names of earlier
torchtitan releases still work; the log gives the current name."""

import re
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from torchtitan_lite.documents import parse_toml, read_toml
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.logger import logger

from .keys import KEYS, TABLES, Key, closest, show, show_key

CONFIG_FILE = "job.config_file"
COMMAND_LINE = "the command line"
CONVERTERS = "model.converters"
ALIASES = {
    CONVERTERS: "float8.enable_float8_linear",
    "job.print_args": "job.print_config",
    "model.hf_assets_path": "model.tokenizer_path",
    "lr_scheduler.lr_min": "lr_scheduler.min_lr_factor",
    "training.batch_size": "training.local_batch_size",
    "training.compile": "compile.enable",
    "training.deterministic": "debug.deterministic",
    "training.seed": "debug.seed",
    "training.tensor_parallel_degree": "parallelism.tensor_parallel_degree",
    "checkpoint.enable_checkpoint": "checkpoint.enable",
}
OLD_FLOAT8_TABLE = "quantize.linear.float8"
WITH_FLOAT8 = (["float8"], [OLD_FLOAT8_TABLE], "float8", OLD_FLOAT8_TABLE)
"""Values of model.converters that enable float8, in a file and on the command line."""


@dataclass(frozen=True)
class Setting:
    """An unchecked value as the user wrote it, and the file or command line it came from."""

    value: object
    source: str

    def cite(self, name: str) -> str:
        """Return the start of an error message: `[training] steps = 0 (from run.toml)`."""
        text = show(self.value)
        if len(text) > 200:
            text = f"{text[:200]}..."
        return f"{show_key(name)} = {text} (from {self.source})"


Layer = dict[str, Setting]
"""Settings of one source, by dotted name."""


def read_files(path: Path) -> list[Layer]:
    """Return the settings of a file and of its chain of `base` files, from the last base on."""
    layers: list[Layer] = []
    files: list[Path] = []
    resolved: set[Path] = set()
    while True:
        files.append(path)
        chain = " -> ".join(map(str, files))
        where = f"{path} (base files: {chain})" if layers else str(path)
        try:
            content = read_toml(path)
        except OSError as error:
            raise ConfigError(f"{where}: cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise ConfigError(f"{where}: {error}") from error
        if path.resolve() in resolved:
            raise ConfigError(f"base files form a cycle: {chain}; remove one of these `base` lines")
        resolved.add(path.resolve())

        base = content.pop("base", None)
        layers.insert(0, {name: Setting(value, str(path)) for name, value in _flatten(content)})
        if base is None:
            return layers
        if not isinstance(base, str) or "\0" in base:
            raise ConfigError(f"base = {show(base)} (from {path}): must be the path of a TOML file")
        path = path.parent / base


def _flatten(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield (dotted name, value) for every value in a table and its sub-tables.

    Yield a table as a value if it is that of a key, and an empty one if its name is unknown, so
    that a misspelt name is reported.
    """
    tables = [name for name, key in KEYS.items() if key.kind == "table"]
    for key, value in table.items():
        name = prefix + key
        if value and isinstance(value, dict) and name not in tables:
            yield from _flatten(value, f"{name}.")
        elif value != {} or current_name(name) not in TABLES:
            yield name, value


def asks_for_help(argv: Sequence[str]) -> bool:
    """Return whether the command line has -h or --help, other than -h as the value of a key."""
    values = [word for option, word in pairwise(argv) if re.fullmatch("--[^=]+", option)]
    return "--help" in argv or argv.count("-h") > values.count("-h")


def read_command_line(argv: Sequence[str]) -> tuple[Path, Layer, list[str]]:
    """Return the config file, the overrides, and a message for each invalid word.

    Raises ConfigError if there is no config file, or if a word is not UTF-8.
    """
    for word in argv:
        if word != word.encode(errors="replace").decode():
            raise ConfigError(f"{ascii(word)} on the command line is not UTF-8")

    path = ""
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
            path = text
        elif bare and key and key.kind != "bool":
            problems.append(
                f"--{name} (from {COMMAND_LINE}): needs a value of type {key.type_text}"
            )
        else:
            layer[name] = Setting(True if bare else _parse(text, key), COMMAND_LINE)
    if not path:
        raise ConfigError(
            f"no config file; name one: --{CONFIG_FILE} train_configs/debug_model.toml"
        )
    return Path(path), layer, problems


def _parse(text: str, key: Key | None) -> object:
    """Parse a word as TOML, but allow unquoted strings and unbracketed lists.

    Empty text unsets an optional key. Text that is not TOML is returned; validation rejects it.
    """
    if key and key.optional and not text:
        return None
    if key and key.kind == "str" and not text.startswith(('"', "'")):
        return text
    if key and key.kind == "list" and not text.startswith("["):
        return text.split(",") if text else []
    try:
        return parse_toml(f"value = {text}".encode())["value"]
    except ValueError:
        return text


def current_name(name: str) -> str:
    """Return the current dotted name of a key or table."""
    if name == OLD_FLOAT8_TABLE or name.startswith(f"{OLD_FLOAT8_TABLE}."):
        return "float8" + name.removeprefix(OLD_FLOAT8_TABLE)
    return ALIASES.get(name, name)


def resolve_aliases(layer: Layer) -> tuple[Layer, list[str]]:
    """Return the settings of one source under their current names, and a message for each setting
    that has no translation or contradicts another."""
    resolved = {name: setting for name, setting in layer.items() if current_name(name) == name}
    problems = []
    for name, old in layer.items():
        new = current_name(name)
        if new == name:
            continue
        logger.info(f"{show_key(name)} is now {show_key(new)}")
        value = old.value
        if name == CONVERTERS:
            if value not in ([], "", *WITH_FLOAT8):
                rule = 'must be ["float8"], ["quantize.linear.float8"] or []'
                problems.append(f"{old.cite(name)}: {rule}")
                continue
            value = value in WITH_FLOAT8

        rival = resolved.setdefault(new, Setting(value, f"{old.source}, as {show_key(name)}"))
        if rival.value != value:
            problems.append(f"{old.cite(name)}: contradicts {rival.cite(new)}; keep the latter")
    return resolved, problems
