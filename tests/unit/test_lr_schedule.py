"""The schedule's values, literally."""

import math

import pytest

from torchtitan_lite.config import LRSchedulerConfig, log_odd_schedule
from torchtitan_lite.lr_schedule import DECAYS, lr_factor


def factors(steps: int, *, of: int | None = None, **schedule: object) -> list[float]:
    """Shares of the peak in the first `steps` steps of a run of `of`, by default the same."""
    keys = LRSchedulerConfig(**schedule).model_dump()
    return [lr_factor(step, training_steps=of or steps, **keys) for step in range(1, steps + 1)]


def test_warm_up_then_linear_decay_over_all_that_is_left() -> None:
    assert factors(6, warmup_steps=2) == pytest.approx([1 / 3, 2 / 3, 4 / 5, 3 / 5, 2 / 5, 1 / 5])


def test_warm_up_stable_decay() -> None:
    assert factors(10, warmup_steps=1, decay_ratio=0.3) == pytest.approx(
        [0.5] + [1.0] * 6 + [0.75, 0.5, 0.25]
    )


def test_no_decay() -> None:
    assert factors(4, warmup_steps=0, decay_ratio=0.0) == [1.0] * 4


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


def test_the_schedule_spans_total_steps_rather_than_the_steps_trained() -> None:
    assert factors(3, warmup_steps=0, total_steps=9) == pytest.approx([0.9, 0.8, 0.7])


def test_a_schedule_shorter_than_its_warm_up_only_warms_up() -> None:
    assert factors(4, warmup_steps=200) == pytest.approx([0.2, 0.4, 0.6, 0.8])


@pytest.mark.parametrize("decay_type", DECAYS)
def test_a_decay_of_the_table_is_a_choice_of_the_config(decay_type: str) -> None:
    assert LRSchedulerConfig(decay_type=decay_type).decay_type == decay_type
    assert DECAYS[decay_type](0.0) == 1 and DECAYS[decay_type](1.0) == pytest.approx(0)


def test_another_decay_is_refused_with_the_choices() -> None:
    with pytest.raises(ValueError, match="'linear', 'sqrt' or 'cosine'"):
        LRSchedulerConfig(decay_type="step")


@pytest.mark.parametrize(
    ("steps", "total_steps", "said"),
    [(20, None, "20"), (200, None, ""), (20, 1000, ""), (300, 50, "50")],
)
def test_a_warm_up_longer_than_the_schedule_is_said_to_be_shortened(
    steps: int, total_steps: int | None, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        schedule = LRSchedulerConfig(warmup_steps=200, total_steps=total_steps)
        log_odd_schedule(schedule, steps=steps, start=0)
    assert [f"shortened to {said}, and" in message for message in caplog.messages] == [True] * bool(
        said
    )


def test_a_schedule_that_ends_before_the_run_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    """As where a new run takes the schedule of an earlier one, but not its steps."""
    for start, total in ((0, None), (-4, 10), (4, None), (0, 3)):
        log_odd_schedule(LRSchedulerConfig(total_steps=total), steps=6, start=start)
    assert not caplog.text
    log_odd_schedule(LRSchedulerConfig(), steps=6, start=-4)
    assert "ends at step 2 of 6; set total_steps = 10" in caplog.text
