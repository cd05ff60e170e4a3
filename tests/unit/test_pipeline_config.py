"""Stages of pipelines, and the rules for their keys."""

import re
from pathlib import Path

import pytest
from pydantic import ValidationError

from torchtitan_lite import launch
from torchtitan_lite.config import Config, ParallelismConfig, check_config, resolve_stages
from torchtitan_lite.config.pipeline import Stages
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.parallel.schedules import SCHEDULES


def pipeline(degree: int, schedule: str = "1F1B", **keys: object) -> ParallelismConfig:
    """Keys of a pipeline, without their prefix."""
    prefixed = {
        key if key.startswith("module") else f"pipeline_parallel_{key}": value
        for key, value in {"degree": degree, "schedule": schedule, **keys}.items()
    }
    return ParallelismConfig.model_validate(prefixed)


def blocks(stages: Stages) -> list[int]:
    return [sum(name.startswith("layers.") for name in stage) for stage in stages]


# torchtitan v0.2.2 divides n_layers + first + last evenly, gives what is left over to the first
# stages, then takes the ends' share off (distributed/pipeline_parallel.py).
@pytest.mark.parametrize(
    ("n_layers", "keys", "expected"),
    [
        (32, (4,), [8, 9, 8, 7]),
        (32, (8,), [4, 5, 4, 4, 4, 4, 4, 3]),
        (32, (4, "Interleaved1F1B"), [4, 5, 4, 4, 4, 4, 4, 3]),
        (126, (8,), [15, 16, 16, 16, 16, 16, 16, 15]),
        (126, (16,), [7, *[8] * 14, 7]),
        (126, (8, "Interleaved1F1B"), [7, *[8] * 14, 7]),
        (32, (4, "InterleavedZeroBubble"), [4, 5, 4, 4, 4, 4, 4, 3]),
        (32, (4, "ZBVZeroBubble"), [4, 5, 4, 4, 4, 4, 4, 3]),
        (6, (2, "GPipe"), [3, 3]),
        (2, (2,), [1, 1]),
    ],
)
def test_blocks_are_divided_as_in_torchtitan(
    n_layers: int, keys: tuple[int, str], expected: list[int]
) -> None:
    stages = resolve_stages(pipeline(*keys), n_layers=n_layers)
    assert blocks(stages) == expected
    names = [f"layers.{i}" for i in range(n_layers)]
    assert [name for stage in stages for name in stage] == [
        "tok_embeddings",
        *names,
        "norm",
        "output",
    ]


@pytest.mark.parametrize(
    ("n_layers", "degree", "schedule", "keys", "expected"),
    [
        (32, 2, "1F1B", {"layers_per_stage": 17}, [16, 16]),
        (32, 2, "1F1B", {"layers_per_stage": 30}, [16, 16]),  # rounded up to two stages
        (32, 2, "Interleaved1F1B", {"layers_per_stage": 6}, [5, 6, 6, 6, 5, 4]),
        (126, 8, "Interleaved1F1B", {"layers_per_stage": 4}, [3, *[4] * 30, 3]),
        (32, 4, "1F1B", {"first_stage_less_layers": 0}, [9, 8, 8, 7]),
        (32, 4, "1F1B", {"last_stage_less_layers": 3}, [8, 9, 9, 6]),
        (
            32,
            4,
            "GPipe",
            {"first_stage_less_layers": 0, "last_stage_less_layers": 0},
            [8, 8, 8, 8],
        ),
        (3, 2, "1F1B", {"first_stage_less_layers": 2, "last_stage_less_layers": 2}, [2, 1]),
    ],
)
def test_keys_change_the_division(
    n_layers: int, degree: int, schedule: str, keys: dict[str, int], expected: list[int]
) -> None:
    stages = resolve_stages(pipeline(degree, schedule, **keys), n_layers=n_layers)
    assert blocks(stages) == expected


WHOLE = ("tok_embeddings", "layers.0", "layers.1", "layers.2", "layers.3", "norm", "output")


def test_the_model_is_one_stage_without_a_pipeline() -> None:
    one = pipeline(1, "Interleaved1F1B", split_points=["layers.9"])
    assert resolve_stages(one, n_layers=4) == (WHOLE,)


def test_stages_begin_with_split_points() -> None:
    points = ["layers.1", "layers.3", "norm"]
    assert resolve_stages(pipeline(4, split_points=points), n_layers=4) == (
        ("tok_embeddings", "layers.0"),
        ("layers.1", "layers.2"),
        ("layers.3",),
        ("norm", "output"),
    )


