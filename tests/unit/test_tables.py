"""Columns of a table, as plain text and in Markdown."""

from torchtitan_lite.base.tables import format_columns

ROWS = [["name", "n", "note"], ["a", "10", ""], ["bcdef", "9", "x"]]

# ----- format_columns -----


def test_columns_are_as_wide_as_their_widest_cell() -> None:
    lines = ["name    n  note", "a      10", "bcdef   9  x"]
    assert format_columns(ROWS, right=[1]).splitlines() == lines


def test_a_name_keeps_the_columns_whatever_it_holds() -> None:
    rows = [["a\x1b[2J", "1"], ["b\nc\td", "2"]]
    assert format_columns(rows).splitlines() == [r"a\x1b[2J   1", "b c     d  2"]


def test_a_markdown_table_has_bars_and_a_rule() -> None:
    assert format_columns(ROWS, right=[1], markdown=True).splitlines() == [
        "| name  |  n | note |",
        "|-------|---:|------|",
        "| a     | 10 |      |",
        "| bcdef |  9 | x    |",
    ]
