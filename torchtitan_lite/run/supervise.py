"""Run the agent of this node and forward signals to it, without torch."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan_lite.base.errors import ConfigError
from torchtitan_lite.base.terminal import clean

from .signals import DUPLICATE_SECONDS

AGENT = (sys.executable, "-m", "torchtitan_lite.run.agent")
REPEATED_SECONDS = 3.0
"""A second signal but SIGINT this soon counts as the first: schedulers signal every process."""


@dataclass(frozen=True)
class AgentEnd:
    """How the agent ended."""

    pid: int
    exit_code: int
    signalled: signal.Signals | None = None  # the first signal that the launcher received
    rank: int | None = None  # first worker that failed
    rank_code: int = 0  # its exit code
    cause: str = ""  # why the agent started no worker
    cause_code: int = 1


def listen(endpoint: str) -> socket.socket:
    """Return the socket at which node 0 serves the run's store: at the port of `endpoint`,
    host:port, on all interfaces; for "", a run on one node, at a free port of the loopback
    interface. Raises ConfigError."""
    if not endpoint:
        return socket.create_server(("127.0.0.1", 0))
    port = int(endpoint.rpartition(":")[2])
    try:
        if socket.has_dualstack_ipv6():
            with suppress(OSError):  # a host without IPv6
                address = ("", port)
                return socket.create_server(address, family=socket.AF_INET6, dualstack_ipv6=True)
        return socket.create_server(("", port))
    except OSError as error:
        raise ConfigError(
            f"RDZV_ENDPOINT={endpoint}: port {port} of this host cannot be opened: "
            f"{error.strerror}; another run may have it: wait for its end, or name another port on "
            "all nodes."
        ) from error


def run_agent(
    spec: dict[str, Any],
    words: Sequence[str],
    *,
    env: dict[str, str],
    log_dir: Path,
    listener: socket.socket | None,
) -> AgentEnd:
    """Run the agent with `env`, `words` and `spec` in its own session, so that Ctrl-C reaches only
    this process, and wait for its end. It takes over `listener`."""
    # Blocked signals stay pending until `wait` takes them, so none is missed. A signal that nohup,
    # or a shell in the background, ignores stays ignored.
    signals = {each for each in DUPLICATE_SECONDS if signal.getsignal(each) is not signal.SIG_IGN}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)

    terminal = os.dup(2)
    failure, failure_writer = os.pipe()
    launcher, alive = os.pipe()
    passed = {"terminal": terminal, "failure": failure_writer, "launcher": launcher}
    descriptors = [*passed.values(), *([listener.fileno()] if listener else [])]
    with (log_dir / "torchrun.log").open("wb") as log:
        agent = subprocess.Popen(
            [*AGENT, json.dumps({**spec, "log_dir": str(log_dir), **passed}), *words],
            env=env,
            stdin=subprocess.DEVNULL,
            stderr=log,
            pass_fds=descriptors,
            start_new_session=True,
            preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, signals),
        )
    for descriptor in (failure_writer, launcher):
        os.close(descriptor)
    if listener is not None:
        listener.close()

    signalled = wait(agent, signals, alive=alive)
    return AgentEnd(
        agent.pid, agent.returncode, signalled, **json.loads(os.read(failure, 65536) or b"{}")
    )


def wait(
    agent: subprocess.Popen[bytes], signals: set[signal.Signals], *, alive: int
) -> signal.Signals | None:
    """Wait for the agent and forward `signals`, which are blocked. Return the first one.

    The first one is forwarded as SIGTERM, only once: a second SIGTERM would make the agent abandon
    its workers. A byte in the pipe `alive` tells it that this end of the pipe may go now. An agent
    without workers dies of SIGTERM. A second signal kills all processes."""
    first, duplicates_until = None, 0.0
    while agent.poll() is None:
        # sigtimedwait would return signals that nobody sent, after Ctrl-Z and fg.
        if not signal.sigpending() & signals:
            time.sleep(0.1)
            continue
        received = signal.Signals(signal.sigwait(signals))
        if first is None:
            first = received
            duplicates_until = time.monotonic() + REPEATED_SECONDS
            say("stopping, saved if enabled; Ctrl-C, or another signal after 3 s, kills the run")
            with suppress(OSError):  # the agent may end just now
                os.write(alive, b"s")
            agent.terminate()
        elif received == signal.SIGINT or time.monotonic() > duplicates_until:
            kill(agent)
    return first


def kill(agent: subprocess.Popen[bytes]) -> None:
    """Kill the agent first, so that it starts no more workers, then the workers' process groups."""
    children: list[str] = []
    with suppress(OSError):
        children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
    agent.kill()
    for child in children:
        with suppress(ProcessLookupError):
            os.killpg(int(child), signal.SIGKILL)


def say(*lines: str) -> None:
    """Write to stderr; ignore a terminal or disk that is gone."""
    with suppress(OSError):
        os.write(2, clean("".join(f"{line}\n" for line in lines)).encode())
