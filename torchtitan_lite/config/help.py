"""Documentation of every key, generated from the sections: `--help`, and docs/config.md.

`python -m torchtitan_lite.config > docs/config.md` rewrites the page.
"""

import textwrap

from .keys import KEYS, TABLES, Key, show

INTRODUCTION = """\
options: --job.config_file FILE.toml [--table.key value ...]

--job.config_file names the TOML file of the run. A line base = "other.toml" at the top of a file
takes every key that the file does not set from the other file. Its path is relative to the first,
and it may have a base too.

--table.key value, or --table.key=value, overrides any key below; the last one given wins.
--table.key alone means true, --table.key= unsets a key whose default is unset, and a list is
written a,b or as in TOML.
"""

PAGE_HEAD = """\
# Config keys

Every key of the TOML file, with its type, default and meaning. `./run_train.sh --help` prints the
same. This page is generated: `python -m torchtitan_lite.config > docs/config.md`.
"""


def format_help() -> str:
    """Return the text that `--help` prints."""
    tables = (f"[{table}]\n" + "".join(map(_format_key, _keys(table))) for table in TABLES)
    return "\n".join((INTRODUCTION, *tables))


def format_config_page() -> str:
    """Return docs/config.md: a Markdown table of keys for each TOML table."""
    tables = []
    for table in TABLES:
        rows = [("key", "type", "default", "meaning"), ("---", "---", "---", "---")]
        for key in _keys(table):
            rows.append((f"`{key.name}`", f"`{key.type_text}`", f"`{show(key.default)}`", key.doc))
        cells = ([cell.replace("|", r"\|") for cell in row] for row in rows)
        tables.append(f"## [{table}]\n\n" + "".join(f"| {' | '.join(row)} |\n" for row in cells))
    return "\n".join((PAGE_HEAD, *tables))


def _keys(table: str) -> list[Key]:
    return [key for key in KEYS.values() if key.table == table]


def _format_key(key: Key) -> str:
    head = f"  --{key.table}.{key.name} {key.type_text} (default: {show(key.default)})"
    lines = [
        *textwrap.wrap(head, 100, subsequent_indent=" " * 4, break_on_hyphens=False),
        *textwrap.wrap(key.doc, 100, initial_indent=" " * 6, subsequent_indent=" " * 6),
    ]
    return "\n".join(lines) + "\n"
