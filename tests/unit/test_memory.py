"""The estimate against what a step really allocates, for ranks of any layout: collectives of the
fake process group allocate as real ones do, and send nothing. S seq_len, B local_batch_size, V
vocab_size."""

import contextlib
import dataclasses
import gc
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sample_jobs import job_of
from torch import nn
from torch._functorch import partitioners
from torch.profiler import ProfilerActivity, profile, record_function
from torch.testing._internal.distributed.fake_pg import FakeStore

from torchtitan_lite.config import (
    ActivationCheckpointConfig,
    CompileConfig,
    Config,
    Float8Config,
    OptimizerConfig,
    ParallelismConfig,
    TrainingConfig,
)
from torchtitan_lite.float8.convert import convert_linears
from torchtitan_lite.float8.selection import select_linears
from torchtitan_lite.models import loss
from torchtitan_lite.models.flavors import BLOCK_LINEARS, FLAVORS, ModelArgs
from torchtitan_lite.models.init import init_weights
from torchtitan_lite.models.llama3 import Transformer
from torchtitan_lite.optim import build_optimizer
from torchtitan_lite.parallel.distributed import build_mesh
from torchtitan_lite.parallel.fsdp import start_microbatch
from torchtitan_lite.parallel.parallelize import parallelize
from torchtitan_lite.planner.memory import Moment, step_memory
from torchtitan_lite.planner.meta_model import RESERVED_RATIO
from torchtitan_lite.planner.rank import Rank

WIDE = ModelArgs(
    dim=256, n_layers=4, n_heads=8, n_kv_heads=4, ffn_dim=768, vocab_size=512, max_seq_len=256
)
DEEP = dataclasses.replace(WIDE, dim=128, n_layers=12, ffn_dim=512)
VOCABULARY = ModelArgs(
    dim=64, n_layers=2, n_heads=4, n_kv_heads=4, ffn_dim=64, vocab_size=8192, max_seq_len=256
)
WEIGHTS = ModelArgs(
    dim=512, n_layers=4, n_heads=8, n_kv_heads=8, ffn_dim=1024, vocab_size=64, max_seq_len=4
)

NONE, FULL, BY_OP, EVERY_SECOND = (
    ActivationCheckpointConfig.model_validate({"mode": mode, "selective_ac_option": option})
    for mode, option in (("none", "op"), ("full", "op"), ("selective", "op"), ("selective", "2"))
)
GPU = {"on_cpu": False, "batch": 1}
COMPILED = {"compile": CompileConfig(enable=True)}
GATHERED_LOGITS = {"parallelism": ParallelismConfig(disable_loss_parallel=True)}


def build_rank(
    args: ModelArgs, dp_shard: int = 1, tp: int = 1, *, batch: int = 4, **changes: Any
) -> Rank:
    """A rank in bf16, eager, without checkpointing, but for `changes`; under float8 all seven
    linears are converted."""
    degrees = changes.pop("degrees", (1, dp_shard, tp))
    on_cpu, cp = changes.pop("on_cpu", True), changes.pop("cp", 1)
    sections = {
        "training": TrainingConfig(seq_len=args.max_seq_len, local_batch_size=batch),
        "activation_checkpoint": NONE,
    }
    float8_linears = BLOCK_LINEARS if "float8" in changes else ()
    job = job_of(Config(**sections | changes), args, degrees=degrees, cp=cp)
    return Rank(job, float8_linears, on_cpu=on_cpu)


def peak(rank: Rank) -> Moment:
    return max(step_memory(rank), key=lambda moment: moment.total)


