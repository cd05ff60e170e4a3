"""Text on its way to a terminal, without what could control it. Imports only the standard library.

Names, texts and messages come from files of anyone. The commands' output, the logger's and the
launcher's are cleaned here, so that no code that makes a message has to remember.
"""

import io
from typing import Any, TextIO, cast


def clean(text: str) -> str:
    r"""Return `text` with the characters that a terminal does not print, but obeys, as in Python:
    \x1b. Newline and tab stay."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char in "\n\t" else char.encode("unicode_escape").decode()
        for char in text
    )


class CleanStream:
    """A text stream that cleans what is written, and is otherwise another stream."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write the cleaned text."""
        return self._stream.write(clean(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def cleaned(stream: TextIO | None) -> TextIO:
    """Return a stream that cleans what is written to `stream`, and escapes letters that its
    encoding lacks instead of raising an error. None if it is closed, which print ignores."""
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")
    return cast(TextIO, None if stream is None else CleanStream(stream))
