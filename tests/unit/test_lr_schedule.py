"""The schedule's values, literally."""

import math

import pytest

from torchtitan_lite.catalog.lr_schedule import DECAYS
from torchtitan_lite.config import LRSchedulerConfig

# ----- lr_factor, DECAYS -----


def factors(steps: int, *, of: int | None = None, **schedule: object) -> list[float]:
    """Shares of the peak in the first `steps` steps of a run of `of`, by default the same."""
    config = LRSchedulerConfig(**schedule)
    return [config.factor(step, training_steps=of or steps) for step in range(1, steps + 1)]


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ({"warmup_steps": 2}, [1 / 3, 2 / 3, 4 / 5, 3 / 5, 2 / 5, 1 / 5]),
        ({"warmup_steps": 1, "decay_ratio": 0.3}, [0.5] + [1.0] * 6 + [0.75, 0.5, 0.25]),
        ({"warmup_steps": 0, "decay_ratio": 0.0}, [1.0] * 4),
        ({"warmup_steps": 0, "total_steps": 9}, [0.9, 0.8, 0.7]),  # and not the steps trained
        ({"warmup_steps": 200}, [0.2, 0.4, 0.6, 0.8]),  # a run shorter than its warm-up
        ({"warmup_steps": 1, "decay_ratio": 1.0}, [0.5, 0.75, 0.5, 0.25]),  # a shortened decay
    ],
)
def test_warm_up_constant_phase_and_decay(schedule, expected):
    assert factors(len(expected), **schedule) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("decay_type", "halfway"),
    [("linear", 0.5), ("sqrt", 1 - math.sqrt(0.5)), ("cosine", 0.5)],
)
def test_decays_end_at_min_lr_factor(decay_type: str, halfway: float) -> None:
    schedule = {"warmup_steps": 0, "decay_type": decay_type, "min_lr_factor": 0.1}
    values = factors(9, **schedule)
    assert values[4] == pytest.approx(0.1 + 0.9 * halfway)
    assert values == sorted(values, reverse=True)
    past_the_end = factors(50, of=60, total_steps=9, **schedule)[-1]
    assert past_the_end == pytest.approx(0.1)


def test_the_decays_of_the_table_are_the_choices_of_the_config() -> None:
    for decay_type, decay in DECAYS.items():
        assert LRSchedulerConfig(decay_type=decay_type).decay_type == decay_type
        assert decay(0.0) == 1 and decay(1.0) == pytest.approx(0)
    with pytest.raises(ValueError, match="'linear', 'sqrt', 'cosine' or module:name"):
        LRSchedulerConfig(decay_type="step")
