"""The command `torchtitan-lite`: the names of its commands, each a module here.

A command's module has a docstring (its first line is the summary, all of it the help),
`add_arguments(parser)` and `run(args)`, which returns the exit code or raises a RunError.
"""

from importlib import import_module, metadata
from types import ModuleType

from torchtitan_lite.base.errors import ConfigError
from torchtitan_lite.base.tables import format_columns
from torchtitan_lite.config.keys import closest

from .parser import Parser

PROGRAM = "torchtitan-lite"
COMMANDS = (
    *("train", "check", "plan", "data", "checkpoint", "convert", "compare"),
    *("generate", "evaluate", "status", "schema"),
)


def load_command(name: str) -> ModuleType:
    """Import the module of a command."""
    return import_module(f"{__name__}.{name}")


def build_parser(name: str) -> Parser:
    """Build the parser of a command."""
    module = load_command(name)
    parser = Parser(prog=f"{PROGRAM} {name}", description=module.__doc__)
    module.add_arguments(parser)
    return parser


def format_commands() -> str:
    """Return the help of the program: the first line of each command's docstring."""
    lines = [(f"  {name}", str(load_command(name).__doc__).split("\n")[0]) for name in COMMANDS]
    return (
        f"usage: {PROGRAM} COMMAND [...]\n\nFP8 pretraining for Llama 3.\n\ncommands:\n"
        f"{format_columns(lines)}\n\n"
        f"{PROGRAM} COMMAND --help explains one; {PROGRAM} --version prints the version."
    )


def run_command(argv: list[str]) -> int | None:
    """Run the command line `argv`, without the program's name, and return its exit code. Raises
    RunError."""
    name, *words = argv or ["--help"]
    if name in ("-h", "--help"):
        print(format_commands())
        return None
    if name == "--version":
        print(metadata.version("torchtitan-lite"))
        return None
    if name not in COMMANDS:
        near = closest(name, (*COMMANDS, "--help", "--version"))
        hint = f"did you mean {near}?" if near else f"{PROGRAM} --help lists them"
        raise ConfigError(f"{name} is not a command of {PROGRAM}; {hint}")

    args = build_parser(name).parse(words)
    code: int | None = load_command(name).run(args)
    return code
