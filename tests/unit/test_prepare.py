"""What is refused before a run builds anything."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from sample_jobs import job_of

from torchtitan_lite.base.errors import ConfigError
from torchtitan_lite.catalog.flavors import FLAVORS
from torchtitan_lite.config import Config
from torchtitan_lite.planner import prepare
from torchtitan_lite.planner.prepare import check_states, prepare_job

WHOLE = 16 * 8_030_261_248 / 2**30
"""GiB of the weights, gradients and moments of 8B in float32."""


def config_of(pp: int = 1, **training: Any) -> Config:
    tables = {"model": {"flavor": "8B"}, "parallelism": {"pipeline_parallel_degree": pp}}
    return Config.model_validate(tables | {"training": {"local_batch_size": 4} | training})


# ----- check_states -----


@pytest.mark.parametrize(
    ("training", "degrees", "pp", "needed_gib"),
    [
        ({}, (1, 8, 1), 1, WHOLE / 8),
        ({}, (2, 4, 1), 1, WHOLE / 4),
        ({}, (1, 1, 1), 1, WHOLE),
        ({}, (1, 2, 1), 4, WHOLE / 8),  # the mean of stages
        ({"dtype": "bfloat16"}, (1, 8, 1), 1, WHOLE / 16),
    ],
)
def test_states_above_the_memory_are_refused_and_below_it_not(training, degrees, pp, needed_gib):
    job = job_of(config_of(pp, **training), FLAVORS["8B"], degrees=degrees, pp=pp)
    check_states(job, 1.001 * needed_gib)
    with pytest.raises(ConfigError, match=rf"8B: .* {needed_gib:.1f} GiB of each rank, which has"):
        check_states(job, 0.99 * needed_gib)


def test_states_on_the_cpu_beside_gpus_are_not_refused():
    job = job_of(config_of(enable_cpu_offload=True), FLAVORS["8B"], degrees=(1, 8, 1))
    check_states(job, 0.1)


# ----- prepare_job -----


def test_what_this_device_cannot_do_is_refused_at_the_start(monkeypatch):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.setattr(prepare, "total_memory_gib", lambda device, sharing: 24.0)
    with pytest.raises(ConfigError, match=r"119\.7 GiB of each rank, which has 24\.0; use more"):
        prepare_job(config_of(seq_len=64), device=torch.device("cpu"))
    profiling = {"profiling": {"enable_memory_snapshot": True}}
    with pytest.raises(ConfigError, match=r"\[profiling\] enable_memory_snapshot = true .* on CPU"):
        prepare_job(Config.model_validate(profiling), device=torch.device("cpu"))
