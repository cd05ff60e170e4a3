"""The store of a job, served here in torchrun's place."""

import pytest
import torch.distributed as dist

from torchtitan_lite.parallel.distributed import connect_store


def test_attempts_do_not_see_each_others_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    served = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    env = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(served.port),
        "RANK": "0",
        "WORLD_SIZE": "2",
    }
    for name, value in {**env, "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
        monkeypatch.setenv(name, value)
    first, also_first = connect_store(5), connect_store(5)
    first.set("address", "old")
    assert also_first.get("address") == b"old"
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert not connect_store(5).check(["address"])
