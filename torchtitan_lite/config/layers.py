"""Read the layers of a config: a chain of TOML files, then the command line. torchtitan's names of
our keys are translated; its other keys are ignored or refused."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torchtitan_lite.base.errors import ConfigError
from torchtitan_lite.base.jsonfile import parse_toml, read_toml
from torchtitan_lite.base.logger import logger
from torchtitan_lite.base.paths import expand_user

from .keys import KEYS, Key, closest, did_you_mean, show, show_key
from .torchtitan import CONVERTERS, FOREIGN, MOVED, UNREAD, current_name, find_foreign

CONFIG_FILE = "job.config_file"
SHIPPED = Path(__file__).parents[1] / "train_configs"
"""Configs of the package."""


@dataclass(frozen=True)
class Setting:
    """An unchecked value as the user wrote it, and the file or command line it came from."""

    value: object
    source: str

    def cite(self, name: str) -> str:
        """Return the start of an error message: `[training] steps = 0 (from run.toml)`."""
        return f"{show_key(name)} = {show(self.value)[:200]} (from {self.source})"


Layer = dict[str, Setting]
"""Settings of one source, by dotted name."""


def read_files(path: Path, *, above: tuple[Path, ...] = ()) -> list[Layer]:
    """Return the settings of a file and of its chain of `base` files, from the last base on.
    `above` are the files whose base it is."""
    where = f"{path} (base of {above[-1]})" if above else str(path)
    try:
        content = read_toml(path)
    except OSError as error:
        hint = did_you_mean(path.stem, shipped_configs())
        if not hint and str(path) == path.stem:  # a name, not a file
            hint = f"; name a TOML file, or one of {', '.join(shipped_configs())}"
        raise ConfigError(f"{where}: cannot be read: {error.strerror}{hint}") from error
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from error
    if path.resolve() in [each.resolve() for each in above]:
        raise ConfigError(f"{where}: base files form a cycle; remove one of their `base` lines")

    base = content.pop("base", None)
    layer = {name: Setting(value, str(path)) for name, value in _flatten(content)}
    if base is None:
        return [layer]
    what = f"base = {show(base)} (from {path}): "
    if not isinstance(base, str) or "\0" in base:
        raise ConfigError(f"{what}must be the path of a TOML file")
    file = find_config(base, what=what, folder=path.parent)
    return [*read_files(file, above=(*above, path)), layer]


def shipped_configs() -> list[str]:
    """Return the names of the configs that the package has."""
    return sorted(path.stem for path in SHIPPED.glob("*.toml"))


def find_config(name: str, *, what: str = "", folder: str | Path = "") -> Path:
    """Return the path of a config: a file, by default in `folder`, or else the shipped config of
    that name. Raises ConfigError, which begins with `what`."""
    path = Path(folder, expand_user(name, what=what or f"--{CONFIG_FILE} {name}: "))
    shipped = SHIPPED / f"{name.removesuffix('.toml')}.toml"
    is_name = "/" not in name and not path.is_file()
    return shipped if is_name and shipped.exists() else path


def _flatten(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield (dotted name, value) for every value in a table and its sub-tables."""
    for key, value in table.items():
        name = prefix + key
        if isinstance(value, dict) and name not in KEYS:
            yield from _flatten(value, f"{name}.")
        else:
            yield name, value


def read_command_line(argv: Sequence[str]) -> tuple[Path, Layer, list[str]]:
    """Return the config file, the overrides, and a message for each invalid word. Raises
    ConfigError if there is no config file, or if a word is not UTF-8."""
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
        name = name.replace("-", "_")
        negated = not equals and ".no_" in name and name not in KEYS  # as tyro writes false
        if negated:
            name = name.replace(".no_", ".")
        key = KEYS.get(current_name(name))
        if not word.startswith("--") or not name:
            fix = f"write --{closest(name, KEYS) or 'table.key'} value, lists as a,b"
            problems.append(f"unexpected {show(word)} on the command line; {fix}")
            continue

        # The value is the rest of the word, or the next word; a bare name means true, or false.
        bare = negated or (not equals and (not words or words[0].startswith("--")))
        if not equals and not bare:
            text = words.popleft()
        if name == CONFIG_FILE:
            path = text
        elif bare and key and key.kind != "boolean":
            problems.append(f"--{name} on the command line needs a value of type {key.type_text}")
        else:
            layer[name] = Setting(not negated if bare else _parse(text, key), "the command line")
    if not path:
        raise ConfigError(f"no config file; name one: --{CONFIG_FILE} debug_model")
    return find_config(path), layer, problems


