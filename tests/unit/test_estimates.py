import itertools
import math
import statistics

import pytest

from torchtitan_lite.benchmarks.estimates import Line, Ratios, block_quantiles, measure_pairs


def test_ratios_are_taken_pair_by_pair() -> None:
    ratios = Ratios.of([1.0, 4.0, 9.0], [2.0, 4.0, 6.0])
    assert ratios.values == (0.5, 1.0, 1.5)
    assert ratios.quartiles == (0.75, 1.0, 1.25)
    assert ratios.median == 1.0
    assert ratios.standard_error == pytest.approx(1.2533 * 0.5 / 1.349 / math.sqrt(3), rel=1e-4)
    assert str(ratios) == "1.000, standard error 0.268, quartiles 0.750 to 1.250, from 3 pairs"


def test_the_standard_error_of_a_median_of_normally_distributed_ratios() -> None:
    values = statistics.NormalDist(1.0, 0.02).samples(4000, seed=0)
    assert Ratios(tuple(values)).standard_error == pytest.approx(
        1.2533 * 0.02 / math.sqrt(4000), rel=0.05
    )
    with_bursts = (*values[:3960], *[30.0] * 40)
    assert Ratios(with_bursts).standard_error == pytest.approx(
        Ratios(tuple(values)).standard_error, rel=0.05
    )


def test_ratios_need_as_many_of_each() -> None:
    with pytest.raises(ValueError, match="shorter"):
        Ratios.of([1.0, 2.0], [1.0])


def test_a_drift_of_the_machine_is_in_no_ratio() -> None:
    drift = [1.0, 1.1, 1.3, 1.7, 2.5]
    assert Ratios.of([0.98 * each for each in drift], drift).values == pytest.approx([0.98] * 5)


def test_neither_of_a_pair_always_comes_first() -> None:
    turns = itertools.count()
    assert measure_pairs(lambda: ("one", next(turns)), lambda: ("other", next(turns)), pairs=3) == (
        [("one", 0), ("one", 3), ("one", 4)],
        [("other", 1), ("other", 2), ("other", 5)],
    )


def test_the_line_through_points_on_one() -> None:
    line = Line.through([1, 2, 4, 8], [3, 5, 9, 17])
    assert (line.intercept, line.slope) == pytest.approx((1, 2))
    assert line.slope_error == pytest.approx(0, abs=1e-12)
    assert line.at(3) == pytest.approx(7)


def test_the_standard_error_of_a_slope() -> None:
    # Residuals -0.1, 0.2, -0.1 about 0.9 + x; 2 degrees of freedom are taken.
    line = Line.through([0, 1, 2], [0.8, 2.1, 2.8])
    assert (line.intercept, line.slope) == pytest.approx((0.9, 1.0))
    assert line.slope_error == pytest.approx(math.sqrt(0.06 / 1 / 2))


def test_two_points_tell_no_error() -> None:
    assert math.isnan(Line.through([0, 1], [0, 1]).slope_error)


def test_quantiles_of_blocks_leave_out_the_rest() -> None:
    values = [1.0, 2.0, 30.0, 6.0, 5.0, 4.0, 7.0]
    assert block_quantiles(values, blocks=2) == [statistics.median([1, 2, 30]), 5.0]
    assert block_quantiles(values, blocks=2, quantile=0.1) == [1.0, 4.0]
