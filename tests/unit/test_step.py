"""The time of a step: bytes of collectives counted by hand, limits, and what float8 gains."""

import math
from dataclasses import replace
from typing import Any

import pytest
from pytest import approx
from sample_plans import DEVICE, RATES, linears_of, roofline_of, scheme_of

from torchtitan_lite.catalog.flavors import FLAVORS, OUTPUT, ModelArgs
from torchtitan_lite.planner.roofline import Roofline
from torchtitan_lite.planner.share import Share
from torchtitan_lite.planner.step import (
    CONTEXT,
    HOST,
    PIPELINE,
    SHARDING,
    TENSOR,
    StepTime,
    time_step,
)
from torchtitan_lite.planner.workload import Gain

ARGS = ModelArgs(dim=1024, n_layers=4, n_heads=8, n_kv_heads=8, ffn_dim=4096, vocab_size=32000)
TIED, LLAMA_8B = replace(ARGS, tie_embeddings=True), FLAVORS["8B"]
TOKENS = 8192
HIDDEN = TOKENS * 1024  # elements
LINEARS, NORMS = 4 * 1024**2 + 3 * 1024 * 4096, 2 * 1024  # parameters of a block
BLOCK = LINEARS + NORMS
EMBEDDING, HEAD = 32000 * 1024, 32000 * 1024 + 1024
PARAMETERS = EMBEDDING + 4 * BLOCK + HEAD

# Collectives and kernels have no latency: communication waits for links of 400 GB/s, for network
# adapters of 45 GB/s and for memory of 2 TB/s, unless they have no limit.
LINK, ADAPTER, MEMORY = 400e9, 45e9, 2e12
FREE = ("kernel_seconds", "collective_seconds", "hop_seconds")
FREE_STARTS = replace(RATES, **dict.fromkeys(FREE, 0), slowest_device=1, host_seconds_per_block=0)
NO_NETWORK = replace(DEVICE, link_gb_s=1e30, network_gb_s=1e30)
NO_MEMORY = replace(DEVICE, bandwidth_tb_s=1e30)

SCHEMES = {
    "bf16": None,
    "rowwise": scheme_of("rowwise"),
    "tensorwise": scheme_of("tensorwise"),
    "gathered": scheme_of("tensorwise", gathered=True),
}
IN_BLOCKS = ("linears", "attention", "pointwise")


def roofline(
    recipe: str = "bf16",
    *,
    args: ModelArgs = ARGS,
    tokens: int = TOKENS,
    passes: int = 1,
    **settings: Any,
) -> Roofline:
    """Return a roofline with one sequence a pass, and `passes` of them on each rank in a step."""
    sequences = passes * math.prod(settings.get("degrees", (1, 1, 1))[:2])
    batch = {"training": {"local_batch_size": 1, "global_batch_size": sequences}}
    given = {"rates": FREE_STARTS} | batch | settings
    return roofline_of(tokens, SCHEMES[recipe], args, **given)


def time(recipe: str = "bf16", **settings: Any) -> StepTime:
    """Time a step in which all linears of the blocks train in float8 if there is a recipe."""
    at = roofline(recipe, **settings)
    linears = linears_of(at.job.model_args, tp=at.job.degrees.tp, output=True)
    return time_step(at, linears, linears[:7] if SCHEMES[recipe] else [])


def sharding_s(step: StepTime) -> float:
    """Seconds of all collectives of FSDP, hidden or not."""
    return step.hidden_s + step.waits_s[SHARDING]


# ----- StepTime, time_step -----


@pytest.mark.parametrize("degrees", [(1, 1, 1), (2, 8, 4)])
def test_step_time_is_the_sum_of_its_parts(degrees):
    step = time("gathered", degrees=degrees)
    assert step.step_s == approx(sum(step.compute_s.values()) + sum(step.waits_s.values()))
    named = {*IN_BLOCKS, "output and loss", "weights and optimizer"}
    others = {"slowest device", "beside communication"}
    assert step.compute_s.keys() == named | others
    assert all(step.compute_s[name] > 0 for name in named)
    assert (step.hidden_s == sum(step.waits_s.values()) == 0) == (degrees == (1, 1, 1))


