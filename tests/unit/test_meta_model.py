"""What training and planning share: the refusal of auto without a known device, and the rates of a
known one."""

from functools import partial

import pytest

from torchtitan_lite.config import (
    ActivationCheckpointConfig,
    CompileConfig,
    Config,
    Float8Config,
    MetricsConfig,
    ModelConfig,
    ParallelDegrees,
    TrainingConfig,
)
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.metrics.devices import lookup_device
from torchtitan_lite.models.flavors import FLAVORS
from torchtitan_lite.planner.meta_model import build_meta_model, device_rates, resolve_checkpointing
from torchtitan_lite.planner.roofline import DeviceRates

H100 = lookup_device("H100 SXM")


def test_rates_are_the_data_sheets_or_given():
    assert device_rates(H100, MetricsConfig()) == DeviceRates(989e12, 1979e12, 3.35e12)
    given = MetricsConfig(peak_tflops_bf16=800.0, peak_tflops_fp8=1500.0)
    assert device_rates(H100, given) == DeviceRates(800e12, 1500e12, 3.35e12)


def test_rates_are_not_guessed():
    assert device_rates(None, MetricsConfig(peak_tflops_bf16=800.0, peak_tflops_fp8=1500.0)) is None
    assert device_rates(lookup_device("A100 SXM 80GB"), MetricsConfig()) is None


def test_auto_needs_a_known_device():
    config = Config(
        model=ModelConfig(flavor="8B"),
        training=TrainingConfig(local_batch_size=1, seq_len=8192),
        float8=Float8Config(enable_float8_linear=True, filter_fqns=("auto",)),
    )
    with pytest.raises(
        ConfigError, match=r'filter_fqns = \["auto"\] weighs float8 by the bf16 and fp8 peaks'
    ):
        build_meta_model(
            config, FLAVORS["8B"], tp_degree=1, emulate=True, fused_attention=True, rates=None
        )
    off = config.model_copy(update={"float8": Float8Config(filter_fqns=("auto",))})
    meta = build_meta_model(
        off, FLAVORS["8B"], tp_degree=1, emulate=True, fused_attention=True, rates=None
    )
    assert {choice.kept_because for choice in meta.choices if choice.kind != "output"} == {
        "float8 is off"
    }


@pytest.mark.parametrize(
    ("memory_gib", "mode", "says"),
    [
        (200, "none", "the cheapest that fits: 97.2 GiB of 200.0"),
        (80, "selective", "the cheapest that fits: 45.5 GiB of 80.0"),
        (40, "full", "the cheapest that fits: 16.5 GiB of 40.0"),
        (10, "full", "and even that may not fit: 16.5 GiB of 10.0"),
    ],
)
def test_auto_checkpointing_is_the_cheapest_that_fits(
    memory_gib: float, mode: str, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = Config(
        model=ModelConfig(flavor="8B"),
        training=TrainingConfig(local_batch_size=2, seq_len=8192),
        compile=CompileConfig(enable=True),
        activation_checkpoint=ActivationCheckpointConfig(mode="auto"),
    )
    build = partial(
        build_meta_model,
        args=FLAVORS["8B"],
        tp_degree=1,
        emulate=False,
        fused_attention=True,
        rates=None,
    )
    with caplog.at_level("INFO"):
        resolved, meta = resolve_checkpointing(
            config, FLAVORS["8B"], build, degrees=ParallelDegrees(1, 64, 1), memory_gib=memory_gib
        )
    assert resolved.activation_checkpoint.mode == mode
    assert bool(meta.recomputed) == (mode != "none")
    assert f'mode = "auto" is "{mode}" here, {says}' in caplog.text


def test_another_mode_is_taken_as_it_is() -> None:
    config = Config(activation_checkpoint=ActivationCheckpointConfig(mode="full"))
    built = []
    resolved, _ = resolve_checkpointing(
        config, FLAVORS["8B"], built.append, degrees=ParallelDegrees(1, 1, 1), memory_gib=1e9
    )
    assert resolved is config and built == [config]
