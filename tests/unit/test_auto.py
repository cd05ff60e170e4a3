"""What training and planning share: what "auto" chooses, and its refusal without a known device."""

import dataclasses
from typing import Any

import pytest
from sample_jobs import job_of

from torchtitan_lite.config import (
    ActivationCheckpointConfig,
    CompileConfig,
    Config,
    Float8Config,
    ModelConfig,
    ParallelismConfig,
    TrainingConfig,
)
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.metrics.devices import DeviceSpec, lookup_device
from torchtitan_lite.models.flavors import FLAVORS, ModelArgs
from torchtitan_lite.planner.auto import find_fitting, kept_options, resolve_auto, turn_on_float8
from torchtitan_lite.planner.meta_model import build_meta_model

H100 = lookup_device("H100 SXM")
SHORT_8B = dataclasses.replace(FLAVORS["8B"], max_seq_len=8192)


def test_auto_needs_a_known_device():
    config = Config(
        model=ModelConfig(flavor="8B"),
        training=TrainingConfig(local_batch_size=1, seq_len=8192),
        float8=Float8Config(enable_float8_linear=True, filter_fqns=("auto",)),
    )
    with pytest.raises(
        ConfigError, match=r'filter_fqns = \["auto"\] compares float8 with bf16 by the bf16'
    ):
        build_meta_model(job_of(config), emulate=True)
    off = config.model_copy(update={"float8": Float8Config(filter_fqns=("auto",))})
    meta = build_meta_model(job_of(off), emulate=True)
    assert {choice.kept_because for choice in meta.choices if choice.kind != "output"} == {
        "float8 is off"
    }


AUTO_CHECKPOINTING = Config(
    model=ModelConfig(flavor="8B"),
    training=TrainingConfig(local_batch_size=2, seq_len=8192),
    compile=CompileConfig(enable=True),
    activation_checkpoint=ActivationCheckpointConfig(mode="auto"),
)


def resolve(
    config: Config,
    args: ModelArgs = FLAVORS["8B"],
    *,
    tp: int = 1,
    memory_gib: float = 1e9,
    device: DeviceSpec | None = H100,
) -> Config:
    job = job_of(config, args, degrees=(1, 64, tp))
    return resolve_auto(job, device=device, memory_gib=memory_gib).config


