"""What reaches a terminal: cleaned in one place, whoever prints it."""

import errno
import io
import json
import subprocess
import sys

import pytest

from torchtitan_lite.base.errors import ConfigError
from torchtitan_lite.base.logger import init_logger, logger
from torchtitan_lite.base.terminal import clean, run_script
from torchtitan_lite.metrics.writers import ConsoleWriter
from torchtitan_lite.run import launch

HOSTILE = "a\tb\n\x1b[2J\x9b\r\x07\x7f\u202e\udc80 é語"
CLEAN = "a\tb\n" + r"\x1b[2J\x9b\r\x07\x7f\u202e\udc80" + " é語"


def raises(error: BaseException) -> None:
    raise error


def test_clean_escapes_what_controls_a_terminal():
    assert clean(HOSTILE) == CLEAN and clean(CLEAN) == CLEAN


# ----- run_script, open_standard_streams -----


@pytest.mark.parametrize(
    ("error", "code"),
    [
        *((ConfigError(HOSTILE), 2), (OSError(errno.EIO, HOSTILE), 7), (RuntimeError(HOSTILE), 1)),
        (OSError(errno.ENAMETOOLONG, HOSTILE), 2),
    ],
)
def test_run_script_cleans_both_streams(error, code, monkeypatch, capfd):
    for name in ("stdout", "stderr"):
        stream = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
        monkeypatch.setattr(sys, name, stream)
    streams = sys.stdout, sys.stderr
    with pytest.raises(SystemExit) as end:
        run_script(lambda _: print(HOSTILE) or raises(error))
    assert end.value.code == code and streams == (sys.stdout, sys.stderr)
    shown = [(stream.flush(), stream.buffer.getvalue().decode())[1] for stream in streams]
    assert shown[0] == f"{CLEAN}\n" and r"\x1b[2J\x9b" in shown[1] and "\x1b" not in shown[1]


def test_run_script_prints_letters_that_the_terminal_lacks_and_survives_without_one(monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", None)
    with pytest.raises(SystemExit, match="^0$"):
        run_script(lambda _: print("é\udc80") or 0)
    assert stream.buffer.getvalue() == rb"\xe9\udc80" + b"\n"


def test_run_script_gives_the_numbers_of_closed_streams_to_no_file():
    opens = "os.system('echo && echo >&2') or os.open(os.devnull, os.O_RDONLY)"
    code = (
        "import os; from torchtitan_lite.base import terminal; terminal.open_standard_streams();"
        f"terminal.run_script(lambda _: {opens})"
    )
    closed = ["bash", "-c", '"$@" <&- >&- 2>&-', "bash", sys.executable, "-c", code]
    assert subprocess.run(closed).returncode == 3


def test_run_script_says_what_to_do_about_a_file(capfd):
    error = PermissionError(errno.EACCES, "Permission denied", "x/metrics.jsonl")
    with pytest.raises(SystemExit, match="^2$"):
        run_script(lambda _: raises(error))
    message = "[Errno 13] Permission denied: 'x/metrics.jsonl'; fix its permissions.\n"
    assert capfd.readouterr().err == message


@pytest.mark.parametrize(
    ("words", "code"),
    [("status nosuch --json", 2), ("plan --job.config_file llama3_8b --device H100_SXM --json", 0)],
)
def test_errors_and_the_log_stay_out_of_an_answer_if_standard_error_is_closed(words, code):
    words = [word.replace("_SXM", " SXM") for word in words.split()]
    program = [sys.executable, "-m", "torchtitan_lite", *words]
    closed = ["bash", "-c", '"$@" 2>&-', "bash", *program]
    ended = subprocess.run(closed, stdout=subprocess.PIPE)
    assert ended.returncode == code
    assert ended.stdout == b"" if code else json.loads(ended.stdout)["request"]


# ----- init_logger, ConsoleWriter, say: other ways to a terminal -----


def test_the_log_is_clean():
    handlers, level, stream = logger.handlers[:], logger.level, io.StringIO()
    propagate = logger.propagate
    try:
        init_logger(stream)
        logger.warning(HOSTILE)
        console = ConsoleWriter(total_steps=3)
        console.write_scalars(1, {HOSTILE: 0.0})
    finally:
        logger.handlers[:], logger.propagate = handlers, propagate
        logger.setLevel(level)
    shown = stream.getvalue()
    assert shown.count(CLEAN) == 2 and "\x1b" not in shown


def test_say_is_clean(capfd):
    launch.say(HOSTILE)
    assert capfd.readouterr().err == f"{CLEAN}\n"
