"""Load a Config from a TOML file and the command line, reporting all errors at once."""

from collections.abc import Mapping

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from torchtitan_lite.base.errors import ConfigError

from .checks import check_config
from .keys import KEYS, TABLES, closest, did_you_mean, flat_config, show, show_key
from .layers import Layer, Setting, read_command_line, read_files, resolve_aliases, resolve_foreign
from .sections import Config
from .types import OUTSIDE


def load_config(argv: list[str], *, world_size: int = 1) -> Config:
    """Return the config that a command line describes, for a run of `world_size` processes. Raises
    one ConfigError that lists every invalid word, key and value, one a line, or else every rule
    between keys that is broken."""
    # Merge the layers, later ones over earlier ones.
    path, overrides, problems = read_command_line(argv)
    settings: Layer = {}
    for layer in (*read_files(path), overrides):
        resolved, alias_problems = resolve_aliases(layer)
        settings |= resolved
        problems += alias_problems
    problems += resolve_foreign(settings)

    unknown = (name for name in settings if name not in KEYS)
    problems += dict.fromkeys(_describe_unknown(name, settings[name]) for name in unknown)

    # Validate each value, then the rules between sound values.
    config = _validate(settings, problems)
    if problems := problems or check_config(config, world_size=world_size):
        raise ConfigError("\n".join(problems))
    return config


def read_table(table: str, values: Mapping[str, object]) -> Config:
    """Return a config of a model's values for one table, without the keys that the table has not.
    Raises ConfigError."""
    settings = {f"{table}.{key}": Setting(value, "the model") for key, value in values.items()}
    return _validate(settings, problems=[])


def shared_settings(config: Config) -> dict[str, str]:
    """Return the values, as text by `[table] key`, on which all ranks must agree: all but the paths
    of tokenizers and data, whose contents are compared by fingerprint."""
    tables = config.model_dump(
        exclude={
            "model": {"tokenizer_path"},
            "training": {"dataset_path": True, "datasets": {"__all__": {"path"}}},
            "validation": {"dataset_path"},
        }
    )
    return {name: show(value) for name, value in flat_config(tables).items()}


def outside_names(config: Config) -> dict[str, str]:
    """Return the key that names each object outside the package, by its module:name, and the module
    of [experimental] custom_import."""
    values = flat_config(config.model_dump())
    found: dict[str, str] = {}
    for name, key in KEYS.items():
        if OUTSIDE in key.choices:
            value = values[show_key(name)]
            named = [value] if isinstance(value, str) else value
            found |= {each: show_key(name) for each in named if ":" in each}
    if module := config.experimental.custom_import:
        found[module] = "[experimental] custom_import"
    return found


def _validate(settings: Layer, problems: list[str]) -> Config:
    """Return the config of sound values, without unknown keys. Raises ConfigError with the
    `problems` and each invalid value."""
    tables: dict[str, dict[str, object]] = {}
    for name, setting in settings.items():
        if (key := KEYS.get(name)) is None:
            continue
        value = None if key.optional and setting.value == "" else setting.value  # TOML has no null
        if key.kind == "array" and isinstance(value, str) and not value.startswith("["):
            value = [part.strip() for part in value.split(",") if part.strip()]
        tables.setdefault(key.table, {})[key.name] = value
    try:
        return Config.model_validate(tables)
    except ValidationError as error:
        invalid = dict.fromkeys(_describe_invalid(detail, settings) for detail in error.errors())
        raise ConfigError("\n".join([*problems, *invalid])) from error


def _describe_unknown(name: str, setting: Setting) -> str:
    """Return the message for an unknown key, which is the same for all keys of an unknown table."""
    table = name.rpartition(".")[0]
    if table and table not in TABLES:
        return f"[{table}] (from {setting.source}): unknown table{did_you_mean(table, TABLES)}"

    near = closest(name, KEYS)
    hint = f"did you mean {show_key(near)}?" if near else "--help lists every key"
    return f"{setting.cite(name)}: unknown key; {hint}"


def _describe_invalid(detail: ErrorDetails, settings: Layer) -> str:
    """Return the message for an invalid value, with pydantic's words for the rule."""
    table, key, *place = detail["loc"]
    name, word = f"{table}.{key}", str(detail["input"])
    rule = detail["msg"].replace("Input should", "must").removeprefix("Value error, ")
    if detail["type"] in ("model_type", "tuple_type"):
        rule = f"must be of type {KEYS[name].type_text}"
    if detail["type"] == "extra_forbidden":
        rule, word = "unknown key", str(place[-1])

    hint = did_you_mean(word, KEYS[name].choices)
    within = f"{'.'.join(map(str, place))}: " if place else ""  # such as 0.path: in a list
    return f"{settings[name].cite(name)}: {within}{rule}{hint}"
