"""The parser of all commands: one form of help, errors with a hint, keys of the config."""

import argparse
import math
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from torchtitan_lite.base.errors import ConfigError
from torchtitan_lite.base.jsonfile import strict_json
from torchtitan_lite.base.paths import expand_user, open_path
from torchtitan_lite.config.keys import KEYS, closest

KEYS_HELP = "--table.key value overrides a key of the config: torchtitan-lite train --help"
BOOL = re.compile("true|false|yes|no|on|off|0|1", re.IGNORECASE)
WORD = re.compile("(?!--).*", re.DOTALL)
FORM = partial(argparse.RawDescriptionHelpFormatter, max_help_position=26, width=100)


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises ConfigError, and that can leave keys of the config alone."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"formatter_class": FORM, "allow_abbrev": False, **settings})
        self.register("type", Path, lambda text: Path(path_text(text)))
        self.takes_keys = False

    def add_keys(self) -> None:
        """Accept `--table.key value` of every key of the config."""
        self.takes_keys, self.epilog = True, KEYS_HELP

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse a command line; `overrides` has the words that belong to keys of the config."""
        own, overrides = split_keys(argv) if self.takes_keys else (argv, [])
        # Options may stand between positional arguments, but not those of a subcommand.
        parse = self.parse_args if self._subparsers else self.parse_intermixed_args
        args = parse(own)
        args.overrides = overrides
        return args

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError, with the nearest option or command to a misspelt one."""
        misspelt = re.search(r"unrecognized arguments: (\S+)|invalid choice: '(.*?)'", message)
        known = self._known()
        near = closest(misspelt[1] or misspelt[2], known) if misspelt else None
        hint = f"did you mean {known[near]}?" if near else "--help shows each"
        raise ConfigError(f"{self.prog}: {message.removeprefix('argument ')}; {hint}")

    def _known(self) -> dict[str, str]:
        """Return each option and command, and each key also without its table, with its name."""
        words: dict[str, str] = {}
        if self.takes_keys:
            words |= {f"--{key.name}": f"--{name}" for name, key in reversed(KEYS.items())}
            words |= {f"--{name}": f"--{name}" for name in ("job.config_file", *KEYS)}
        for action in self._actions:
            words |= {word: word for word in (*action.option_strings, *(action.choices or ()))}
            if isinstance(action, argparse._SubParsersAction):
                for parser in action.choices.values():
                    words |= parser._known()
        return words


def print_answer(args: argparse.Namespace, value: object, text: str) -> None:
    """Print the answer of a command: with --json its `value`, else `text`."""
    print(strict_json(value) if args.json else text, flush=True)


def path_text(text: str) -> str:
    """Return a path in which ~ is the user's home: an argparse type, of type=Path too."""
    try:
        return expand_user(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error}") from error


def path_or_url(text: str) -> Path:
    """Return the Path of a path, or the UPath of a URL: an argparse type."""
    try:
        return open_path(path_text(text))
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def number(
    text: str, *, kind: Callable[[str], float] = int, least: float = 1, most: int = 10**15
) -> float:
    """Return a number in a range: an argparse type."""
    try:
        value = kind(text)
    except ValueError:
        value = math.nan
    if not least <= value <= most:
        form = "whole number" if kind is int else "number"
        raise argparse.ArgumentTypeError(f"{text} must be a {form} from {least} to {most}")
    return value


device_count = partial(number, most=10**6)


def split_keys(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split a command line into a command's own words, and keys of the config with their values.
    A word after a bool's name is its value only if it means true or false."""
    own: list[str] = []
    keys: list[str] = []
    value: re.Pattern[str] | None = None  # of the key before, if it has none yet
    for word in argv:
        is_key = bool(re.match(r"--[\w-]+\.", word))
        is_value = value is not None and bool(value.fullmatch(word))
        (keys if is_key or is_value else own).append(word)
        value = None
        if is_key and "=" not in word:
            key = KEYS.get(word[2:].replace("-", "_").replace(".no_", "."))
            value = BOOL if key is not None and key.kind == "boolean" else WORD
    return own, keys
