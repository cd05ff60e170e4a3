"""The estimate against what a step really allocates, for ranks of any layout: collectives of the
fake process group allocate as real ones do, and send nothing."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pytest import approx
from sample_jobs import job_of
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function
from torch.testing._internal.distributed.fake_pg import FakeStore

from torchtitan_lite.catalog.flavors import BLOCK_LINEARS, FLAVORS, ModelArgs
from torchtitan_lite.config import Config
from torchtitan_lite.float8.convert import convert_linears
from torchtitan_lite.float8.selection import select_linears
from torchtitan_lite.models import loss
from torchtitan_lite.models.llama3 import Transformer
from torchtitan_lite.parallel.fsdp import start_microbatch
from torchtitan_lite.parallel.mesh import build_mesh
from torchtitan_lite.parallel.parallelize import parallelize
from torchtitan_lite.planner.memory import Moment, step_memory
from torchtitan_lite.planner.rank import Rank
from torchtitan_lite.planner.workload import RESERVED_RATIO
from torchtitan_lite.training.optim import build_optimizer

PLAN = (Path(__file__).parents[2] / "docs/plan.md").read_text()

WIDE = ModelArgs(
    dim=256, n_layers=2, n_heads=8, n_kv_heads=4, ffn_dim=768, vocab_size=512, max_seq_len=256
)
DEEP = replace(WIDE, dim=128, n_layers=8, ffn_dim=512)
WIDE_4, DEEP_12 = replace(WIDE, n_layers=4), replace(DEEP, n_layers=12)
VOCABULARY = ModelArgs(
    dim=64, n_layers=2, n_heads=4, n_kv_heads=4, ffn_dim=64, vocab_size=8192, max_seq_len=256
)
WEIGHTS = ModelArgs(
    dim=512, n_layers=4, n_heads=8, n_kv_heads=8, ffn_dim=1024, vocab_size=64, max_seq_len=4
)
# Heads of 32 dimensions attend in float32 on CPU, and those of 64 in bf16.
LONG = ModelArgs(
    dim=256, n_layers=2, n_heads=8, n_kv_heads=2, ffn_dim=512, vocab_size=256, max_seq_len=2048
)
LONG_BF16 = replace(LONG, n_heads=4)
MASKED = replace(LONG_BF16, document_bos_id=1, max_seq_len=1024)
LARGE = replace(WEIGHTS, vocab_size=8192)
TIED, TIED_LARGE = (replace(each, tie_embeddings=True) for each in (VOCABULARY, LARGE))
LLAMA_8B = FLAVORS["3-8B"]

FULL, BY_OP = ({"activation_checkpoint": {"mode": mode}} for mode in ("full", "selective"))
SECOND = {"activation_checkpoint": {"mode": "selective", "selective_ac_option": "2"}}
COMPILED = {"compile": {"enable": True}}
EAGER_LOSS = {"compile": {"enable": True, "components": ["model"]}}
NEVER = {"parallelism": {"fsdp_reshard_after_forward": "never"}}
EACH = {"parallelism": {"fsdp_reduce_gradients": "each"}}
GATHERED_LOGITS = {"parallelism": {"disable_loss_parallel": True}}
FOREACH = {"optimizer": {"implementation": "foreach"}}
GPU: dict[str, Any] = {"on_cpu": False, "batch": 1}
Degrees = tuple[int, int, int]  # dp_replicate, dp_shard, tp


def training(**keys: Any) -> dict[str, Any]:
    return {"training": keys}


def float8(recipe: str = "tensorwise", **keys: Any) -> dict[str, Any]:
    return {"float8": {"enable_float8_linear": True, "recipe_name": recipe} | keys}


FLOAT32, BF16 = training(mixed_precision_param="float32"), training(dtype="bfloat16")
BF16_REDUCE = training(mixed_precision_reduce="bfloat16")
FOUR = training(local_batch_size=1, global_batch_size=8)  # passes of 2 ranks, or 8 of one


def build_rank(
    args: ModelArgs,
    degrees: Degrees = (1, 1, 1),
    *,
    cp: int = 1,
    batch: int = 4,
    on_cpu: bool = True,
    **tables: dict[str, Any],
) -> Rank:
    """A rank in bf16, eager, without checkpointing, but for `tables` of the config; under float8
    all seven linears are converted."""
    batch_keys = {"seq_len": args.max_seq_len, "local_batch_size": batch}
    given = {"activation_checkpoint": {"mode": "none"}} | tables
    given["training"] = batch_keys | tables.get("training", {})
    job = job_of(Config.model_validate(given), args, degrees=degrees, cp=cp)
    return Rank(job, BLOCK_LINEARS if "float8" in tables else (), on_cpu=on_cpu)


def peak(rank: Rank) -> Moment:
    return max(step_memory(rank), key=lambda moment: moment.total)


# ----- step_memory, beside what a step allocates -----


@contextmanager
def fake_process_group(size: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def build_model(rank: Rank) -> Transformer:
    config, tp = rank.config, rank.degrees.tp
    with torch.device("meta"):
        model = Transformer(rank.model).to(getattr(torch, config.training.dtype))
    if rank.float8_linears:
        choices = select_linears(model, filter_fqns=(), tp_degree=tp, tokens=rank.tokens)
        convert_linears(model, choices, float8=config.float8, emulate=True)
    parallelize(
        [model],
        build_mesh(rank.degrees, device_type="cpu"),
        parallelism=config.parallelism,
        activation_checkpoint=config.activation_checkpoint,
        compile=config.compile,
        training=config.training,
        flash=False,
    )
    model.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.zero_()
    return model


def train(rank: Rank) -> None:
    """Two steps, as the trainer makes them; the second one but for the first of its microbatches is
    recorded as `measured`, and each backward."""
    config, model = rank.config, build_model(rank)
    optimizer = build_optimizer(model.parameters(), config.optimizer)
    cross_entropy = loss.CrossEntropy(compiled=config.compile.enable)
    shape = config.training.local_batch_size, config.training.seq_len
    tokens = torch.randint(rank.model.vocab_size, shape)
    labels = model.shard_sequence(tokens, 1)
    for step in range(2):
        for accum_step in range(rank.accum_steps):
            last = accum_step == rank.accum_steps - 1
            start_microbatch(model, config.parallelism, last=last)
            measured = step and (last or accum_step)
            with record_function("measured") if measured else nullcontext():
                if rank.fuses_loss:
                    total = model(tokens, partial(cross_entropy.of_linear, labels=labels))
                else:
                    total = cross_entropy.of_logits(model(tokens), labels)
                with record_function("backward"):
                    total.backward()
        with record_function("measured") if step else nullcontext():
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        optimizer.zero_grad()


def measure(rank: Rank) -> tuple[int, int]:
    """Bytes allocated between the last forward of a step and its backward, and at the most from
    that forward on."""
    gc.collect()  # what an earlier test leaves must not be freed meanwhile
    with (
        fake_process_group(rank.degrees.world_size),
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler,
    ):
        train(rank)
    events = profiler.profiler.kineto_results.events()
    spans = [(event.start_ns(), event.end_ns()) for event in events if event.name() == "measured"]
    backward = max(event.start_ns() for event in events if event.name() == "backward")
    changes = sorted(
        (event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"
    )
    allocated, before, most = 0, 0, 0
    for time, change in changes:
        allocated += change
        if time < backward:
            before = allocated
        if any(begin <= time <= end for begin, end in spans):
            most = max(most, allocated)
    return before, most


def at_loss(rank: Rank) -> int:
    """Estimated bytes between the forward and the backward."""
    moment = step_memory(rank)[0]
    # Copied by FSDP, for the head, and freed.
    head = 2 * rank.model.dim * (rank.model.vocab_size // rank.degrees.tp + 1)
    return moment.total - moment.logits - head


ONE, TWO, EIGHT, TP, BOTH = (1, 1, 1), (1, 2, 1), (1, 8, 1), (1, 1, 2), (1, 2, 2)
ACCUMULATED, ALONE = training(global_batch_size=16), {"batch": 1}
QUICK, SLOW = (), pytest.mark.slow
# fmt: off
STEPS = {  # of a model, with degrees and settings, to a tolerance
    "full": (WIDE, ONE, FULL, 0.05, SLOW),
    "second": (WIDE, ONE, SECOND, 0.05, QUICK),
    "fsdp tp": (WIDE, BOTH, {}, 0.05, SLOW),
    "fsdp tp op": (WIDE, BOTH, BY_OP, 0.05, QUICK),
    "fsdp": (DEEP, EIGHT, {"batch": 2}, 0.05, SLOW),
    "fsdp full": (DEEP, EIGHT, FULL | {"batch": 2}, 0.05, QUICK),
    "fsdp op": (DEEP, EIGHT, BY_OP | {"batch": 2}, 0.05, SLOW),
    "logits": (VOCABULARY, (1, 4, 2), FULL, 0.05, SLOW),
    "gathered logits": (VOCABULARY, BOTH, BY_OP | GATHERED_LOGITS, 0.05, QUICK),
    "weights": (WEIGHTS, EIGHT, ALONE, 0.05, QUICK),
    "hsdp": (WEIGHTS, (2, 2, 1), {}, 0.05, QUICK),
    "float32": (WEIGHTS, TWO, FLOAT32, 0.05, QUICK),
    "float32 op": (WIDE, TWO, BY_OP | FLOAT32, 0.05, SLOW),
    "bf16 reduce": (WEIGHTS, TWO, BF16_REDUCE, 0.05, QUICK),
    "bf16 reduce op": (WIDE, TWO, BY_OP | BF16_REDUCE, 0.05, SLOW),
    "bf16 weights": (WEIGHTS, TWO, BF16, 0.05, QUICK),
    "foreach": (WEIGHTS, TWO, FOREACH, 0.05, QUICK),
    "accumulation": (WIDE, TWO, BY_OP | ACCUMULATED, 0.05, SLOW),
    "never": (WIDE, TWO, BY_OP | NEVER, 0.05, SLOW),
    "never accumulation": (WIDE, TWO, BY_OP | NEVER | ACCUMULATED, 0.05, SLOW),
    "never four": (WEIGHTS, TWO, NEVER | FOUR, 0.05, SLOW),
    "each four": (WEIGHTS, TWO, EACH | FOUR, 0.05, QUICK),
    "one float32": (WEIGHTS, ONE, FLOAT32, 0.05, QUICK),
    "one bf16 reduce": (WIDE, ONE, BF16_REDUCE, 0.05, SLOW),
    "one accumulation": (WIDE, ONE, ACCUMULATED, 0.05, SLOW),
    "one large": (LARGE, ONE, ALONE, 0.03, QUICK),
    "one large four": (LARGE, ONE, training(local_batch_size=1, global_batch_size=4), 0.03, SLOW),
    "tied tp": (TIED, (1, 4, 2), {}, 0.02, QUICK),
    "tied gathered logits": (TIED, BOTH, GATHERED_LOGITS, 0.02, SLOW),
    "tied fsdp": (TIED_LARGE, EIGHT, ALONE, 0.02, QUICK),
    "tied one": (TIED_LARGE, ONE, ALONE, 0.02, SLOW),
    "tied four": (TIED_LARGE, TWO, FOUR, 0.02, SLOW),
    "cp": (LONG, ONE, {"cp": 2, "batch": 2}, 0.1, SLOW),
    "cp full": (LONG, ONE, FULL | {"cp": 8, "batch": 2}, 0.1, SLOW),
    "cp op": (LONG_BF16, ONE, BY_OP | {"cp": 4, "batch": 2}, 0.1, SLOW),
    "cp tp": (LONG_BF16, TP, {"cp": 2, "batch": 2}, 0.1, QUICK),
    "cp mask": (MASKED, ONE, {"cp": 4, "batch": 2}, 0.1, QUICK),
    "compiled": (WIDE_4, TWO, COMPILED, 0.05, SLOW),
    "compiled full": (DEEP_12, TWO, FULL | COMPILED, 0.05, SLOW),
    "compiled tp op": (WIDE_4, BOTH, BY_OP | COMPILED, 0.05, SLOW),
    "compiled one": (WIDE_4, ONE, COMPILED, 0.05, SLOW),
    "float8": (WIDE_4, TWO, float8(), 0.01, SLOW),
    "float8 rowwise": (WIDE_4, TWO, float8("rowwise"), 0.01, SLOW),
    "float8 gw_hp": (WIDE_4, TWO, float8("rowwise_with_gw_hp"), 0.01, SLOW),
    "float8 tp": (WIDE, BOTH, float8(), 0.01, QUICK),
    "float8 tp rowwise": (WIDE_4, BOTH, float8("rowwise"), 0.01, SLOW),
    "float8 tp gw_hp": (WIDE_4, BOTH, float8("rowwise_with_gw_hp"), 0.01, SLOW),
    "float8 tp op": (WIDE_4, BOTH, float8() | BY_OP, 0.01, SLOW),
    "float8 compiled": (DEEP_12, TWO, float8() | COMPILED, 0.01, SLOW),
    "float8 gw_hp compiled": (DEEP_12, TWO, float8("rowwise_with_gw_hp") | COMPILED, 0.01, SLOW),
}
# fmt: on
HEIGHTS = {
    "tied tp": "loss",
    "tied gathered logits": "loss",
    "tied fsdp": "gradients of layers.1",
    "tied one": "gradients of tok_embeddings",
    "tied four": "gradients of layers.3",
}
LESS = {"bf16 weights", "each four", "hsdp", "tied fsdp", "weights"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=marks) for name, (*_, marks) in STEPS.items()]
)
def test_step_memory_is_what_a_step_allocates(name):
    if name in LESS and version("torch").startswith("2.12."):
        pytest.skip("torch 2.12 allocates 6 MB less than versions before and after it")
    args, degrees, settings, tolerance, _ = STEPS[name]
    rank = build_rank(args, degrees, **settings)
    most, (kept, allocated) = peak(rank), measure(rank)
    if "float8" in settings:
        # The peak would hold the float32 operands of emulated matmuls, which no GPU makes.
        assert at_loss(rank) == approx(kept, rel=tolerance)
        return
    assert most.total == approx(allocated, rel=tolerance)
    assert most.name == HEIGHTS.get(name, most.name)


def test_step_memory_of_a_loss_in_several_chunks(monkeypatch):
    monkeypatch.setattr(loss, "CHUNK_LOGITS", 2**21)  # of 2**23
    monkeypatch.setattr(loss, "PIECE_LOGITS", 2**19)
    rank = build_rank(replace(VOCABULARY, dim=256, n_heads=8), EIGHT, **FULL)
    assert peak(rank).name == "loss"
    assert peak(rank).total == approx(measure(rank)[1], rel=0.05)


def test_step_memory_keeps_what_the_compilers_partition_does():
    rank = build_rank(WIDE, TWO, **COMPILED)
    # The forward and backward graphs run as they are, without generated code.
    with torch.compiler.set_stance("default", force_backend="aot_eager_decomp_partition"):
        assert at_loss(rank) == approx(measure(rank)[0], rel=0.05)


@pytest.mark.slow
def test_step_memory_under_a_memory_budget():
    """The compiler takes no more than its budget, and the estimate is of all of it."""
    kept = []
    for budget in (0.2, 0.6):
        torch._dynamo.reset()
        checkpoint = {"mode": "memory_budget", "memory_budget": budget}
        rank = build_rank(DEEP, TWO, activation_checkpoint=checkpoint, **COMPILED)
        kept.append((at_loss(rank), measure(rank)[0]))
    (low, measured_low), (high, measured_high) = kept
    assert measured_low < measured_high
    assert 0.8 * low < measured_low < 1.02 * low and 0.8 * high < measured_high < 1.02 * high


@pytest.mark.parametrize(("changes", "microbatches"), [({}, 1), (EACH, 4)])
def test_fsdp_reduce_gradients_in_the_last_or_in_each_microbatch(changes, microbatches):
    rank = build_rank(replace(WEIGHTS, dim=64, ffn_dim=64), TWO, **changes, **FOUR)
    with fake_process_group(2), profile(activities=[ProfilerActivity.CPU]) as profiler:
        train(rank)
    names = [event.name() for event in profiler.profiler.kineto_results.events()]
    # Of four blocks and both ends, in two steps.
    assert names.count("c10d::_reduce_scatter_base_") == 2 * microbatches * 6


# ----- step_memory, Moment: literal bytes on GPUs -----

TOKENS, BLOCK, EMBEDDING, HEAD = 8192, 218_112_000, 128256 * 4096, 128256 * 4096 + 4096
ALL = 8_030_261_248
ROTARY = 2 * 4 * TOKENS * 64


def moments_of(args: ModelArgs, degrees: Degrees, **settings: Any) -> dict[str, Moment]:
    rank = build_rank(args, degrees, **GPU | settings)
    return {moment.name: moment for moment in step_memory(rank)}


def test_step_memory_of_8b_on_one_gpu_holds_copies_or_gradients():
    moments = moments_of(LLAMA_8B, ONE, **BY_OP, **COMPILED)
    # The loss needs copies of all weights but the embedding's. At the end of a block's backward
    # there are those of the blocks before it, its own gradients in float32, of which the last is
    # still there in bf16, and the float32 ones of the blocks behind it.
    assert moments["loss"].buffers == 2 * (32 * BLOCK + HEAD) + ROTARY
    of_block = moments["gradients of layers.5"]
    assert of_block.buffers == 2 * 5 * BLOCK + 4 * BLOCK + 2 * 14336 * 4096 + ROTARY
    assert of_block.gradients == (26 * BLOCK + HEAD) * 4
    assert moments["gradients of tok_embeddings"].buffers == (2 + 4) * EMBEDDING + ROTARY


@pytest.mark.parametrize(("microbatches", "embedding"), [(2, 0), (3, 2 * EMBEDDING)])
def test_step_memory_of_one_gpu_keeps_the_embedding_in_middle_microbatches(microbatches, embedding):
    moments = moments_of(LLAMA_8B, ONE, **training(global_batch_size=microbatches))
    assert moments["loss"].buffers == 2 * (32 * BLOCK + HEAD) + embedding + ROTARY


def test_step_memory_of_8b_on_8_gpus():
    moments = moments_of(LLAMA_8B, EIGHT, **BY_OP, **COMPILED)
    assert list(moments)[:3] == ["loss", "backward of output", "gradients of output"]
    assert len(moments) == 1 + 2 * (32 + 2) + 1
    shards = ALL * 4 // 8
    name, update = list(moments.items())[-1]
    assert name == "optimizer step"
    assert update == Moment(name, shards, shards, 2 * shards, buffers=ROTARY)

    # A block keeps its input, wq's output, attention's and its log-sum-exp, wv's and w1's; the head
    # its norm's input, and the gradients of its output and of the projection's weight, which the
    # loss made from the logits in bf16 and that output; FSDP has gathered the head, and holds what
    # it copied that from. The rotary tables are there all the time.
    kept = 32 * TOKENS * (2 * (3 * 4096 + 1024 + 14336) + 4 * 32)
    kept += 2 * TOKENS * 2 * 4096 + 2 * EMBEDDING
    working = 2 * TOKENS * 128256 + 2 * TOKENS * 4096
    highest = Moment("loss", shards, 0, 2 * shards, kept, working, 2 * 2 * HEAD + ROTARY)
    assert moments["loss"] == highest == max(moments.values(), key=lambda each: each.total)

    # At the end of a block's backward: its weights, the next block's, its gradients, and the
    # float32 ones in flight.
    assert moments["gradients of layers.5"].buffers == (2 + 2 + 2 + 4) * BLOCK + ROTARY
    assert moments["gradients of layers.5"].gradients == (26 * BLOCK + HEAD) * 4 // 8


def test_step_memory_of_1b_on_8_gpus_holds_its_tied_embedding_once():
    moments = moments_of(FLAVORS["1B"], EIGHT, **FULL, **COMPILED)
    shards, matrix, block = 1_235_814_400 * 4 // 8, 128256 * 2048, 60_821_504
    update, of_block = moments["optimizer step"], moments["gradients of layers.5"]
    rotary = 2 * 4 * 131072 * 32
    assert update == Moment("optimizer step", shards, shards, 2 * shards, buffers=rotary)
    # The matrix with the last norm, and its gradient, beside what a block of an untied model needs.
    stays = 2 * (matrix + 2048) + 2 * matrix
    assert of_block.buffers == (2 + 2 + 2 + 4) * block + stays + rotary
    assert of_block.gradients == 10 * block * 4 // 8
    assert moments["gradients of tok_embeddings"].gradients == 16 * block * 4 // 8


def test_step_memory_of_a_float8_all_gather():
    moments = moments_of(LLAMA_8B, EIGHT, **float8(enable_fsdp_float8_all_gather=True))
    linears, norms = 218_103_808, 8192
    gathered = 2 * (linears + 2 * norms)
    assert moments["backward of layers.5"].buffers == gathered + 4 * (linears + norms) + ROTARY


def test_step_memory_of_gradients_that_are_added_up():
    moments = list(moments_of(LLAMA_8B, EIGHT, **training(global_batch_size=16)).values())
    assert (moments[0].gradients, moments[-1].gradients) == (ALL * 4, ALL * 4 // 8)


@pytest.mark.parametrize(("reshard", "output"), [("never", HEAD), ("default", 0)])
def test_step_memory_of_weights_that_stay_between_microbatches(reshard, output):
    sharding = {"fsdp_reshard_after_forward": reshard}
    once, twice = (
        moments_of(LLAMA_8B, EIGHT, parallelism=sharding, **training(global_batch_size=sequences))
        for sequences in (8, 16)
    )
    name = "backward of layers.31"
    assert twice[name].buffers - once[name].buffers == 2 * output


def test_step_memory_with_enable_cpu_offload():
    moments = moments_of(LLAMA_8B, EIGHT, **training(enable_cpu_offload=True)).values()
    states = [(each.parameters, each.gradients, each.optimizer_states) for each in moments]
    assert set(states) == {(0, 0, 0)}
    assert list(moments)[-1].total == ROTARY


@pytest.mark.parametrize(
    ("mode", "more"),
    [
        # 16,384 tokens of a rank, and 131,072 keys and values of 8 heads of 128, in bf16: the
        # compiler puts the two chunks together again. "op" keeps none of them.
        ("none", 2 * 2 * (131072 - 16384) * 1024),
        ("selective", 0),
    ],
)
def test_step_memory_of_keys_and_values_of_131072_tokens(mode, more):
    alone, shared = (
        build_rank(
            replace(LLAMA_8B, max_seq_len=cp * 16384),
            EIGHT,
            cp=cp,
            activation_checkpoint={"mode": mode},
            **GPU,
            **COMPILED,
        )
        for cp in (1, 8)
    )
    assert shared.groups[1].saved - alone.groups[1].saved == more


def test_step_memory_of_405b_on_512_gpus():
    args = replace(FLAVORS["405B"], max_seq_len=8192)
    most = peak(build_rank(args, (1, 64, 8), on_cpu=False, batch=2, **FULL, **COMPILED))
    assert most.name == "backward of layers.124"
    # Matrices are split over tp, norms are not.
    assert most.parameters == (405_849_243_648 // 8 + 253 * 16384) * 4 // 64
    assert 16 * 2**30 < most.total < 32 * 2**30


# ----- RESERVED_RATIO -----

# GiB reserved: torchtitan's benchmarks of December 2024 on H100, and of June 2025 on H200, by
# tokens, batch, degrees and settings.
PUBLISHED = [
    (82.4, "8B", 8192, 2, (1, 8, 1), BY_OP),
    (77.0, "8B", 8192, 2, (1, 8, 1), BY_OP | EAGER_LOSS),
    (67.0, "8B", 8192, 2, (1, 128, 1), BY_OP),
    (62.0, "8B", 8192, 2, (1, 128, 1), BY_OP | EAGER_LOSS),
    (83.9, "8B", 32768, 1, (1, 8, 1), FULL | EAGER_LOSS),
    (71.9, "70B", 8192, 16, (1, 32, 8), FULL | EAGER_LOSS),
    (47.96, "8B", 8192, 2, (1, 32, 1), BY_OP | COMPILED),
    (46.97, "8B", 8192, 2, (1, 64, 1), BY_OP | COMPILED),
]


def test_reserved_ratio_is_the_highest_of_published_runs():
    ratios = []
    for reserved, flavor, seq_len, batch, degrees, settings in PUBLISHED:
        args = replace(FLAVORS[flavor], max_seq_len=seq_len)
        rank = build_rank(args, degrees, batch=batch, on_cpu=False, **settings)
        estimate = torchtitan_peak(rank) / 2**30
        ratios.append(round(reserved / estimate, 2))
        assert f"| {estimate:.1f} | {reserved:.1f} | {ratios[-1]:.2f} |" in PLAN
    assert min(ratios) == 1.18 and max(ratios) == RESERVED_RATIO


def torchtitan_peak(rank: Rank) -> int:
    """Bytes at the height of a step whose loss is not fused. It holds for each logit, eager, the
    log-probability, its gradient and the logit's, in float32; compiled, the logit and its gradient;
    split, copies of its own besides."""
    split = rank.degrees.tp > 1
    if rank.config.compile.covers("loss"):
        per_logit = 2 + 2 * 4 if split else 2 * 2
    else:
        per_logit = (4 if split else 3) * 4
    fused, *others = step_memory(rank)
    weight_gradient = 2 * rank.model.vocab_size * rank.model.dim // rank.degrees.tp
    copied_from = weight_gradient + 2 * rank.model.dim  # by FSDP, and freed before the loss
    unfused = fused.total - fused.logits - weight_gradient - copied_from + per_logit * rank.logits
    return max(unfused, *(moment.total for moment in others))
