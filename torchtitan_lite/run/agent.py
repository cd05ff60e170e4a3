"""The elastic agent of this node: starts the workers, and starts them again after a failure.

`run.launch` starts it as `python -m torchtitan_lite.run.agent FAILURE`, so that it imports torch
while the config is checked. FAILURE is a file descriptor for JSON: the arguments of AgentEnd that
say what failed. What to run is JSON on standard input:

  modules       what is imported before the workers are forked, beside `torchtitan_lite.train`
  words         arguments of `torchtitan_lite.train`
  store         arguments of `open_store`
  ngpu          workers to start
  max_restarts  how often all workers are started again
  log_dir       folder of the logs: the workers', and torchrun.log, the agent's own stderr
  launcher      process that the agent must not outlive
"""

import gc
import os
import signal
import sys

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python's handler does not run during C++ waits
    if not getattr(sys.flags, "safe_path", False) and sys.path[0] == os.getcwd():  # noqa: PTH109
        del sys.path[0]  # a random.py in the working directory would shadow the standard library's
    gc.disable()  # imports create many permanent objects; scanning them repeatedly wastes time

import ctypes
import json
import secrets
import traceback
from concurrent import futures
from contextlib import redirect_stderr
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.launcher.api import LaunchConfig, launch_agent

from torchtitan_lite.base.errors import ConfigError, RankLostError, RunError
from torchtitan_lite.patches import allow_long_saves, fork_workers, spare_compilers

from .forked_worker import MODULE, ForkedWorker
from .signals import REPEAT_SECONDS

START_KEY, BACKEND = "torchtitan_lite/start", "torchtitan_lite"
PR_SET_PDEATHSIG = 1  # of Linux' prctl


class NodeRendezvous(StaticTCPRendezvous):
    """The nodes meet in a store that is open already, with the numbers that they were given.

    Unlike c10d's rendezvous it unpickles nothing: whoever reaches c10d's store runs code here."""

    def __init__(self, store: dist.Store, name: str, at: dict[str, Any]) -> None:
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


def run_workers(spec: dict[str, Any]) -> None:
    """Run the workers until they are done. Raises ChildFailedError if a worker of this node failed,
    RankLostError if other nodes do not come."""
    # torch makes a rendezvous by the name of its kind.
    at = spec["store"]
    store, name = open_store(**at)
    nodes = NodeRendezvous(store, name, at)
    rendezvous_handler_registry.register(BACKEND, lambda _: nodes)

    # Start the workers, and wait for them.
    config = LaunchConfig(
        min_nodes=at["nnodes"],
        max_nodes=at["nnodes"],
        nproc_per_node=spec["ngpu"],
        max_restarts=spec["max_restarts"],
        run_id=name,
        rdzv_backend=BACKEND,
        logs_specs=DefaultLogsSpecs(log_dir=spec["log_dir"], tee=Std.ALL),
        log_line_prefix_template=os.environ["TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"],
        signals_to_handle=",".join(each.name for each in REPEAT_SECONDS),
    )
    try:
        launch_agent(config, MODULE, spec["words"])
    except dist.DistError as error:
        raise RankLostError(
            f"not all of NNODES={at['nnodes']} nodes have come within [comm] init_timeout_seconds "
            f"= {at['timeout_s']:g}, or one has gone: {str(error).splitlines()[0]}"
        ) from error


def main() -> None:
    """Run the workers until they are done. Exit code 1 if they fail."""
    failure = int(sys.argv[1])
    # Stop and save, as after SIGTERM, when the launcher is gone: nobody else would stop the run.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    told = sys.stdin.read()
    spec = json.loads(told) if told else {}
    if os.getppid() != spec.get("launcher"):
        return
    os.environ["TORCHTITAN_LITE_AGENT"] = str(os.getpid())  # whose end a worker must not miss
    allow_long_saves()
    spare_compilers()
    fork_workers(ForkedWorker)

    # torch shows the workers' stderr on sys.stderr. Its loggers keep the stream of its import.
    terminal_fd = os.dup(2)
    with Path(spec["log_dir"], "torchrun.log").open("wb") as log:
        os.dup2(log.fileno(), 2)
    try:
        with os.fdopen(terminal_fd, "w", buffering=1) as terminal, redirect_stderr(terminal):
            for name in (MODULE, *spec["modules"]):
                import_module(name)  # once, for all workers
            try:
                run_workers(spec)
            except (ChildFailedError, RunError) as error:
                os.write(failure, json.dumps(describe(error)).encode())
                raise
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # a thread may wait for ever, for node 0 or, after a second signal, for workers
    os._exit(0)  # the interpreter's teardown takes half a second


def describe(error: ChildFailedError | RunError) -> dict[str, Any]:
    """Return the arguments of AgentEnd that say what failed."""
    if isinstance(error, RunError):
        return {"cause": str(error), "cause_code": error.exit_code}
    rank, failure = error.get_first_failure()
    if failure.exitcode > 0:
        ended = {"cause_code": failure.exitcode, "rank": rank}
        if not isinstance(failure.message, dict):  # the rank has recorded no error
            return ended | {"cause": f"rank {rank} ended with exit code {failure.exitcode}"}
        told = failure.message
        unexpected = "py_callstack" in told["extraInfo"]  # else a RunError, which names its ranks
        return ended | {"cause": told["message"], "rank": rank if unexpected else None}
    killed = f"rank {rank} was killed by {failure.signal_name()}"
    print(killed, file=sys.stderr)  # other ranks, which only miss it, may report it first
    return {"cause": killed, "cause_code": RankLostError.exit_code, "rank": rank}


if __name__ == "__main__":
    main()
