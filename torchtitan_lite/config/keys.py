"""The keys of the TOML file as data, derived from the sections, and how messages name them."""

import difflib
import json
import types
import typing
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic.fields import FieldInfo

from .sections import Config, Section


@dataclass(frozen=True)
class Key:
    """One key of one table."""

    table: str
    name: str
    kind: str
    """bool, int, float, str or list."""
    choices: tuple[str, ...]
    """Allowed values; empty: any."""
    item_keys: tuple[str, ...]
    """Keys of each item, in a list of tables."""
    optional: bool
    """Whether the key may be unset (None)."""
    default: object
    doc: str

    @property
    def type_text(self) -> str:
        """The type in a few characters: `int`, `"a"|"b"`, `list of "a"|"b"`, `list of {a, b}`."""
        choices = "|".join(show(choice) for choice in self.choices)
        if self.item_keys:
            choices = f"{{{', '.join(self.item_keys)}}}"
        if self.kind == "list" and choices:
            return f"list of {choices}"
        return choices or self.kind


def _unwrap(annotation: Any) -> Any:
    """Return the bare type inside Annotated[...] and ... | None."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return _unwrap(args[0])
    if origin in (typing.Union, types.UnionType):
        return _unwrap(next(arg for arg in args if arg is not types.NoneType))
    return annotation


def _build_key(table: str, name: str, field: FieldInfo) -> Key:
    bare = _unwrap(field.annotation)
    is_list = typing.get_origin(bare) is tuple
    element = _unwrap(typing.get_args(bare)[0]) if is_list else bare
    choices = typing.get_args(element) if typing.get_origin(element) is Literal else ()
    is_table = isinstance(element, type) and issubclass(element, Section)
    return Key(
        table=table,
        name=name,
        kind="list" if is_list else "str" if choices else bare.__name__,
        choices=choices,
        item_keys=tuple(element.model_fields) if is_table else (),
        optional=types.NoneType in typing.get_args(field.annotation),
        default=field.default,
        doc=" ".join((field.description or "").split()),
    )


KEYS: dict[str, Key] = {
    f"{table}.{name}": _build_key(table, name, field)
    for table, section in Config.model_fields.items()
    for name, field in type(section.default).model_fields.items()
}
"""Every key by its dotted name, such as "training.steps", in the order of the sections."""

TABLES = tuple(Config.model_fields)


def show(value: object) -> str:
    """Format a value on one line, nearly as TOML does; `unset` for None."""
    return "unset" if value is None else json.dumps(value, ensure_ascii=False, default=str)


def show_key(name: str) -> str:
    """Format "training.steps" as `[training] steps`. A name outside every table stays as given."""
    table, _, key = name.rpartition(".")
    return f"[{table}] {key}" if table else key


def closest(word: str, options: Iterable[str]) -> str | None:
    """Return the option nearest to a misspelt word, ignoring case; None if none is near."""
    by_folded = {option.lower(): option for option in options}
    matches = difflib.get_close_matches(word.lower(), by_folded, n=1, cutoff=0.68)
    return by_folded[matches[0]] if matches else None


def did_you_mean(word: str, options: Iterable[str]) -> str:
    """Return `; did you mean X?` with the nearest option; empty if none is near."""
    option = closest(word, options)
    return f"; did you mean {show(option)}?" if option else ""


@dataclass(frozen=True)
class Setting:
    """A value as the user wrote it, not yet checked, and where it was written."""

    value: object
    source: str

    def cite(self, name: str) -> str:
        """Begin a message about this setting: `[training] steps = 0 (from run.toml)`."""
        return f"{show_key(name)} = {show(self.value)} (from {self.source})"


Layer = dict[str, Setting]
"""Settings of one source, by dotted name."""
