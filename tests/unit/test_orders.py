"""Plans of pipelines: the order of passes, pauses, and memory of each rank."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from sample_jobs import job_of
from sample_plans import DEVICE, RATES
from torch.distributed.pipelining.schedules import get_schedule_class

from torchtitan_lite.catalog.flavors import ModelArgs
from torchtitan_lite.catalog.schedules import SCHEDULES
from torchtitan_lite.config import Config, resolve_stages
from torchtitan_lite.config.job import Job
from torchtitan_lite.planner.memory import rank_moments
from torchtitan_lite.planner.orders import in_flight, rank_ends, rank_order
from torchtitan_lite.planner.pipeline_time import time_pipeline
from torchtitan_lite.planner.roofline import Roofline

ARGS = ModelArgs(dim=1024, n_layers=6, n_heads=8, n_kv_heads=8, ffn_dim=4096, vocab_size=32000)
SIZES = [(2, 1, 2), (2, 1, 8), (4, 1, 4), (4, 1, 9), (8, 1, 32)]
LOOPED_SIZES = [(2, 2, 2), (2, 2, 8), (4, 2, 8), (4, 3, 12), (4, 2, 6), (8, 2, 32)]
MIB = 2**20

# ----- rank_order -----


def torch_order(schedule: str, degree: int, stages: int, microbatches: int) -> list[list[str]]:
    """The actions of each rank by torch's schedule, such as 1F0: stage, kind and microbatch."""
    group = {"group_size": degree, "group_rank": 0, "num_stages": stages}
    about = {"submod": None, "is_last": False, "has_backward": True}
    own = range(0, stages, degree)
    made: Any = [SimpleNamespace(**group, **about, stage_index=i) for i in own]
    looped = SCHEDULES[schedule].looped
    planned = get_schedule_class(schedule)(made if looped else made[0], microbatches)
    order = planned.pipeline_order if looped else planned._get_pipeline_order()
    return [
        [
            f"{action.stage_index}{action.computation_type.value}{action.microbatch_index}"
            for action in order[rank]
            if action is not None and action.computation_type.value in ("F", "B")
        ]
        for rank in range(degree)
    ]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_ranks_run_in_the_order_of_torch(schedule: str) -> None:
    for degree, each, microbatches in LOOPED_SIZES if SCHEDULES[schedule].looped else SIZES:
        stages = degree * each
        theirs = torch_order(schedule, degree, stages, microbatches)
        sizes = {"degree": degree, "stages": stages, "microbatches": microbatches}
        for rank in range(degree):
            ours = [f"{a.stage}{a.kind}{a.microbatch}" for a in rank_order(schedule, rank, **sizes)]
            if schedule == "1F1B":  # there torch counts the last rank's forwards from 1
                ours, theirs[rank] = ([a[:2] for a in order] for order in (ours, theirs[rank]))
            assert ours == theirs[rank]


# ----- rank_ends -----


def bubble(schedule: str, degree: int, each: int, microbatches: int, *, send_s: float = 0) -> float:
    """Share of the time in which the first rank waits, where B takes twice as long as F."""
    sizes = {"degree": degree, "stages": degree * each, "microbatches": microbatches}
    orders = [rank_order(schedule, rank, **sizes) for rank in range(degree)]
    passes = {"F": 1.0, "B": 2.0}
    seconds = {(kind, i): passes[kind] for kind in passes for i in range(degree * each)}
    return 1 - 3 * each * microbatches / max(rank_ends(orders, seconds, send_s=send_s))


def test_share_of_pauses_with_equal_stages() -> None:
    assert bubble("1F1B", 2, 1, 2) == pytest.approx(1 / 3)
    assert bubble("1F1B", 2, 1, 8) == pytest.approx(1 / 9)
    assert bubble("GPipe", 4, 1, 8) == pytest.approx(3 / 11)
    assert bubble("1F1B", 8, 1, 32) == pytest.approx(7 / 39)
    assert bubble("Interleaved1F1B", 8, 2, 32) == pytest.approx(7 / 71)
    assert bubble("Interleaved1F1B", 4, 3, 12) == pytest.approx(3 / 39)


def test_sends_delay_each_turn_of_two_neighbours() -> None:
    # The first rank begins its third forward when it has sent two and has a gradient back.
    assert bubble("1F1B", 2, 1, 3, send_s=0.5) == pytest.approx(1 - 9 / 14)
    assert bubble("GPipe", 2, 1, 3, send_s=0.5) == pytest.approx(1 - 9 / 13)


# ----- in_flight -----


