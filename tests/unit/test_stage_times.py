"""The times of a pipeline's stages, with literal seconds of each rank."""

from pytest import approx
from torch import Tensor, float64, tensor

from torchtitan_lite.metrics.hardware import Peaks
from torchtitan_lite.metrics.stage_times import StageTimes

PEAKS = Peaks("one GFLOPS", {"bf16": 1e-3})
FLOPS = [{"bf16": 2_000_000, "fp8": 0}, {"bf16": 1_000_000, "fp8": 0}]


def stage_times(*rank_stages: tuple[int, ...], rank: int = 0, sharing: int = 1) -> StageTimes:
    """The times of a pipeline after the first step, of which none is in a figure."""
    times = StageTimes(rank_stages, pipeline_rank=rank, flops=FLOPS * len(rank_stages[0]))
    first = (1, 1, 99, *[9] * len(rank_stages[0]))
    times.exchanged(rows(*[first] * len(rank_stages) * sharing))
    return times


def rows(*ranks: tuple[float, ...]) -> Tensor:
    """Of each rank peak memory, steps, seconds of the pipeline and of its stages."""
    return tensor(ranks, dtype=float64)


def since_first(*ranks: tuple[float, ...]) -> Tensor:
    """The same of the steps after the first one."""
    return rows(*((gib, 1 + n, 99 + s, *(9 + x for x in own)) for gib, n, s, *own in ranks))


# ----- StageTimes -----


def test_own_values_of_a_rank():
    times = stage_times((0, 2), (1, 3), rank=1)
    totals = {"steps": 3, "step": 9.0, "pipeline": 6.0, "stage 1": 1.0, "stage 3": 2.0}
    assert times.own(totals, memory_gib=0.5) == [0.5, 3, 6.0, 1.0, 2.0]


def test_bubble_pct_of_equal_stages_is_the_formulas():
    for microbatches in (2, 4, 8):
        times = stage_times((0,), (1,))
        # The last rank waits for the first forward, 1 s, and ends before the last backward, 2 s.
        whole, own = 3.0 * (microbatches + 1), 3 * microbatches
        times.exchanged(since_first((1, 1, whole, own), (1, 1, whole - 2, own)))
        bubble = approx(100 / (microbatches + 1))  # (p - 1) / (m + p - 1)
        assert times.figures(1000, PEAKS)["bubble_pct"] == bubble


def test_figures_are_of_the_steps_since_the_last_record():
    times = stage_times((0,), (1,))
    times.exchanged(since_first((1, 1, 10, 10), (2, 1, 9, 10)))
    assert times.figures(1000, PEAKS)["bubble_pct"] == 0
    assert times.figures(1000, PEAKS) == {}  # there was no other step
    times.exchanged(since_first((3, 3, 30, 18), (2, 3, 29, 20)))
    assert times.figures(1000, PEAKS) == {
        "memory_max_gib": 3.0,
        "memory_max_rank": 0,
        "bubble_pct": approx(55.0),  # 4 and 5 of 10 s are computing
        "stage_time_s": {0: 4.0, 1: 5.0},
        # 1,000 tokens of 2 and 1 MFLOP in 4 and 5 s, at a peak of 1 GFLOPS.
        "stage_mfu": {0: approx(50.0), 1: approx(20.0)},
    }


def test_figures_of_ranks_that_share_a_stage_divide_its_tokens():
    times = stage_times((0,), (1,), sharing=2)
    # Ranks 0 and 1 have stage 0, ranks 2 and 3 stage 1. Each pipeline has a longest rank.
    times.exchanged(since_first((1, 1, 10, 2), (1, 1, 20, 6), (1, 1, 8, 5), (7, 1, 16, 5)))
    figures = times.figures(1000, PEAKS)
    assert figures["stage_time_s"] == {0: 4.0, 1: 5.0}
    assert figures["stage_mfu"] == {0: approx(25.0), 1: approx(10.0)}
    assert figures["bubble_pct"] == approx(100 * (1 - (0.2 + 0.3 + 0.5 + 0.25) / 4))
    assert figures["memory_max_rank"] == 3


def test_figures_of_a_rank_with_several_stages():
    times = stage_times((0, 3), (1, 2))
    times.exchanged(since_first((1, 1, 10, 1, 2), (1, 1, 10, 3, 4)))
    figures = times.figures(1000, PEAKS)
    assert list(figures["stage_time_s"].items()) == [(0, 1.0), (1, 3.0), (2, 4.0), (3, 2.0)]
    assert figures["bubble_pct"] == approx(50.0)


def test_figures_wait_until_all_ranks_have_a_step():
    times = StageTimes([(0,), (1,)], pipeline_rank=0, flops=FLOPS)
    assert times.figures(1000, PEAKS) == {}
    for steps in ((0, 0), (1, 0), (2, 1), (3, 1)):  # the third is the baseline
        times.exchanged(rows(*((1, n, 10 * n, 5 * n) for n in steps)))
        assert times.figures(1000, PEAKS) == {}
    times.exchanged(rows((1, 3, 30, 15), (1, 2, 20, 10)))
    assert times.figures(1000, PEAKS)["bubble_pct"] == approx(50.0)


def test_figures_without_a_peak_have_no_mfu():
    times = stage_times((0,), (1,))
    times.exchanged(since_first((1, 1, 10, 5), (1, 1, 10, 5)))
    assert times.figures(1000, Peaks("Tesla T4"))["stage_mfu"] == {}
