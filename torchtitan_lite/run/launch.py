"""The launcher of a run on this node: `torchtitan-lite train`, which run_train.sh calls.

It checks environment and config within a second, without importing torch. Then it starts the agent,
forwards signals, and reports how the run ended. The agent is torch's elastic agent: it starts and
restarts one worker, torchtitan_lite.train, per rank. It needs its own process, because torch
replaces all signal handlers and waits for other nodes in C++, where no Python handler runs.
"""

import gc
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from torchtitan_lite.base.errors import STOPPED_EXIT_CODE, ConfigError, RankLostError, RunError
from torchtitan_lite.base.terminal import clean
from torchtitan_lite.config import load_config

from .compiler_checks import check_compiler
from .forked import ForkedProcess, set_streams
from .run_folder import Status, explained, job_name, read_status, take_lock, time_name, write_status
from .signals import REPEAT_SECONDS, StopSignal

VARIABLES = """\
variables:
  CONFIG_FILE    TOML file, or the name of a shipped one (debug_model); --job.config_file FILE does
                 the same, and takes precedence
  NGPU           processes on this node (the number of CUDA devices; 2 where there are none)
  LOG_RANK       comma-separated local ranks that print more than warnings and errors (0)
  NNODES         nodes (1); for more, start this script on each of them with the next two:
  NODE_RANK      number of this node, from 0
  RDZV_ENDPOINT  host:port of node 0
  MAX_RESTARTS   how often all ranks are started again after a failure; they continue from the
                 last checkpoint (0)
  OMP_NUM_THREADS  threads of a process (the number of cores over NGPU, at least 1)
  OMP_WAIT_POLICY  ACTIVE: waiting threads spin; PASSIVE: they sleep (PASSIVE without CUDA devices)
  TORCH_ELASTIC_SHUTDOWN_TIMEOUT  seconds that a stopped run may take to save (600)

SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2 or SIGINT (Ctrl-C) stops the run before its next forward
pass and saves the last finished step. A second signal kills the run if it is SIGINT or comes 3 s
later; the last checkpoint stays.

Exit codes: 0 done, 2 config, 3 data, 4 checkpoint, 5 numeric, 6 rank lost or timed out, 7 storage,
1 unexpected, 75 stopped on a signal, and saved where checkpoints are enabled.
"""
SHUTDOWN = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"


class Launch:
    """The checked variables and words of a launch. `endpoint` is "" for one node. Raises
    ConfigError."""

    def __init__(self, env: Mapping[str, str], overrides: Sequence[str]) -> None:
        self.gpus = gpus = count_cuda_devices(env)
        self.words = ["--job.config_file", env.get("CONFIG_FILE") or "debug_model", *overrides]
        self.ngpu = read_count(env, "NGPU", gpus or 2, minimum=1)
        self.max_restarts = read_count(env, "MAX_RESTARTS", 0, minimum=0)
        self.worker_env = read_worker_env(env, ngpu=self.ngpu, gpus=gpus)

        self.nnodes = read_count(env, "NNODES", 1, minimum=1)
        nodes = {name: env.get(name, "") for name in ("NNODES", "NODE_RANK", "RDZV_ENDPOINT")}
        named = nodes["NODE_RANK"] or nodes["RDZV_ENDPOINT"]
        if (self.nnodes > 1 or (named and not nodes["NNODES"])) and "" in nodes.values():
            raise ConfigError(
                f"{' '.join(map('='.join, nodes.items()))}: several nodes need their number, this "
                "one's from 0, and host:port of node 0; set all three, or for one node none"
            )
        self.node_rank, self.endpoint = read_count(env, "NODE_RANK", 0, minimum=0), ""
        if self.nnodes > 1:
            self.endpoint = env.get("RDZV_ENDPOINT", "")
            port = self.endpoint.rpartition(":")[2]
            if not re.fullmatch(r"[^\s/]+:[0-9]{1,5}", self.endpoint) or not 0 < int(port) < 65536:
                raise ConfigError(f"RDZV_ENDPOINT={self.endpoint} must be host:port of node 0.")
        if self.node_rank >= self.nnodes:
            raise ConfigError(
                f"NODE_RANK={self.node_rank} must be below NNODES={self.nnodes}; nodes count from 0"
            )

    def task(self, listener: socket.socket | None, *, timeout_s: float) -> dict[str, Any]:
        """Return what the launch says of the agent's Task. `listener` is node 0's socket for the
        run's store, which is the agent's from here on."""
        host, _, port = self.endpoint.rpartition(":")
        if listener is not None:
            port = listener.getsockname()[1]
        store = {
            "host": host.strip("[]") or "127.0.0.1",
            "port": int(port),
            "node_rank": self.node_rank,
            "nnodes": self.nnodes,
            "listener": None if listener is None else listener.detach(),
            "timeout_s": timeout_s,
        }
        counts = {"ngpu": self.ngpu, "max_restarts": self.max_restarts}
        return {"words": self.words, "store": store, **counts}


