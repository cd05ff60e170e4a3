"""Print a script that completes commands, options, keys, flavors and configs in a shell.

bash:  eval "$(torchtitan-lite completion bash)"                in ~/.bashrc
zsh:   eval "$(torchtitan-lite completion zsh)"                 in ~/.zshrc, after compinit
"""

import argparse

from torchtitan_lite.catalog.flavors import FLAVORS
from torchtitan_lite.config import shipped_configs
from torchtitan_lite.config.keys import KEYS

from . import COMMANDS, PROGRAM, load_command, summary
from .parser import Parser

SHELLS = {
    "bash": f"complete -o default -F _shtab_torchtitan_lite {PROGRAM}",
    "zsh": f"compdef -e '_shtab_torchtitan_lite || _files' {PROGRAM}",
}
"""Last line of each shell's script: it completes a path where no word fits."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Take the shell."""
    parser.add_argument("shell", choices=list(SHELLS), help="shell that reads the script")


def run(args: argparse.Namespace) -> None:
    """Print the script."""
    import shtab  # only this command needs it

    whole = Parser(prog=PROGRAM)
    commands = whole.add_subparsers()
    for name in COMMANDS:
        parser = commands.add_parser(name, help=summary(name))
        load_command(name).add_arguments(parser)
        if parser.takes_keys:
            add_key_options(parser)
    print(shtab.complete(whole, args.shell), SHELLS[args.shell], sep="\n")


def add_key_options(parser: Parser) -> None:
    """Add an option for each key of the config, with its choices."""
    parser.add_argument("--job.config_file", choices=shipped_configs(), help="TOML file or name")
    for name, key in KEYS.items():
        choices = list(FLAVORS) if name == "model.flavor" else list(key.choices)
        if key.kind == "boolean":
            choices = ["true", "false"]
        if "{" in key.type_text:  # a table, whose choices are its keys
            choices = []
        text = key.doc.replace("%", "%%")  # argparse formats it
        parser.add_argument(f"--{name}", choices=choices or None, help=text)
