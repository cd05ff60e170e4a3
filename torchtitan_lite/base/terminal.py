"""Text on its way to a terminal, without what could control it. Imports only the standard library.

Names, texts and messages come from files of anyone. The commands' output, the logger's and the
launcher's are cleaned here, so that no code that makes a message has to remember.
"""

import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any, TextIO, cast

CONTROLS = {*range(0x20), *range(0x7F, 0xA0)} - {ord("\n"), ord("\t")}
"""They move the cursor, change colours, or rename the window."""
DIRECTIONS = {*range(0x202A, 0x202F), *range(0x2066, 0x206A)}
"""They show text in another order than it has."""
SURROGATES = range(0xD800, 0xE000)
"""Halves of a character, which no encoding has."""
ESCAPES = {
    code: chr(code).encode("unicode_escape").decode()
    for code in (*CONTROLS, *DIRECTIONS, *SURROGATES)
}


def clean(text: str) -> str:
    r"""Return `text` with control characters other than newline and tab as in Python: \x1b."""
    return text.translate(ESCAPES)


class CleanStream:
    """A text stream that cleans what is written, and is otherwise another stream."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write the cleaned text."""
        return self._stream.write(clean(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def clean_output() -> Iterator[None]:
    """Clean what the block prints."""
    with redirect_stdout(_cleaned(sys.stdout)), redirect_stderr(_cleaned(sys.stderr)):
        yield


def _cleaned(stream: TextIO | None) -> TextIO:
    if stream is None:  # closed: print ignores it
        return cast(TextIO, None)
    escape_unknown(stream)
    return cast(TextIO, CleanStream(stream))


def escape_unknown(stream: TextIO) -> None:
    """Have a stream escape letters that its encoding lacks, instead of raising an error."""
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")