@contextlib.contextmanager
def fake_process_group(size: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def build_model(rank: Rank) -> Transformer:
    args, tp = rank.model, rank.degrees.tp
    with torch.device("meta"):
        model = Transformer(args).to(getattr(torch, rank.config.training.dtype))
    if rank.float8_linears:
        choices = select_linears(model, filter_fqns=(), tp_degree=tp, tokens=rank.tokens)
        convert_linears(model, choices, float8=rank.config.float8, emulate=True)
    parallelize(
        [model],
        build_mesh(rank.degrees, device_type="cpu"),
        parallelism=rank.config.parallelism,
        activation_checkpoint=rank.config.activation_checkpoint,
        compile=rank.config.compile,
        training=rank.config.training,
        flash=False,
    )
    model.to_empty(device="cpu")
    init_weights(model, seed=0)
    return model


def train(rank: Rank) -> None:
    """Two steps, as the trainer makes them; the second one but for the first of its microbatches is
    recorded as `measured`, and each backward."""
    model = build_model(rank)
    optimizer = build_optimizer(model.parameters(), rank.config.optimizer)
    cross_entropy = loss.CrossEntropy(compiled=rank.config.compile.enable)
    tokens = torch.randint(
        rank.model.vocab_size, (rank.config.training.local_batch_size, rank.config.training.seq_len)
    )
    labels = model.shard_sequence(tokens, 1)
    for step in range(2):
        for accum_step in range(rank.accum_steps):
            last = accum_step == rank.accum_steps - 1
            start_microbatch(model, rank.config.parallelism, last=last)
            measured = step and (last or accum_step)
            with record_function("measured") if measured else contextlib.nullcontext():
                if rank.fuses_loss:
                    total = model(tokens, partial(cross_entropy.of_linear, labels=labels))
                else:
                    total = cross_entropy.of_logits(model(tokens), labels)
                with record_function("backward"):
                    total.backward()
        with record_function("measured") if step else contextlib.nullcontext():
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


@pytest.mark.parametrize(
    ("args", "batch", "dp_shard", "tp", "checkpoint"),
    [
        (WIDE, 4, 1, 1, NONE),
        (WIDE, 4, 1, 1, FULL),
        (WIDE, 4, 1, 1, BY_OP),
        (WIDE, 4, 1, 1, EVERY_SECOND),
        (WIDE, 4, 2, 2, NONE),
        (WIDE, 4, 2, 2, BY_OP),
        (DEEP, 2, 8, 1, NONE),
        (DEEP, 2, 8, 1, FULL),
        (DEEP, 2, 8, 1, BY_OP),
        (VOCABULARY, 4, 4, 2, FULL),
        (WEIGHTS, 1, 8, 1, NONE),
    ],
)
def test_peak_of_a_step(
    args: ModelArgs, batch: int, dp_shard: int, tp: int, checkpoint: ActivationCheckpointConfig
) -> None:
    rank = build_rank(args, dp_shard, tp, batch=batch, activation_checkpoint=checkpoint)
    assert peak(rank).total == pytest.approx(measure(rank)[1], rel=0.05)


# Heads of 32 dimensions attend in float32 on CPU, and those of 64 in bf16.
LONG = ModelArgs(
    dim=256, n_layers=2, n_heads=8, n_kv_heads=2, ffn_dim=512, vocab_size=256, max_seq_len=2048
)
LONG_BF16 = dataclasses.replace(LONG, n_heads=4)
MASKED = dataclasses.replace(LONG_BF16, document_bos_id=1, max_seq_len=1024)


@pytest.mark.parametrize(
    ("args", "cp", "tp", "checkpoint"),
    [
        (LONG, 2, 1, NONE),
        (LONG, 8, 1, FULL),
        (LONG_BF16, 4, 1, BY_OP),
        (LONG_BF16, 2, 2, NONE),
        (MASKED, 4, 1, NONE),
    ],
)
def test_peak_of_a_part_of_a_sequence(
    args: ModelArgs, cp: int, tp: int, checkpoint: ActivationCheckpointConfig
) -> None:
    rank = build_rank(args, tp=tp, cp=cp, batch=2, activation_checkpoint=checkpoint)
    assert peak(rank).total == pytest.approx(measure(rank)[1], rel=0.1)


def kept_by_8b(checkpoint: ActivationCheckpointConfig) -> dict[int, int]:
    """Bytes that a block keeps for 16,384 tokens of a rank, by the ranks that share a sequence."""
    kept = {}
    for cp, seq_len in ((1, 16384), (8, 131072)):
        args = dataclasses.replace(FLAVORS["8B"], max_seq_len=seq_len)
        rank = build_rank(args, 8, cp=cp, activation_checkpoint=checkpoint, **GPU, **COMPILED)
        kept[cp] = rank.groups[1].saved
    return kept


def test_8b_keeps_the_keys_and_values_of_131072_tokens() -> None:
    """16,384 tokens of a rank, and 131,072 keys and values of 8 heads of 128, in bf16."""
    kept = kept_by_8b(NONE)
    own, whole = 2 * 2 * 16384 * 1024, 2 * 2 * 131072 * 1024
    assert whole == 512 * 2**20
    assert kept[8] - kept[1] == whole - own  # the compiler puts the two chunks together again


def test_8b_gathers_no_key_twice_into_what_it_keeps_by_op() -> None:
    kept = kept_by_8b(BY_OP)
    assert kept[8] == kept[1]


NEVER = {"parallelism": ParallelismConfig(fsdp_reshard_after_forward="never")}
EACH = {"parallelism": ParallelismConfig(fsdp_reduce_gradients="each")}
FOUR_PASSES = {"training": TrainingConfig(seq_len=4, local_batch_size=1, global_batch_size=8)}


def training(**changes: Any) -> dict[str, TrainingConfig]:
    return {"training": TrainingConfig(seq_len=256, local_batch_size=4, **changes)}


@pytest.mark.parametrize(
    ("args", "tp", "changes"),
    [
        (WIDE, 1, training(mixed_precision_param="float32")),
        (WIDE, 1, training(mixed_precision_reduce="bfloat16")),
        (WEIGHTS, 1, {"training": TrainingConfig(seq_len=4, dtype="bfloat16")}),
        (WIDE, 1, NEVER),
        (WIDE, 1, {"degrees": (2, 2, 1)}),
        (WIDE, 1, training(global_batch_size=16)),
        (WIDE, 1, NEVER | training(global_batch_size=16)),
        (WEIGHTS, 1, NEVER | FOUR_PASSES),
        (WEIGHTS, 1, EACH | FOUR_PASSES),
        (VOCABULARY, 2, GATHERED_LOGITS),
        (WEIGHTS, 1, {"optimizer": OptimizerConfig(implementation="foreach")}),
    ],
    ids=[
        "float32",
        "bf16-reduce",
        "bf16-weights",
        "never",
        "hsdp",
        "accumulation",
        "never-accumulation",
        "never-four-passes",
        "each-four-passes",
        "gathered-logits",
        "foreach",
    ],
)
def test_peak_under_other_settings(args: ModelArgs, tp: int, changes: dict[str, Any]) -> None:
    rank = build_rank(args, 2, tp, activation_checkpoint=BY_OP, **changes)
    assert peak(rank).total == pytest.approx(measure(rank)[1], rel=0.05)


@pytest.mark.parametrize(("changes", "microbatches"), [({}, 1), (EACH, 4)])
def test_gradients_of_each_group_are_reduced(changes: dict[str, Any], microbatches: int) -> None:
    rank = build_rank(WEIGHTS, 2, **changes, **FOUR_PASSES)
    with fake_process_group(2), profile(activities=[ProfilerActivity.CPU]) as profiler:
        train(rank)
    reduced = [event for event in profiler.events() if event.name == "c10d::_reduce_scatter_base_"]
    assert len(reduced) == 2 * microbatches * 6  # of four blocks and both ends, in two steps


@pytest.mark.parametrize(
    "changes",
    [
        training(mixed_precision_param="float32"),
        training(mixed_precision_reduce="bfloat16"),
        {"training": TrainingConfig(seq_len=4, dtype="bfloat16")},
        {"parallelism": ParallelismConfig(fsdp_reshard_after_forward="never")},
        training(global_batch_size=16),
        COMPILED,
    ],
    ids=["float32", "bf16-reduce", "bf16-weights", "never", "accumulation", "compiled"],
)
def test_peak_on_one_rank(changes: dict[str, Any]) -> None:
    torch._dynamo.reset()
    bf16_weights = changes.get("training", TrainingConfig()).dtype == "bfloat16"
    rank = build_rank(WEIGHTS if bf16_weights else WIDE, **changes)
    assert peak(rank).total == pytest.approx(measure(rank)[1], rel=0.05)


TIED_VOCABULARY = dataclasses.replace(VOCABULARY, tie_embeddings=True)
TIED_WEIGHTS = dataclasses.replace(WEIGHTS, vocab_size=8192, tie_embeddings=True)


@pytest.mark.parametrize(
    ("args", "dp_shard", "tp", "batch", "changes", "height"),
    [
        (TIED_VOCABULARY, 4, 2, 4, {}, "loss"),
        (TIED_VOCABULARY, 2, 2, 4, GATHERED_LOGITS, "loss"),
        (TIED_WEIGHTS, 8, 1, 1, {}, "gradients of layers.1"),
        (TIED_WEIGHTS, 1, 1, 1, {}, "gradients of tok_embeddings"),
        (TIED_WEIGHTS, 2, 1, 1, FOUR_PASSES, "gradients of layers.3"),
    ],
    ids=["tp", "gathered-logits", "fsdp", "alone", "accumulation"],
)
def test_peak_with_tied_embeddings(
    args: ModelArgs, dp_shard: int, tp: int, batch: int, changes: dict[str, Any], height: str
) -> None:
    rank = build_rank(args, dp_shard, tp, batch=batch, **changes)
    assert peak(rank).name == height
    assert peak(rank).total == pytest.approx(measure(rank)[1], rel=0.02)


def test_peak_of_a_loss_in_several_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    args = dataclasses.replace(VOCABULARY, dim=512, n_heads=8)
    monkeypatch.setattr(loss, "CHUNK_LOGITS", 2**21)  # of 2**23
    monkeypatch.setattr(loss, "PIECE_LOGITS", 2**19)
    rank = build_rank(args, 8, activation_checkpoint=FULL)
    assert peak(rank).name == "loss"
    assert peak(rank).total == pytest.approx(measure(rank)[1], rel=0.05)


@pytest.mark.parametrize(
    ("args", "tp", "checkpoint"),
    [(WIDE, 1, NONE), (DEEP, 1, FULL), (WIDE, 2, BY_OP)],
    ids=["none", "full", "op-tp"],
)
def test_peak_of_a_compiled_step(
    args: ModelArgs, tp: int, checkpoint: ActivationCheckpointConfig
) -> None:
    torch._dynamo.reset()
    rank = build_rank(args, 2, tp, activation_checkpoint=checkpoint, **COMPILED)
    assert peak(rank).total == pytest.approx(measure(rank)[1], rel=0.05)


def test_kept_by_a_memory_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler takes no more than its budget, and the estimate is of all of it."""
    monkeypatch.setattr(
        partitioners, "get_default_op_list", partitioners.get_default_op_list
    )  # which is replaced
    kept = []
    for budget in (0.2, 0.6):
        torch._dynamo.reset()
        checkpoint = ActivationCheckpointConfig(mode="memory_budget", memory_budget=budget)
        rank = build_rank(DEEP, 2, activation_checkpoint=checkpoint, **COMPILED)
        at_loss = step_memory(rank)[0]
        copied_from = 2 * rank.model.dim * (rank.model.vocab_size + 1)
        kept.append((at_loss.total - at_loss.logits - copied_from, measure(rank)[0]))
    (low, measured_low), (high, measured_high) = kept
    assert measured_low < measured_high
    assert 0.8 * low < measured_low < 1.02 * low and 0.8 * high < measured_high < 1.02 * high


def recipe(name: str) -> Float8Config:
    return Float8Config.model_validate({"enable_float8_linear": True, "recipe_name": name})


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_kept_by_a_float8_forward(name: str, tp: int) -> None:
    # The peak would hold the float32 operands of emulated matmuls, which no GPU makes.
    check_kept(build_rank(WIDE, 2, tp, float8=recipe(name)))


def test_kept_by_op_of_a_float8_forward() -> None:
    check_kept(build_rank(WIDE, 2, 2, activation_checkpoint=BY_OP, float8=recipe("tensorwise")))


@pytest.mark.parametrize("name", ["tensorwise", "rowwise_with_gw_hp"])
def test_kept_by_a_compiled_float8_forward(name: str) -> None:
    torch._dynamo.reset()
    check_kept(build_rank(DEEP, 2, float8=recipe(name), **COMPILED))


def check_kept(rank: Rank) -> None:
    at_loss = step_memory(rank)[0]
    copied_from = (
        2 * rank.model.dim * (rank.model.vocab_size // rank.degrees.tp + 1)
    )  # by FSDP, for the head
    assert at_loss.total - at_loss.logits - copied_from == pytest.approx(measure(rank)[0], rel=0.01)


def test_8b_on_one_gpu_holds_copies_or_gradients() -> None:
    rank = build_rank(FLAVORS["3-8B"], activation_checkpoint=BY_OP, **GPU, **COMPILED)
    moments = {moment.name: moment for moment in step_memory(rank)}
    block, output, rotary = 218_112_000, 128256 * 4096 + 4096, 2 * 4 * 8192 * 64
    # The loss needs copies of all weights but the embedding's. At the end of a block's backward
    # there are those of the blocks before it, its own gradients in float32, of which the last is
    # still there in bf16, and the float32 ones of the blocks behind it.
    assert moments["loss"].buffers == 2 * (32 * block + output) + rotary
    assert moments["gradients of layers.5"].buffers == (
        2 * 5 * block + 4 * block + 2 * 14336 * 4096 + rotary
    )
    assert moments["gradients of layers.5"].gradients == (26 * block + output) * 4
    assert moments["gradients of tok_embeddings"].buffers == (2 + 4) * 128256 * 4096 + rotary


@pytest.mark.parametrize(("microbatches", "embedding"), [(2, 0), (3, 2 * 128256 * 4096)])
def test_one_gpu_keeps_its_embedding_in_middle_microbatches(
    microbatches: int, embedding: int
) -> None:
    several = TrainingConfig(seq_len=8192, local_batch_size=1, global_batch_size=microbatches)
    at_loss = step_memory(build_rank(FLAVORS["3-8B"], training=several, on_cpu=False))[0]
    block, output, rotary = 218_112_000, 128256 * 4096 + 4096, 2 * 4 * 8192 * 64
    assert at_loss.buffers == 2 * (32 * block + output) + embedding + rotary


@pytest.mark.parametrize("microbatches", [1, 4])
def test_peak_of_large_matrices_on_one_rank(microbatches: int) -> None:
    few = TrainingConfig(seq_len=4, local_batch_size=1, global_batch_size=microbatches)
    args = dataclasses.replace(WEIGHTS, vocab_size=8192)
    rank = build_rank(args, training=few)
    assert peak(rank).total == pytest.approx(measure(rank)[1], rel=0.03)


def test_8b_on_8_gpus() -> None:
    rank = build_rank(FLAVORS["3-8B"], 8, activation_checkpoint=BY_OP, **GPU, **COMPILED)
    moments = {moment.name: moment for moment in step_memory(rank)}
    assert list(moments)[:3] == ["loss", "backward of output", "gradients of output"]
    assert list(moments)[-1] == "optimizer step"
    assert len(moments) == 1 + 2 * (32 + 2) + 1
    shards = 8_030_261_248 * 4 // 8
    tokens, block, output = 8192, 218_112_000, 128256 * 4096 + 4096
    assert moments["optimizer step"] == Moment(
        "optimizer step", shards, shards, 2 * shards, buffers=2 * 4 * tokens * 64
    )
    # A block keeps its input, wq's output, attention's and its log-sum-exp, wv's and w1's; the head
    # its norm's input, and the gradients of its output and of the projection's weight, which the
    # loss made from the logits in bf16 and that output; FSDP has gathered the head, and holds what
    # it copied that from. The rotary tables are there all the time.
    kept = (
        32 * tokens * (2 * (3 * 4096 + 1024 + 14336) + 4 * 32)
        + 2 * tokens * 2 * 4096
        + 2 * 128256 * 4096
    )
    working, rotary = 2 * tokens * 128256 + 2 * tokens * 4096, 2 * 4 * tokens * 64
    assert moments["loss"] == Moment(
        "loss", shards, 0, 2 * shards, kept, working, 2 * 2 * output + rotary
    )
    # At the end of a block's backward: its weights, the next block's, its gradients, and the
    # float32 ones in flight.
    assert moments["gradients of layers.5"].buffers == (2 + 2 + 2 + 4) * block + rotary
    assert moments["gradients of layers.5"].gradients == (26 * block + output) * 4 // 8
    assert peak(rank) == moments["loss"]


def test_1b_on_8_gpus_holds_its_embedding_once() -> None:
    rank = build_rank(FLAVORS["1B"], 8, activation_checkpoint=FULL, **GPU, **COMPILED)
    moments = {moment.name: moment for moment in step_memory(rank)}
    shards, matrix, block = 1_235_814_400 * 4 // 8, 128256 * 2048, 60_821_504
    rotary = 2 * 4 * 131072 * 32
    assert moments["optimizer step"] == Moment(
        "optimizer step", shards, shards, 2 * shards, buffers=rotary
    )
    # The matrix with the last norm, and its gradient, beside what a block of an untied model needs.
    stays = 2 * (matrix + 2048) + 2 * matrix
    assert moments["gradients of layers.5"].buffers == (2 + 2 + 2 + 4) * block + stays + rotary
    assert moments["gradients of layers.5"].gradients == 10 * block * 4 // 8
    assert moments["gradients of tok_embeddings"].gradients == 16 * block * 4 // 8


def test_float8_all_gather_halves_the_gathered_blocks() -> None:
    float8 = Float8Config(enable_float8_linear=True, enable_fsdp_float8_all_gather=True)
    buffers = {
        moment.name: moment.buffers
        for moment in step_memory(build_rank(FLAVORS["3-8B"], 8, float8=float8, **GPU))
    }
    linears, norms = 218_103_808, 8192
    gathered, rotary = 2 * (linears + 2 * norms), 2 * 4 * 8192 * 64
    assert buffers["backward of layers.5"] == gathered + 4 * (linears + norms) + rotary


def test_accumulated_gradients_are_not_sharded() -> None:
    accumulate = TrainingConfig(seq_len=8192, local_batch_size=1, global_batch_size=16)
    moments = step_memory(build_rank(FLAVORS["3-8B"], 8, training=accumulate, on_cpu=False))
    assert moments[0].gradients == 8_030_261_248 * 4
    assert moments[-1].gradients == 8_030_261_248 * 4 // 8


@pytest.mark.parametrize(("reshard", "output"), [("never", 128256 * 4096 + 4096), ("default", 0)])
def test_weights_of_never_stay_gathered_between_microbatches(reshard: str, output: int) -> None:
    buffers = {}
    for sequences in (8, 16):
        several = TrainingConfig(seq_len=8192, local_batch_size=1, global_batch_size=sequences)
        sharding = ParallelismConfig(fsdp_reshard_after_forward=reshard)
        rank = build_rank(FLAVORS["3-8B"], 8, training=several, parallelism=sharding, on_cpu=False)
        moments = {moment.name: moment.buffers for moment in step_memory(rank)}
        buffers[sequences] = moments["backward of layers.31"]
    assert buffers[16] - buffers[8] == 2 * output


def test_offloaded_shards_are_not_on_the_device() -> None:
    offload = TrainingConfig(seq_len=8192, local_batch_size=1, enable_cpu_offload=True)
    moments = step_memory(build_rank(FLAVORS["3-8B"], 8, training=offload, on_cpu=False))
    assert [
        moment.parameters + moment.gradients + moment.optimizer_states for moment in moments
    ] == [0] * len(moments)
    assert moments[-1].total == 2 * 4 * 8192 * 64  # the rotary tables


def test_405b_on_512_gpus() -> None:
    args = dataclasses.replace(FLAVORS["405B"], max_seq_len=8192)
    rank = build_rank(args, 64, 8, activation_checkpoint=FULL, on_cpu=False, batch=2, **COMPILED)
    most = peak(rank)
    assert most.name == "backward of layers.124"
    assert (
        most.parameters == (405_849_243_648 // 8 + 253 * 16384) * 4 // 64
    )  # matrices are split over tp, norms are not
    assert 16 * 2**30 < most.total < 32 * 2**30


EAGER_LOSS = {"compile": CompileConfig(enable=True, components=("model",))}
# GiB reserved: torchtitan's benchmarks of December 2024 on H100, and of June 2025 on H200.
PUBLISHED = [
    (82.4, "8B", 8192, 2, 8, 1, BY_OP, {}),
    (77.0, "8B", 8192, 2, 8, 1, BY_OP, EAGER_LOSS),
    (67.0, "8B", 8192, 2, 128, 1, BY_OP, {}),
    (62.0, "8B", 8192, 2, 128, 1, BY_OP, EAGER_LOSS),
    (83.9, "8B", 32768, 1, 8, 1, FULL, EAGER_LOSS),
    (71.9, "70B", 8192, 16, 32, 8, FULL, EAGER_LOSS),
    (47.96, "8B", 8192, 2, 32, 1, BY_OP, COMPILED),
    (46.97, "8B", 8192, 2, 64, 1, BY_OP, COMPILED),
]


@pytest.mark.parametrize(
    ("reserved", "flavor", "seq_len", "batch", "dp_shard", "tp", "checkpoint", "changes"), PUBLISHED
)
def test_gpus_reserve_more(
    reserved: float,
    flavor: str,
    seq_len: int,
    batch: int,
    dp_shard: int,
    tp: int,
    checkpoint: ActivationCheckpointConfig,
    changes: dict[str, Any],
) -> None:
    args = dataclasses.replace(FLAVORS[flavor], max_seq_len=seq_len)
    rank = build_rank(
        args, dp_shard, tp, batch=batch, activation_checkpoint=checkpoint, on_cpu=False, **changes
    )
    assert 1.18 <= round(reserved * 2**30 / torchtitan_peak(rank), 2) <= RESERVED_RATIO


def torchtitan_peak(rank: Rank) -> int:
    """Bytes at the height of a step whose loss is not fused. It holds for each logit, eager, the
    log-probability, its gradient and the logit's, in float32; compiled, the logit and its gradient;
    split, copies of its own besides."""
    if rank.config.compile.covers("loss"):
        per_logit = 2 + 2 * 4 if rank.degrees.tp > 1 else 2 * 2
    else:
        per_logit = (4 if rank.degrees.tp > 1 else 3) * 4
    fused = step_memory(rank)[0]
    weight_gradient = 2 * rank.model.vocab_size * rank.model.dim // rank.degrees.tp
    copied_from = weight_gradient + 2 * rank.model.dim  # by FSDP, and freed before the loss
    return max(
        *(moment.total for moment in step_memory(rank)[1:]),
        fused.total - fused.logits - weight_gradient - copied_from + per_logit * rank.logits,
    )
