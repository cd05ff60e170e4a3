"""Progress of work that takes longer than a few seconds. Never on standard output."""

import os
import sys
from types import SimpleNamespace

from tqdm import tqdm

from .logger import logger
from .terminal import clean

tqdm.monitor_interval = 0  # starts no thread: each update looks at the clock


def _log(text: str) -> None:
    if line := text.strip():
        logger.warning(line)  # also on ranks that log nothing less


def progress(what: str, total: int | None, *, unit: str = "B", shown: bool = True) -> tqdm:
    """Return a context whose `update(n)` counts finished units, of `total` (None: unknown). After
    5 s it is a bar on a terminal, elsewhere a line in the log every 10 s. Of ranks that share the
    work, one has it `shown`."""
    style: dict = {"file": SimpleNamespace(write=_log), "mininterval": 10.0, "ncols": 0}
    if os.isatty(2):  # the stream of the commands would escape the bar's carriage returns
        style = {"file": sys.__stderr__, "ncols": max(os.get_terminal_size(2)[0] or 80, 2) - 1}
    style |= {"unit": unit, "unit_scale": unit == "B", "leave": False, "delay": 5.0, "miniters": 1}
    return tqdm(desc=clean(what), total=total, disable=not shown, **style)
