"""Stages of pipelines, and the rules for their keys."""

import re
from typing import Any

import pytest

from torchtitan_lite.base.errors import ConfigError
from torchtitan_lite.config import Config, ParallelismConfig, check_config, resolve_stages

WHOLE = ("tok_embeddings", "layers.0", "layers.1", "layers.2", "layers.3", "norm", "output")


def pipeline(degree: int, schedule: str = "1F1B", **keys: object) -> ParallelismConfig:
    """Keys of a pipeline, without their prefix, and others of the table."""
    prefixed = {
        key if key.startswith(("module", "fsdp")) else f"pipeline_parallel_{key}": value
        for key, value in {"degree": degree, "schedule": schedule, **keys}.items()
    }
    return ParallelismConfig.model_validate(prefixed)


def named(*stages: tuple[str, ...]) -> ParallelismConfig:
    """A pipeline with a rank for each of the stages, whose modules are named."""
    return pipeline(len(stages), module_fqns_per_model_part=[list(stage) for stage in stages])


# ----- resolve_stages -----


# torchtitan v0.2.2 divides n_layers + first + last evenly, gives what is left over to the first
# stages, then takes the ends' share off (distributed/pipeline_parallel.py).
@pytest.mark.parametrize(("n_layers", "config", "expected"), [
    (32, pipeline(4), [8, 9, 8, 7]),
    (32, pipeline(8), [4, 5, 4, 4, 4, 4, 4, 3]),
    (32, pipeline(4, "Interleaved1F1B"), [4, 5, 4, 4, 4, 4, 4, 3]),
    (126, pipeline(16), [7, *[8] * 14, 7]),
    (6, pipeline(2, "GPipe"), [3, 3]),
    (2, pipeline(2), [1, 1]),
    (32, pipeline(2, layers_per_stage=17), [16, 16]),
    (32, pipeline(2, layers_per_stage=30), [16, 16]),  # rounded up to two stages
    (32, pipeline(2, "Interleaved1F1B", layers_per_stage=6), [5, 6, 6, 6, 5, 4]),
    (126, pipeline(8, "Interleaved1F1B", layers_per_stage=4), [3, *[4] * 30, 3]),
    (32, pipeline(4, first_stage_less_layers=0), [9, 8, 8, 7]),
    (32, pipeline(4, last_stage_less_layers=3), [8, 9, 9, 6]),
    (32, pipeline(4, first_stage_less_layers=0, last_stage_less_layers=0), [8, 8, 8, 8]),
    (3, pipeline(2, first_stage_less_layers=2, last_stage_less_layers=2), [2, 1]),
])  # fmt: skip
def test_blocks_are_divided_as_in_torchtitan(n_layers, config, expected):
    stages = resolve_stages(config, n_layers=n_layers)
    assert [sum(name.startswith("layers.") for name in stage) for stage in stages] == expected
    blocks = [f"layers.{i}" for i in range(n_layers)]
    assert sum(stages, ()) == ("tok_embeddings", *blocks, "norm", "output")


@pytest.mark.parametrize(("config", "expected"), [
    (pipeline(1, "Interleaved1F1B", split_points=["layers.9"]), (WHOLE,)),
    (pipeline(4, split_points=["layers.1", "layers.3", "norm"]),
     (WHOLE[:2], WHOLE[2:4], WHOLE[4:5], WHOLE[5:])),
    (named(WHOLE[:1], WHOLE[1:5], WHOLE[5:]), (WHOLE[:1], WHOLE[1:5], WHOLE[5:])),
])  # fmt: skip
def test_stages_are_one_or_begin_at_split_points_or_are_named(config, expected):
    assert resolve_stages(config, n_layers=4) == expected


NAMED = "module_fqns_per_model_part makes stages of"
POINTS = "pipeline_parallel_split_points makes stages of"
MUST_BE = (
    " modules; they must be tok_embeddings, layers.0 to layers.3, norm and output, each once and "
    "in this order, at least one in a stage, and norm in that of output$"
)


