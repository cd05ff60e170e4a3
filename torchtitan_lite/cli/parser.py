"""The parser of all commands: one form of help, errors with a hint, keys of the config."""

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from torchtitan_lite.base.errors import ConfigError
from torchtitan_lite.base.jsonfile import strict_json
from torchtitan_lite.config import expand_user
from torchtitan_lite.config.keys import KEYS, closest

KEYS_HELP = (
    "--table.key value overrides any key of the config; torchtitan-lite train --help lists them."
)

BOOL = re.compile("true|false|yes|no|on|off|0|1", re.IGNORECASE)


def _formatter(prog: str) -> argparse.HelpFormatter:
    return argparse.RawDescriptionHelpFormatter(prog, max_help_position=26, width=100)


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises ConfigError, and that can leave keys of the config alone."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"formatter_class": _formatter, "allow_abbrev": False, **settings})
        self.register("type", Path, lambda text: Path(path_text(text)))
        self.takes_keys = False

    def add_keys(self) -> None:
        """Accept `--table.key value` of every key of the config."""
        self.takes_keys, self.epilog = True, KEYS_HELP

    def add_json(self) -> None:
        """Add the option that `print_answer` reads."""
        self.add_argument("--json", action="store_true", help="print JSON")

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse a command line; `overrides` has the words that belong to keys of the config."""
        own, overrides = split_keys(argv) if self.takes_keys else (argv, [])
        # Options may stand between positional arguments, but not those of a subcommand.
        parse = self.parse_args if self._subparsers else self.parse_intermixed_args
        args = parse(own)
        args.overrides = overrides
        return args

    def print_help(self, file: Any = None) -> None:
        """Print the help. Raises OSError if it cannot be written, where argparse is silent."""
        print(self.format_help(), end="", flush=True)

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
            own = [*action.option_strings, *map(str, action.choices or ())]
            words |= dict(zip(own, own, strict=True))
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


def split_keys(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split a command line into a command's own words, and keys of the config with their values."""
    own: list[str] = []
    keys: list[str] = []
    for index, word in enumerate(argv):
        before = argv[index - 1] if index else ""
        is_value = _takes_value(before, word) and not word.startswith("--")
        (keys if _is_key(word) or is_value else own).append(word)
    return own, keys


def _is_key(word: str) -> bool:
    return bool(re.match(r"--[\w-]+\.", word))


def _takes_value(option: str, word: str) -> bool:
    """Return whether `word` is the value of a key before it. After a bool's name it is if it means
    true or false, also where the config refuses its spelling."""
    key = KEYS.get(option.removeprefix("--").replace("-", "_").replace(".no_", "."))
    is_bool = key is not None and key.kind == "bool"
    return _is_key(option) and "=" not in option and (not is_bool or bool(BOOL.fullmatch(word)))
