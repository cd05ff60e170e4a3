"""The time of an optimizer step: bytes of collectives counted by hand, limits, and the band."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from sample_plans import DEVICE, H100, RATES, linears_of, roofline_of, scheme_of

from torchtitan_lite.models.flavors import BLOCK_LINEARS, FLAVORS, OUTPUT, ModelArgs
from torchtitan_lite.models.llama3 import Transformer
from torchtitan_lite.planner import prediction
from torchtitan_lite.planner.constants import Rates
from torchtitan_lite.planner.pipeline import time_step
from torchtitan_lite.planner.prediction import Prediction, format_verdict, predict
from torchtitan_lite.planner.roofline import Roofline
from torchtitan_lite.planner.step import StepTime

ARGS = ModelArgs(dim=1024, n_layers=4, n_heads=8, n_kv_heads=8, ffn_dim=4096, vocab_size=32000)
TOKENS = 8192
HIDDEN = TOKENS * 1024  # elements
LINEARS = 4 * 1024**2 + 3 * 1024 * 4096  # parameters of a block's linears,
BLOCK = LINEARS + 2 * 1024  # of a block, with its norms,
EMBEDDING, HEAD = 32000 * 1024, 32000 * 1024 + 1024
PARAMETERS = EMBEDDING + 4 * BLOCK + HEAD

# Neither collectives nor kernels have a latency, and memory has no limit: links of 400 GB/s and
# network adapters of 45 GB/s are what communication waits for.
FREE_STARTS = replace(
    RATES,
    kernel_seconds=0,
    collective_seconds=0,
    link_hop_seconds=0,
    network_hop_seconds=0,
    small_reduction_seconds=0,
    slowest_device=1,
)
FREE_HOST = {
    "host_seconds_per_kernel": 0,
    "host_seconds_per_block": 0,
    "host_seconds_per_parameter": 0,
}
NO_NETWORK = replace(DEVICE, link_gb_s=1e30, network_gb_s=1e30)
NO_MEMORY = replace(DEVICE, bandwidth_tb_s=1e30)
TP, SHARDING, REPLICAS, BESIDE, SLOWEST = (
    "tensor parallelism",
    "sharding",
    "replicas",
    "beside communication",
    "by the slowest device",
)
BF16, TENSORWISE, ROWWISE = None, scheme_of("tensorwise"), scheme_of("rowwise")
GATHERED = scheme_of("tensorwise", gathered=True)


def roofline(scheme: Any = BF16, args: ModelArgs = ARGS, **settings: Any) -> Roofline:
    return roofline_of(TOKENS, scheme, args, **{"rates": FREE_STARTS} | settings)


def time(scheme: Any = BF16, args: ModelArgs = ARGS, **settings: Any) -> StepTime:
    """Time a step in which all linears of the blocks train in float8 if there is a scheme."""
    at = roofline(scheme, args, **settings)
    linears = linears_of(args, tp=at.job.degrees.tp, output=True)
    return time_step(at, linears, linears[:7] if scheme else [])


def sharded_s(step: StepTime) -> float:
    """Seconds of all collectives of FSDP, hidden or not."""
    return step.hidden_s[SHARDING] + step.exposed_s[SHARDING]


def replicas_s(step: StepTime) -> float:
    """Seconds of all sums over replicas, hidden or not."""
    return step.hidden_s[REPLICAS] + step.exposed_s[REPLICAS]


# Context parallelism.

CONTEXT = "context parallelism"


@pytest.mark.parametrize(("mode", "collectives"), [("none", 2), ("full", 3)])
def test_keys_and_values_of_8b_are_gathered_once_and_again_for_the_backward(
    mode: str, collectives: int
) -> None:
    at = roofline_of(
        131072,
        args=FLAVORS["8B"],
        device=NO_MEMORY,
        rates=FREE_STARTS,
        cp=8,
        activation_checkpoint={"mode": mode},
    )
    step = time_step(at, linears_of(FLAVORS["8B"], output=True), [])
    sent = 7 / 8 * 2 * 131072 * 8 * 128 * 2  # 7 parts of keys and values of 8 heads, in bf16
    assert sent == 448 * 2**20
    assert step.exposed_s[CONTEXT] == pytest.approx(32 * collectives * sent / 400e9)
    assert step.hidden_s[CONTEXT] == 0


def test_copies_around_keys_and_values_are_those_of_the_code() -> None:
    """In bytes of the gathered 512 MiB: stacked, 2 of an eighth; put in order, 2; in the backward
    the gradients of two chunks read and their sum written, 3. The output of two chunks put
    together, and its gradient: 4 of 128 MiB."""
    at = roofline_of(131072, device=NO_NETWORK, rates=FREE_STARTS, cp=8)
    step = time_step(at, linears_of(FLAVORS["8B"], output=True), [])
    moved = (2 / 8 + 2 + 3) * 512 * 2**20 + 4 * 128 * 2**20
    assert step.exposed_s[CONTEXT] == pytest.approx(32 * moved / 2e12)


def test_a_document_mask_needs_one_pass_over_keys_and_values() -> None:
    args = replace(FLAVORS["8B"], document_bos_id=1)
    at = roofline_of(131072, args=args, device=NO_NETWORK, rates=FREE_STARTS, cp=8)
    step = time_step(at, linears_of(args, output=True), [])
    assert step.exposed_s[CONTEXT] == pytest.approx(32 * (2 / 8 + 2 + 2) * 512 * 2**20 / 2e12)


def test_ranks_of_a_sequence_shard_the_weights() -> None:
    by_cp, by_data = (time(degrees=(1, shard, 1), cp=cp) for shard, cp in ((1, 8), (8, 1)))
    assert by_cp.device_parts_s["optimizer"] == by_data.device_parts_s["optimizer"]
    assert by_data.exposed_s[CONTEXT] == 0


# The sum.


@pytest.mark.parametrize("degrees", [(1, 1, 1), (1, 8, 1), (2, 8, 4)])
def test_a_step_is_the_sum_of_its_parts(degrees: tuple[int, int, int]) -> None:
    step = time(TENSORWISE, degrees=degrees, rates=replace(RATES, **FREE_HOST))
    parts = *step.device_parts_s.values(), *step.exposed_s.values(), *step.slowed_s.values()
    assert step.step_s == pytest.approx(math.fsum(parts)) and step.host_s == 0
    assert step.device_parts_s.keys() == {
        "linears",
        "attention",
        "pointwise",
        "fsdp copies",
        "output",
        "loss",
        "optimizer",
    }
    assert all(seconds > 0 for seconds in step.device_parts_s.values())


def test_a_step_waits_for_the_slower_of_host_and_device() -> None:
    step, busy = (
        time(rates=replace(RATES, host_seconds_per_block=seconds)) for seconds in (1e-3, 1)
    )
    assert busy.step_s == busy.host_s > 4
    assert busy.device_parts_s == step.device_parts_s
    assert busy.host_s - step.host_s == pytest.approx(4 * (1 - 1e-3))


def test_the_host_issues_each_kernel_of_each_microbatch() -> None:
    at = replace(RATES, **FREE_HOST | {"host_seconds_per_kernel": 1})
    once, thrice = (
        time(rates=at, training={"local_batch_size": 1, "global_batch_size": n}).host_s
        for n in (1, 3)
    )
    optimizer = roofline().optimizer(1).kernels
    # One rank casts the weights of six groups, by two kernels each, only once a step.
    assert thrice - optimizer == pytest.approx(3 * (once - optimizer) - 2 * 2 * 6)
    in_float8 = time(TENSORWISE, rates=at).host_s
    assert in_float8 > once  # for the casts
    with_tp = time(degrees=(1, 1, 2), rates=at).host_s
    assert with_tp > once  # for the collectives


def test_the_host_updates_each_sharded_parameter_once_a_step() -> None:
    at = replace(RATES, **FREE_HOST | {"host_seconds_per_parameter": 1})
    with torch.device("meta"):
        parameters = len(list(Transformer(ARGS).parameters()))
    for degrees, microbatches, host_s in (
        ((1, 2, 1), 1, parameters),
        ((1, 2, 1), 3, parameters),
        ((1, 1, 2), 1, parameters),
        ((1, 1, 1), 1, 0),
    ):
        training = {"local_batch_size": 1, "global_batch_size": degrees[1] * microbatches}
        assert time(rates=at, degrees=degrees, training=training).host_s == host_s


def test_linears_attention_and_output_are_those_of_the_roofline() -> None:
    at = roofline(TENSORWISE)
    linears = linears_of(ARGS, output=True)
    parts = time_step(at, linears, linears[:7]).device_parts_s
    in_blocks = at.linears(linears[:7], linears[:7])
    assert parts["linears"] == pytest.approx(sum(each.both.seconds for each in in_blocks))
    assert parts["output"] == pytest.approx(at.bf16(linears[7]).both.seconds)
    assert parts["attention"] == pytest.approx(at.attention().both.seconds)
    assert parts["loss"] == pytest.approx(at.loss().seconds)
    assert parts["optimizer"] == pytest.approx(at.optimizer(PARAMETERS).seconds)


def test_the_optimizer_updates_a_shard() -> None:
    whole, sharded, with_tp = (
        time(degrees=degrees).device_parts_s["optimizer"]
        for degrees in ((1, 1, 1), (4, 8, 1), (1, 1, 2))
    )
    assert sharded == pytest.approx(whole / 8)
    assert whole / 2 < with_tp < whole / 2 * 1.001  # the norms are whole


def test_a_bf16_step_does_not_depend_on_the_recipe() -> None:
    for degrees in ((1, 8, 1), (1, 2, 4)):
        linears = linears_of(ARGS, tp=degrees[2], output=True)
        steps = [
            time_step(roofline(scheme, degrees=degrees), linears, [])
            for scheme in (BF16, ROWWISE, GATHERED)
        ]
        assert steps[0] == steps[1] == steps[2]


def test_the_slowest_of_several_devices_holds_up_the_others() -> None:
    late = replace(FREE_STARTS, slowest_device=1.25)
    alone, two = (time(degrees=(1, n, 1), rates=late) for n in (1, 2))
    assert alone.slowed_s[SLOWEST] == 0
    assert two.slowed_s[SLOWEST] == pytest.approx(0.25 * sum(two.device_parts_s.values()))


# FSDP and replicas.


def test_one_rank_communicates_nothing() -> None:
    step = time(GATHERED, rates=RATES)
    assert {*step.exposed_s.values(), *step.slowed_s.values(), *step.hidden_s.values()} == {0}


@pytest.mark.parametrize("degrees", [(1, 8, 1), (2, 4, 1), (1, 16, 8), (2, 1, 1)])
def test_links_without_limits_expose_nothing(degrees: tuple[int, int, int]) -> None:
    device = replace(NO_NETWORK, bandwidth_tb_s=1e30)  # for the copies of tensor parallelism
    free = time(TENSORWISE, degrees=degrees, device=device)
    assert sum(free.exposed_s.values()) + sum(free.hidden_s.values()) < 1e-12
    limited = time(TENSORWISE, degrees=degrees, device=NO_MEMORY)
    assert sum(limited.exposed_s.values()) > 1e-4
    assert free.device_parts_s == limited.device_parts_s


RESHARDED = {"never": 0, "default": 4, "always": 4}  # blocks that are gathered again


@pytest.mark.parametrize("reshard", RESHARDED)
@pytest.mark.parametrize(
    ("scheme", "block"),
    [
        (BF16, 2 * BLOCK),
        (TENSORWISE, 2 * BLOCK),
        (GATHERED, LINEARS + 2 * (BLOCK - LINEARS)),
    ],
)
def test_fsdp_gathers_weights_twice_and_reduces_gradients_once(
    scheme: Any, block: int, reshard: str
) -> None:
    gathered = 2 * (EMBEDDING + HEAD) + (4 + RESHARDED[reshard]) * block
    gathered += 2 * HEAD * (reshard == "always")
    reduced = 4 * PARAMETERS  # in float32
    step = time(scheme, degrees=(1, 8, 1), parallelism={"fsdp_reshard_after_forward": reshard})
    assert sharded_s(step) == pytest.approx((gathered + reduced) * 7 / 8 / 400e9)


def test_only_linears_in_float8_are_gathered_in_float8() -> None:
    at = roofline(GATHERED, degrees=(1, 8, 1))
    linears = linears_of(ARGS, output=True)
    some = time_step(at, linears, [each for each in linears if each.kind.endswith("w2")])
    all_bf16 = time_step(at, linears, [])
    saved = 8 * 1024 * 4096  # a byte an element of w2, of 4 blocks twice
    assert sharded_s(all_bf16) - sharded_s(some) == pytest.approx(saved * 7 / 8 / 400e9)


def test_gradients_may_be_reduced_in_bf16() -> None:
    in_float32, in_bf16 = (
        time(degrees=(1, 8, 1), training={"mixed_precision_reduce": dtype})
        for dtype in ("float32", "bfloat16")
    )
    difference = sharded_s(in_float32) - sharded_s(in_bf16)
    assert difference == pytest.approx(2 * PARAMETERS * 7 / 8 / 400e9)


def test_replicas_only_sum_gradients() -> None:
    step = time(GATHERED, degrees=(2, 1, 1))
    assert sharded_s(step) == 0
    assert replicas_s(step) == pytest.approx(2 * 4 * PARAMETERS / 2 / 400e9)


def test_replicas_sum_shards_between_nodes() -> None:
    sharded, both = (time(degrees=(replicas, 8, 1)) for replicas in (1, 4))
    summed = 2 * (4 * PARAMETERS / 8) * 3 / 4 / 45e9  # one rank of each node, so one adapter
    assert replicas_s(both) == pytest.approx(summed) and replicas_s(sharded) == 0
    assert sharded_s(both) == sharded_s(sharded)


@pytest.mark.parametrize(
    ("reshard", "again"), [("default", 4 * BLOCK), ("always", 4 * BLOCK + EMBEDDING + 1024)]
)
def test_tied_embeddings_are_gathered_and_reduced_once(reshard: str, again: int) -> None:
    tied = time(
        args=replace(ARGS, tie_embeddings=True),
        degrees=(1, 8, 1),
        parallelism={"fsdp_reshard_after_forward": reshard},
    )
    parameters = EMBEDDING + 1024 + 4 * BLOCK
    moved = 2 * (parameters + again) + 4 * parameters
    assert sharded_s(tied) == pytest.approx(moved * 7 / 8 / 400e9)


def test_what_computation_does_not_hide_is_exposed_and_grows_with_the_bytes() -> None:
    # The first gather waits for nothing, and nothing waits for the last reduction.
    first = 2 * (EMBEDDING + BLOCK) * 7 / 8
    last = 4 * (EMBEDDING + BLOCK) * 7 / 8
    fast = time(degrees=(1, 8, 1), device=replace(DEVICE, link_gb_s=5e4))
    assert fast.exposed_s[SHARDING] == pytest.approx((first + last) / 4e13)

    # On slow links computation hides as much as it takes, however long communication takes.
    slow, slower, slowest = (
        time(degrees=(1, 8, 1), device=replace(DEVICE, link_gb_s=1 / n)) for n in (1, 2, 3)
    )
    in_blocks = ("linears", "attention", "pointwise", "fsdp copies")
    hides = sum(slow.device_parts_s[part] for part in in_blocks)
    for each in (slow, slower, slowest):
        assert each.hidden_s[SHARDING] == pytest.approx(hides)
        assert each.slowed_s[BESIDE] == pytest.approx(hides / 8)
    more = slower.exposed_s[SHARDING] - slow.exposed_s[SHARDING]
    assert slowest.exposed_s[SHARDING] - slower.exposed_s[SHARDING] == pytest.approx(more)
    assert more == pytest.approx(sharded_s(slow))


def test_accumulation_repeats_everything_but_reductions_and_the_optimizer() -> None:
    once, thrice = (
        time(degrees=(2, 8, 1), training={"local_batch_size": 1, "global_batch_size": 16 * n})
        for n in (1, 3)
    )
    for part, seconds in once.device_parts_s.items():
        # Gradients are cast once, added twice, and copied: 34 bytes in place of 6.
        more = (34 - 3 * 6) * PARAMETERS / 2e12 if part == "fsdp copies" else 0
        times = 1 if part == "optimizer" else 3
        assert thrice.device_parts_s[part] == pytest.approx(times * seconds + more)
    gathered = (2 * (EMBEDDING + HEAD) + 8 * 2 * BLOCK) * 7 / 8 / 400e9
    assert sharded_s(thrice) - sharded_s(once) == pytest.approx(2 * gathered)

    # Each microbatch waits for its first gather.
    first = 2 * (EMBEDDING + BLOCK) * 7 / 8 / 400e9
    assert thrice.exposed_s[SHARDING] - once.exposed_s[SHARDING] == pytest.approx(2 * first)


def test_reductions_in_each_microbatch_repeat_everything_but_the_optimizer() -> None:
    once, thrice = (
        time(
            degrees=(2, 8, 1),
            training={"local_batch_size": 1, "global_batch_size": 16 * n},
            parallelism={"fsdp_reduce_gradients": "each"},
        )
        for n in (1, 3)
    )
    for part, seconds in once.device_parts_s.items():
        more = 2 * 12 / 8 * PARAMETERS / 2e12 if part == "fsdp copies" else 0  # shards are added
        times = 1 if part == "optimizer" else 3
        assert thrice.device_parts_s[part] == pytest.approx(times * seconds + more)
    for seconds in (sharded_s, replicas_s):
        assert seconds(thrice) == pytest.approx(3 * seconds(once))
    assert thrice.exposed_s[SHARDING] == pytest.approx(3 * once.exposed_s[SHARDING])


@pytest.mark.parametrize("scheme", [BF16, GATHERED])
def test_weights_that_stay_are_gathered_and_copied_once_a_step(scheme: Any) -> None:
    def steps(reshard: str) -> list[StepTime]:
        return [
            time(
                scheme,
                degrees=(1, 8, 1),
                training={"local_batch_size": 1, "global_batch_size": 8 * n},
                parallelism={"fsdp_reshard_after_forward": reshard},
            )
            for n in (1, 3)
        ]

    (once, thrice), others = steps("never"), steps("always")
    assert sharded_s(thrice) == pytest.approx(sharded_s(once))
    assert thrice.exposed_s[SHARDING] == pytest.approx(once.exposed_s[SHARDING])

    # A gather copies the whole, and of a shard 10 bytes a weight or 23 with its cast. "always" has
    # five of each block and of the head more in three microbatches, and two of the embedding.
    linears, norms = 4 * LINEARS, 4 * (BLOCK - LINEARS)
    high, low = 4 + 10 / 8, 2 + 23 / 8 if scheme else 4 + 10 / 8
    nbytes = high * (2 * EMBEDDING + 5 * HEAD + 5 * norms) + 5 * low * linears
    more = others[1].device_parts_s["fsdp copies"] - thrice.device_parts_s["fsdp copies"]
    assert more == pytest.approx(nbytes / 2e12)


# Tensor parallelism.

LARGE = {
    # Bytes an element of what a block gathers and scatters in each pass, beside recomputation, and
    # of what it recomputes; all counted in what torchao and FSDP run in a process group of 8.
    ("bf16", "none"): (2 * 2 + 2 * 2, 2 * 2 + 2 * 2, 0),
    ("bf16", "selective"): (8, 8, 2 * 2),
    ("bf16", "full"): (8, 8, 2 * 2 + 2),
    ("rowwise", "selective"): (8, 8, 2 * 2),
    ("tensorwise", "none"): (2 * 1 + 2 * 2, 2 * 1 + 2 * 2, 0),
    ("tensorwise", "selective"): (6, 6, 0),  # the compiler keeps the gathered inputs
    ("tensorwise", "full"): (6, 6, 2 * 1 + 2),
}
ENDS = 4 * 2  # of the embedding and around the projection to the vocabulary, in both passes
SCHEMES = {"bf16": BF16, "rowwise": ROWWISE, "tensorwise": TENSORWISE}


@pytest.mark.parametrize(("recipe", "mode"), LARGE)
@pytest.mark.parametrize("tp", [2, 8])
def test_tensor_parallelism_moves_what_was_counted(recipe: str, mode: str, tp: int) -> None:
    step = time(
        SCHEMES[recipe],
        degrees=(1, 1, tp),
        device=NO_MEMORY,
        activation_checkpoint={"mode": mode},
    )
    nbytes = HIDDEN * (4 * sum(LARGE[recipe, mode]) + ENDS)
    assert step.exposed_s[TP] == pytest.approx(nbytes * (tp - 1) / tp / 400e9)
    assert step.exposed_s[SHARDING] == sum(step.hidden_s.values()) == 0


def test_eager_checkpointing_gathers_float8_inputs_again() -> None:
    compiled, eager = (
        time(
            TENSORWISE,
            degrees=(1, 1, 2),
            device=NO_MEMORY,
            compiled=compiled,
            activation_checkpoint={"mode": "selective"},
        ).exposed_s[TP]
        for compiled in (True, False)
    )
    assert eager - compiled == pytest.approx(4 * HIDDEN * 2 * 1 / 2 / 400e9)


def test_an_input_is_gathered_in_float8_if_all_its_linears_are() -> None:
    at = roofline(TENSORWISE, degrees=(1, 1, 2), device=NO_MEMORY)
    linears = linears_of(ARGS, tp=2, output=True)

    def in_float8(*kept: str) -> float:
        chosen = [each for each in linears[:7] if each.kind.split(".")[1] not in kept]
        return time_step(at, linears, chosen).exposed_s[TP]

    byte = 4 * HIDDEN / 2 / 400e9  # of one gather in each of 4 blocks
    assert in_float8("w3") - in_float8() == pytest.approx(byte)
    assert in_float8("w1", "w3") - in_float8() == pytest.approx(byte)
    assert in_float8("wv", "wo") - in_float8() == pytest.approx(2 * byte)


@pytest.mark.parametrize(
    ("scheme", "mode", "reductions"),
    [
        (BF16, "full", 0),
        (TENSORWISE, "none", 4 + 7),
        (TENSORWISE, "selective", 4 + 7),
        (TENSORWISE, "full", 4 + 10),
        (ROWWISE, "none", 2 + 4),
        (ROWWISE, "selective", 2 + 4),
        (ROWWISE, "full", 2 + 6),
    ],
)
def test_scales_are_reduced_over_the_ranks(scheme: Any, mode: str, reductions: int) -> None:
    rates = replace(FREE_STARTS, small_reduction_seconds=1)
    step = time(
        scheme,
        degrees=(1, 1, 4),
        device=replace(NO_NETWORK, bandwidth_tb_s=1e30),
        rates=rates,
        activation_checkpoint={"mode": mode},
    )
    assert step.exposed_s[TP] == pytest.approx(4 * reductions)


@pytest.mark.parametrize(("sequences", "copies"), [(1, 4), (2, 8)])
def test_pieces_of_several_sequences_are_put_together(sequences: int, copies: int) -> None:
    # What is scattered is always copied, 2 bytes read and 2 written of each element: 4 times a
    # block and twice around them. What is gathered, only if it has several sequences.
    training = {"seq_len": TOKENS // sequences, "local_batch_size": sequences}
    step = time(degrees=(1, 1, 2), device=NO_NETWORK, training=training)
    ends = 2 * sequences
    assert step.exposed_s[TP] == pytest.approx(HIDDEN * 4 * (4 * copies + ends) / 2e12)


@pytest.mark.parametrize("scheme", [BF16, TENSORWISE])
def test_a_loss_that_is_not_parallel_gathers_the_logits_and_computes_all_on_each_rank(
    scheme: Any,
) -> None:
    parallel, whole = (
        time(scheme, degrees=(1, 1, 4), parallelism={"disable_loss_parallel": each})
        for each in (False, True)
    )
    nbytes = 2 * TOKENS * 32000
    gathered = nbytes * 3 / 4 / 400e9 + 2 * nbytes / 2e12  # and read and written at 2 TB/s
    assert whole.exposed_s[TP] - parallel.exposed_s[TP] == pytest.approx(gathered)
    loss = [each.device_parts_s["loss"] for each in (parallel, whole)]
    assert loss[1] == pytest.approx(4 * loss[0])


ASYNC = {
    # Bytes an element that async tensor parallelism overlaps in both passes of a block, and around
    # the blocks: what no cast and no rescaling of rows separates from its matmul.
    "bf16": (16, 8),
    "tensorwise": (4 * 1 + 4 * 2, 2 * 2),
    "rowwise": (2 * 2, 2 * 2),  # the sums of the forward pass, and those around the blocks
}


@pytest.mark.parametrize("recipe", ASYNC)
def test_async_tensor_parallelism_hides_its_share_of_what_is_beside_a_matmul(recipe: str) -> None:
    waited, overlapped = (
        time(
            SCHEMES[recipe],
            degrees=(1, 1, 2),
            device=NO_MEMORY,
            parallelism={"enable_async_tensor_parallel": each},
        )
        for each in (False, True)
    )
    in_block, ends = ASYNC[recipe]
    hidden = 0.25 * HIDDEN * (4 * in_block + ends) / 2 / 400e9
    assert waited.hidden_s[TP] == 0
    assert overlapped.hidden_s[TP] == pytest.approx(hidden)
    assert overlapped.exposed_s[TP] == pytest.approx(waited.exposed_s[TP] - hidden)
    assert overlapped.device_parts_s == waited.device_parts_s


@pytest.mark.parametrize("asynchronous", [False, True])
def test_fsdp_hides_behind_tensor_parallelism_that_is_waited_for(asynchronous: bool) -> None:
    step = time(
        degrees=(1, 8, 8),
        device=replace(DEVICE, network_gb_s=0.1),
        parallelism={"enable_async_tensor_parallel": asynchronous},
    )
    in_blocks = ("linears", "attention", "pointwise", "fsdp copies")
    hides = sum(step.device_parts_s[part] for part in in_blocks) + step.exposed_s[TP]
    assert step.hidden_s[SHARDING] == pytest.approx(hides)
    assert (step.hidden_s[TP] > 0) == asynchronous


# Predictions.


def ends_of(**moves: tuple[float, float]) -> Any:
    def move_constants(_: Any, rates: Rates) -> Any:
        return {
            name: tuple(replace(rates, **{name: end}) for end in ends)
            for name, ends in moves.items()
        }

    return move_constants


def predicted(moves: Any, monkeypatch: pytest.MonkeyPatch) -> Prediction:
    monkeypatch.setattr(prediction, "move_constants", moves)
    at = roofline(TENSORWISE, FLAVORS["8B"], degrees=(1, 8, 1), rates=RATES)
    return predict(at, linears_of(FLAVORS["8B"], output=True))


def test_a_guess_that_does_not_matter_does_not_widen_the_band(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for moves in (ends_of(), ends_of(async_tensor_parallel=(0.1, 0.9), attention_flex=(0.1, 0.9))):
        found = predicted(moves, monkeypatch)
        assert found.speedup_band == (found.step_speedup,) * 2
        assert found.float8_s_band == (found.float8.step_s,) * 2


def test_the_moves_of_guesses_add_up_as_squares(monkeypatch: pytest.MonkeyPatch) -> None:
    fp8, attention = {"fp8_matmul": (0.3, 0.5)}, {"attention_cudnn": (0.4, 0.7)}
    one, other, both = (
        predicted(ends_of(**moves), monkeypatch) for moves in (fp8, attention, fp8 | attention)
    )
    value = both.float8.step_s
    for i in (0, 1):
        moved = (math.log(each.float8_s_band[i] / value) for each in (one, other))
        assert math.log(both.float8_s_band[i] / value) == pytest.approx(
            math.copysign(math.hypot(*moved), i - 0.5)
        )
    low, high = one.float8_s_band
    assert low < value < high

    # By hand: the fp8 rate moves the speedup as it moves the step in float8, and not that in bf16.
    assert one.speedup_band == pytest.approx((one.bf16.step_s / high, one.bf16.step_s / low))
    # Attention takes as long in both, so that more of it makes the speedup smaller.
    assert other.speedup_band[0] < other.step_speedup < other.speedup_band[1]


def test_ends_on_one_side_move_the_band_to_that_side_only(monkeypatch: pytest.MonkeyPatch) -> None:
    found = predicted(ends_of(fp8_matmul=(0.3, 0.35)), monkeypatch)
    assert found.float8_s_band[0] == found.float8.step_s < found.float8_s_band[1]
    assert found.speedup_band[0] < found.step_speedup == found.speedup_band[1]


def test_a_band_contains_its_value() -> None:
    found = predict(
        roofline_of(TOKENS, ROWWISE, device=H100, degrees=(1, 8, 1)),
        linears_of(FLAVORS["8B"], output=True),
    )
    for value, (low, high) in (
        (found.step_speedup, found.speedup_band),
        (found.float8.step_s, found.float8_s_band),
    ):
        assert 0.5 * value < low < value < high < 2 * value
    assert found.step_speedup == found.bf16.step_s / found.float8.step_s


def test_a_prediction_names_what_had_better_be_kept() -> None:
    # At the rates of thin matmuls float8 casts cost more than they save.
    linears = linears_of(FLAVORS["8B"], tp=8)
    at = roofline_of(TOKENS, ROWWISE, degrees=(1, 1, 8))
    found = predict(at, linears)
    kept = set(BLOCK_LINEARS) - {each.kind for each in at.choose(linears)}
    assert kept and set(found.better_kept) == kept
    assert found.converted == list(BLOCK_LINEARS)

    without = predict(at, linears_of(FLAVORS["8B"], tp=8, kept=kept))
    assert without.better_kept == [] and set(without.converted) == set(BLOCK_LINEARS) - kept
    assert without.step_speedup > found.step_speedup


def test_the_projection_is_timed_in_float8_if_it_is_converted() -> None:
    at = roofline(TENSORWISE)
    linears = linears_of(ARGS, output=True)
    output = replace(linears[7], kept_because="")
    assert output.kind == OUTPUT
    converted = predict(at, [*linears[:7], output]).float8.device_parts_s
    kept = predict(at, linears).float8.device_parts_s
    assert converted["output"] == pytest.approx(at.float8(output).both.seconds)
    assert converted["output"] < kept["output"]
    assert converted["linears"] == kept["linears"]


@pytest.mark.parametrize(
    ("speedup", "band", "on", "off"),
    [
        (1.25, (1.2, 1.3), "helps: a step runs", "would help: a step would run"),
        (1.06, (1.01, 1.1), "helps: a step runs", "would help: a step would run"),
        (1.25, (0.99, 1.3), "may help or hurt: a step runs", "may help or hurt: a step would run"),
        (0.5, (0.4, 0.6), "hurts: a step runs", "would hurt: a step would run"),
        (0.97, (0.9, 1.02), "is neutral: a step runs", "would be neutral: a step would run"),
        (0.97, (0.89, 1.02), "may help or hurt: a step runs", "may help or hurt: a step would run"),
        (0.94, (0.9, 1.01), "may help or hurt: a step runs", "may help or hurt: a step would run"),
    ],
)
def test_verdicts(speedup: float, band: tuple[float, float], on: str, off: str) -> None:
    step = time()
    gain = Prediction("rowwise", speedup, band, (1, 1), ["wq"], [], step, step, {})
    said = f"at {speedup:.2f}x the speed of bf16 ({band[0]:.2f} to {band[1]:.2f}); "
    kept = "no linear is better kept in bf16."
    assert format_verdict(gain) == f"rowwise float8 {on} {said}{kept}"
    assert format_verdict(gain, on=False) == f"rowwise float8 {off} {said}{kept}"
    gain = replace(gain, better_kept=["wk", "wv"])
    assert format_verdict(gain).endswith(f"{said}keep wk, wv in bf16.")


def test_verdict_without_a_linear_in_float8() -> None:
    step = time()
    gain = Prediction("rowwise", 1.0, (1.0, 1.0), (1, 1), [], [], step, step, {})
    kept = "rowwise float8 is on, but filter_fqns keeps every linear in bf16."
    assert format_verdict(gain) == kept
    assert format_verdict(gain, on=False).startswith("rowwise float8 would gain nothing: ")
