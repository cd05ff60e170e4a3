"""The parts of the trainer that need no processes."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from torchtitan_lite.config import Config, ParallelDegrees, ValidationConfig
from torchtitan_lite.parallel.mesh import Groups
from torchtitan_lite.training import trainer

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("degrees", "dp_ranks"),
    [
        (ParallelDegrees(1, 2, 2, 1, 1), [0, 0, 1, 1]),  # dp_replicate, dp_shard, cp, tp, pp
        (ParallelDegrees(2, 1, 1, 2, 2), [0, 0, 1, 1, 0, 0, 1, 1]),
        (ParallelDegrees(2, 2, 2, 2, 2), [*[0] * 4, *[1] * 4, *[2] * 4, *[3] * 4] * 2),
    ],
)
def test_trainer_gives_ranks_that_differ_in_cp_tp_or_pp_only_the_same_data(
    degrees, dp_ranks, monkeypatch
):
    found = []

    def note(*_: Any, dp_rank: int, progress: Any) -> None:
        found.append(dp_rank)
        raise StopIteration

    monkeypatch.setattr(trainer, "build_batches", note)
    job: Any = SimpleNamespace(degrees=degrees, config=None)
    parts: Any = {"tokenizer": None, "watchdog": SimpleNamespace()}
    for rank in range(degrees.world_size):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=len(dp_ranks))
        with pytest.raises(StopIteration):
            trainer.Trainer(job, device=CPU, **parts)
        dist.destroy_process_group()
    assert found == dp_ranks


def test_groups_of_replicas_and_ranks_of_tensor_parallelism_skip_together():
    for rank, group in ((0, [0, 1, 4, 5]), (15, [10, 11, 14, 15])):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=16)
        groups = Groups(ParallelDegrees(2, 2, 1, 2, 2), device_type="cpu")
        assert dist.get_process_group_ranks(groups.replicas) == group
        dist.destroy_process_group()


def test_trainer_makes_no_samples_without_validation():
    config = Config(validation=ValidationConfig(prompts=("a",)))
    job: Any = SimpleNamespace(config=config, degrees=SimpleNamespace(pp=1))
    run: Any = SimpleNamespace(job=job, config=config, built=SimpleNamespace(linears=[]))
    tokenizer: Any = None  # a prompt would need one
    trainer.Trainer.build_optional(run, tokenizer)
    assert run.samples is None
