"""The launcher of a run on this node: `torchtitan-lite train`, which run_train.sh calls.

It checks environment and config within a second, without importing torch. Then it starts the agent,
forwards signals, and reports how the run ended. The agent is torch's elastic agent: it starts and
restarts one worker, torchtitan_lite.train, per rank. It needs its own process, because torch
replaces all signal handlers and waits for other nodes in C++, where no Python handler runs.
"""

import os
import sys

if __name__ == "__main__" and sys.path[0] == os.getcwd():  # noqa: PTH109
    del sys.path[0]  # a random.py in the working directory would shadow the standard library's

import re
import shlex
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from torchtitan_lite.base.errors import STOPPED_EXIT_CODE as STOPPED
from torchtitan_lite.base.errors import ConfigError, RankLostError, RunError, run_script
from torchtitan_lite.config import did_you_mean, find_config, load_config, shipped_configs

from .compiler_checks import check_compiler
from .run_folder import make_log_folder, read_end
from .status import Status, write_status
from .supervise import AgentEnd, listen, run_agent, say

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
  OMP_WAIT_POLICY  ACTIVE: OpenMP threads spin while they wait; PASSIVE: they sleep (PASSIVE
                   without CUDA devices)
  TORCH_ELASTIC_SHUTDOWN_TIMEOUT  seconds that a stopped run may take to save (600)

SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2 or SIGINT (Ctrl-C) stops the run before its next forward
pass and saves the last finished step. A second signal kills the run if it is SIGINT or comes 3 s
later; the last checkpoint stays.

Exit codes: 0 done, 2 config, 3 data, 4 checkpoint, 5 numeric, 6 rank lost or timed out, 7 storage,
1 unexpected, 75 stopped on a signal or at the time limit, and saved where checkpoints are enabled.
"""
DEFAULT_CONFIG = "debug_model"
SHUTDOWN = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
PREFIX = "[rank${rank}] "
ENDPOINT = re.compile(r"([^\s:/\[\]]+|\[[0-9a-fA-F:]+\]):[0-9]{1,5}")
NEXT = {
    1: "look at the logs",
    2: "fix the config",
    3: "fix the data",
    4: "do as the error says, or find intact checkpoints: torchtitan-lite checkpoint verify {path}",
    5: "lower [optimizer] lr, or name an earlier [checkpoint] load_step",
    6: "look at the logs and at the host of that rank",
    7: "make room, or do as the error says",
    75: "start it again when you like",
}
"""Advice on what to do before the next start, by exit code."""


class Launch:
    """The checked variables and words of a launch, on a terminal of `columns`, 0 without one.
    `elastic` has arguments of torch's LaunchConfig; `endpoint` is "" for one node. Raises
    ConfigError."""

    def __init__(self, env: Mapping[str, str], overrides: Sequence[str], *, columns: int) -> None:
        self.gpus = gpus = count_cuda_devices(env)
        self.config_file = env.get("CONFIG_FILE") or DEFAULT_CONFIG
        self.overrides = overrides
        self.words = ["--job.config_file", self.config_file, *overrides]
        self.ngpu = read_count(env, "NGPU", gpus or 2, minimum=1)
        self.program = env.get("LAUNCHED_AS") or "python -m torchtitan_lite.run.launch"
        self.worker_env = read_worker_env(env, ngpu=self.ngpu, gpus=gpus, columns=columns)

        self.nnodes = read_count(env, "NNODES", 1, minimum=1)
        self.node_rank, self.endpoint = 0, ""
        if self.nnodes > 1:
            self.node_rank = read_count(env, "NODE_RANK", "", minimum=0)
            self.endpoint = env.get("RDZV_ENDPOINT", "")
            port = self.endpoint.rpartition(":")[2]
            if not ENDPOINT.fullmatch(self.endpoint) or not 0 < int(port) < 65536:
                raise ConfigError(f"RDZV_ENDPOINT={self.endpoint} must be host:port of node 0.")
        if self.node_rank >= self.nnodes:
            raise ConfigError(
                f"NODE_RANK={self.node_rank} must be below NNODES={self.nnodes}; nodes count from 0"
            )
        self.elastic: dict[str, Any] = {
            "min_nodes": self.nnodes,
            "max_nodes": self.nnodes,
            "nproc_per_node": self.ngpu,
            "max_restarts": read_count(env, "MAX_RESTARTS", 0, minimum=0),
            "log_line_prefix_template": PREFIX,
        }

    def listen(self) -> socket.socket | None:
        """Return the socket at which node 0 serves the run's store; None on other nodes. Raises
        ConfigError."""
        return listen(self.endpoint) if self.node_rank == 0 else None

    def store(self, listener: socket.socket | None, *, timeout_s: float) -> dict[str, Any]:
        """Return the arguments of the agent's `open_store`."""
        host, _, port = self.endpoint.rpartition(":")
        if listener is not None:
            port = listener.getsockname()[1]
        return {
            "host": host.strip("[]") or "127.0.0.1",
            "port": int(port),
            "node_rank": self.node_rank,
            "nnodes": self.nnodes,
            "listener": None if listener is None else listener.fileno(),
            "timeout_s": timeout_s,
        }

    def restart_command(self) -> str:
        """Return the shell command that starts the run again. It leaves out --checkpoint.load_step,
        because the run would load that step again instead of the last one."""
        variables = {"CONFIG_FILE": self.config_file, "NGPU": self.ngpu}
        if self.nnodes > 1:
            node = {"NODE_RANK": self.node_rank, "RDZV_ENDPOINT": self.endpoint}
            variables = {"NNODES": self.nnodes} | node | variables
        assignments = [f"{name}={shlex.quote(str(value))}" for name, value in variables.items()]
        line = " ".join([*assignments, self.program, *map(shlex.quote, self.overrides)])
        return re.sub(r" --checkpoint\.load[_-]step[= ]\S+", "", line)