@pytest.mark.parametrize("device", [H100, None])
@pytest.mark.parametrize(
    ("memory_gib", "label", "says"),
    [
        (200, "none", "96.8 GiB of 200.0 GiB; the fastest other: activation_checkpoint"),
        (95, "selective 16", ""),
        # By operator is faster than every fourth block, which would fit.
        (80, "selective", ""),
        (40, "full", "no other fits"),
        (10, "full", "the smallest, and even that may not fit 10.0 GiB"),
    ],
)
def test_auto_checkpointing_is_the_fastest_that_fits(
    memory_gib: float,
    label: str,
    says: str,
    device: DeviceSpec | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level("INFO"):
        resolved = resolve(AUTO_CHECKPOINTING, memory_gib=memory_gib, device=device)
    assert resolved.activation_checkpoint.label == label
    assert f'"auto" is activation_checkpoint "{label}", fsdp_reshard_after_forward' in caplog.text
    assert says in caplog.text and ("times of an H100 SXM" in caplog.text) == (device is None)


def sequences(number: int, *, checkpoint: str = "auto") -> Config:
    """8B in bf16 on that many sequences a step, one at a time, with "auto" for what is gathered."""
    return AUTO_CHECKPOINTING.model_copy(
        update={
            "training": TrainingConfig(local_batch_size=1, seq_len=8192, global_batch_size=number),
            "activation_checkpoint": ActivationCheckpointConfig(mode=checkpoint),
            "parallelism": ParallelismConfig(fsdp_reshard_after_forward="auto"),
        }
    )


@pytest.mark.parametrize(
    ("number", "memory_gib", "checkpoint", "chosen"),
    [
        (8, 141, "auto", ("none", "never", "last")),
        (8, 70, "none", ("none", "default", "last")),
        # Two of 32 blocks are recomputed, to keep all weights.
        (8, 80, "auto", ("selective 16", "never", "last")),
        (128, 141, "auto", ("none", "never", "last")),
        # Whole float32 gradients are faster where they fit.
        (128, 80, "auto", ("none", "default", "each")),
    ],
)
def test_auto_chooses_what_is_recomputed_gathered_again_and_reduced_together(
    number: int, memory_gib: float, checkpoint: str, chosen: tuple[str, str, str]
) -> None:
    job = job_of(sequences(number, checkpoint=checkpoint), SHORT_8B, degrees=(1, 8, 1))
    job = resolve_auto(job, device=H100, memory_gib=memory_gib)
    ac, sharding = job.config.activation_checkpoint, job.config.parallelism
    kept = ac.label, sharding.fsdp_reshard_after_forward, sharding.fsdp_reduce_gradients
    assert kept == chosen
    assert {f"parallelism.fsdp_{key}" for key in ("reshard_after_forward", "reduce_gradients")} <= {
        *job.chosen
    }


@pytest.mark.parametrize("schedule", ["1F1B", "InterleavedZeroBubble"])
def test_weights_of_zero_bubble_schedules_stay_gathered_though_they_do_not_fit(
    schedule: str,
) -> None:
    config = sequences(8, checkpoint="none").model_copy(
        update={
            "parallelism": ParallelismConfig(
                fsdp_reshard_after_forward="auto",
                pipeline_parallel_degree=2,
                pipeline_parallel_schedule=schedule,
            )
        }
    )
    job = job_of(config, SHORT_8B, degrees=(1, 4, 1), pp=2)
    job = resolve_auto(job, device=H100, memory_gib=1)
    chosen = {"1F1B": "always", "InterleavedZeroBubble": "default"}[schedule]
    assert job.config.parallelism.fsdp_reshard_after_forward == chosen


@pytest.mark.parametrize(
    ("degrees", "training"),
    [
        ((1, 8, 1), {}),
        ((1, 1, 1), {"global_batch_size": 16}),
        # Their sums would be in bf16.
        ((1, 8, 1), {"global_batch_size": 128, "dtype": "bfloat16"}),
    ],
    ids=["one microbatch", "one rank", "bf16"],
)
def test_auto_reduces_in_the_last_microbatch_where_each_is_no_alternative(
    degrees: tuple[int, int, int], training: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("torchtitan_lite.planner.auto.kept_options")  # nothing is planned
    config = Config(training=TrainingConfig(local_batch_size=1, seq_len=8192, **training))
    job = resolve_auto(job_of(config, SHORT_8B, degrees=degrees), device=H100, memory_gib=1)
    assert job.config.parallelism.fsdp_reduce_gradients == "last"


def test_70b_accumulates_gradients_on_64_gpus() -> None:
    args = dataclasses.replace(FLAVORS["3-70B"], max_seq_len=8192)
    job = job_of(sequences(8 * 64), args, degrees=(1, 64, 1))
    best, *_ = kept_options(job, device=H100, memory_gib=80)
    assert round(best.reserved_gib, 1) == 46.5
    moments = best.work.moments()
    assert {moment.gradients for moment in moments} == {70_553_706_496 * 4 // 64}


def test_no_choice_that_fits_is_faster_by_more_than_a_half_percent() -> None:
    job = job_of(sequences(128), SHORT_8B, degrees=(1, 8, 1))
    chosen = kept_options(job, device=H100, memory_gib=100)
    assert all(each.reserved_gib <= 100 for each in chosen)
    best, *others = chosen
    assert min(each.step_s for each in others) * 1.005 > best.step_s
    assert [each.step_s for each in others] == sorted(each.step_s for each in others)

    # None of those left out fits: with 1e9 GiB there are all seven times two times two.
    every = kept_options(job, device=H100, memory_gib=1e9)
    assert len(every) == 7 * 2 * 2
    left_out = [each for each in every if each.reserved_gib > 100]
    assert len(left_out) + len(chosen) == len(every)


def test_auto_recomputes_no_block_that_a_model_does_not_have() -> None:
    args = dataclasses.replace(FLAVORS["8B"], n_layers=4)
    options = kept_options(job_of(sequences(8), args), device=H100, memory_gib=1e9)
    labels = {each.work.job.config.activation_checkpoint.label for each in options}
    assert labels == {"none", "selective 4", "selective 3", "selective", "full"}

    # Nor is one suggested, whatever the memory.
    *_, largest = sorted(options, key=lambda each: each.reserved_gib)
    sizes = range(1, int(largest.reserved_gib) + 1)
    found = [each for gib in sizes for each in find_fitting(largest.work, gib)]
    assert {each["activation_checkpoint"] for each in found} <= labels


def test_one_rank_has_one_choice_of_what_stays_gathered() -> None:
    config = sequences(8, checkpoint="full")
    jobs = [job_of(config, SHORT_8B, degrees=(1, 1, 1))]
    parallelism = ParallelismConfig(fsdp_reshard_after_forward="default")
    default = config.model_copy(update={"parallelism": parallelism})
    jobs.append(job_of(default, SHORT_8B, degrees=(1, 1, 1)))
    kept = [kept_options(job, device=H100, memory_gib=80) for job in jobs]
    assert [len(each) for each in kept] == [1, 1]
    # Larger layouts have others.
    auto, given = (find_fitting(each[0].work, 80) for each in kept)
    assert auto == given
    assert auto


@pytest.mark.parametrize(("dtype", "given"), [("float32", "each"), ("bfloat16", "last")])
def test_larger_layouts_than_one_rank_reduce_gradients_in_each_microbatch_where_that_is_possible(
    dtype: str, given: str
) -> None:
    found = []
    for reduced in ("auto", given):
        config = sequences(16, checkpoint="full").model_copy(
            update={"parallelism": ParallelismConfig(fsdp_reduce_gradients=reduced)}
        )
        training = config.training.model_copy(update={"dtype": dtype})
        config = config.model_copy(update={"training": training})
        job = job_of(config, SHORT_8B, degrees=(1, 1, 1))
        job = resolve_auto(job, device=H100, memory_gib=80)
        assert job.config.parallelism.fsdp_reduce_gradients == (
            "last" if reduced == "auto" else given
        )
        found.append(find_fitting(build_meta_model(job), 40))
    assert found[0] == found[1]
    assert found[0]


@pytest.mark.parametrize(("recipe", "kept"), [("tensorwise", False), ("rowwise", True)])
def test_float8_that_is_turned_on_has_no_key_that_its_recipe_excludes(
    recipe: str, kept: bool
) -> None:
    float8 = Float8Config.model_validate({"recipe_name": recipe, "scale_gradients_in_matmul": True})
    job = turn_on_float8(job_of(Config(float8=float8)), filter_fqns=())
    assert job.config.float8.scale_gradients_in_matmul == kept


def test_a_config_without_auto_is_returned_as_it_is() -> None:
    config = Config(
        activation_checkpoint=ActivationCheckpointConfig(mode="full"),
        parallelism=ParallelismConfig(fsdp_reduce_gradients="each"),
    )
    assert resolve(config, device=None) == config


def auto_float8(*filters: str, compiled: bool = True, **float8: Any) -> Config:
    return AUTO_CHECKPOINTING.model_copy(
        update={
            "training": TrainingConfig(local_batch_size=1, seq_len=8192),
            "compile": CompileConfig(enable=compiled),
            "float8": Float8Config(
                enable_float8_linear=True, filter_fqns=("auto", *filters), **float8
            ),
        }
    )


@pytest.mark.parametrize(
    ("config", "tp", "kept"),
    [
        (auto_float8(), 1, []),
        (auto_float8("layers.0", "w1"), 1, []),
        # Casts and reductions of scales cost more than small matmuls gain.
        (auto_float8("wq", "w1", "w2", "w3"), 8, ["attention.wk", "attention.wv", "attention.wo"]),
    ],
)
def test_resolved_filters_select_the_same_linears_without_a_data_sheet(
    config: Config, tp: int, kept: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        resolved = resolve(config, tp=tp)
    patterns = [pattern for pattern in config.float8.filter_fqns if pattern != "auto"]
    filters = list(resolved.float8.filter_fqns)
    assert filters[: len(patterns)] == patterns
    assert "auto" not in filters and set(kept) <= set(filters)
    assert all(f"{kind} (" in caplog.text for kind in kept)

    with_auto = config.model_copy(update={"activation_checkpoint": resolved.activation_checkpoint})
    converted = [
        {name for choice in meta.choices if choice.converted for name in choice.names}
        for meta in (
            build_meta_model(job_of(each, FLAVORS["8B"], degrees=(1, 1, tp)), device=device)
            for each, device in ((with_auto, H100), (resolved, None))
        )
    ]
    assert converted[0] == converted[1]
    assert bool(converted[0]) == (tp == 1)


def test_output_is_not_converted_where_auto_keeps_it(caplog: pytest.LogCaptureFixture) -> None:
    args = dataclasses.replace(FLAVORS["8B"], vocab_size=50257)
    config = auto_float8(convert_output=True)
    with caplog.at_level("INFO"):
        resolved = resolve(config, args)
    assert "output (out_features 50257, not a multiple of 16)" in caplog.text
    assert (resolved.float8.filter_fqns, resolved.float8.convert_output) == ((), False)
    assert resolve(config).float8.convert_output


def test_float8_is_off_where_auto_converts_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        resolved = resolve(auto_float8(compiled=False))
    assert not resolved.float8.enable_float8_linear
    assert "x the time of bf16, as eager casts are not fused)" in caplog.text
    build_meta_model(job_of(resolved))


def test_auto_is_resolved_by_a_data_sheet_only() -> None:
    with pytest.raises(ConfigError, match=r'filter_fqns = \["auto"\] compares float8 with bf16'):
        resolve(auto_float8(), device=None)


def test_another_layout_of_the_same_model_is_predicted_without_building_it_again() -> None:
    config = auto_float8("wk").model_copy(
        update={"float8": Float8Config(enable_float8_linear=True, filter_fqns=("wk",))}
    )
    one, other = (
        job_of(config, FLAVORS["8B"], degrees=degrees) for degrees in ((1, 8, 1), (2, 64, 1))
    )
    moved = dataclasses.replace(build_meta_model(one), job=other)
    assert moved.predict(H100) == build_meta_model(other).predict(H100)
    assert moved.predict(H100) != build_meta_model(one).predict(H100)
    assert moved.moments() == build_meta_model(other).moments()