def test_step_time_of_an_output_in_float8():
    at, (*linears, kept) = roofline("tensorwise"), linears_of(ARGS, output=True)
    output = replace(kept, kept_because="")
    assert output.kind == OUTPUT
    parts = time_step(at, [*linears, output], [*linears, output]).compute_s
    assert parts["output and loss"] == approx(at.linears_s([output], [output]) + at.loss_s())
    in_bf16 = time_step(at, [*linears, kept], linears).compute_s
    assert in_bf16["output and loss"] == approx(at.linears_s([output], []) + at.loss_s())
    assert in_bf16["linears"] == parts["linears"]


@pytest.mark.parametrize("degrees", [(1, 8, 1), (1, 2, 4)])
def test_step_time_in_bf16_does_not_depend_on_the_recipe(degrees):
    linears = linears_of(ARGS, tp=degrees[2], output=True)
    steps = [time_step(roofline(recipe, degrees=degrees), linears, []) for recipe in SCHEMES]
    assert [step for step in steps if step != steps[0]] == []


def test_step_time_waits_for_the_slowest_of_several_devices():
    late = replace(FREE_STARTS, slowest_device=1.25, overlap_slowdown=0)
    alone, two = (time(degrees=(1, n, 1), rates=late) for n in (1, 2))
    assert alone.compute_s["slowest device"] == 0
    slowed = two.compute_s["slowest device"]
    assert slowed == approx(0.25 * (sum(two.compute_s.values()) - slowed))


def test_step_time_of_kernels_that_are_slower_in_training():
    alone, slow = (time(rates=replace(FREE_STARTS, in_training=each)) for each in (1.0, 1.5))
    for name in (*IN_BLOCKS, "output and loss", "weights and optimizer"):
        assert slow.compute_s[name] == approx(1.5 * alone.compute_s[name])


def test_step_time_is_the_hosts_if_that_is_longer():
    step = time(rates=replace(FREE_STARTS, host_seconds_per_block=1), passes=3)
    assert step.step_s == 4 * (3 + 1)
    assert step.waits_s[HOST] == approx(16 - sum(step.compute_s.values()))
    assert step.compute_s == time(passes=3).compute_s


# ----- Collectives: FSDP, TENSOR, CONTEXT -----


def fsdp(reshard: str) -> dict[str, Any]:
    return {"degrees": (1, 8, 1), "parallelism": {"fsdp_reshard_after_forward": reshard}}


def mode(name: str, **settings: Any) -> dict[str, Any]:
    """Tensor parallelism over 8 ranks, with this mode of activation checkpointing."""
    given = {"degrees": (1, 1, 8), "device": NO_MEMORY, "activation_checkpoint": {"mode": name}}
    return given | settings