@pytest.mark.parametrize(("n_layers", "config", "pattern"), [
    (4, named(WHOLE[:3], WHOLE[4:]), f"{NAMED} 3, 3{MUST_BE}"),
    (4, named(WHOLE[:3], WHOLE[2:]), f"{NAMED} 3, 5{MUST_BE}"),
    (4, named(WHOLE, ("layers.4",)), f"{NAMED} 7, 1{MUST_BE}"),
    (4, named(WHOLE[:3], WHOLE[3:-1]), f"{NAMED} 3, 3{MUST_BE}"),
    (4, named((), WHOLE), f"{NAMED} 0, 7{MUST_BE}"),
    (4, pipeline(2, split_points=["layers.4"]), f"{POINTS} 0, 7{MUST_BE}"),
    (4, pipeline(2, split_points=["tok_embeddings"]), f"{POINTS} 0, 7{MUST_BE}"),
    (4, pipeline(3, split_points=["layers.2", "layers.1"]), f"{POINTS} 3, 0, 5{MUST_BE}"),
    (4, pipeline(3, split_points=["layers.1", "layers.1"]), f"{POINTS} 2, 0, 5{MUST_BE}"),
    (4, pipeline(2, split_points=["output"]), f"{POINTS} 6, 1{MUST_BE}"),
    (6, pipeline(99999999), "degree = 99999999 makes 99999999 stages of 6 blocks"),
    (6, pipeline(8), "degree = 8 makes 8 stages of 6 blocks, .*first_stage_less_layers = 1 "
     "and pipeline_parallel_last_stage_less_layers = 1"),
    (8, pipeline(8), "degree = 8 makes 8 stages of 8 blocks, "),
    (32, pipeline(4, layers_per_stage=4), "pipeline_parallel_layers_per_stage makes 9 stages, .* "
     '= "1F1B" with pipeline_parallel_degree = 4 needs 4$'),
    (32, pipeline(4, "Interleaved1F1B", layers_per_stage=4), " 9 stages, .* = "
     '"Interleaved1F1B" with pipeline_parallel_degree = 4 needs a multiple above 4'),
    (32, pipeline(4, "Interleaved1F1B", layers_per_stage=9), " 4 stages, .* needs a multiple abov"),
    (4, pipeline(2, split_points=["layers.1", "layers.2"]), "split_points makes 3 stages"),
    (4, pipeline(2, module_fqns_per_model_part=[list(WHOLE)]), "model_part makes 1 stages"),
])  # fmt: skip
def test_resolve_stages_refuses(n_layers, config, pattern):
    with pytest.raises(ConfigError, match=rf"^\[parallelism] .*{pattern}"):
        resolve_stages(config, n_layers=n_layers)


# ----- check_config -----


def check(config: ParallelismConfig, *, batch: int = 8, **tables: Any) -> list[str]:
    training = {"local_batch_size": batch, "seq_len": 64}
    parallelism = config.model_dump(exclude_unset=True)
    return check_config(
        Config.model_validate({"training": training, "parallelism": parallelism, **tables}),
        world_size=config.pipeline_parallel_degree,
    )


@pytest.mark.parametrize(("schedule", "batch"), [
    ("1F1B", 8), ("GPipe", 8), ("Interleaved1F1B", 8), ("1F1B", 2), ("1F1B", 5),
    ("Interleaved1F1B", 3),  # one round
])  # fmt: skip
def test_sound_pipelines(schedule, batch):
    tables = {"float8": {"enable_float8_linear": True}, "compile": {"enable": True}}
    assert check(pipeline(2, schedule), batch=batch, **tables) == []


TIED = {"model": {"flavor": "debugmodel", "tie_embeddings": True}}
INTERLEAVED = pipeline(2, "Interleaved1F1B")


@pytest.mark.parametrize(("config", "tables", "pattern"), [
    (pipeline(2, "Interleaved1F1B", microbatch_size=8), {},
     r"training] global_batch_size = -1, \[parallelism] pipeline_parallel_microbatch_size = 8, .*"
     r"degree = 2, .*: a rank has 1 microbatches, .*; increase local_batch_size or global_batch"),
    (INTERLEAVED, {"batch": 5},
     r'training] .*\[parallelism] pipeline_parallel_schedule = "Interleaved1F1B": a rank has 5 '
     "microbatches, .* 2 equal rounds; use 4 or 6"),
    (pipeline(2, fsdp_reduce_gradients="each"), {},
     r'parallelism] fsdp_reduce_gradients = "each", .*pipeline_parallel_degree = 2: .* "last" or'),
    (pipeline(8), {}, "parallelism] pipeline_parallel_degree = 8 makes 8 stages of 6 blocks"),
    (pipeline(2), TIED,
     r"parallelism] pipeline_parallel_degree = 2, .*\[model] tie_embeddings = true: .*degree to 1"),
])  # fmt: skip
def test_check_config_refuses_a_pipeline(config, tables, pattern):
    (message,) = check(config, **tables)
    assert re.match(pattern, message[1:]), message
