"""The elastic agent of this node: starts the workers, and starts them again after a failure.

`run.launch` forks it. It imports what the workers need, and forks them: torch is loaded once."""

import ctypes
import gc
import json
import os
import secrets
import signal
import sys
from collections.abc import Mapping, Sequence
from concurrent import futures
from contextlib import redirect_stderr
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.launcher.api import LaunchConfig, launch_agent

from torchtitan_lite.base.errors import ConfigError, RankLostError, RunError
from torchtitan_lite.patches import allow_long_saves, fork_workers, spare_compilers

from .forked import ForkedProcess, close_all_but_standard_streams, set_streams
from .signals import REPEAT_SECONDS

MODULE = "torchtitan_lite.train"
NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""Lets torch and torchao look for GPUs without CUDA: a process that is forked after a call of CUDA
cannot use it."""
START_KEY, BACKEND = "torchtitan_lite/start", "torchtitan_lite"
PR_SET_PDEATHSIG = 1  # of Linux' prctl


class NodeRendezvous(StaticTCPRendezvous):
    """The nodes meet in a store that is open already, with the numbers that they were given.

    Unlike c10d's rendezvous it unpickles nothing: whoever reaches c10d's store runs code here."""

    def __init__(self, store: dist.Store, name: str, at: Mapping[str, Any]) -> None:
        """`at` has the arguments of the `open_store` that returned the first two."""
        place = (at["host"], at["port"], at["node_rank"], at["nnodes"])
        super().__init__(*place, name, at["timeout_s"])
        self._store = store

    def get_backend(self) -> str:
        """Return the name under which torch knows this class."""
        return BACKEND


def open_store(
    *, host: str, port: int, node_rank: int, nnodes: int, listener: int | None, timeout_s: float
) -> tuple[dist.Store, str]:
    """Return the store of this start, which node 0 serves on the socket `listener`, and the start's
    random name, below which all keys are: processes of another start do not know it.

    Raises RankLostError if node 0 does not answer within `timeout_s`, ConfigError if it has another
    number of nodes, or a node of this number already."""
    timeout = timedelta(seconds=timeout_s)
    if node_rank == 0:
        served = dist.TCPStore(
            host,
            port,
            is_master=True,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=listener,
        )
        name = secrets.token_hex(16)
        served.set(START_KEY, json.dumps([name, nnodes]))
        return served, name

    at = f"RDZV_ENDPOINT={host}:{port}"

    def join() -> tuple[dist.Store, str]:
        store = dist.TCPStore(host, port, timeout=timeout)
        name, started = json.loads(store.get(START_KEY))
        if started != nnodes:
            raise ConfigError(
                f"NNODES={nnodes} on node {node_rank}, but node 0 at {at} was started with "
                f"NNODES={started}; start all nodes alike, or name another port."
            )
        if store.add(f"{name}/node {node_rank}", 1) > 1:
            raise ConfigError(
                f"NODE_RANK={node_rank}: the run of {at} has had this node already; give each node "
                "its own NODE_RANK, and each run its own port, or start all nodes again."
            )
        return store, name

    # A server that accepts connections and does not answer would block this thread for ever.
    try:
        return futures.ThreadPoolExecutor(1).submit(join).result(timeout_s)
    except (futures.TimeoutError, dist.DistError) as error:
        raise RankLostError(
            f"{at}: no node 0 answers there within [comm] init_timeout_seconds = {timeout_s:g}; "
            "start it with NODE_RANK=0 and the same RDZV_ENDPOINT, and open the port between the "
            "nodes."
        ) from error


@dataclass(frozen=True, kw_only=True)
class Task:
    """What the agent runs, and where it reports."""

    words: Sequence[str]
    """Arguments of MODULE."""
    modules: Sequence[str]
    """What is imported before the workers are forked, beside MODULE."""
    store: Mapping[str, Any]
    """Arguments of `open_store`."""
    ngpu: int
    """Workers to start."""
    max_restarts: int
    log_dir: str
    """Folder of the workers' logs."""
    terminal: int
    """File descriptor for the workers' lines on stderr; the agent's own stderr is a log."""
    failure: int
    """File descriptor for JSON: the arguments of AgentEnd that say what failed."""
    launcher: int
    """Process that the agent must not outlive."""


