"""Degrees, batch sizes and shares that follow from the config."""

import dataclasses
import re

import pytest

from torchtitan_lite.config import (
    BatchSizes,
    DatasetConfig,
    ModelConfig,
    ParallelDegrees,
    ParallelismConfig,
    TrainingConfig,
    resolve_batch,
    resolve_degrees,
    resolve_model,
    resolve_shares,
)
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.models.flavors import FLAVORS, ModelArgs, RopeScaling


def parallelism(replicate: int, shard: int, cp: int, tp: int, pp: int = 1) -> ParallelismConfig:
    return ParallelismConfig(
        data_parallel_replicate_degree=replicate,
        data_parallel_shard_degree=shard,
        pipeline_parallel_degree=pp,
        context_parallel_degree=cp,
        tensor_parallel_degree=tp,
    )


@pytest.mark.parametrize(
    ("degrees", "world_size", "resolved"),
    [
        ((1, -1, 1, 1), 1, (1, 1, 1, 1, 1)),
        ((1, -1, 1, 1), 8, (1, 8, 1, 1, 1)),
        ((2, -1, 1, 2), 8, (2, 2, 1, 2, 1)),
        ((2, 2, 1, 2), 8, (2, 2, 1, 2, 1)),
        ((1, 1, 1, 8), 8, (1, 1, 1, 8, 1)),
        ((1, -1, 8, 1), 8, (1, 1, 8, 1, 1)),
        ((2, -1, 2, 2), 16, (2, 2, 2, 2, 1)),
        ((1, -1, 1, 1, 4), 4, (1, 1, 1, 1, 4)),
        ((2, -1, 2, 2, 3), 48, (2, 2, 2, 2, 3)),
    ],
)
def test_resolve_degrees(
    degrees: tuple[int, ...], world_size: int, resolved: tuple[int, ...]
) -> None:
    result = resolve_degrees(parallelism(*degrees), world_size=world_size)
    assert dataclasses.astuple(result) == resolved
    assert result.world_size == world_size


def test_ranks_that_share_sequences_are_not_data_parallel_but_shard_weights() -> None:
    degrees = ParallelDegrees(dp_replicate=2, dp_shard=3, cp=7, tp=5, pp=11)
    assert (degrees.dp, degrees.fsdp, degrees.world_size) == (6, 21, 2310)