@pytest.mark.parametrize(
    ("schedule", "rank", "flight"),
    [
        ("GPipe", 0, (8, 7)),
        ("1F1B", 0, (4, 4)),
        ("1F1B", 3, (1, 1)),
        ("Interleaved1F1B", 0, (11, 11)),
        ("Interleaved1F1B", 3, (5, 5)),
    ],
)
def test_microbatches_in_flight(schedule: str, rank: int, flight: tuple[int, int]) -> None:
    stages = 8 if SCHEDULES[schedule].looped else 4
    order = rank_order(schedule, rank, degree=4, stages=stages, microbatches=8)
    kept = dict.fromkeys(range(stages), 1)
    assert in_flight(order, kept, kept) == flight


def test_what_backward_does_not_free_adds_up() -> None:
    # F0 F0 F2 F2 F0 B2 F0 B2 F2 B0 F2 B0 and four more backward passes.
    order = rank_order("Interleaved1F1B", 0, degree=2, stages=4, microbatches=4)
    assert in_flight(order, {0: 3, 2: 4}, {0: 3, 2: 4}) == (17, 17)
    assert in_flight(order, {0: 3, 2: 4}, {0: 2, 2: 2}) == (17, 22)


# ----- rank_moments -----


def pipeline_job(schedule: str = "1F1B", *, n: int = 4, **parallelism: Any) -> Job:
    """A job of 1,024 tokens a microbatch on two ranks, eager in bf16, that recomputes all."""
    pipeline = {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": schedule}
    config = Config.model_validate(
        {
            "activation_checkpoint": {"mode": "full"},
            "parallelism": pipeline | parallelism,
            "training": {"seq_len": 1024, "local_batch_size": n, "global_batch_size": n},
        }
    )
    job = job_of(config, replace(ARGS, max_seq_len=1024), degrees=(1, 1, 1))
    stages = resolve_stages(config.parallelism, n_layers=ARGS.n_layers)
    return replace(job, degrees=replace(job.degrees, pp=2), stages=stages)


def test_a_rank_holds_its_stages() -> None:
    block = 4 * 1024**2 + 3 * 1024 * 4096 + 2 * 1024
    matrix = 32000 * 1024
    first, last = (moments[-1] for moments in rank_moments(pipeline_job(), (), on_cpu=False))
    assert first.parameters == 4 * (3 * block + matrix)
    assert last.parameters == 4 * (3 * block + matrix + 1024)
    # Buffers for 4 microbatches of 1,024 x 1,024 in bf16, from one neighbour each.
    rotary = 4 * 1024 * 128
    assert first.buffers == last.buffers == 4 * 2 * MIB + rotary


def test_a_stage_without_blocks_is_planned() -> None:
    blocks = [f"layers.{i}" for i in range(ARGS.n_layers)]
    stages = [["tok_embeddings"], [*blocks, "norm", "output"]]
    job = pipeline_job(module_fqns_per_model_part=stages)
    assert rank_moments(job, (), on_cpu=False)[0][-1].parameters == 4 * 32000 * 1024
    timed = time_pipeline(Roofline(DEVICE, RATES, job), [], [])
    assert timed.actions_s[0]["F"] < timed.actions_s[1]["F"] / 10


def test_gradients_stay_whole_and_activations_follow_the_schedule() -> None:
    held = [
        [each for each in moments if each.name == "gradients of tok_embeddings"]
        for schedule in ("1F1B", "GPipe")
        for moments in rank_moments(pipeline_job(schedule), (), on_cpu=False)[:1]
    ]
    # A microbatch keeps the inputs of three blocks and the stage's output, 2 MiB each.
    microbatch = 4 * 2 * MIB
    for i, (one, all_) in enumerate(zip(*held, strict=True)):
        assert one.gradients == all_.gradients == (0, one.parameters)[i]
        assert all_.activations - one.activations == (2, 1)[i] * microbatch


def test_interleaved_stages_keep_what_they_receive_and_what_they_send() -> None:
    jobs = [pipeline_job("Interleaved1F1B", n=n) for n in (4, 8)]
    before, after = (
        [max(moment.total for moment in rank) for rank in rank_moments(job, (), on_cpu=False)]
        for job in jobs
    )
    # Of a rank's two stages one has two neighbours, the other one: of each microbatch they receive
    # three residual streams of 2 MiB, and send three.
    assert [b - a for a, b in zip(before, after, strict=True)] == [4 * 6 * 2 * MIB] * 2


# ----- time_pipeline -----
def test_the_step_is_that_of_the_slowest_stage() -> None:
    n = 8
    timed = time_pipeline(Roofline(DEVICE, RATES, pipeline_job(n=n)), [], [])
    first, last = timed.ranks
    (f0, b0), (f1, b1) = ((actions["F"], actions["B"]) for actions in timed.actions_s)
    assert f1 > f0 and b0 == pytest.approx(b1, rel=1e-3)
    # The last rank waits for the first forward; the first one for the last backward.
    assert first.step_s == last.step_s > f0 + n * (f1 + b1) + b0
    assert last.idle_s["for other stages"] < first.idle_s["for other stages"]
    assert timed.send_s == pytest.approx(7e-6 + 2e-6 + 2 * MIB / 400e9)
