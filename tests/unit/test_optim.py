"""The schedule's values, literally, and the optimizer's settings."""

import math

import pytest
import torch
from torch import nn

from torchtitan_lite.config import LRSchedulerConfig, OptimizerConfig
from torchtitan_lite.optim import build_optimizer, lr_factor


def factors(steps: int, **schedule: object) -> list[float]:
    config = LRSchedulerConfig(**schedule)
    return [lr_factor(step, schedule=config, training_steps=steps) for step in range(1, steps + 1)]


def test_warm_up_then_linear_decay_over_all_that_is_left() -> None:
    assert factors(6, warmup_steps=2) == pytest.approx([1 / 3, 2 / 3, 4 / 5, 3 / 5, 2 / 5, 1 / 5])


def test_warm_up_stable_decay() -> None:
    assert factors(10, warmup_steps=1, decay_ratio=0.3) == pytest.approx([0.5] + [1.0] * 6 + [0.75, 0.5, 0.25])


def test_no_decay() -> None:
    assert factors(4, warmup_steps=0, decay_ratio=0.0) == [1.0] * 4


@pytest.mark.parametrize(
    ("decay_type", "halfway"),
    [("linear", 0.5), ("sqrt", 1 - math.sqrt(0.5)), ("cosine", 0.5)],
)
def test_decays_end_at_min_lr_factor(decay_type: str, halfway: float) -> None:
    values = factors(9, warmup_steps=0, decay_type=decay_type, min_lr_factor=0.1)
    assert values[4] == pytest.approx(0.1 + 0.9 * halfway)
    assert values == sorted(values, reverse=True)
    past_the_end = lr_factor(
        50,
        schedule=LRSchedulerConfig(warmup_steps=0, decay_type=decay_type, min_lr_factor=0.1, total_steps=9),
        training_steps=60,
    )
    assert past_the_end == pytest.approx(0.1)


def test_the_schedule_spans_total_steps_rather_than_the_steps_trained() -> None:
    assert factors(3, warmup_steps=0, total_steps=9) == pytest.approx([0.9, 0.8, 0.7])


def test_a_schedule_shorter_than_its_warm_up_only_warms_up() -> None:
    assert factors(4, warmup_steps=200) == pytest.approx([0.2, 0.4, 0.6, 0.8])


@pytest.mark.parametrize("implementation", ["fused", "foreach", "for-loop"])
def test_implementations_make_the_same_update(implementation: str) -> None:
    def updated(**kwargs: object) -> torch.Tensor:
        torch.manual_seed(0)
        linear = nn.Linear(8, 8, bias=False)
        optimizer = build_optimizer(linear.parameters(), OptimizerConfig(lr=0.1, beta2=0.9, eps=1e-6, **kwargs))
        for _ in range(3):
            linear(torch.ones(1, 8)).square().sum().backward()
            optimizer.step()
        assert optimizer.defaults["fused"] is (kwargs.get("implementation") == "fused")
        return linear.weight.detach()

    torch.manual_seed(0)
    reference = nn.Linear(8, 8, bias=False)
    adamw = torch.optim.AdamW(reference.parameters(), lr=0.1, betas=(0.9, 0.9), eps=1e-6, weight_decay=0.1)
    for _ in range(3):
        reference(torch.ones(1, 8)).square().sum().backward()
        adamw.step()
    torch.testing.assert_close(updated(implementation=implementation), reference.weight.detach())
