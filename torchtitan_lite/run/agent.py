"""The elastic agent of this node: starts the workers, and starts them again after a failure.

`run.supervise` starts it as `python -m torchtitan_lite.run.agent SPEC WORDS...`.
SPEC is JSON with these keys; WORDS are the arguments of `torchtitan_lite.train`.

  launch      arguments of torch's LaunchConfig
  store       arguments of `open_store`
  log_dir     folder of the workers' logs
  terminal    file descriptor for the workers' lines on stderr; the agent's own stderr is a log
  failure     file descriptor for JSON: the arguments of AgentEnd that say what failed
  launcher    file descriptor whose end means that the launcher is gone
"""

import os
import sys

if __name__ == "__main__" and sys.path[0] == os.getcwd():  # noqa: PTH109
    del sys.path[0]  # as in torchtitan_lite.run.launch

import json
import secrets
import signal
import threading
from concurrent import futures
from contextlib import redirect_stderr
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.launcher.api import LaunchConfig, launch_agent

from torchtitan_lite.base.errors import ConfigError, RankLostError, RunError
from torchtitan_lite.patches import allow_long_saves

from .signals import DUPLICATE_SECONDS

START_KEY, BACKEND = "torchtitan_lite/start", "torchtitan_lite"
SIGNALS = ",".join(each.name for each in DUPLICATE_SECONDS)


class NodeRendezvous(StaticTCPRendezvous):
    """The nodes meet in a store that is open already, with the numbers that they were given.

    Unlike c10d's rendezvous it unpickles nothing: whoever reaches c10d's store runs code here."""

    def __init__(self, store: dist.Store, name: str, at: dict[str, Any]) -> None:
        """`at` has the arguments of the `open_store` that returned the first two."""
        nodes, timeout = at["nnodes"], at["timeout_s"]
        super().__init__(at["host"], at["port"], at["node_rank"], nodes, name, timeout)
        self._store = store

    def get_backend(self) -> str:
        """Return the name under which torch knows this class."""
        return BACKEND


def open_store(
    *, host: str, port: int, node_rank: int, nnodes: int, listener: int | None, timeout_s: float
) -> tuple[dist.Store, str]:
    """Return the store of this start, which node 0 serves on the socket `listener`, and the start's
    random name. All keys are below the name, which processes of another start do not know.

    Raises RankLostError if node 0 does not answer within `timeout_s`, and ConfigError if it was
    started with another number of nodes."""
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

    def join() -> tuple[dist.Store, str, int]:
        store = dist.TCPStore(host, port, timeout=timeout)
        return store, *json.loads(store.get(START_KEY))

    # A server that accepts connections and does not answer would block this thread for ever.
    try:
        store, name, started = futures.ThreadPoolExecutor(1).submit(join).result(timeout_s)
    except (futures.TimeoutError, dist.DistError) as error:
        raise RankLostError(
            f"RDZV_ENDPOINT={host}:{port}: no node 0 answers there within [comm] "
            f"init_timeout_seconds = {timeout_s:g}; start it with NODE_RANK=0 and the same "
            "RDZV_ENDPOINT, and open the port between the nodes."
        ) from error
    if started != nnodes:
        raise ConfigError(
            f"NNODES={nnodes} on node {node_rank}, but node 0 at RDZV_ENDPOINT={host}:{port} was "
            f"started with NNODES={started}; start all nodes alike, or name another port."
        )
    return store, name


def end_with_launcher(descriptor: int) -> None:
    """Stop the workers as SIGTERM does when the launcher is gone: nobody else would. A byte says
    that it has sent SIGTERM itself: a second one would abandon the workers."""
    if not os.read(descriptor, 1):
        signal.raise_signal(signal.SIGTERM)


def run_workers(spec: dict[str, Any], words: list[str]) -> None:
    """Run the workers until they are done. Raises ChildFailedError if a worker of this node failed,
    RankLostError if other nodes do not come."""
    # torch makes a rendezvous by the name of its kind.
    at = spec["store"]
    store, name = open_store(**at)
    nodes = NodeRendezvous(store, name, at)
    rendezvous_handler_registry.register(BACKEND, lambda _: nodes)

    # Start the workers, and wait for them.
    config = LaunchConfig(
        **spec["launch"],
        run_id=name,
        rdzv_backend=BACKEND,
        logs_specs=DefaultLogsSpecs(log_dir=spec["log_dir"], tee=Std.ALL),
        signals_to_handle=SIGNALS,
    )
    python = os.environ.get("PYTHON_EXEC", sys.executable)  # as under torchrun
    try:
        launch_agent(config, python, ["-u", "-m", "torchtitan_lite.train", *words])
    except dist.DistError as error:
        raise RankLostError(
            f"not all of NNODES={at['nnodes']} nodes have come within [comm] init_timeout_seconds "
            f"= {at['timeout_s']:g}, or one has gone: {str(error).splitlines()[0]}"
        ) from error


def main() -> None:
    """Run the workers until they are done. Exit code 1 if they fail."""
    spec, words = json.loads(sys.argv[1]), sys.argv[2:]
    threading.Thread(target=end_with_launcher, args=(spec["launcher"],), daemon=True).start()
    os.environ["TORCHTITAN_LITE_AGENT"] = str(os.getpid())  # whose end a worker must not miss
    allow_long_saves()

    # torch shows the workers' stderr on sys.stderr. Its loggers keep the stream of its import.
    with os.fdopen(spec["terminal"], "w", buffering=1) as terminal, redirect_stderr(terminal):
        try:
            run_workers(spec, words)
        except (ChildFailedError, RunError) as error:
            os.write(spec["failure"], json.dumps(describe(error)).encode())
            if isinstance(error, RunError):
                os._exit(1)  # a thread may wait for node 0 for ever
            raise


def describe(error: ChildFailedError | RunError) -> dict[str, Any]:
    """Return the arguments of AgentEnd that say what failed."""
    if isinstance(error, RunError):
        return {"cause": str(error), "cause_code": error.exit_code}
    rank, failure = error.get_first_failure()
    return {"rank": rank, "rank_code": failure.exitcode}


if __name__ == "__main__":
    main()