def test_stages_are_those_that_are_named() -> None:
    named = (WHOLE[:1], WHOLE[1:5], WHOLE[5:])
    keys = {"module_fqns_per_model_part": [list(stage) for stage in named]}
    assert resolve_stages(pipeline(3, **keys), n_layers=4) == named


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([WHOLE[:3], WHOLE[4:]], "its stages miss layers.2; name each of tok_embeddings, "),
        ([WHOLE[:3], WHOLE[2:]], "its stages repeat layers.1; "),
        (
            [WHOLE[:3], (*WHOLE[3:], "layers.4")],
            "its stages have unknown layers.4; name each of tok_embeddings, layers.0 to layers.3, "
            "norm and output once, in this order",
        ),
        (
            [(*WHOLE[:1], "layers.1", "layers.0"), WHOLE[3:]],
            "its stages change the order of layers.1, layers.0; ",
        ),
    ],
)
def test_stages_that_are_not_the_model(stages: list[tuple[str, ...]], message: str) -> None:
    keys = {"module_fqns_per_model_part": [list(stage) for stage in stages]}
    start = "[parallelism] module_fqns_per_model_part: "
    with pytest.raises(ConfigError, match=re.escape(start + message)):
        resolve_stages(pipeline(2, **keys), n_layers=4)


@pytest.mark.parametrize(
    "points",
    [["layers.4"], ["tok_embeddings"], ["layers.2", "layers.1"], ["layers.1", "layers.1"]],
)
def test_split_points_that_split_nothing(points: list[str]) -> None:
    message = "must be modules from layers.0 to output, each once, in the order of the model"
    with pytest.raises(ConfigError, match=f"pipeline_parallel_split_points = .*{message}"):
        resolve_stages(pipeline(len(points) + 1, split_points=points), n_layers=4)


@pytest.mark.parametrize(
    ("n_layers", "config", "message"),
    [
        (
            6,
            pipeline(8),
            "[parallelism] pipeline_parallel_degree = 8 makes 8 stages of 0, 1, 1, 1, 1, 1, 1, 0 "
            "blocks from 6, and each needs one; use fewer stages, or lower "
            "pipeline_parallel_first_stage_less_layers = 1 and "
            "pipeline_parallel_last_stage_less_layers = 1",
        ),
        (
            32,
            pipeline(4, layers_per_stage=4),
            "[parallelism] pipeline_parallel_layers_per_stage: it makes 9 stages, but "
            'pipeline_parallel_schedule = "1F1B" with pipeline_parallel_degree = 4 needs 4, one '
            "for each rank",
        ),
        (
            32,
            pipeline(4, "Interleaved1F1B", layers_per_stage=4),
            "it makes 9 stages, but pipeline_parallel_schedule = "
            '"Interleaved1F1B" with pipeline_parallel_degree = 4 needs 8 or 12, two or more for '
            "each rank",
        ),
        (
            32,
            pipeline(4, "Interleaved1F1B", layers_per_stage=9),
            "it makes 4 stages, but pipeline_parallel_schedule = "
            '"Interleaved1F1B" with pipeline_parallel_degree = 4 needs 8 or 12, two or more for '
            "each rank",
        ),
        (
            32,
            pipeline(2, "ZBVZeroBubble", layers_per_stage=6),
            'it makes 6 stages, but pipeline_parallel_schedule = "ZBVZeroBubble" with '
            "pipeline_parallel_degree = 2 needs 4, two for each rank",
        ),
        (
            4,
            pipeline(2, split_points=["layers.1", "layers.2"]),
            "[parallelism] pipeline_parallel_split_points: it makes 3 stages, but ",
        ),
        (
            4,
            pipeline(2, module_fqns_per_model_part=[list(WHOLE)]),
            "[parallelism] module_fqns_per_model_part: it makes 1 stages, but ",
        ),
        (
            4,
            pipeline(2, module_fqns_per_model_part=[[], list(WHOLE)]),
            "[parallelism] module_fqns_per_model_part: stages of 0, 7 modules; each stage needs "
            "one, and the last one needs both norm and output",
        ),
        (
            4,
            pipeline(2, split_points=["output"]),
            "[parallelism] pipeline_parallel_split_points: stages of 6, 1 modules; each stage ",
        ),
    ],
)
def test_stages_that_the_ranks_cannot_share(
    n_layers: int, config: ParallelismConfig, message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        resolve_stages(config, n_layers=n_layers)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("1F1B", [(0,), (1,)]),
        ("Interleaved1F1B", [(0, 2), (1, 3)]),
        ("ZBVZeroBubble", [(0, 3), (1, 2)]),
    ],
)
def test_the_stages_of_a_rank(schedule: str, expected: list[tuple[int, ...]]) -> None:
    stages = 2 * len(expected[0])
    ranks = [SCHEDULES[schedule].rank_stages(rank, degree=2, stages=stages) for rank in (0, 1)]
    assert ranks == expected


# ----- Rules between keys -----


