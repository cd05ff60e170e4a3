"""How nodes meet; tests/unit/test_launch.py has the agent as a process."""

import re
import socket
import time
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing.errors import (
    ChildFailedError,
    ErrorHandler,
    ProcessFailure,
)

from torchtitan_lite.base.errors import ConfigError, DataError, RankLostError, RunError
from torchtitan_lite.run.agent import describe, open_store
from torchtitan_lite.train import record_cause

pytestmark = pytest.mark.timeout(60)


def opened(node_rank: int, listener: socket.socket, **changes: Any) -> tuple[Any, str]:
    """Open the store of two nodes, which node 0 serves on `listener`."""
    host, port = listener.getsockname()
    served = listener.detach() if node_rank == 0 else None
    at = {"host": host, "port": port, "node_rank": node_rank, "nnodes": 2, "listener": served}
    return open_store(**{**at, "timeout_s": 30, **changes})


# ----- open_store -----


def test_nodes_of_a_start_share_a_store_below_a_random_name():
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()
    store, name = opened(0, listener)
    store.set("key", "value")
    at = {"host": address[0], "port": address[1], "node_rank": 1, "listener": None}
    other, same = open_store(**at, nnodes=2, timeout_s=30)
    assert (other.get("key"), same) == (b"value", name)
    assert opened(0, socket.create_server(("127.0.0.1", 0)))[1] != name
    with pytest.raises(ConfigError, match="^NNODES=3 on node 1, but node 0 .*:.* NNODES=2"):
        open_store(**at, nnodes=3, timeout_s=30)
    with pytest.raises(ConfigError, match="^NODE_RANK=1: the run of .* this node already; give"):
        open_store(**at, nnodes=2, timeout_s=30)


@pytest.mark.parametrize("accepts", [True, False])
def test_a_node_0_that_does_not_answer_is_named_in_time(accepts):
    began = time.monotonic()
    with socket.create_server(("127.0.0.1", 0)) as squatter:
        if not accepts:
            squatter.shutdown(socket.SHUT_RDWR)
        with pytest.raises(RankLostError) as error:
            opened(1, squatter, timeout_s=1)
    assert time.monotonic() - began < 20
    told = describe(error.value)
    assert re.match(r"RDZV_ENDPOINT=127.*init_timeout_seconds = 1; .*NODE_RANK=0", told["cause"])
    assert told["cause_code"] == 6


# ----- describe -----


@pytest.mark.parametrize(
    ("error", "exit_code", "told"),
    [
        (DataError("no text: fix it"), 3, {"cause": "no text: fix it", "rank": None}),
        (KeyError("x"), 1, {"cause": "KeyError: 'x'", "rank": 2}),
        (None, 3, {"cause": "rank 2 ended with exit code 3", "rank": 2}),
    ],
)
def test_describe_names_the_error_that_a_rank_recorded(
    error, exit_code, told, tmp_path, monkeypatch
):
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    if error is not None:
        record = record_cause if isinstance(error, RunError) else ErrorHandler().record_exception
        record(error)
    failure = ProcessFailure(local_rank=2, pid=1, exitcode=exit_code, error_file=str(file))
    found = describe(ChildFailedError("train", {2: failure}))
    assert found == told | {"cause_code": exit_code}


def test_an_error_that_cannot_be_recorded_is_not_replaced_by_another(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "gone" / "error.json"))
    record_cause(DataError("no text"))