def read_worker_env(
    env: Mapping[str, str], *, ngpu: int, gpus: int, columns: int
) -> dict[str, str]:
    """Return the variables that workers need in addition to `env`. Raises ConfigError."""
    log_rank = env.get("LOG_RANK", "").replace(" ", "") or "0"
    ranks = [rank for rank in log_rank.split(",") if re.fullmatch("0|[1-9][0-9]{0,8}", rank)]
    if ",".join(ranks) != log_rank or max(map(int, ranks)) >= ngpu:
        raise ConfigError(
            f"LOG_RANK={log_rank} must be comma-separated ranks of 0 to NGPU - 1 = {ngpu - 1}."
        )
    threads = max(1, len(os.sched_getaffinity(0)) // ngpu)
    added = {
        "LOG_RANK": log_rank,
        "OMP_NUM_THREADS": env.get("OMP_NUM_THREADS") or str(threads),
        SHUTDOWN: str(read_count(env, SHUTDOWN, 600, minimum=0)),
        "PYTHONUNBUFFERED": "1",
        "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": PREFIX,
    }

    # On a shared machine, spinning threads would take cores from threads that work.
    if gpus == 0:
        added["OMP_WAIT_POLICY"] = env.get("OMP_WAIT_POLICY", "PASSIVE")

    # Workers write to files, which the agent shows on the terminal.
    if columns:
        added |= {"COLUMNS": str(columns), "FORCE_COLOR": "1"}
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


def find_outcome(status: Status | None, end: AgentEnd) -> tuple[str, int, int | None]:
    """Return why a run did not finish: cause, exit code, and rank at fault, if any.
    `status` is None if the run ended before it opened its folder. A killed rank takes precedence
    over errors of other ranks, except over their report of a lost rank."""
    lost = RankLostError.exit_code
    if end.cause:
        return end.cause, end.cause_code, None
    if end.rank_code < 0:
        killed = f"rank {end.rank} was killed by {signal.Signals(-end.rank_code).name}"
        if status is None or status.exit_code != lost:
            return killed, lost, end.rank
        return f"{status.cause} ({killed})", lost, end.rank if status.rank is None else status.rank

    stopped_by = "Ctrl-C" if end.signalled == signal.SIGINT else getattr(end.signalled, "name", "")
    if status is not None and status.exit_code is not None:
        cause = status.cause or status.state
        if stopped_by:  # workers only see a SIGTERM
            cause = cause.replace("stopped by SIGTERM", f"stopped by {stopped_by}")
        return cause, status.exit_code, status.rank
    if end.rank_code > 0:
        return f"rank {end.rank} ended with exit code {end.rank_code}", end.rank_code, end.rank
    if stopped_by and status is None:
        return f"stopped by {stopped_by} before the first step", STOPPED, None
    if end.signalled:
        return "killed before it could stop at a step's end", lost, None
    if end.exit_code < 0:
        return f"the agent was killed by {signal.Signals(-end.exit_code).name}", lost, None
    return "the agent failed", 1, None


def report_end(launch: Launch, end: AgentEnd, *, path: Path, log_dir: Path, since: float) -> int:
    """Print why a run did not finish, if so, correct its status.json, and return its exit code.
    `path` is the run folder, `since` a time before the start."""
    on_file, status = read_end(path, since=since, agent=end.pid, owner=launch.node_rank == 0)
    cause, code, rank = find_outcome(status, end)
    if code == 0:  # the signal came once the run was done
        return code
    if status is not None and (status.exit_code, status.cause or status.state) != (code, cause):
        ended = replace(status, cause=cause, exit_code=code, rank=rank, time=time.time())
        with suppress(RunError):  # a full disk: the lines below say the same
            write_status(path, replace(ended, state="stopped" if code == STOPPED else "failed"))

    # No worker reported an error, but the agent's log may have one.
    if status is None and code == 1:
        with suppress(OSError):
            say(*(log_dir / "torchrun.log").read_text(errors="replace").splitlines()[-20:])

    step, last_checkpoint = (on_file.step, on_file.last_checkpoint) if on_file else (0, None)
    advice = NEXT.get(code, NEXT[1]).format(path=shlex.quote(str(path)))
    effect = "continues from the last checkpoint" if last_checkpoint else "starts from step 1"
    say(
        f"exit code {code}: {cause}",
        *([] if rank is None else [f"rank: {rank}"]),
        f"step: {step}",
        f"last checkpoint: {last_checkpoint or 'none'}",
        f"run folder: {path}",
        f"logs: {find_logs(log_dir, rank=rank, first_rank=launch.node_rank * launch.ngpu)}",
        f"next: {advice}; this {effect}: {launch.restart_command()}",
    )
    return code


def find_logs(folder: Path, *, rank: int | None, first_rank: int) -> str:
    """Return the log files of the last attempt of `rank`, if it ran on this node, else `folder`."""
    # torch writes RUN/attempt_K/LOCAL_RANK/{stdout,stderr}.log.
    attempts = [] if rank is None else list(folder.glob(f"*/attempt_*/{rank - first_rank}"))
    last = max(attempts, key=lambda path: int(path.parent.name[len("attempt_") :]), default=None)
    return str(folder) if last is None else f"{last}/{{stdout,stderr}}.log"


def main(argv: list[str]) -> NoReturn:
    """Launch the run, wait for it, report how it ended, and exit with its exit code."""
    # Check everything that can be checked before any process starts.
    columns = shutil.get_terminal_size().columns if os.isatty(1) else 0
    launch = Launch(os.environ, argv, columns=columns)
    if not find_config(launch.config_file).is_file():  # only one process could read a pipe
        hint = did_you_mean(Path(launch.config_file).stem, shipped_configs())
        raise ConfigError(f"CONFIG_FILE={launch.config_file} is not a file{hint or '; name one.'}")
    config = load_config(launch.words, world_size=launch.nnodes * launch.ngpu)
    check_compiler(os.environ, compiles=config.compile.enable, on_gpu=launch.gpus > 0)
    listener = launch.listen()

    # Run, with the logs in the run folder.
    path = Path(config.job.dump_folder)
    log_dir = make_log_folder(path)
    since = time.time()
    store = launch.store(listener, timeout_s=config.comm.init_timeout_seconds)
    end = run_agent(
        {"launch": launch.elastic, "store": store},
        launch.words,
        env=os.environ | launch.worker_env,
        log_dir=log_dir,
        listener=listener,
    )
    if end.exit_code == 0:
        sys.exit()
    sys.exit(report_end(launch, end, path=path, log_dir=log_dir, since=since))


if __name__ == "__main__":
    run_script(main)
