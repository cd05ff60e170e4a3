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
    TrainingConfig,
)
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.metrics.devices import DeviceSpec, lookup_device
from torchtitan_lite.models.flavors import BLOCK_LINEARS, FLAVORS, ModelArgs
from torchtitan_lite.planner.meta_model import build_meta_model, resolve_auto

H100 = lookup_device("H100 SXM")


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


@pytest.mark.parametrize(
    ("memory_gib", "mode", "says"),
    [
        (200, "none", "the cheapest that fits: 97.3 GiB of 200.0"),
        (80, "selective", "the cheapest that fits: 45.6 GiB of 80.0"),
        (40, "full", "the cheapest that fits: 16.6 GiB of 40.0"),
        (10, "full", "and even that may not fit: 16.6 GiB of 10.0"),
    ],
)
def test_auto_checkpointing_is_the_cheapest_that_fits(
    memory_gib: float, mode: str, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        resolved = resolve(AUTO_CHECKPOINTING, memory_gib=memory_gib, device=None)
    assert resolved.activation_checkpoint.mode == mode
    assert f'mode = "auto" is "{mode}" here, {says}' in caplog.text


def test_a_config_without_auto_is_returned_as_it_is() -> None:
    config = Config(activation_checkpoint=ActivationCheckpointConfig(mode="full"))
    assert resolve(config, device=None) is config


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
        # Reductions of scales cost more than small matmuls gain.
        (auto_float8("wq"), 8, list(BLOCK_LINEARS.keys() - {"attention.wq"})),
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