@pytest.mark.parametrize(
    ("degrees", "world_size", "message"),
    [
        (
            (1, 3, 1, 2),
            4,
            "[parallelism] data_parallel_shard_degree * data_parallel_replicate_degree * "
            "pipeline_parallel_degree * context_parallel_degree * tensor_parallel_degree = "
            "3 * 1 * 1 * 1 * 2 = 6, but the run has 4 processes; "
            "set data_parallel_shard_degree to 2 or -1",
        ),
        (
            (1, 0, 1, 1),
            4,
            "= 0 * 1 * 1 * 1 * 1 = 0, but the run has 4 processes; "
            "set data_parallel_shard_degree to 4 or -1",
        ),
        (
            (2, -1, 3, 4),
            36,
            "[parallelism] data_parallel_replicate_degree * pipeline_parallel_degree * "
            "context_parallel_degree * tensor_parallel_degree = 2 * 1 * 3 * 4 = 24 does not divide "
            "the world size, 36; run 24 or 48 processes",
        ),
        (
            (1, 3, 1, 2),
            5,
            "= 1 * 1 * 1 * 2 = 2 does not divide the world size, 5; run 4 or 6 processes",
        ),
        (
            (1, -1, 1, 8),
            1,
            "= 1 * 1 * 1 * 8 = 8 does not divide the world size, 1; run 8 or 16 processes",
        ),
        ((1, -1, 4, 1), 2, "= 1 * 1 * 4 * 1 = 4 does not divide the world size, 2; run 4 or 8"),
        (
            (1, -1, 1, 1, 4),
            6,
            "= 1 * 4 * 1 * 1 = 4 does not divide the world size, 6; run 4 or 8 processes",
        ),
    ],
)
def test_degrees_that_do_not_fit(degrees: tuple[int, ...], world_size: int, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        resolve_degrees(parallelism(*degrees), world_size=world_size)


@pytest.mark.parametrize(
    ("local", "total", "dp", "resolved"),
    [
        (8, -1, 1, BatchSizes(8, 8, 1)),
        (8, -1, 4, BatchSizes(8, 32, 1)),
        (8, 32, 4, BatchSizes(8, 32, 1)),
        (4, 64, 2, BatchSizes(4, 64, 8)),
    ],
)
def test_resolve_batch(local: int, total: int, dp: int, resolved: BatchSizes) -> None:
    training = TrainingConfig(local_batch_size=local, global_batch_size=total)
    # Without a pipeline its microbatch size has no effect.
    plain = ParallelismConfig(pipeline_parallel_microbatch_size=3)
    assert resolve_batch(training, plain, dp_degree=dp) == resolved


@pytest.mark.parametrize(
    ("local", "total", "dp", "size", "resolved"),
    [
        (8, -1, 1, 1, BatchSizes(1, 8, 8)),
        (8, -1, 2, 4, BatchSizes(4, 16, 2)),
        (8, 64, 2, 2, BatchSizes(2, 64, 16)),  # microbatches of gradient accumulation too
    ],
)
def test_a_pass_of_a_pipeline_is_one_of_its_microbatches(
    local: int, total: int, dp: int, size: int, resolved: BatchSizes
) -> None:
    training = TrainingConfig(local_batch_size=local, global_batch_size=total)
    pipeline = ParallelismConfig(pipeline_parallel_degree=2, pipeline_parallel_microbatch_size=size)
    assert resolve_batch(training, pipeline, dp_degree=dp) == resolved


def test_microbatches_that_do_not_divide_the_local_batch() -> None:
    pipeline = ParallelismConfig(pipeline_parallel_degree=2, pipeline_parallel_microbatch_size=3)
    message = (
        "[training] local_batch_size = 8 is not a multiple of [parallelism] "
        "pipeline_parallel_microbatch_size = 3; use 6 or 9"
    )
    with pytest.raises(ConfigError, match=re.escape(message) + "$"):
        resolve_batch(TrainingConfig(local_batch_size=8), pipeline, dp_degree=1)


@pytest.mark.parametrize(
    ("total", "fix"),
    [(30, "use 32 or 64"), (63, "use 32 or 64"), (65, "use 64 or 96"), (0, "use 32 or 64")],
)
def test_batch_that_does_not_divide(total: int, fix: str) -> None:
    with pytest.raises(
        ConfigError,
        match=rf"\[training\] global_batch_size = {total} is not a multiple of local_batch_size "
        rf"\* dp_degree = "
        rf"4 \* 8 = 32; {fix}$",
    ):
        training = TrainingConfig(local_batch_size=4, global_batch_size=total)
        resolve_batch(training, ParallelismConfig(), dp_degree=8)


def datasets(*weights: float) -> tuple[DatasetConfig, ...]:
    return tuple(
        DatasetConfig(path=f"data/{number}", weight=weight) for number, weight in enumerate(weights)
    )


@pytest.mark.parametrize(
    ("weights", "shares"),
    [
        ((), (1,)),
        ((7.5,), (1,)),
        ((1, 1), (1, 1)),
        ((0.3, 0.1), (3, 1)),
        ((0.1, 0.2, 0.7), (1, 2, 7)),
        ((1.5, 1e-3), (1500, 1)),
        ((6, 4, 10), (3, 2, 5)),
        ((99999, 1), (99999, 1)),
    ],
)
def test_resolve_shares(weights: tuple[float, ...], shares: tuple[int, ...]) -> None:
    assert resolve_shares(datasets(*weights)) == shares


@pytest.mark.parametrize(
    ("weights", "fix"),
    [
        ((100_000, 1), "use 99995, 1"),
        ((0.333333, 0.666667), "use 33332, 66664"),
        ((1, 1e-300), "use 99996, 1"),
    ],
)
def test_weights_too_fine_for_a_mix(weights: tuple[float, ...], fix: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"whole numbers with a sum of at most 100,000; {fix}, which is near$"
    ):
        resolve_shares(datasets(*weights))
    fitting = [float(weight) for weight in fix.removeprefix("use ").split(", ")]
    assert sum(resolve_shares(datasets(*fitting))) <= 100_000


ALONE = {"flavor": "", "dim": 64, "n_layers": 2, "n_heads": 4, "ffn_dim": 96}


def test_model_keys_override_the_flavor() -> None:
    assert resolve_model(ModelConfig(flavor="8B")) == FLAVORS["8B"]
    model = ModelConfig(flavor="8B_16layers", n_kv_heads=4, vocab_size=0, tie_embeddings=True)
    expected = dataclasses.replace(
        FLAVORS["8B"], n_layers=16, n_kv_heads=4, vocab_size=0, tie_embeddings=True
    )
    assert resolve_model(model) == expected


def test_rope_keys_replace_the_flavors_and_its_limit() -> None:
    scaling = {"factor": 16.0, "original_max_position_embeddings": 4096}
    args = resolve_model(ModelConfig(flavor="3-8B", rope_scaling=scaling))
    assert args.rope_scaling == RopeScaling(16.0, 1.0, 4.0, 4096)
    assert args.max_seq_len > 10**6
    none = resolve_model(ModelConfig(flavor="8B", rope_scaling={"factor": 1.0}))
    assert dataclasses.replace(none, max_seq_len=8192) == FLAVORS["3-8B"]


def test_dimensions_stand_alone_without_a_flavor() -> None:
    llama_2_7b = {"dim": 4096, "n_layers": 32, "n_heads": 32, "ffn_dim": 11008, "vocab_size": 32000}
    args = resolve_model(ModelConfig(flavor="", **llama_2_7b, rope_theta=1e4))
    assert dataclasses.replace(args, max_seq_len=4096) == ModelArgs(
        **llama_2_7b, n_kv_heads=32, rope_theta=10000.0, max_seq_len=4096
    )
    assert resolve_model(ModelConfig(**ALONE)).vocab_size == 0  # the tokenizer's


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            {"flavor": "", "dim": 64, "n_heads": 4},
            'flavor = "" has no .* set n_layers, ffn_dim too',
        ),
        ({"flavor": "8b"}, 'flavor = "8b" must be one of .*, or "" for none; did you mean "8B"'),
        (
            {"flavor": "8B_varlen"},
            r'within documents; set flavor = "8B" and \[training\] document_mask = true',
        ),
        ({"flavor": "debugmodel_flex_attn"}, 'set flavor = "debugmodel" and'),
        ({"flavor": "7B_flex"}, 'flavor = "7B_flex" must be one of'),
        ({"dim": 100}, r"dim = 100 .* 2 \* n_heads = 32, .*; use dim = 96 or 128"),
        (ALONE | {"n_kv_heads": 3}, "n_kv_heads = 3 does not divide n_heads = 4; use .* 1, or 4"),
        (
            ALONE | {"rope_scaling": {"factor": 8.0, "low_freq_factor": 4.0}},
            "low_freq_factor = 4.0, which must be below high_freq_factor = 4.0",
        ),
    ],
)
def test_dimensions_that_fit_no_model(model: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=rf"\[model\] .*{message}"):
        resolve_model(ModelConfig.model_validate(model))