def read_worker_env(env: Mapping[str, str], *, ngpu: int, gpus: int) -> dict[str, str]:
    """Return the variables that workers need in addition to `env`. Raises ConfigError."""
    log_rank = env.get("LOG_RANK", "").replace(" ", "") or "0"
    ranks = log_rank.split(",")
    if not all(re.fullmatch("[0-9]{1,9}", rank) and int(rank) < ngpu for rank in ranks):
        raise ConfigError(
            f"LOG_RANK={log_rank} must be comma-separated ranks of 0 to NGPU - 1 = {ngpu - 1}."
        )
    threads = max(1, len(os.sched_getaffinity(0)) // ngpu)
    added = {
        "LOG_RANK": log_rank,
        "OMP_NUM_THREADS": env.get("OMP_NUM_THREADS") or str(threads),
        SHUTDOWN: str(read_count(env, SHUTDOWN, 600, minimum=0)),
        "PYTHONUNBUFFERED": "1",
        "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "[rank${rank}] ",
    }

    # On a shared machine, spinning threads would take cores from threads that work.
    if gpus == 0:
        added["OMP_WAIT_POLICY"] = env.get("OMP_WAIT_POLICY", "PASSIVE")
    return added


def read_count(env: Mapping[str, str], name: str, default: int | str, *, minimum: int) -> int:
    """Return the whole number in a variable, by default `default`. Raises ConfigError."""
    text = env.get(name) or str(default)
    if not re.fullmatch(r"[0-9]{1,9}", text) or int(text) < minimum:
        raise ConfigError(f"{name}={text} is not a whole number of {minimum} or more.")
    return int(text)


def count_cuda_devices(env: Mapping[str, str]) -> int:
    """Return the number of CUDA devices that PyTorch may use, without importing it."""
    if (visible := env.get("CUDA_VISIBLE_DEVICES")) is not None:
        names = visible.split(",")  # such as 0, GPU-..., MIG-...; -1 hides all devices
        return sum(bool(re.match("[0-9GM]", name.strip())) for name in names)
    listed = ""
    with suppress(OSError):
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout
    return sum(line.startswith("GPU") for line in listed.splitlines())


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


def make_log_folder(path: Path) -> Path:
    """Create a log folder of this start, named after the time and host. Raises ConfigError,
    StorageError."""
    name = f"{time_name(time.time())}-{socket.gethostname()}"
    folder = path / "logs" / name
    with explained(path):
        folder.parent.mkdir(parents=True, exist_ok=True)
        for number in itertools.count(2):
            try:
                folder.mkdir()
                break
            except FileExistsError:  # of another start in this second
                folder = folder.with_name(f"{name}.{number}")
    return folder


@dataclass(frozen=True)
class AgentEnd:
    """How the agent ended, and what it said about that."""

    pid: int
    exit_code: int
    signalled: int = 0  # first signal that the launcher received
    repeated: bool = False  # whether a second one made the launcher kill it
    cause: str = ""
    cause_code: int = 1
    rank: int | None = None  # first of its workers that failed
    killed: bool = False  # whether a signal ended that one


def run_agent(task: Mapping[str, Any], env: Mapping[str, str], *, log: Path) -> AgentEnd:
    """Run the agent, with `env` added to its environment and `log` as its stderr, and wait for its
    end. `task` are the arguments of its Task that say what to run."""
    failure = os.memfd_create("failure")  # a pipe would hold 64 KiB
    launcher, terminal = os.getpid(), os.dup(2)

    def run() -> None:
        with log.open("wb") as stderr:
            set_streams(1, stderr.fileno())
        os.environ.update(env)
        gc.disable()  # imports create many permanent objects; scanning them again wastes time
        start_agent({**task, "launcher": launcher, "terminal": terminal, "failure": failure})

    # Signals wait until they can be handled.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, REPEAT_SECONDS)
    agent = ForkedProcess(run)
    for descriptor in (terminal, task["store"]["listener"]):
        if descriptor is not None:
            os.close(descriptor)

    # Forward only the first signal: the agent would abandon its workers at a second one. An agent
    # without workers dies of it.
    stop = StopSignal(kill=lambda: kill(agent))
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    forwarded = False
    while (exit_code := agent.poll()) is None:
        if stop.received and not forwarded:
            say("stopping, saved if enabled; Ctrl-C, or another signal after 3 s, stops unsaved")
            agent.send_signal(stop.received)
            forwarded = True
        time.sleep(0.1)

    said = json.loads(os.pread(failure, os.fstat(failure).st_size, 0) or b"{}")
    return AgentEnd(agent.pid, exit_code, stop.received, stop.repeated, **said)


def start_agent(task: Mapping[str, Any]) -> None:
    """Be the agent."""
    from .agent import Task, main  # they import torch

    main(Task(**task))


def kill(agent: ForkedProcess) -> None:
    """Kill the agent first, so that it starts no more workers, then the workers' process groups."""
    children: list[str] = []
    with suppress(OSError):
        children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
    agent.send_signal(signal.SIGKILL)
    for child in children:
        with suppress(ProcessLookupError):
            os.killpg(int(child), signal.SIGKILL)


def wait_for_end(path: Path, *, since: float, job: str | None) -> Status | None:
    """Return the status of a run whose agent has ended; None if it never began.

    `since` is a time before its start. `job` is its name, or None on nodes other than rank 0's.
    Workers that outlive a killed agent write their status, then release the lock: wait for it."""

    def read() -> Status | None:
        status = read_status(path)
        is_own = status is not None and status.started >= since and job in (None, status.job)
        return status if is_own else None

    status = read()
    if status is not None and status.state == "running":
        with suppress(RunError, OSError):
            os.close(take_lock(path))
    return read()


def find_outcome(status: Status | None, end: AgentEnd) -> tuple[str, int, int | None]:
    """Return why a run ended: cause, exit code, and rank at fault, if any.

    The run's own `status` says it, after the signal that has killed the rank, unless no rank has
    written the end; None if the run ended before it opened its folder."""
    if status is not None and status.exit_code is not None:
        cause = status.cause or status.state
        if end.killed and end.rank == status.rank:  # ranks that miss it do not know the signal
            cause = f"{end.cause}; {cause}"
        return cause, status.exit_code, status.rank
    if end.cause:
        return end.cause, end.cause_code, end.rank
    if end.signalled and status is None:
        name = signal.Signals(end.signalled).name
        return f"stopped by {name} before the first step", STOPPED_EXIT_CODE, None
    if end.repeated:
        return "stopped by a second Ctrl-C or signal without saving", RankLostError.exit_code, None
    if end.signalled:
        return "killed before it could stop at a step's end", RankLostError.exit_code, None
    if end.exit_code < 0:
        name = signal.Signals(-end.exit_code).name
        return f"the agent was killed by {name}", RankLostError.exit_code, None
    return "the agent failed, and torchrun.log says why", RunError.exit_code, None


def report_end(launch: Launch, end: AgentEnd, *, path: Path, log_dir: Path, since: float) -> int:
    """Print why a run ended, unless it is done, complete its status.json, and return its exit code.
    `path` is the run folder, `since` a time before the start."""
    job = job_name(end.pid) if launch.node_rank == 0 else None
    status = wait_for_end(path, since=since, job=job)
    cause, code, rank = find_outcome(status, end)
    if code == 0:  # the signal came once the run was done
        return code
    lines = [f"exit code {code}: {cause}"]
    if rank is not None:
        lines.append(f"rank: {rank}")
    if status is not None:
        lines.append(f"step: {status.step}")
        lines.append(f"last checkpoint: {status.last_checkpoint or 'none'}")
        if cause != (status.cause or status.state):
            ended = replace(status, state="failed", cause=cause, exit_code=code, rank=rank)
            with suppress(RunError):  # a full disk: the lines say the same
                write_status(path, replace(ended, time=time.time()))
    if code == STOPPED_EXIT_CODE and status is not None and status.last_checkpoint:
        lines.append("the same command resumes")
    say(*lines, f"run folder: {path}", f"logs: {log_dir}")
    return code


def say(*lines: str) -> None:
    """Write to stderr; ignore a terminal or disk that is gone."""
    with suppress(OSError):
        os.write(2, clean("".join(f"{line}\n" for line in lines)).encode())


def main(argv: list[str]) -> NoReturn:
    """Launch the run, wait for it, report how it ended, and exit with its exit code."""
    # Check everything that can be checked before any process starts.
    launch = Launch(os.environ, argv)
    config = load_config(launch.words, world_size=launch.nnodes * launch.ngpu)
    compiles = config.compile.enable
    check_compiler(os.environ, compiles=compiles, on_gpu=launch.gpus > 0)
    listener = listen(launch.endpoint) if launch.node_rank == 0 else None

    # Run, with the logs in the run folder.
    path = Path(config.job.dump_folder)
    log_dir = make_log_folder(path)
    since = time.time()
    task = launch.task(listener, timeout_s=config.comm.init_timeout_seconds)
    task |= {"log_dir": str(log_dir)}
    modules = {
        "torchao.float8": config.float8.enable_float8_linear,
        "torch._inductor.compile_fx": compiles,
    }
    task["modules"] = [name for name, is_used in modules.items() if is_used]
    end = run_agent(task, launch.worker_env, log=log_dir / "torchrun.log")
    if end.exit_code == 0:
        sys.exit()
    sys.exit(report_end(launch, end, path=path, log_dir=log_dir, since=since))
