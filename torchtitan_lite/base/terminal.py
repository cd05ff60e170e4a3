"""Text on its way to a terminal, without what could control it, and the end of a program.

Names, texts and messages come from files of anyone. The commands' output, the logger's and the
launcher's are cleaned here, so that no code that makes a message has to remember.
"""

import io
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from typing import Any, TextIO, cast

from .errors import RunError, kind_of
from .files import storage_fix


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


def run_script(main: Callable[[list[str]], int | None]) -> None:
    """Call `main` with the arguments of the command line, and exit with the code that it returns.

    What is printed is cleaned. A RunError, and an OSError of a file or of standard output, is one
    line. Ctrl-C exits with 130."""
    with redirect_stdout(cleaned(sys.stdout)), redirect_stderr(cleaned(sys.stderr)):
        try:
            code = main(sys.argv[1:])
            print(end="", flush=True)
        except RunError as error:
            print(error, file=sys.stderr)
            code = error.exit_code
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            code = 130
        except Exception as error:
            code = RunError.exit_code
            if isinstance(error, OSError) and error.errno is not None:
                code = kind_of(error).exit_code
                print(f"{error}; {storage_fix(error)}.", file=sys.stderr)
                # The interpreter flushes standard output once more at exit.
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            else:
                traceback.print_exc()
    sys.exit(code)


def open_standard_streams() -> None:
    """Open the null device for closed standard streams: a file or socket that took the number of
    one would be lost to a child, or take what that prints. Errors would go to standard output."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)
