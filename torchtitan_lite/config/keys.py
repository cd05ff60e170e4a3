"""The keys of the TOML file as data, derived from the sections; how messages name them, the text
of `--help`, and the JSON schema."""

import difflib
import json
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from torchtitan_lite.base.jsonfile import parse_toml

from .sections import Config
from .types import OUTSIDE, REFERENCE, Section

INTRODUCTION = """\
options: --job.config_file FILE.toml [--table.key value ...]

--job.config_file names the TOML file of the run. A line base = "other.toml" at the top of a file
takes every key that the file does not set from the other file. Its path is relative to the first,
and it may have a base too.

--table.key value, or --table.key=value, overrides any key below; the last one given wins.
--table.key alone means true, --table.no_key false, and a list is written a,b or as in TOML.
--table.key= unsets a key whose default is unset, as key = "" does in a file. A hyphen may stand for
each underscore of a key.
torchtitan's TOML files and options, up to v0.2.2, work: docs/torchtitan.md.
"""
Values = Mapping[str, Any]
"""Values by `[table] key`."""


@dataclass(frozen=True)
class Key:
    """One key of one table."""

    table: str
    name: str
    kind: str
    """boolean, integer, number, string, array or object, as in JSON Schema."""
    type_text: str
    """Such as `integer`, `"a"|"b"`, `array of "a"|"b"` or `array of {a, b}`."""
    choices: list[str]
    """Allowed values, perhaps OUTSIDE; empty: any. Of a table, or a list of tables, the keys."""
    optional: bool
    """Whether the key may be unset (None)."""
    default: object
    doc: str


def show(value: object) -> str:
    """Format a value on one line, nearly as TOML does; `unset` for None."""
    if value and isinstance(value, dict):
        return f"{{ {show_settings(value)} }}"
    return "unset" if value is None else json.dumps(value, ensure_ascii=False, default=str)


def show_settings(values: Mapping[str, object]) -> str:
    """Format the keys of a table and their values on one line: `dim = 4096, n_layers = 32`."""
    return ", ".join(f"{key} = {show(value)}" for key, value in values.items())


def show_key(name: str) -> str:
    """Format "training.steps" as `[training] steps`. A name outside every table stays as given."""
    table, _, key = name.rpartition(".")
    return f"[{table}] {key}" if table else key


def describe(values: Values, *names: str, fix: str) -> str:
    """Return a message about the keys `names`, such as "[training] steps": their values, then the
    rule and the fix."""
    return f"{', '.join(f'{name} = {show(values[name])[:200]}' for name in names)}: {fix}"


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


def closest(word: str, options: Iterable[str]) -> str | None:
    """Return the option nearest to a misspelt word, ignoring case; None if none is near."""
    by_folded = {option.lower(): option for option in options}
    matches = difflib.get_close_matches(word.lower(), by_folded, n=1, cutoff=0.68)
    return by_folded[matches[0]] if matches else None


def did_you_mean(word: str, options: Iterable[str]) -> str:
    """Return `; did you mean X?` with the nearest option; empty if none is near."""
    option = closest(word, options)
    return f"; did you mean {show(option)}?" if option else ""


def _build_keys(table: str, section: type[Section]) -> Iterator[Key]:
    schema = section.model_json_schema()
    for name, field in schema["properties"].items():
        options = field.get("anyOf", [field])
        value = options[0]
        kind, item = value.get("type", "object"), value.get("items", value)
        choices = [item["const"]] if "const" in item else item.get("enum", [])
        if REFERENCE in (each.get("pattern") for each in (*options, item)):
            choices = [*choices, OUTSIDE]
        type_text = "|".join(map(show, choices))
        if "$ref" in item:  # a table, or a list of tables
            choices = list(schema["$defs"][item["$ref"].rpartition("/")[2]]["properties"])
            type_text = f"{{{', '.join(choices)}}}"
        if choices and kind == "array":
            type_text = f"array of {type_text}"

        yield Key(
            table=table,
            name=name,
            kind=kind,
            type_text=type_text or kind,
            choices=choices,
            optional={"type": "null"} in options,
            default=field["default"],
            doc=" ".join(field["description"].split()),
        )


TABLES = tuple(Config.model_fields)
KEYS = {
    f"{table}.{key.name}": key
    for table, section in Config.model_fields.items()
    for key in _build_keys(table, type(section.default))
}
"""Every key by its dotted name, such as "training.steps", in the order of the sections."""


def format_help() -> str:
    """Return the text that `--help` prints."""
    lines = [INTRODUCTION.rstrip()]
    for table, keys in groupby(KEYS.values(), lambda key: key.table):
        lines += ["", f"[{table}]"]
        for key in keys:
            head = f"  --{table}.{key.name} {key.type_text} (default: {show(key.default)})"
            lines += textwrap.wrap(head, 100, subsequent_indent=" " * 4, break_on_hyphens=False)
            lines += textwrap.wrap(key.doc, 100, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines) + "\n"


def config_schema() -> dict[str, Any]:
    """Return the JSON schema of a TOML file, in the newest draft that TOML editors support. It has
    this project's names of keys, not torchtitan's other ones, which load too."""
    unset = '{"type": "null"}', '{"const": ""}'  # TOML has no null
    schema = json.loads(json.dumps(Config.model_json_schema()).replace(*unset))
    text = "TOML file with the keys that this one does not set, relative to this one."
    schema["properties"] = {"base": {"type": "string", "description": text}} | schema["properties"]
    return {"$schema": "http://json-schema.org/draft-07/schema#"} | schema