def sequences(count: int) -> dict[str, Any]:
    training = {"seq_len": TOKENS // count, "local_batch_size": count}
    return {"degrees": (1, 1, 2), "device": NO_NETWORK, "training": training}


def context(device: Any, name: str = "none") -> dict[str, Any]:
    """8 ranks that share 131,072 tokens of 8B."""
    return mode(name, args=LLAMA_8B, tokens=131072, cp=8, degrees=(1, 1, 1), device=device)


EIGHT = 7 / 8 / LINK  # seconds a byte over 8 ranks
BLOCKS, FLOAT8_BLOCKS = 4 * 2 * BLOCK, 4 * (LINEARS + 2 * NORMS)
ENDS, SUMS = 2 * (EMBEDDING + HEAD), 4 * PARAMETERS  # gradients are summed in float32
TIED_MODEL = BLOCKS + 2 * HEAD + 4 * (PARAMETERS - EMBEDDING)
IN_BF16 = {"local_batch_size": 1, "mixed_precision_reduce": "bfloat16"}
KEYS_AND_VALUES = 2 * 131072 * 8 * 128 * 2  # bytes of whole sequences, of 8 heads of 128
COLLECTIVES: list[tuple[str, str, dict[str, Any], float]] = [
    # Weights are gathered for the forward and, unless they stay, for the backward pass.
    (SHARDING, "bf16", fsdp("never"), (BLOCKS + ENDS + SUMS) * EIGHT),
    (SHARDING, "bf16", fsdp("never") | {"passes": 3}, (BLOCKS + ENDS + SUMS) * EIGHT),
    (SHARDING, "bf16", fsdp("default"), (2 * BLOCKS + ENDS + SUMS) * EIGHT),
    (SHARDING, "tensorwise", fsdp("default"), (2 * BLOCKS + ENDS + SUMS) * EIGHT),
    (SHARDING, "gathered", fsdp("default"), (2 * FLOAT8_BLOCKS + ENDS + SUMS) * EIGHT),
    (SHARDING, "bf16", fsdp("never") | {"args": TIED}, TIED_MODEL * EIGHT),
    (SHARDING, "bf16", fsdp("default") | {"args": TIED}, (TIED_MODEL + BLOCKS) * EIGHT),
    (SHARDING, "bf16", fsdp("never") | {"training": IN_BF16}, (BLOCKS + ENDS + SUMS / 2) * EIGHT),
    # Replicas sum gradients twice over, or shards of them by one adapter of each node.
    (SHARDING, "gathered", {"degrees": (2, 1, 1)}, 2 * SUMS / 2 / LINK),
    (
        *(SHARDING, "bf16", {"degrees": (4, 8, 1)}),
        (2 * BLOCKS + ENDS + SUMS) * EIGHT + 2 * SUMS / 8 * 3 / 4 / ADAPTER,
    ),
    # Bytes an element that a block gathers and scatters in both passes, and again.
    (TENSOR, "bf16", mode("none"), HIDDEN * 4 * 16 * EIGHT),
    (TENSOR, "bf16", mode("selective"), HIDDEN * 4 * (16 + 4) * EIGHT),
    (TENSOR, "bf16", mode("full"), HIDDEN * 4 * (16 + 6) * EIGHT),
    (TENSOR, "rowwise", mode("selective"), HIDDEN * 4 * (16 + 4) * EIGHT),
    (TENSOR, "tensorwise", mode("none"), HIDDEN * 4 * 12 * EIGHT),
    (TENSOR, "tensorwise", mode("selective"), HIDDEN * 4 * 12 * EIGHT),  # the inputs are kept
    (TENSOR, "tensorwise", mode("selective", compiled=False), HIDDEN * 4 * 14 * EIGHT),
    (TENSOR, "tensorwise", mode("full"), HIDDEN * 4 * (12 + 4) * EIGHT),
    # What is scattered is copied, 2 bytes read and 2 written of each element, 4 times a block. What
    # is gathered, only if it has several sequences.
    (TENSOR, "bf16", sequences(1), HIDDEN * 4 * 4 * 4 / MEMORY),
    (TENSOR, "bf16", sequences(2), HIDDEN * 4 * 4 * 8 / MEMORY),
    # Keys and values are gathered forward, recomputed and, as gradients, backward.
    (CONTEXT, "bf16", context(NO_MEMORY), 32 * 2 * KEYS_AND_VALUES * EIGHT),
    (CONTEXT, "bf16", context(NO_MEMORY, "full"), 32 * 3 * KEYS_AND_VALUES * EIGHT),
    # Their copies: stacked, 2 of an eighth; put in order, 2; gradients of two chunks read and their
    # sum written, 3.
    (CONTEXT, "bf16", context(NO_NETWORK), 32 * (2 / 8 + 2 + 3) * KEYS_AND_VALUES / MEMORY),
]


@pytest.mark.parametrize(("kind", "recipe", "settings", "seconds"), COLLECTIVES)
def test_collectives_take_the_bytes_that_were_counted(kind, recipe, settings, seconds):
    step = time(recipe, **settings)
    found = sharding_s(step) if kind == SHARDING else step.waits_s[kind]
    assert found == approx(seconds)


def test_only_linears_in_float8_are_gathered_in_float8():
    def step(degrees: tuple[int, int, int], *kept: str) -> StepTime:
        at = roofline("gathered", degrees=degrees, device=NO_MEMORY)
        linears = linears_of(ARGS, tp=degrees[2], output=True)
        chosen = [each for each in linears[:7] if each.kind.split(".")[1] not in kept]
        return time_step(at, linears, chosen)

    # FSDP: a byte an element of w2, of 4 blocks twice.
    fsdp8, tp8 = (1, 8, 1), (1, 1, 8)
    saved = sharding_s(step(fsdp8, "w2")) - sharding_s(step(fsdp8))
    assert saved == approx(8 * 1024 * 4096 * EIGHT)

    # Tensor parallelism: a byte an element of an input that any linear reads in bf16.
    for kept, inputs in ((["w3"], 1), (["w1", "w3"], 1), (["wv", "wo"], 2)):
        saved = step(tp8, *kept).waits_s[TENSOR] - step(tp8).waits_s[TENSOR]
        assert saved == approx(4 * inputs * HIDDEN * EIGHT)


def test_sharding_is_waited_for_as_far_as_computation_does_not_hide_it():
    # The first gather waits for nothing, and nothing waits for the last reduction.
    first, last = (width * (EMBEDDING + BLOCK) * 7 / 8 for width in (2, 4))
    fast = time(degrees=(1, 8, 1), device=replace(DEVICE, link_gb_s=5e4))
    assert fast.waits_s[SHARDING] == approx((first + last) / 4e13)

    # On slow links computation hides as much as it takes, however long communication takes.
    for n in (1, 2):
        slow = time(degrees=(1, 8, 1), device=replace(DEVICE, link_gb_s=1 / n))
        hides = sum(slow.compute_s[part] for part in IN_BLOCKS)
        assert slow.hidden_s == approx(hides)
        assert slow.compute_s["beside communication"] == approx(hides / 8)


@pytest.mark.parametrize(
    ("recipe", "in_block"),
    [
        # Bytes an element that async tensor parallelism overlaps in both passes of a block: what no
        # cast and no rescaling of rows separates from its matmul.
        ("bf16", 16),
        ("tensorwise", 4 * 1 + 4 * 2),
        ("rowwise", 2 * 2),  # the sums of the forward pass
    ],
)
def test_enable_async_tensor_parallel_hides_its_share(recipe, in_block):
    waited, overlapped = (
        time(recipe, **mode("none", parallelism={"enable_async_tensor_parallel": each}))
        for each in (False, True)
    )
    hidden = 0.25 * HIDDEN * 4 * in_block * EIGHT
    assert overlapped.waits_s[TENSOR] == approx(waited.waits_s[TENSOR] - hidden)


# ----- Copies, the optimizer, and gradient accumulation -----

# Bytes a weight: FSDP reads and writes a gathered one, of 2 bytes or 1 in float8, beside 10 of its
# shard. A gradient is cast, from 2 bytes to 4; each other is added, and their sum is copied to be
# reduced. AdamW moves 6 * 4 + 2 * 8 of a shard.
WHOLE, THREE_SUMMED = 4 + 10 / 8, 6 + 2 * 10 + 8
UPDATE = (6 * 4 + 2 * 8) / 8
EACH = {"degrees": (1, 8, 1), "parallelism": {"fsdp_reduce_gradients": "each"}}


@pytest.mark.parametrize(
    ("recipe", "settings", "passes", "nbytes"),
    [
        ("bf16", fsdp("never"), 1, WHOLE + 6 + UPDATE),
        ("bf16", fsdp("default"), 1, 2 * WHOLE + 6 + UPDATE),
        ("gathered", fsdp("never"), 1, WHOLE - 2 * 4 * LINEARS / PARAMETERS + 6 + UPDATE),
        ("bf16", fsdp("never"), 3, WHOLE + THREE_SUMMED + UPDATE),
        ("bf16", fsdp("default"), 3, 6 * WHOLE + THREE_SUMMED + UPDATE),
        ("bf16", EACH, 3, 6 * WHOLE + 3 * 6 + UPDATE),
        ("bf16", {}, 3, 14 + 6 + 2 * 10 + 8 * UPDATE),
    ],
)
def test_copies_of_weights_and_gradients_and_the_update(recipe, settings, passes, nbytes):
    step = time(recipe, passes=passes, **settings)
    assert step.compute_s["weights and optimizer"] == approx(nbytes * PARAMETERS / MEMORY)


def test_muon_has_one_moment_of_matrices_and_ranks_share_its_iterations():
    muon = {"optimizer": {"name": "Muon"}}
    assert Share(roofline(**muon).job, ()).state_width == approx(8 - 4 * 4 * LINEARS / PARAMETERS)
    at = roofline()
    square = 3 * at.gemm_s(1024, 1024, 1024)
    wide = sum(at.gemm_s(*sizes) for sizes in ((1024, 1024, 4096), (1024,) * 3, (1024, 4096, 1024)))
    iterations = 5 * 4 * (4 * square + 3 * wide)
    assert time(**muon).compute_s["Newton-Schulz"] == approx(iterations)

    # Each of 8 ranks has 4 of 28 matrices at most, and sends 7/8 of its shards twice, in bfloat16.
    exchanges = 2 * 2 * 4 * LINEARS / 8 * 7 / 8 / LINK
    step = time(degrees=(1, 8, 1), **muon)
    assert step.compute_s["Newton-Schulz"] == approx(iterations * 4 / 28 + exchanges)


@pytest.mark.parametrize("reduced", ["last", "each"])
def test_gradient_accumulation_repeats_all_but_reductions_and_the_optimizer(reduced):
    once, thrice = (
        time(degrees=(1, 8, 1), passes=n, parallelism={"fsdp_reduce_gradients": reduced})
        for n in (1, 3)
    )
    for part in (*IN_BLOCKS, "output and loss"):
        assert thrice.compute_s[part] == approx(3 * once.compute_s[part])

    # Each microbatch gathers, and waits for its first gather.
    in_each = reduced == "each"
    summed, last = (0, 0) if in_each else (SUMS * EIGHT, 4 * (EMBEDDING + BLOCK) * EIGHT)
    repeated, waited = sharding_s(once) - summed, once.waits_s[SHARDING] - last
    assert sharding_s(thrice) == approx(3 * repeated + summed)
    assert thrice.waits_s[SHARDING] == approx(3 * waited + last)


# ----- PIPELINE -----


def pipeline(schedule: str, pp: int, passes: int, **settings: Any) -> StepTime:
    tables = {"pipeline_parallel_degree": pp, "pipeline_parallel_schedule": schedule}
    tables["pipeline_parallel_microbatch_size"] = 1
    args = replace(ARGS, n_layers=16, vocab_size=1)  # so that all stages are equal
    batch = {"local_batch_size": passes, "global_batch_size": passes}
    ends = {"pipeline_parallel_first_stage_less_layers": 0}
    ends["pipeline_parallel_last_stage_less_layers"] = 0
    parallelism = {"parallelism": tables | ends, "training": batch}
    return time(args=args, degrees=(1, 1, 1), pp=pp, device=NO_NETWORK, **parallelism, **settings)


@pytest.mark.parametrize(
    ("schedule", "stages"), [("1F1B", 1), ("GPipe", 1), ("Interleaved1F1B", 2)]
)
def test_a_pipeline_pauses_for_a_microbatch_of_each_other_rank(schedule, stages):
    ac = {"activation_checkpoint": {"mode": "none"}}
    step = pipeline(schedule, 4, 8, **ac)
    work = sum(step.compute_s[name] for name in IN_BLOCKS)  # of 8 microbatches
    assert step.waits_s[PIPELINE] == approx(3 / 8 * work / stages, rel=0.03)


def test_a_pipeline_takes_the_time_of_its_busiest_rank():
    alone, four = time(args=replace(ARGS, n_layers=16)), pipeline("1F1B", 4, 8)
    assert four.compute_s["linears"] == approx(8 * alone.compute_s["linears"] / 4)
    assert alone.waits_s[PIPELINE] == 0


# ----- Gain -----


@pytest.mark.parametrize(
    ("speedup", "on", "off"),
    [
        (1.25, "helps", "would help"),
        (1.05, "may help or hurt", "may help or hurt"),
        (0.95, "may help or hurt", "may help or hurt"),
        (0.5, "hurts", "would hurt"),
    ],
)
def test_verdict_claims_what_the_whole_range_says(speedup, on, off):
    fast, slow = (StepTime({"linears": seconds}, {}, 0) for seconds in (1.0, speedup))
    gain = Gain("rowwise", slow, fast, [])
    low, high = gain.speedup_range
    assert low < speedup < high
    for verdict, effect in ((gain.verdict(), on), (gain.verdict(on=False), off)):
        assert verdict.startswith(f"rowwise float8 {effect}: ")
        assert f"{speedup:.2f}x the speed of bf16 ({low:.2f} to {high:.2f})" in verdict
    assert "keep wk, wv" in replace(gain, better_kept=["wk", "wv"]).verdict()
    assert "rowwise float8 has no linear" in replace(gain, better_kept=None).verdict()
