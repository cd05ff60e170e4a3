"""Tables as plain text."""

from collections.abc import Collection, Sequence


def format_columns(rows: Sequence[Sequence[str]], *, right: Collection[int] = ()) -> str:
    """`rows` of cells, a line each, in columns as wide as their widest cell; those numbered in
    `right` are aligned to the right, the others to the left."""
    columns = list(zip(*rows, strict=True))
    padded = []
    for number, column in enumerate(columns):
        width = max(map(len, column))
        padded.append(
            [cell.rjust(width) if number in right else cell.ljust(width) for cell in column]
        )
    return "\n".join("  ".join(cells).rstrip() for cells in zip(*padded, strict=True))
