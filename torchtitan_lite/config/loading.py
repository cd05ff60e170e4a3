"""Load a Config from a TOML file and the command line, reporting all errors at once; write it as
TOML."""

from collections.abc import Mapping

import tomli_w
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from torchtitan_lite.base.errors import ConfigError
from torchtitan_lite.base.logger import logger
from torchtitan_lite.catalog.schedules import ZERO_BUBBLE

from .arithmetic import resolve_model
from .checks import check_config
from .keys import KEYS, TABLES, closest, did_you_mean, show
from .layers import (
    CONFIG_FILE,
    Layer,
    Setting,
    read_command_line,
    read_files,
    resolve_aliases,
    resolve_foreign,
)
from .sections import Config

RULES = {
    "bool_type": "must be true or false",
    "int_type": "must be a whole number",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "string_type": "must be a string, in quotes",
    "string_too_short": "must not be empty",
    "string_pattern_mismatch": "must match {pattern}",
    "tuple_type": "must be a list, in brackets",
    "model_type": "must be a {type}",
    "missing": "must be set",
    "value_error": "{error}",
    "greater_than": "must be above {gt:,.12g}",
    "greater_than_equal": "must be at least {ge:,.12g}",
    "less_than": "must be below {lt:,.12g}",
    "less_than_equal": "must be at most {le:,.12g}",
}
"""Message for each kind of pydantic error. The braces are filled with the limit or the type."""


def load_config(argv: list[str], *, world_size: int) -> Config:
    """Return the config that a command line describes, for a run of `world_size` processes.

    Raises one ConfigError that lists every error, one a line.
    """
    # Merge the layers, later ones over earlier ones.
    path, overrides, problems = read_command_line(argv)
    settings: Layer = {}
    for layer in (*read_files(path), overrides):
        resolved, alias_problems = resolve_aliases(layer)
        settings |= resolved
        problems += alias_problems
    problems += resolve_foreign(settings)

    known = {name: setting for name, setting in settings.items() if name in KEYS}
    unknown = {name: setting for name, setting in settings.items() if name not in KEYS}
    problems += dict.fromkeys(_describe_unknown(name, unknown[name]) for name in unknown)
    unsound = {name.split(".")[0] for name in unknown}

    # Validate each value. Tables with an invalid value fall back to defaults, so that the rules
    # between the others can still be checked.
    try:
        config = _validate(known)
    except ValidationError as error:
        problems += _describe_all(error, known)
        unsound |= {str(detail["loc"][0]) for detail in error.errors()}
        sound = {name for name in known if KEYS[name].table not in unsound}
        config = _validate({name: known[name] for name in sound})

    problems += check_config(config, world_size=world_size, unsound=unsound)
    if problems:
        raise ConfigError("\n".join(problems))

    checkpoint = config.checkpoint
    exports = checkpoint.last_save_model_only or checkpoint.last_save_in_hf
    if checkpoint.export_dtype != "float32" and not exports:
        logger.info(
            "no effect here: [checkpoint] export_dtype: the last save has the whole run; with "
            "last_save_model_only = true, torchtitan's default, it has weights alone"
        )
    return config


def check_model_table(model: Mapping[str, object], *, source: str) -> None:
    """Raise ConfigError unless a config takes `model` as its table [model]."""
    settings = {f"model.{key}": Setting(value, source) for key, value in model.items()}
    try:
        resolve_model(_validate(settings).model)
    except ValidationError as error:
        raise ConfigError("\n".join(_describe_all(error, settings))) from error


def shared_settings(config: Config) -> dict[str, str]:
    """Return the values, as text by `[table] key`, on which all ranks must agree.

    Paths of tokenizers and data may differ between nodes: their contents are compared by
    fingerprint.
    """
    tables = config.model_dump(
        exclude={
            "model": {"tokenizer_path"},
            "training": {"dataset_path": True, "datasets": {"__all__": {"path"}}},
            "validation": {"dataset_path"},
        }
    )
    return {
        f"[{table}] {key}": show(value)
        for table, section in tables.items()
        for key, value in section.items()
    }


def dump_config(config: Config, *, changes_only: bool = False) -> str:
    """Return the config as TOML that loads to an equal Config. Unset keys are left out, and with
    `changes_only` also those that have their defaults."""
    return tomli_w.dumps(config.model_dump(exclude_none=True, exclude_defaults=changes_only))


def _validate(settings: Layer) -> Config:
    tables: dict[str, dict[str, object]] = {}
    for name, setting in settings.items():
        key, value = KEYS[name], setting.value
        if key.kind == "list" and isinstance(value, str) and not value.startswith("["):
            value = [part.strip() for part in value.split(",") if part.strip()]
        tables.setdefault(key.table, {})[key.name] = value
    return Config.model_validate(tables)


def _describe_unknown(name: str, setting: Setting) -> str:
    """Return the message for an unknown key, which is the same for all keys of an unknown table."""
    table, _, key = name.rpartition(".")
    if name in TABLES:
        return f"{setting.cite(name)}: is a table, not a key"
    if table in KEYS and KEYS[table].kind == "table":
        return f"{setting.cite(name)}: write --{table}='{show({key: setting.value})}', as one value"
    if table and table not in TABLES:
        near = f"[{table}]" if table in KEYS else closest(table, TABLES)  # one bracket too few
        hint = f"; did you mean [{near}]?" if near else ""
        return f"[{table}] (from {setting.source}): unknown table{hint}"

    if closest(name, [CONFIG_FILE]):
        return f"{setting.cite(name)}: unknown key; did you mean --{CONFIG_FILE}?"

    # Suggest the nearest key of the same table, or else of another table.
    for known in ([each for each in KEYS.values() if each.table == table], KEYS.values()):
        if near := closest(key, [each.name for each in known]):
            homes = [f"[{each.table}] {near}" for each in known if each.name == near]
            return f"{setting.cite(name)}: unknown key; did you mean {' or '.join(homes)}?"
    return f"{setting.cite(name)}: unknown key; --help lists every key"


def _describe_all(error: ValidationError, settings: Layer) -> list[str]:
    return list(dict.fromkeys(_describe_invalid(detail, settings) for detail in error.errors()))


def _describe_invalid(detail: ErrorDetails, settings: Layer) -> str:
    table, key, *place = detail["loc"]
    name, kind = f"{table}.{key}", detail["type"]
    subject = settings[name].cite(name)
    if place and isinstance(place[-1], str):  # a key of a table, or of one of a list, from 1
        value = None if kind == "missing" else detail["input"]
        setting = Setting(value, settings[name].source)
        owner = f"[[{name}]] {int(place[0]) + 1}" if len(place) == 2 else f"[{name}]"
        subject = f"{owner}: {setting.cite(place[-1])}"

    if kind == "literal_error":
        choices = KEYS[name].choices
        hint = did_you_mean(str(detail["input"]), choices)
        if reason := ZERO_BUBBLE.get(str(detail["input"])):
            hint = f"; {reason}"
        return f"{subject}: must be {' or '.join(map(show, choices))}{hint}"
    if kind == "extra_forbidden":
        return f"{subject}: unknown key{did_you_mean(str(place[-1]), KEYS[name].choices)}"
    rule = RULES[kind].format(type=KEYS[name].type_text, **detail.get("ctx", {}))
    return f"{subject}: {rule}"