def run_workers(task: Task) -> None:
    """Run the workers until they are done. Raises ChildFailedError if a worker of this node failed,
    RankLostError if other nodes do not come."""
    # torch makes a rendezvous by the name of its kind.
    at = task.store
    store, name = open_store(**at)
    nodes = NodeRendezvous(store, name, at)
    rendezvous_handler_registry.register(BACKEND, lambda _: nodes)

    # Start the workers, and wait for them.
    config = LaunchConfig(
        min_nodes=at["nnodes"],
        max_nodes=at["nnodes"],
        nproc_per_node=task.ngpu,
        max_restarts=task.max_restarts,
        run_id=name,
        rdzv_backend=BACKEND,
        logs_specs=DefaultLogsSpecs(log_dir=task.log_dir, tee=Std.ALL),
        log_line_prefix_template=os.environ["TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"],
        signals_to_handle=",".join(each.name for each in REPEAT_SECONDS),
    )
    try:
        launch_agent(config, MODULE, list(task.words))
    except dist.DistError as error:
        raise RankLostError(
            f"not all of NNODES={at['nnodes']} nodes have come within [comm] init_timeout_seconds "
            f"= {at['timeout_s']:g}, or one has gone: {str(error).splitlines()[0]}"
        ) from error


def start_worker(
    words: Sequence[str], env: Mapping[str, str], stdout: TextIO, stderr: TextIO
) -> ForkedProcess:
    """Start what would be `python -u -m torchtitan_lite.train WORDS` as a new program."""
    has_gpus = torch.cuda.is_available()

    def run() -> None:
        set_streams(stdout.fileno(), stderr.fileno())
        close_all_but_standard_streams()
        os.environ.update(env)
        sys.argv = [MODULE, *words]
        gc.freeze()  # later collections scan only objects made after the imports
        gc.enable()
        del os.environ[NVML_CHECK]
        if has_gpus and torch.cuda._is_in_bad_fork():  # NVML has failed: start again
            os.execv(sys.executable, [sys.executable, "-m", *sys.argv])
        import_module(MODULE).main()

    return ForkedProcess(run)


def main(task: Task) -> None:
    """Run the workers until they are done. Raises what has failed, for the log."""
    # Stop and save, as after SIGTERM, when the launcher is gone: nobody else would stop the run.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != task.launcher:
        return
    os.environ[NVML_CHECK] = "1"
    os.environ["TORCHTITAN_LITE_AGENT"] = str(os.getpid())  # whose end a worker must not miss
    allow_long_saves()
    spare_compilers()
    fork_workers(start_worker)

    # torch shows the workers' stderr on sys.stderr. Its loggers keep the stream of its import.
    with os.fdopen(task.terminal, "w", buffering=1) as terminal, redirect_stderr(terminal):
        for name in (MODULE, *task.modules):
            import_module(name)  # once, for all workers
        try:
            run_workers(task)
        except (ChildFailedError, RunError) as error:
            os.write(task.failure, json.dumps(describe(error)).encode())
            raise


def describe(error: ChildFailedError | RunError) -> dict[str, Any]:
    """Return the arguments of AgentEnd that say what failed."""
    if isinstance(error, RunError):
        return {"cause": str(error), "cause_code": error.exit_code}
    rank, failure = error.get_first_failure()
    if failure.exitcode > 0:
        ended = {"cause_code": failure.exitcode, "rank": rank}
        if not isinstance(failure.message, dict):  # the rank has recorded no error
            return ended | {"cause": f"rank {rank} ended with exit code {failure.exitcode}"}
        error_file = failure.message
        unexpected = "py_callstack" in error_file["extraInfo"]  # else a RunError names its ranks
        return ended | {"cause": error_file["message"], "rank": rank if unexpected else None}
    killed = f"rank {rank} was killed by {failure.signal_name()}"
    print(killed, file=sys.stderr)  # other ranks, which only miss it, may report it first
    return {"cause": killed, "cause_code": RankLostError.exit_code, "rank": rank, "killed": True}
