"""One logger for the package."""

import logging
import os
import sys
from typing import TextIO

from .terminal import cleaned

logger = logging.getLogger("torchtitan_lite")


def init_logger(stream: TextIO | None = None) -> None:
    """Print the time and the message of each record to `stream`, by default standard output.

    Local ranks in LOG_RANK (default "0") print everything, others only warnings and errors. Each
    line begins with the rank unless torchrun prints it already."""
    env = os.environ
    prefixed = "RANK" in env and "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE" not in env
    prefix = f"[rank{env['RANK']}] " if prefixed else ""
    handler = logging.StreamHandler(cleaned(stream or sys.stdout))
    handler.setFormatter(logging.Formatter(f"{prefix}%(asctime)s %(message)s", datefmt="%H:%M:%S"))
    logger.handlers[:] = [handler]
    talks = env.get("LOCAL_RANK", "0") in env.get("LOG_RANK", "0").split(",")
    logger.setLevel(logging.INFO if talks else logging.WARNING)
    logger.propagate = False