def given_keys(argv: Sequence[str]) -> set[str]:
    """Return the keys that a command line sets, by dotted name, but not those that it leaves to
    choose by "auto" or -1."""
    _, layer, _ = read_command_line(argv)
    return {current_name(name) for name, each in layer.items() if each.value not in ("auto", -1)}


def _parse(text: str, key: Key | None) -> object:
    """Parse a word as TOML, but allow unquoted strings, and numbers such as .1 and 1. Empty text,
    or None, unsets an optional key. Text that is not TOML is left to validation."""
    if key and key.optional and text in ("", "None"):
        return None
    if key and key.kind == "string" and not text.startswith(('"', "'")):
        return text
    try:
        if key and key.kind == "number":
            return float(text)
        return parse_toml(f"value = {text}".encode())["value"]
    except ValueError:
        return text


def resolve_aliases(layer: Layer) -> tuple[Layer, list[str]]:
    """Return the settings of one source under their current names, and a message for each that
    cannot be translated or contradicts another."""
    resolved = {name: setting for name, setting in layer.items() if current_name(name) == name}
    problems = []
    for name, old in layer.items():
        new, value = current_name(name), old.value
        if new == name:
            continue
        if new in KEYS:
            logger.info(f"{show_key(name)} is now {show_key(new)}")
        if name == CONVERTERS:
            only = value[0] if isinstance(value, list) and len(value) == 1 else value
            chosen = MOVED.get(only, only) if isinstance(only, str) else only
            if chosen not in ([], "", "float8", "mx"):
                rule = 'must be ["quantize.linear.float8"], ["quantize.linear.mx"] or []'
                problems.append(f"{old.cite(name)}: {rule}")
                continue
            resolved[CONVERTERS] = replace(old, value=chosen)
            value = chosen in ("float8", "mx")

        rival = resolved.setdefault(new, Setting(value, f"{old.source}, as {show_key(name)}"))
        if rival.value != value:
            problems.append(f"{old.cite(name)}: contradicts {rival.cite(new)}; keep the latter")
    return resolved, problems


def resolve_foreign(settings: Layer) -> list[str]:
    """Remove torchtitan's keys without a counterpart here from the merged `settings`, and log that
    they have no effect. Return a message for each that asks for what does not happen here."""
    # torchtitan's converter mx reads [mx], not [float8].
    unused: list[str] = []
    if (converter := settings.pop(CONVERTERS, None)) and converter.value == "mx":
        unused = [name for name in UNREAD if settings.pop(name, None)]
        settings["float8.recipe_name"] = replace(converter, value="mxfp8")
        if filters := settings.pop("mx.filter_fqns", None):
            logger.info("[mx] filter_fqns is now [float8] filter_fqns")
            settings["float8.filter_fqns"] = filters

    # A key has no effect if its value asks for what happens here anyway.
    problems = []
    for name, setting in list(settings.items()):
        if name in KEYS or (pattern := find_foreign(name)) is None:
            continue
        del settings[name]
        values = FOREIGN[pattern]
        shown = [show(value) for value in values or ()]
        if values is None or show(setting.value) in shown:
            unused.append(name)
        else:
            other = f", or set it to {' or '.join(shown)[:200]}" if shown else ""
            rule = "is not offered (docs/torchtitan.md); remove the key"
            problems.append(f"{setting.cite(name)}: {rule}{other}")
    if unused:
        logger.info(f"no effect here (docs/torchtitan.md): {', '.join(map(show_key, unused))}")
    return problems
