"""Degrees, batch sizes, shares and dimensions that follow from the config."""

from dataclasses import astuple, replace

import pytest

from torchtitan_lite.base.errors import ConfigError
from torchtitan_lite.catalog.flavors import FLAVORS, ModelArgs, RopeScaling
from torchtitan_lite.config import (
    BatchSizes,
    Config,
    DatasetConfig,
    ModelConfig,
    ParallelDegrees,
    ParallelismConfig,
    TrainingConfig,
    keep_batch,
    resolve_batch,
    resolve_degrees,
    resolve_model,
    resolve_shares,
)

# ----- resolve_degrees, ParallelDegrees -----


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
        ((2, 2, 1, 2), 8, (2, 2, 1, 2, 1)),
        ((1, -1, 8, 1), 8, (1, 1, 8, 1, 1)),
        ((2, -1, 2, 2, 3), 48, (2, 2, 2, 2, 3)),
    ],
)
def test_resolve_degrees(degrees, world_size, resolved):
    result = resolve_degrees(parallelism(*degrees), world_size=world_size)
    assert astuple(result) == resolved
    assert result.world_size == world_size


def test_parallel_degrees_of_data_and_of_shards():
    # Ranks that share sequences have the same data, but shard the weights.
    degrees = ParallelDegrees(dp_replicate=2, dp_shard=3, cp=7, tp=5, pp=11)
    assert (degrees.dp, degrees.fsdp, degrees.world_size) == (6, 21, 2310)


@pytest.mark.parametrize(("degrees", "world_size", "message"), [
    ((1, 3, 1, 2), 4, r"\[parallelism\] data_parallel_replicate_degree \* "
     r"pipeline_parallel_degree \* context_parallel_degree \* tensor_parallel_degree = "
     r"1 \* 1 \* 1 \* 2 = 2 leaves 2 of 4 processes, .*_shard_degree = 3; .* 2 or -1"),
    ((1, 0, 1, 1), 4, "= 1 leaves 4 of 4 processes, .* = 0; .* 4 or -1"),
    ((2, -1, 3, 4), 36, r"2 \* 1 \* 3 \* 4 = 24 .* 36; run 24 or 48"),
    ((1, 3, 1, 2), 5, r"1 \* 1 \* 1 \* 2 = 2 .* 5; run 4 or 6"),
    ((1, -1, 4, 1), 2, r"1 \* 1 \* 4 \* 1 = 4 .* 2; run 4 or 8"),
    ((1, -1, 1, 1, 4), 6, r"1 \* 4 \* 1 \* 1 = 4 .* 6; run 4 or 8"),
])  # fmt: skip
def test_resolve_degrees_refuses_those_that_do_not_fit(degrees, world_size, message):
    with pytest.raises(ConfigError, match=message):
        resolve_degrees(parallelism(*degrees), world_size=world_size)


# ----- resolve_batch -----


@pytest.mark.parametrize(
    ("pp", "size", "local", "total", "dp", "resolved"),
    [
        (1, 1, 8, -1, 1, BatchSizes(8, 8, 1)),
        (1, 1, 8, -1, 4, BatchSizes(8, 32, 1)),
        (1, 3, 4, 64, 2, BatchSizes(4, 64, 8)),  # without a pipeline its size has no effect
        (2, 1, 8, -1, 1, BatchSizes(1, 8, 8)),
        (2, 4, 8, -1, 2, BatchSizes(4, 16, 2)),
        (2, 2, 8, 64, 2, BatchSizes(2, 64, 16)),  # microbatches of gradient accumulation too
    ],
)
def test_resolve_batch(pp, size, local, total, dp, resolved):
    training = TrainingConfig(local_batch_size=local, global_batch_size=total)
    pipeline = ParallelismConfig(
        pipeline_parallel_degree=pp, pipeline_parallel_microbatch_size=size
    )
    assert resolve_batch(training, pipeline, dp_degree=dp) == resolved


def test_resolve_batch_refuses_a_local_batch_that_microbatches_do_not_divide():
    pipeline = ParallelismConfig(pipeline_parallel_degree=2, pipeline_parallel_microbatch_size=3)
    message = r"\[training\] local_batch_size = 8 .*pipeline_parallel_microbatch_size = 3; .*6 or 9"
    with pytest.raises(ConfigError, match=message):
        resolve_batch(TrainingConfig(local_batch_size=8), pipeline, dp_degree=1)


@pytest.mark.parametrize(
    ("total", "fix"), [(0, "32 or 64"), (30, "32 or 64"), (63, "32 or 64"), (65, "64 or 96")]
)
def test_resolve_batch_refuses_a_global_batch_that_does_not_divide(total, fix):
    training = TrainingConfig(local_batch_size=4, global_batch_size=total)
    message = rf"\[training\] global_batch_size = {total} .* 4 \* 8 = 32; use {fix}$"
    with pytest.raises(ConfigError, match=message):
        resolve_batch(training, ParallelismConfig(), dp_degree=8)


# ----- keep_batch -----


