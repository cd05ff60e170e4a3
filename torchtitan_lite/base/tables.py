"""Tables as text: for a terminal, or in Markdown."""

from collections.abc import Collection, Sequence

from .terminal import clean


def format_columns(
    rows: Sequence[Sequence[str]], *, right: Collection[int] = (), markdown: bool = False
) -> str:
    """Format `rows` of cells, headings first, as lines with columns of equal width: those whose
    index is in `right` are aligned to the right. `markdown` adds the bars and the rule of a table.
    Cells are cleaned, since that changes their width."""
    rows = [[clean(cell.replace("\n", " ").expandtabs()) for cell in row] for row in rows]
    columns = list(zip(*rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    aligned = [
        [cell.rjust(width) if index in right else cell.ljust(width) for cell in column]
        for index, (column, width) in enumerate(zip(columns, widths, strict=True))
    ]
    lines = list(zip(*aligned, strict=True))
    if not markdown:
        return "\n".join("  ".join(cells).rstrip() for cells in lines)

    heading, *body = (f"| {' | '.join(cells)} |" for cells in lines)
    rule = "|".join(
        "-" * (width + 1) + (":" if index in right else "-") for index, width in enumerate(widths)
    )
    return "\n".join([heading, f"|{rule}|", *body])
