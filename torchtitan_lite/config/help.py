"""The documentation of every key, generated from the sections."""

import textwrap

from torchtitan_lite.config.keys import KEYS, TABLES, Key, show

INTRODUCTION = """\
options: --job.config_file FILE.toml [--table.key value ...]

--job.config_file names the TOML file of the run. A line base = "other.toml" at the top of a file, a path relative to
that file, takes every key that the file does not set from the other one, which may have a base of its own.

--table.key value, or --table.key=value, overrides any key below; the last one given wins. --table.key alone means
true, --table.key= unsets a key whose default is unset, and a list is written a,b or as in TOML.
"""


def format_help() -> str:
    """The page that `--help` prints: how a run is configured, then each key with its type, default
    and meaning."""
    tables = (
        f"[{table}]\n" + "".join(_format_key(key) for key in KEYS.values() if key.table == table)
        for table in TABLES
    )
    return "\n".join((INTRODUCTION, *tables))


def _format_key(key: Key) -> str:
    head = f"  --{key.table}.{key.name} {key.type_text} (default: {show(key.default)})\n"
    return (
        head
        + textwrap.fill(key.doc, width=110, initial_indent=" " * 6, subsequent_indent=" " * 6)
        + "\n"
    )


def format_config_table() -> str:
    """Every key as a row of a Markdown table: key, type, default, meaning."""
    rows = [("key", "type", "default", "meaning"), ("---", "---", "---", "---")]
    for name, key in KEYS.items():
        rows.append((f"`{name}`", f"`{key.type_text}`", f"`{show(key.default)}`", key.doc))
    return "".join(
        "| " + " | ".join(cell.replace("|", r"\|") for cell in row) + " |\n" for row in rows
    )
