import os

import pytest

from torchtitan_lite.benchmarks.scaling import (
    BLOCKS,
    SWEEPS,
    WARM_UP_STEPS,
    Point,
    Setting,
    Sweep,
    SweepResult,
    affine,
    by_flops,
    long_run,
    median_point,
    point_of,
    shared_cores,
)


def points(*seconds: float, flops: float = 1.0) -> tuple[Point, ...]:
    return tuple(Point(each, 100 / each, flops) for each in seconds)


def test_a_point_leaves_out_the_warm_up() -> None:
    records = [{"step_time_s": 9.0, "tflops": 0.002, "tps": 50.0}] * WARM_UP_STEPS
    records += [{"step_time_s": each, "tflops": 0.004, "tps": 100.0} for each in (0.5, 0.25, 0.5)]
    point = point_of(records, tokens=512)
    assert (point.step_s, point.tps) == (0.5, 1024)
    assert point.flops == pytest.approx(512 * 4e9 / 100)


def test_several_runs_of_a_point_come_to_the_median() -> None:
    runs = [Point(0.5, 1024.0, 7.0), Point(0.25, 2048.0, 7.0), Point(2.0, 256.0, 7.0)]
    assert median_point(runs) == Point(0.5, 1024.0, 7.0)


def test_the_affine_law_is_met_by_a_fixed_cost_and_one_a_unit() -> None:
    assert affine([1, 2, 4, 8], points(0.3, 0.4, 0.6, 1.0)) == pytest.approx([0.3, 0.4, 0.6, 1.0])


def test_the_affine_law_is_not_met_by_a_square() -> None:
    expected = affine([1, 2, 4, 8], points(1, 4, 16, 64))
    assert (
        max(abs(each / square - 1) for each, square in zip(expected, (1, 4, 16, 64), strict=True))
        > 0.5
    )


def test_the_law_of_flops_has_the_rate_of_the_last() -> None:
    measured = [Point(1.0, 1.0, 10.0), Point(2.0, 1.0, 40.0)]
    assert by_flops([Setting(), Setting(n_layers=8)], measured) == [0.5, 2.0]


def test_the_law_of_flops_is_that_of_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    settings = [Setting(ranks=ranks) for ranks in (1, 2, 4)]
    assert by_flops(settings, points(0.5, 0.5, 1.0)) == [0.5, 0.5, 1.0]


def test_ranks_share_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    assert shared_cores([1, 2, 4], points(0.5, 0.6, 2.0)) == [0.5, 0.5, 1.0]


def test_a_row_holds_what_was_measured_against_what_was_expected() -> None:
    sweep = Sweep("layers", {x: Setting(n_layers=x) for x in (1, 2, 4)}, affine, "the law")
    result = SweepResult(sweep, points(0.25, 0.25, 0.25))
    (first, *_) = result.rows()
    assert first == pytest.approx(
        {
            "layers": 1,
            "tps": 400,
            "step_s": 0.25,
            "law_s": 0.25,
            "over_law": 1,
            "flops_s": 0.25,
            "over_flops": 1,
        }
    )
    assert str(result).splitlines()[0] == "layers: the law"
    assert len(str(result).splitlines()) == 2 + 3


def test_each_sweep_varies_one_thing() -> None:
    assert [*SWEEPS["layers"].settings] == [1, 2, 4, 8]
    assert {
        setting.seq_len * setting.local_batch_size
        for setting in SWEEPS["seq_len"].settings.values()
    } == {1024}
    assert {setting.seq_len for setting in SWEEPS["batch"].settings.values()} == {128}
    assert [setting.ranks for setting in SWEEPS["ranks"].settings.values()] == [1, 2, 4]


def test_a_long_run_that_costs_no_more_and_keeps_nothing() -> None:
    steps = 40 * BLOCKS
    run = long_run([0.01] * steps, dict.fromkeys(range(1, steps + 1), 2048))
    assert (run.steps, run.first_s, run.ratios.median, run.resident_mib) == (steps, 0.01, 1.0, 2.0)
    assert (run.growth.slope, run.growth.slope_error) == (0, 0)


def test_a_long_run_that_leaks_and_slows_down() -> None:
    steps = 40 * BLOCKS
    seconds = [0.01] * (steps // 2) + [0.02] * (steps // 2)
    run = long_run(seconds, {step: 1000 + 3 * step for step in range(1, steps + 1)})
    assert run.ratios.median == 2.0
    assert run.growth.slope == pytest.approx(3)
    assert "of the last 200 steps over the first 200, by the fastest 10% of each 20: 2.000" in str(
        run
    )
    assert run.as_json()["growth_kib_per_step"] == pytest.approx(3)


def test_neighbours_that_slow_most_steps_of_the_second_half_down() -> None:
    half = 20 * BLOCKS
    run = long_run(
        [0.01] * half + [0.01 if step % 5 == 0 else 0.03 for step in range(half)],
        dict.fromkeys(range(2 * half), 1),
    )
    assert (run.ratios.median, run.median_ratio) == pytest.approx((1.0, 3.0))


def test_memory_of_the_first_half_does_not_count() -> None:
    steps = 40 * BLOCKS
    resident = {step: 1000 * min(step, steps // 2) for step in range(1, steps + 1)}
    assert long_run([0.01] * steps, resident).growth.slope == pytest.approx(0)
