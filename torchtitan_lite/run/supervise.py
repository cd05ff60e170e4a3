"""Run the agent of this node and forward signals to it, without torch."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan_lite.base.errors import ConfigError
from torchtitan_lite.base.terminal import clean

from .signals import StopSignal

AGENT = (sys.executable, "-m", "torchtitan_lite.run.agent")


@dataclass(frozen=True)
class AgentEnd:
    """How the agent ended, and what it said about that."""

    pid: int
    exit_code: int
    signalled: int = 0  # first signal that the launcher received
    cause: str = ""
    cause_code: int = 1
    rank: int | None = None  # first of its workers that failed


def listen(endpoint: str) -> socket.socket:
    """Return the socket at which node 0 serves the run's store: at the port of `endpoint`,
    host:port, on all interfaces; for "" (one node) at a free loopback port. Raises ConfigError."""
    if not endpoint:
        return socket.create_server(("127.0.0.1", 0))
    port = int(endpoint.rpartition(":")[2])
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    try:
        return socket.create_server(("", port), family=family, dualstack_ipv6=both)
    except OSError as error:
        raise ConfigError(
            f"RDZV_ENDPOINT={endpoint}: port {port} of this host cannot be opened: "
            f"{error.strerror}; another run may have it: wait for its end, or name another port on "
            "all nodes."
        ) from error


def run_agent(
    spec: dict[str, Any], *, env: dict[str, str], log_dir: Path, listener: socket.socket | None
) -> AgentEnd:
    """Run the agent with `env` and `spec` in its own session, so that Ctrl-C reaches only this
    process, and wait for its end. It takes over `listener`."""
    failure, failure_writer = os.pipe()
    passed = {"terminal": os.dup(2), "failure": failure_writer}
    spec = {**spec, **passed, "log_dir": str(log_dir), "launcher": os.getpid()}
    with (log_dir / "torchrun.log").open("wb") as log:
        agent = subprocess.Popen(
            [*AGENT, json.dumps(spec)],
            env=env,
            stdin=subprocess.DEVNULL,
            stderr=log,
            pass_fds=[*passed.values(), *([listener.fileno()] if listener else [])],
            start_new_session=True,
        )
    os.close(failure_writer)
    if listener is not None:
        listener.close()

    signalled = wait(agent)
    said = json.loads(os.read(failure, 65536) or b"{}")
    return AgentEnd(agent.pid, agent.returncode, signalled, **said)


def wait(agent: subprocess.Popen[bytes]) -> int:
    """Wait for the agent, and return the first signal that came, or 0.

    It is forwarded only once: the agent would abandon its workers at a second one. An agent without
    workers dies of it."""
    stop = StopSignal(kill=lambda: kill(agent))
    forwarded = False
    while agent.poll() is None:
        if stop.received and not forwarded:
            say("stopping, saved if enabled; Ctrl-C, or another signal after 3 s, kills the run")
            agent.send_signal(stop.received)
            forwarded = True
        time.sleep(0.1)
    return stop.received


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
