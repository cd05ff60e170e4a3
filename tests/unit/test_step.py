"""The time of an optimizer step: bytes of collectives counted by hand, limits, and the band."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from pytest import approx
from sample_plans import DEVICE, RATES, linears_of, roofline_of, scheme_of

from torchtitan_lite.catalog.flavors import BLOCK_LINEARS, FLAVORS, OUTPUT, ModelArgs
from torchtitan_lite.models.llama3 import Transformer
from torchtitan_lite.planner import prediction
from torchtitan_lite.planner.communication import CONTEXT, REPLICAS, SHARDING, TENSOR
from torchtitan_lite.planner.pipeline_time import time_step
from torchtitan_lite.planner.prediction import Prediction, format_verdict, predict
from torchtitan_lite.planner.roofline import Roofline
from torchtitan_lite.planner.step import StepTime

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
LATENCIES = ("kernel", "collective", "link_hop", "network_hop", "small_reduction")
FREE_STARTS = replace(RATES, **{f"{name}_seconds": 0 for name in LATENCIES}, slowest_device=1)
HOST = ("host_seconds_per_kernel", "host_seconds_per_block", "host_seconds_per_parameter")
NO_HOST = replace(RATES, **dict.fromkeys(HOST, 0))
NO_NETWORK = replace(DEVICE, link_gb_s=1e30, network_gb_s=1e30)
NO_MEMORY = replace(DEVICE, bandwidth_tb_s=1e30)

GATHERED = scheme_of("tensorwise", gathered=True)
SCHEMES = {
    "bf16": None,
    "rowwise": scheme_of("rowwise"),
    "tensorwise": scheme_of("tensorwise"),
    "gathered": GATHERED,
}
IN_BLOCKS = ("linears", "attention", "pointwise", "fsdp copies")


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


def whole_s(step: StepTime, kind: str) -> float:
    """Seconds of all collectives of a kind, hidden or not."""
    return step.hidden_s[kind] + step.exposed_s[kind]


# ----- StepTime, time_step -----


def test_step_time_is_the_sum_of_its_parts():
    for degrees in ((1, 1, 1), (2, 8, 4)):
        step = time("gathered", degrees=degrees, rates=NO_HOST)
        waits = [*step.exposed_s.values(), *step.slowed_s.values()]
        assert step.step_s == approx(math.fsum([*step.device_parts_s.values(), *waits]))
        assert step.device_parts_s.keys() == {*IN_BLOCKS, "output", "loss", "optimizer"}
        assert all(seconds > 0 for seconds in step.device_parts_s.values())
        one_rank = not any([*waits, *step.hidden_s.values()])
        assert one_rank == (degrees == (1, 1, 1)) and step.host_s == 0


def test_step_time_of_an_output_in_float8():
    at, (*linears, kept) = roofline("tensorwise"), linears_of(ARGS, output=True)
    output = replace(kept, kept_because="")
    assert output.kind == OUTPUT
    parts = time_step(at, [*linears, output], [*linears, output]).device_parts_s
    assert parts["output"] == approx(at.float8(output).both.seconds)
    in_bf16 = time_step(at, [*linears, kept], linears).device_parts_s
    assert in_bf16["output"] == approx(at.bf16(output).both.seconds)
    assert in_bf16["linears"] == parts["linears"]


@pytest.mark.parametrize("degrees", [(1, 8, 1), (1, 2, 4)])
def test_step_time_in_bf16_does_not_depend_on_the_recipe(degrees):
    linears = linears_of(ARGS, tp=degrees[2], output=True)
    steps = [time_step(roofline(recipe, degrees=degrees), linears, []) for recipe in SCHEMES]
    assert [step for step in steps if step != steps[0]] == []


def test_step_time_of_the_optimizer_is_that_of_a_shard():
    whole, sharded, shared, with_tp = (
        time(degrees=degrees, cp=cp).device_parts_s["optimizer"]
        for degrees, cp in (((1, 1, 1), 1), ((4, 8, 1), 1), ((1, 1, 1), 8), ((1, 1, 2), 1))
    )
    assert sharded == shared == approx(whole / 8)
    assert whole / 2 < with_tp < whole / 2 * 1.001  # the norms are whole


def test_step_time_waits_for_the_slowest_of_several_devices():
    late = replace(FREE_STARTS, slowest_device=1.25)
    alone, two = (time(degrees=(1, n, 1), rates=late) for n in (1, 2))
    assert alone.slowed_s["by the slowest device"] == 0
    compute = sum(two.device_parts_s.values())
    assert two.slowed_s["by the slowest device"] == approx(0.25 * compute)


# ----- host_s -----


def host_s(per: str, recipe: str = "bf16", **settings: Any) -> float:
    """Seconds of a host that takes one for each kernel, block or parameter."""
    return time(recipe, rates=replace(NO_HOST, **{f"host_seconds_per_{per}": 1}), **settings).host_s


def test_host_s_is_the_step_if_it_is_longer():
    step = time(rates=replace(NO_HOST, host_seconds_per_block=1), passes=3)
    assert step.step_s == step.host_s == 4 * 3
    assert step.device_parts_s == time(rates=NO_HOST, passes=3).device_parts_s


def test_host_s_counts_the_kernels_of_each_microbatch():
    once, thrice = host_s("kernel"), host_s("kernel", passes=3)
    optimizer = roofline().optimizer(1).kernels
    # One rank casts the weights of six groups, by two kernels each, only once a step.
    assert thrice - optimizer == approx(3 * (once - optimizer) - 2 * 2 * 6)
    assert host_s("kernel", "tensorwise") > once  # for the casts
    assert host_s("kernel", degrees=(1, 1, 2)) > once  # for the collectives


def test_host_s_counts_each_sharded_parameter_once_a_step():
    with torch.device("meta"):
        parameters = len(list(Transformer(ARGS).parameters()))
    for degrees in ((1, 2, 1), (1, 1, 2)):
        assert host_s("parameter", degrees=degrees, passes=3) == parameters
    assert host_s("parameter") == 0


# ----- SHARDING, REPLICAS, TENSOR, CONTEXT: time of all collectives -----


def fsdp(reshard: str) -> dict[str, Any]:
    return {"degrees": (1, 8, 1), "parallelism": {"fsdp_reshard_after_forward": reshard}}


def mode(name: str, **settings: Any) -> dict[str, Any]:
    """Tensor parallelism over 8 ranks, with this mode of activation checkpointing."""
    given = {"degrees": (1, 1, 8), "device": NO_MEMORY, "activation_checkpoint": {"mode": name}}
    return given | settings


def scales(name: str) -> dict[str, Any]:
    """The same where each reduction of a scale takes a second, and nothing else any time."""
    rates = replace(FREE_STARTS, small_reduction_seconds=1)
    return mode(name, device=replace(NO_NETWORK, bandwidth_tb_s=1e30), rates=rates)


def sequences(count: int) -> dict[str, Any]:
    training = {"seq_len": TOKENS // count, "local_batch_size": count}
    return {"degrees": (1, 1, 2), "device": NO_NETWORK, "training": training}


def context(device: Any, name: str = "none", bos_id: int | None = None) -> dict[str, Any]:
    """8 ranks that share 131,072 tokens of 8B."""
    args = replace(LLAMA_8B, document_bos_id=bos_id)
    return mode(name, args=args, tokens=131072, cp=8, degrees=(1, 1, 1), device=device)


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
    (SHARDING, "bf16", fsdp("always"), (2 * BLOCKS + ENDS + 2 * HEAD + SUMS) * EIGHT),
    (SHARDING, "tensorwise", fsdp("default"), (2 * BLOCKS + ENDS + SUMS) * EIGHT),
    (SHARDING, "gathered", fsdp("default"), (2 * FLOAT8_BLOCKS + ENDS + SUMS) * EIGHT),
    (SHARDING, "bf16", fsdp("never") | {"args": TIED}, TIED_MODEL * EIGHT),
    (SHARDING, "bf16", fsdp("default") | {"args": TIED}, (TIED_MODEL + BLOCKS) * EIGHT),
    (SHARDING, "bf16", fsdp("always") | {"args": TIED}, (TIED_MODEL + BLOCKS + 2 * HEAD) * EIGHT),
    (SHARDING, "bf16", fsdp("never") | {"training": IN_BF16}, (BLOCKS + ENDS + SUMS / 2) * EIGHT),
    # Replicas sum gradients twice over, or shards of them by one adapter of each node.
    (SHARDING, "bf16", {"degrees": (2, 1, 1)}, 0),
    (SHARDING, "bf16", {"degrees": (4, 8, 1)}, (2 * BLOCKS + ENDS + SUMS) * EIGHT),
    (REPLICAS, "bf16", {"degrees": (1, 8, 1)}, 0),
    (REPLICAS, "gathered", {"degrees": (2, 1, 1)}, 2 * SUMS / 2 / LINK),
    (REPLICAS, "bf16", {"degrees": (4, 8, 1)}, 2 * SUMS / 8 * 3 / 4 / ADAPTER),
    # Bytes an element that a block gathers and scatters in both passes, and again, as counted in
    # what torchao and FSDP run in a process group of 8; and 8 for both ends of the model.
    (TENSOR, "bf16", mode("none"), HIDDEN * (4 * 16 + 8) * EIGHT),
    (TENSOR, "bf16", mode("selective"), HIDDEN * (4 * (16 + 4) + 8) * EIGHT),
    (TENSOR, "bf16", mode("full"), HIDDEN * (4 * (16 + 6) + 8) * EIGHT),
    (TENSOR, "rowwise", mode("selective"), HIDDEN * (4 * (16 + 4) + 8) * EIGHT),
    (TENSOR, "tensorwise", mode("none"), HIDDEN * (4 * 12 + 8) * EIGHT),
    (TENSOR, "tensorwise", mode("selective"), HIDDEN * (4 * 12 + 8) * EIGHT),  # the inputs are kept
    (TENSOR, "tensorwise", mode("selective", compiled=False), HIDDEN * (4 * 14 + 8) * EIGHT),
    (TENSOR, "tensorwise", mode("full"), HIDDEN * (4 * (12 + 4) + 8) * EIGHT),
    # Scales that a block reduces over the ranks.
    (TENSOR, "bf16", scales("full"), 0),
    (TENSOR, "tensorwise", scales("none"), 4 * (4 + 7)),
    (TENSOR, "tensorwise", scales("selective"), 4 * (4 + 7)),
    (TENSOR, "tensorwise", scales("full"), 4 * (4 + 10)),
    (TENSOR, "rowwise", scales("selective"), 4 * (2 + 4)),
    (TENSOR, "rowwise", scales("full"), 4 * (2 + 6)),
    # What is scattered is copied, 2 bytes read and 2 written of each element: 4 times a block and
    # twice around them. What is gathered, only if it has several sequences.
    (TENSOR, "bf16", sequences(1), HIDDEN * 4 * (4 * 4 + 2) / MEMORY),
    (TENSOR, "bf16", sequences(2), HIDDEN * 4 * (4 * 8 + 4) / MEMORY),
    # Keys and values are gathered forward, recomputed and, as gradients, backward.
    (CONTEXT, "bf16", context(NO_MEMORY), 32 * 2 * KEYS_AND_VALUES * EIGHT),
    (CONTEXT, "bf16", context(NO_MEMORY, "full"), 32 * 3 * KEYS_AND_VALUES * EIGHT),
    # Their copies: stacked, 2 of an eighth; put in order, 2; gradients of two chunks read and their
    # sum written, 3, or of a masked sequence 2. And 4 of the chunks of the output.
    (
        *(CONTEXT, "bf16", context(NO_NETWORK)),
        32 * ((2 / 8 + 2 + 3) * KEYS_AND_VALUES + 4 * 128 * 2**20) / MEMORY,
    ),
    (CONTEXT, "bf16", context(NO_NETWORK, bos_id=1), 32 * (2 / 8 + 4) * KEYS_AND_VALUES / MEMORY),
]


@pytest.mark.parametrize(("kind", "recipe", "settings", "seconds"), COLLECTIVES)
def test_collectives_take_the_bytes_that_were_counted(kind, recipe, settings, seconds):
    step = time(recipe, **settings)
    assert whole_s(step, kind) == approx(seconds)
    assert kind in (SHARDING, REPLICAS) or step.hidden_s[kind] == 0


def test_only_linears_in_float8_are_gathered_in_float8():
    def seconds(kind: str, degrees: tuple[int, int, int], *kept: str) -> float:
        at = roofline("gathered", degrees=degrees, device=NO_MEMORY)
        linears = linears_of(ARGS, tp=degrees[2], output=True)
        chosen = [each for each in linears[:7] if each.kind.split(".")[1] not in kept]
        return whole_s(time_step(at, linears, chosen), kind)

    # FSDP: a byte an element of w2, of 4 blocks twice.
    fsdp8, tp8 = (1, 8, 1), (1, 1, 8)
    saved = seconds(SHARDING, fsdp8, "w2") - seconds(SHARDING, fsdp8)
    assert saved == approx(8 * 1024 * 4096 * EIGHT)

    # Tensor parallelism: a byte an element of an input that any linear reads in bf16.
    for kept, inputs in ((["w3"], 1), (["w1", "w3"], 1), (["wv", "wo"], 2)):
        saved = seconds(TENSOR, tp8, *kept) - seconds(TENSOR, tp8)
        assert saved == approx(4 * inputs * HIDDEN * EIGHT)


def test_tensor_parallelism_without_a_parallel_loss_gathers_the_logits():
    parallel, whole = (
        time(degrees=(1, 1, 8), parallelism={"disable_loss_parallel": each})
        for each in (False, True)
    )
    nbytes = 2 * TOKENS * 32000
    gathered = nbytes * EIGHT + 2 * nbytes / MEMORY  # and read and written
    assert whole.exposed_s[TENSOR] - parallel.exposed_s[TENSOR] == approx(gathered)
    assert whole.device_parts_s["loss"] == approx(8 * parallel.device_parts_s["loss"])


# ----- SHARDING, TENSOR: hidden and exposed -----


def test_sharding_is_exposed_as_far_as_computation_does_not_hide_it():
    # The first gather waits for nothing, and nothing waits for the last reduction.
    first, last = (width * (EMBEDDING + BLOCK) * 7 / 8 for width in (2, 4))
    fast = time(degrees=(1, 8, 1), device=replace(DEVICE, link_gb_s=5e4))
    assert fast.exposed_s[SHARDING] == approx((first + last) / 4e13)

    # On slow links computation hides as much as it takes, however long communication takes.
    for n in (1, 2):
        slow = time(degrees=(1, 8, 1), device=replace(DEVICE, link_gb_s=1 / n))
        hides = sum(slow.device_parts_s[part] for part in IN_BLOCKS)
        assert slow.hidden_s[SHARDING] == approx(hides)
        assert slow.slowed_s["beside communication"] == approx(hides / 8)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_sharding_hides_behind_tensor_parallelism_that_is_waited_for(asynchronous):
    step = time(
        degrees=(1, 8, 8),
        device=replace(DEVICE, network_gb_s=0.1),
        parallelism={"enable_async_tensor_parallel": asynchronous},
    )
    hides = sum(step.device_parts_s[part] for part in IN_BLOCKS) + step.exposed_s[TENSOR]
    assert step.hidden_s[SHARDING] == approx(hides)


@pytest.mark.parametrize(
    ("recipe", "in_block", "ends"),
    [
        # Bytes an element that async tensor parallelism overlaps in both passes of a block, and
        # around the blocks: what no cast and no rescaling of rows separates from its matmul.
        ("bf16", 16, 8),
        ("tensorwise", 4 * 1 + 4 * 2, 2 * 2),
        ("rowwise", 2 * 2, 2 * 2),  # the sums of the forward pass, and those around the blocks
    ],
)
def test_enable_async_tensor_parallel_hides_its_share(recipe, in_block, ends):
    waited, overlapped = (
        time(recipe, **mode("none", parallelism={"enable_async_tensor_parallel": each}))
        for each in (False, True)
    )
    hidden = 0.25 * HIDDEN * (4 * in_block + ends) * EIGHT
    assert waited.hidden_s[TENSOR] == 0
    assert overlapped.hidden_s[TENSOR] == approx(hidden)
    assert overlapped.exposed_s[TENSOR] == approx(waited.exposed_s[TENSOR] - hidden)


# ----- time_step: copies around gathers, and gradient accumulation -----

# Bytes a weight: FSDP reads and writes a gathered one, of 2 bytes or 1 in float8, beside 10 of its
# shard, or 23 with the cast. One rank casts its own, to 2 bytes, or to 1 in four passes over it.
WHOLE, FLOAT8, ALONE, ALONE_FLOAT8 = 4 + 10 / 8, 2 + 23 / 8, 4 + 2, 4 + 2 + 19
# A gradient is cast, from 2 bytes to 4. Each other is added, and their sum is copied to be reduced.
# If each is reduced, shards are added.
THREE, THREE_SUMMED, THREE_REDUCED = 6 + 2 * 10, 6 + 2 * 10 + 8, 3 * 6 + 2 * 12 / 8
EACH = {"degrees": (1, 8, 1), "parallelism": {"fsdp_reduce_gradients": "each"}}
IN_FLOAT8 = 4 * LINEARS
OTHERS = PARAMETERS - IN_FLOAT8


@pytest.mark.parametrize(
    ("recipe", "settings", "passes", "nbytes"),
    [
        ("bf16", fsdp("never"), 1, (WHOLE + 6) * PARAMETERS),
        ("bf16", fsdp("default"), 1, (WHOLE + 6) * PARAMETERS + WHOLE * 4 * BLOCK),
        ("gathered", fsdp("never"), 1, FLOAT8 * IN_FLOAT8 + WHOLE * OTHERS + 6 * PARAMETERS),
        ("bf16", fsdp("never"), 3, (WHOLE + THREE_SUMMED) * PARAMETERS),
        (
            *("bf16", fsdp("always"), 3),
            3 * WHOLE * (PARAMETERS + 4 * BLOCK + HEAD) + THREE_SUMMED * PARAMETERS,
        ),
        ("bf16", EACH, 3, 3 * WHOLE * (PARAMETERS + 4 * BLOCK) + THREE_REDUCED * PARAMETERS),
        ("bf16", {}, 3, (ALONE + THREE) * PARAMETERS),
        ("gathered", {}, 1, ALONE_FLOAT8 * IN_FLOAT8 + ALONE * OTHERS + 6 * PARAMETERS),
    ],
)
def test_copies_of_weights_and_gradients(recipe, settings, passes, nbytes):
    step = time(recipe, passes=passes, **settings)
    assert step.device_parts_s["fsdp copies"] == approx(nbytes / MEMORY)


@pytest.mark.parametrize("reduced", ["last", "each"])
def test_gradient_accumulation_repeats_all_but_reductions_and_the_optimizer(reduced):
    once, thrice = (
        time(degrees=(2, 8, 1), passes=n, parallelism={"fsdp_reduce_gradients": reduced})
        for n in (1, 3)
    )
    for part in once.device_parts_s.keys() - {"fsdp copies"}:
        times = 1 if part == "optimizer" else 3
        assert thrice.device_parts_s[part] == approx(times * once.device_parts_s[part])

    # Each microbatch gathers, and waits for its first gather.
    in_each = reduced == "each"
    summed, last = (0, 0) if in_each else (SUMS * EIGHT, 4 * (EMBEDDING + BLOCK) * EIGHT)
    repeated, waited = whole_s(once, SHARDING) - summed, once.exposed_s[SHARDING] - last
    assert whole_s(thrice, SHARDING) == approx(3 * repeated + summed)
    assert thrice.exposed_s[SHARDING] == approx(3 * waited + last)
    assert whole_s(thrice, REPLICAS) == approx((3 if in_each else 1) * whole_s(once, REPLICAS))


# ----- predict, Prediction -----


def predicted(monkeypatch: pytest.MonkeyPatch, **moves: tuple[float, float]) -> Prediction:
    """Predict with these ends of uncertain constants only."""

    def move_constants(device: Any, rates: Any) -> Any:
        return {
            name: tuple(replace(rates, **{name: end}) for end in ends)
            for name, ends in moves.items()
        }

    monkeypatch.setattr(prediction, "move_constants", move_constants)
    at = roofline("tensorwise", args=LLAMA_8B, degrees=(1, 8, 1), rates=RATES)
    return predict(at, linears_of(LLAMA_8B, output=True))


def test_predict_has_a_band_where_a_guess_moves_the_step(monkeypatch):
    ends = (0.1, 0.9)  # of what the step does not have
    for moves in ({}, {"async_tensor_parallel": ends, "attention_flex": ends}):
        found = predicted(monkeypatch, **moves)
        assert found.speedup_band == (found.step_speedup,) * 2
        assert found.float8_s_band == (found.float8.step_s,) * 2
    found = predicted(monkeypatch, fp8_matmul=(0.3, 0.35))  # both are slower
    assert found.float8_s_band[0] == found.float8.step_s < found.float8_s_band[1]
    assert found.speedup_band[0] < found.step_speedup == found.speedup_band[1]


def test_predict_adds_up_the_moves_of_guesses_as_squares(monkeypatch):
    fp8, attention = {"fp8_matmul": (0.3, 0.5)}, {"attention_cudnn": (0.4, 0.7)}
    one, other, both = (
        predicted(monkeypatch, **moves) for moves in (fp8, attention, fp8 | attention)
    )
    value = both.float8.step_s
    assert both.step_speedup == both.bf16.step_s / value
    for i, sign in ((0, -1), (1, 1)):
        moved = (math.log(each.float8_s_band[i] / value) for each in (one, other))
        assert math.log(both.float8_s_band[i] / value) == approx(sign * math.hypot(*moved))
    low, high = one.float8_s_band
    assert low < value < high

    # The fp8 rate moves the speedup as it moves the step in float8, and not that in bf16. Attention
    # takes as long in both, so that more of it makes the speedup smaller.
    assert one.speedup_band == approx((one.bf16.step_s / high, one.bf16.step_s / low))
    assert other.speedup_band[0] < other.step_speedup < other.speedup_band[1]


def test_predict_names_linears_that_had_better_be_kept():
    # At the rates of thin matmuls float8 casts cost more than they save.
    at = roofline("rowwise", args=LLAMA_8B, degrees=(1, 1, 8), rates=RATES)
    linears = linears_of(LLAMA_8B, tp=8)
    found = predict(at, linears)
    kept = set(BLOCK_LINEARS) - {each.kind for each in at.choose(linears)}
    assert kept and set(found.better_kept) == kept
    assert found.converted == list(BLOCK_LINEARS)

    without = predict(at, linears_of(LLAMA_8B, tp=8, kept=kept))
    assert without.better_kept == [] and set(without.converted) == set(BLOCK_LINEARS) - kept
    assert without.step_speedup > found.step_speedup


# ----- format_verdict -----


@pytest.mark.parametrize(
    ("speedup", "band", "on", "off"),
    [
        (1.25, (1.2, 1.3), "helps", "would help"),
        (1.06, (1.01, 1.1), "helps", "would help"),
        (1.25, (0.99, 1.3), "may help or hurt", "may help or hurt"),
        (0.5, (0.4, 0.6), "hurts", "would hurt"),
        (0.97, (0.9, 1.02), "is neutral", "would be neutral"),
        (0.97, (0.89, 1.02), "may help or hurt", "may help or hurt"),
        (0.94, (0.9, 1.01), "may help or hurt", "may help or hurt"),
    ],
)
def test_format_verdict(speedup, band, on, off):
    step = time()
    gain = Prediction("rowwise", speedup, band, (1, 1), ["wq"], [], step, step, {})
    figures = f"{speedup:.2f}x the speed of bf16 ({band[0]:.2f} to {band[1]:.2f})"
    for verdict, effect in ((format_verdict(gain), on), (format_verdict(gain, on=False), off)):
        assert verdict.startswith(f"rowwise float8 {effect}: ") and figures in verdict
    kept = format_verdict(replace(gain, better_kept=["wk", "wv"]))
    assert "keep wk, wv" in kept and "keep wk" not in format_verdict(gain)


def test_format_verdict_without_a_linear_in_float8():
    step = time()
    gain = Prediction("rowwise", 1.0, (1.0, 1.0), (1, 1), [], [], step, step, {})
    assert "filter_fqns keeps every linear" in format_verdict(gain)
    assert "would gain nothing" in format_verdict(gain, on=False)
