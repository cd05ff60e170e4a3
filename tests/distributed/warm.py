"""Python, and torchrun in it, in processes that are forked from one that has imported what they
need.

Imports are most of the time of a short run. That processes begin and end as they do for users is
tested on those that users start: by run_train.sh. All are forked from multiprocessing's server,
also torchrun's own, as torchrun has threads and a fork keeps locked forever what another thread had
locked: glibc's resolver, for one.
"""

import multiprocessing
import os
import runpy
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing import forkserver
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

WARM = multiprocessing.get_context("forkserver")
# Eager float8 imports parts of the compiler too.
PRELOADED = ["torch.distributed.launcher", "torch._inductor.compile_fx"]
PRELOADED += ["torchtitan_lite.training.trainer", "torchtitan_lite.planner.prepare"]
PRELOADED += ["torchao.float8"]
WARM.set_forkserver_preload(PRELOADED)
GRACE = 60.0  # seconds for a torchrun to end its workers, to which it gives 30


def python(
    words: Sequence[str], *, cwd: Path, env: Mapping[str, str], timeout: float
) -> subprocess.CompletedProcess[str]:
    """The finished `python WORDS`, where `words` are a script or -m and a module, and arguments.
    Not for several threads: multiprocessing may lose an exit code. Raises
    subprocess.TimeoutExpired."""
    with TemporaryDirectory() as folder:
        outputs = [Path(folder) / name for name in ("stdout", "stderr")]
        process = WARM.Process(target=_python, args=(words, cwd, dict(env), outputs))
        process.start()
        try:
            process.join(timeout)
            code = process.exitcode
        finally:
            process.terminate()  # as long as it runs
            process.join(GRACE)
            process.kill()
        stdout, stderr = (path.read_text() for path in outputs)
    if code is None:
        raise subprocess.TimeoutExpired(words, timeout, stdout, stderr)
    return subprocess.CompletedProcess(words, code, stdout, stderr)


def _python(
    words: Sequence[str], cwd: Path, env: Mapping[str, str], outputs: Sequence[Path]
) -> None:
    os.setsid()
    for stream, path in zip((sys.stdout, sys.stderr), outputs, strict=True):
        os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND), stream.fileno())
        stream.reconfigure(line_buffering=True)
    os.chdir(cwd)
    os.environ.update(env)
    torch.set_num_threads(1)
    # Its server is that of the process that started this one.
    forkserver._forkserver.ensure_running = lambda: None
    SubprocessHandler._popen = lambda handler, command, env: Worker(
        partial(_python, command[2:], cwd, env, outputs)
    )
    SubprocessHandler.close = lambda handler, death_sig: handler.proc.send_signal(death_sig)
    module = words[0] == "-m"
    sys.argv = [*words[module:]]
    if module:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")


class Worker:
    """A process of torchrun, with what it asks of the subprocess.Popen that it takes it for."""

    def __init__(self, target: partial[None]) -> None:
        """Started, to do `target`."""
        self.process = WARM.Process(target=target)
        self.process.start()
        self.pid = self.process.pid

    def poll(self) -> int | None:
        """The exit code, negative after a signal; None while it runs."""
        return self.process.exitcode

    def send_signal(self, number: int) -> None:
        """Send a signal to it and its children. It may have ended: the server, its parent, leaves
        no zombie."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def wait(self, timeout: float) -> None:
        """Return when it has ended, or after `timeout` seconds."""
        self.process.join(timeout)