def check(config: ParallelismConfig, *, batch: int = 8, **tables: dict[str, object]) -> list[str]:
    training = {"local_batch_size": batch, "seq_len": 64}
    parallelism = config.model_dump(exclude_unset=True)
    return check_config(
        Config.model_validate({"training": training, "parallelism": parallelism, **tables}),
        world_size=config.pipeline_parallel_degree,
    )


ZERO_BUBBLE = pipeline(2, "InterleavedZeroBubble")
EAGER = {"activation_checkpoint": {"mode": "none"}}


def test_sound_pipelines() -> None:
    float8 = {"float8": {"enable_float8_linear": True}, "compile": {"enable": True}}
    for schedule in ("1F1B", "GPipe", "Interleaved1F1B"):
        assert check(pipeline(2, schedule), **float8) == []
    for schedule in ("InterleavedZeroBubble", "ZBVZeroBubble"):
        assert check(pipeline(2, schedule), **EAGER) == []


def test_each_rank_needs_a_microbatch() -> None:
    (message,) = check(pipeline(4, microbatch_size=4))
    assert message == (
        "[training] global_batch_size = 8 makes 2 microbatches of [parallelism] "
        "pipeline_parallel_microbatch_size = 4 on each data-parallel rank, fewer than "
        "pipeline_parallel_degree = 4; increase local_batch_size or global_batch_size"
    )


def test_interleaved_microbatches_come_in_equal_rounds() -> None:
    (message,) = check(pipeline(2, "Interleaved1F1B"), batch=5)
    assert message == (
        '[parallelism] pipeline_parallel_schedule = "Interleaved1F1B" needs a number of '
        "microbatches that is a multiple of its 5 // 2 = 2 rounds, not 5; use 4 or 6"
    )
    assert check(pipeline(2), batch=5) == []
    assert check(pipeline(2, "Interleaved1F1B"), batch=3) == []  # one round


def test_a_pipeline_reduces_gradients_once_a_step() -> None:
    tables = {**pipeline(2).model_dump(exclude_unset=True), "fsdp_reduce_gradients": "each"}
    (message,) = check(ParallelismConfig.model_validate(tables))
    assert message.startswith(
        '[parallelism] fsdp_reduce_gradients = "each" cannot be with pipeline_parallel_degree = 2'
    )
    assert message.endswith('use "last" or "auto"')


@pytest.mark.parametrize(
    ("tables", "named", "fix"),
    [
        ({"compile": {"enable": True}}, "[compile] enable = true", "false"),
        (
            {"float8": {"enable_float8_linear": True}},
            "[float8] enable_float8_linear = true",
            "false",
        ),
        (
            {"activation_checkpoint": {"mode": "full"}},
            '[activation_checkpoint] mode = "full"',
            '"none"',
        ),
    ],
)
def test_zero_bubble_is_refused_where_it_is_wrong(
    tables: dict[str, dict[str, object]], named: str, fix: str
) -> None:
    (message,) = check(ZERO_BUBBLE, **EAGER | tables)
    assert message == (
        '[parallelism] pipeline_parallel_schedule = "InterleavedZeroBubble" computes wrong '
        f"gradients or repeats matmuls with {named} (pytorch/pytorch#161904, "
        f"pytorch/pytorch#164756); set that to {fix}, or use another schedule"
    )


def test_zero_bubble_keeps_weights_gathered() -> None:
    tables = ZERO_BUBBLE.model_dump(exclude_unset=True)
    resharded = ParallelismConfig.model_validate({**tables, "fsdp_reshard_after_forward": "always"})
    (message,) = check(resharded, **EAGER)
    assert '[parallelism] fsdp_reshard_after_forward = "always"' in message
    assert 'set that to "never"' in message


def test_tied_weights_are_on_one_rank() -> None:
    (message,) = check(pipeline(2), model={"flavor": "debugmodel", "tie_embeddings": True})
    assert message.startswith(
        "[parallelism] pipeline_parallel_degree = 2 puts the embedding and the output on different "
        "ranks, and [model] tie_embeddings = true makes them one weight"
    )


def test_unknown_schedule() -> None:
    with pytest.raises(ValidationError, match="pipeline_parallel_schedule"):
        pipeline(2, "DualPipeV")


def test_stages_are_judged_before_any_worker_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("NGPU", "8")
    started: list[object] = []
    monkeypatch.setattr(launch, "run_agent", lambda *args, **kwargs: started.append(args))
    words = ["--job.dump_folder", str(tmp_path / "run"), "--parallelism.pipeline_parallel_degree"]
    with pytest.raises(ConfigError, match="makes 8 stages of 0, 1, 1, 1, 1, 1, 1, 0 blocks"):
        launch.main([*words, "8"])
    assert started == []