@pytest.mark.parametrize(("local", "total", "world_size", "saved", "kept"), [
    (4, -1, 2, "local_batch_size = 4", -1),
    (4, -1, 1, "local_batch_size = 4", 8),
    (2, -1, 2, "local_batch_size = 4\nglobal_batch_size = -1", 8),
    (4, 16, 2, "local_batch_size = 4", 16),
    (2, -1, 4, "local_batch_size = 4", -1),
    (1, -1, 1, "local_batch_size = 4\nglobal_batch_size = 24", 24),
    # Keys and values of other versions.
    (4, -1, 1, 'local_batch_size = 4\nold = 1\n[optimizer]\nstate_dtype = "int8"\n[a]', 8),
])  # fmt: skip
def test_the_saved_batch_is_kept_where_none_is_asked_for(
    local, total, world_size, saved, kept, notices
):
    training = {"local_batch_size": local, "global_batch_size": total}
    config = Config.model_validate({"training": training})
    saved = f"[training]\n{saved}"
    found = keep_batch(config, saved=saved, saved_dp=2, world_size=world_size)
    assert found.training.global_batch_size == kept
    said = f"global_batch_size = -1 keeps the checkpoint's, {kept}" in notices.text
    assert said == (kept != total)


# ----- resolve_shares -----


def datasets(*weights: float) -> tuple[DatasetConfig, ...]:
    return tuple(
        DatasetConfig(path=f"data/{number}", weight=weight) for number, weight in enumerate(weights)
    )


@pytest.mark.parametrize(
    ("weights", "shares"),
    [
        ((), (1,)),
        ((7.5,), (1,)),
        ((0.3, 0.1), (3, 1)),
        ((0.1, 0.2, 0.7), (1, 2, 7)),
        ((1.5, 1e-3), (1500, 1)),
        ((6, 4, 10), (3, 2, 5)),
        ((99999, 1), (99999, 1)),
    ],
)
def test_resolve_shares(weights, shares):
    assert resolve_shares(datasets(*weights)) == shares


@pytest.mark.parametrize("weights", [(100_000, 1), (0.333333, 0.666667), (1, 1e-300)])
def test_resolve_shares_refuses_weights_that_are_too_fine(weights):
    with pytest.raises(ConfigError, match=r"\[training\] datasets.* : .* at most 100,000; round"):
        resolve_shares(datasets(*weights))


# ----- resolve_model -----

ALONE = {"flavor": "", "dim": 64, "n_layers": 2, "n_heads": 4, "ffn_dim": 96}


def test_resolve_model_overrides_the_flavor():
    assert resolve_model(ModelConfig(flavor="8B")) == FLAVORS["8B"]
    changes = {"n_layers": 16, "n_kv_heads": 4, "vocab_size": 0, "tie_embeddings": True}
    assert resolve_model(ModelConfig(flavor="8B", **changes)) == replace(FLAVORS["8B"], **changes)


def test_resolve_model_has_no_limit_with_other_rope_keys_than_the_flavors():
    scaling = {"factor": 16.0, "original_max_position_embeddings": 4096}
    args = resolve_model(ModelConfig(flavor="3-8B", rope_scaling=scaling))
    assert args.rope_scaling == RopeScaling(16.0, 1.0, 4.0, 4096)
    assert args.max_seq_len > 10**6
    none = resolve_model(ModelConfig(flavor="8B", rope_scaling={"factor": 1.0}))
    assert replace(none, max_seq_len=8192) == FLAVORS["3-8B"]


def test_resolve_model_takes_dimensions_without_a_flavor():
    llama_2 = {"dim": 4096, "n_layers": 32, "n_heads": 32, "ffn_dim": 11008, "vocab_size": 32000}
    args = resolve_model(ModelConfig(flavor="", **llama_2, rope_theta=1e4))
    assert replace(args, max_seq_len=4096) == ModelArgs(
        **llama_2, n_kv_heads=32, rope_theta=10000.0, max_seq_len=4096
    )
    assert resolve_model(ModelConfig(**ALONE)).vocab_size == 0  # the tokenizer's


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"flavor": "", "dim": 64, "n_heads": 4}, 'flavor = "" .* set n_layers, ffn_dim'),
        ({"flavor": "8b"}, 'flavor = "8b" must be .*did you mean "8B"'),
        ({"dim": 100}, r"dim = 100 .* 2 \* n_heads = 32, .*; use 96 or 128"),
        (ALONE | {"n_kv_heads": 3}, "n_kv_heads = 3 .* n_heads = 4; use 1, or 4"),
        (
            ALONE | {"rope_scaling": {"factor": 8.0, "low_freq_factor": 4.0}},
            "low_freq_factor = 4.0, .* high_freq_factor = 4.0",
        ),
    ],
)
def test_resolve_model_refuses_dimensions_that_do_not_fit(model, message):
    with pytest.raises(ConfigError, match=rf"\[model\] .*{message}"):
        resolve_model(ModelConfig.model_validate(model))
