"""The plan of a block follows what its linears are. Collectives are counted in a process group
that sends nothing."""

from collections import Counter
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sample_models import SMALL, on_meta, ready
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torchao.float8.float8_tensor_parallel import (
    Float8ColwiseParallel,
    Float8RowwiseParallel,
    PrepareFloat8ModuleInput,
)
from torchao.float8.float8_training_tensor import Float8TrainingTensor

from torchtitan_lite.base.errors import ConfigError
from torchtitan_lite.config import ActivationCheckpointConfig
from torchtitan_lite.models.loss import CrossEntropy
from torchtitan_lite.parallel.activation_checkpoint import apply_activation_checkpointing
from torchtitan_lite.parallel.tensor_parallel import (
    _block_plan,
    apply_tensor_parallel,
    enable_async_tensor_parallel,
    float8_gathers,
)

# ----- _block_plan, apply_tensor_parallel, float8_gathers, enable_async_tensor_parallel -----


def plan(recipe: str | None, *filters: str) -> dict[str, type]:
    block = on_meta(SMALL, recipe, filter_fqns=filters).layers["0"]
    return {name: type(style) for name, style in _block_plan(block).items()}


PLAIN = {"input": PrepareModuleInput, "column": ColwiseParallel, "row": RowwiseParallel}
FLOAT8 = {
    "input": PrepareFloat8ModuleInput,
    "column": Float8ColwiseParallel,
    "row": Float8RowwiseParallel,
}


@pytest.mark.parametrize(
    ("recipe", "filters", "in_float8"),
    [
        (None, (), ""),
        ("rowwise", (), ""),
        ("tensorwise", (), "attention wq wk wv wo feed_forward w1 w3 w2"),
        # An input that a kept linear reads too is gathered in high precision.
        ("tensorwise", ("wk", "w2"), "wq wv wo feed_forward w1 w3"),
    ],
)
def test_what_only_tensorwise_linears_read_is_gathered_in_float8(recipe, filters, in_float8):
    kinds = {"attention": "input", "feed_forward": "input", "wo": "row", "w2": "row"}
    for path, style in plan(recipe, *filters).items():
        name = path.rpartition(".")[2]
        if not name.endswith("norm"):
            styles = FLOAT8 if name in in_float8.split() else PLAIN
            assert style is styles[kinds.get(name, "column")], path


def test_float8_gathers_are_those_of_parts_whose_readers_all_are_tensorwise() -> None:
    linears = [*(f"attention.w{i}" for i in "qkvo"), *(f"feed_forward.w{i}" for i in "123")]
    names = {f"layers.{i}.{name}" for i in range(3) for name in linears}
    # Each part's input, and the gradient of each part's output.
    assert float8_gathers(names) == 3 * 4
    assert float8_gathers(names | {"output"}) == 3 * 4 + 1
    assert float8_gathers(names - {"layers.1.attention.wk"}) == 3 * 4 - 1
    assert float8_gathers(names - {"layers.2.feed_forward.w2"}) == 3 * 4 - 1
    assert float8_gathers([]) == 0


@pytest.fixture
def tp_mesh() -> DeviceMesh:
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=TP)
    return init_device_mesh("cpu", (TP,), mesh_dim_names=("tp",))


def test_both_ends_split_the_vocabulary_alike_and_stay_tied(tp_mesh: DeviceMesh) -> None:
    args = replace(SMALL, vocab_size=50)
    tied, untied = on_meta(replace(args, tie_embeddings=True)), on_meta(args)
    for model in (tied, untied):
        apply_tensor_parallel(model, tp_mesh, loss_parallel=True)
    embedding, output = untied.tok_embeddings.weight, untied.output.weight
    assert embedding is not output and embedding.placements == output.placements == (Shard(0),)
    assert embedding.to_local().shape == output.to_local().shape == (13, 64)  # of 50
    assert tied.output.weight is tied.tok_embeddings.weight
    assert tied.output.weight.placements == (Shard(0),)


def test_norms_are_whole_and_their_gradients_partial_sums(tp_mesh: DeviceMesh) -> None:
    model = on_meta(replace(SMALL, n_heads=8, n_kv_heads=4))
    apply_tensor_parallel(model, tp_mesh, loss_parallel=False)
    ready(model)(torch.zeros(1, 16, dtype=torch.long)).sum().backward()
    norms = {name: weight for name, weight in model.named_parameters() if "norm" in name}
    assert len(norms) == 2 * 2 + 1
    for name, weight in norms.items():
        assert weight.placements == (Replicate(),), name
        assert weight.grad.placements == (Partial(),), name


def test_async_tensor_parallelism_is_refused_without_symmetric_memory() -> None:
    mesh = SimpleNamespace(
        device_type="cpu", get_group=lambda: SimpleNamespace(size=lambda: 2, group_name="tp")
    )
    with pytest.raises(ConfigError, match=r"_parallel = true needs .* 2 GPUs.*none on cpu"):
        enable_async_tensor_parallel(mesh)
    assert not torch._inductor.config._micro_pipeline_tp


def test_async_tensor_parallelism_lets_the_compiler_fuse_over_the_group(monkeypatch, recwarn):
    group = SimpleNamespace(size=lambda: 2, group_name="tp")
    memory = torch.distributed._symmetric_memory
    met = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(memory, "empty", lambda *size, device: (size, device))
    monkeypatch.setattr(memory, "rendezvous", lambda probe, group: met.append((probe, group)))
    enabled = []
    monkeypatch.setattr(memory, "enable_symm_mem_for_group", enabled.append)
    enable_async_tensor_parallel(SimpleNamespace(device_type="cuda", get_group=lambda: group))
    assert torch._inductor.config._micro_pipeline_tp
    assert met == [(((1,), torch.device("cuda", 0)), group)]
    assert enabled == ["tp"] and not recwarn


# ----- apply_tensor_parallel: its collectives -----

TP, TOKENS, DIM = 4, 32, 128
LARGE = TOKENS * DIM  # elements of a gathered activation
MODES = {
    "none": ActivationCheckpointConfig(mode="none"),
    "op": ActivationCheckpointConfig(mode="selective"),
    "full": ActivationCheckpointConfig(mode="full"),
}
Counts = Counter[tuple[str, str, int]]
"""Collectives by pass, kind and bytes per element."""


class Collectives(TorchDispatchMode):
    """Counts the collectives of whole activations, and all of scales and of the loss as "small"."""

    def __init__(self) -> None:
        super().__init__()
        self.of_pass, self.counts = "forward", Counts()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor | Float8TrainingTensor) for each in types):
            return NotImplemented  # it communicates with the tensor that it wraps
        out = func(*args, **(kwargs or {}))
        namespace, kind = func._schema.name.split("::")
        if "c10d" in namespace and "wait" not in kind and "autograd" not in kind:
            tensors = [each for each in (*args, out) if isinstance(each, torch.Tensor)]
            elements = max((each.numel() for each in tensors), default=0)
            large = elements == LARGE
            size = tensors[0].element_size() if large else 0
            self.counts[self.of_pass, kind if large else "small", size] += 1
        return out


def count(tp_mesh: DeviceMesh, n_layers: int, recipe: str, mode: str) -> Counts:
    """What a rank's microbatch communicates."""
    sizes = {"dim": DIM, "n_heads": 8, "n_kv_heads": 4, "ffn_dim": 256, "vocab_size": 320}
    args = replace(SMALL, **sizes, n_layers=n_layers, max_seq_len=TOKENS)
    model = on_meta(args, None if recipe == "bf16" else recipe)
    apply_tensor_parallel(model, tp_mesh, loss_parallel=True)
    apply_activation_checkpointing(model, MODES[mode])
    model.to_empty(device="cpu").bfloat16()
    for tensor in (*model.parameters(), *model.buffers()):
        nn.init.zeros_(tensor)

    tokens = torch.zeros(1, TOKENS, dtype=torch.long)
    loss = partial(CrossEntropy(compiled=False), labels=tokens)
    with Collectives() as collectives:
        total = model(tokens, loss)
        collectives.of_pass = "backward"
        total.backward()
    return collectives.counts


def large(counts: Counts) -> dict[tuple[str, str, int], int]:
    return {key: n for key, n in counts.items() if n and key[1] != "small"}


@pytest.mark.parametrize("recipe", ["bf16", "tensorwise", "rowwise"])
@pytest.mark.parametrize(
    ("mode", "gathers_again", "scatters_again"), [("none", 0, 0), ("op", 2, 0), ("full", 2, 1)]
)
def test_a_block_gathers_and_scatters_twice(recipe, mode, gathers_again, scatters_again, tp_mesh):
    # What is gathered is the input of wq, wk and wv, that of w1 and w3, and, in backward, the
    # gradients of the outputs of wo and w2. Recomputed are both inputs, and the sum after wo.
    size = 1 if recipe == "tensorwise" else 2
    block = count(tp_mesh, 2, recipe, mode)
    block.subtract(count(tp_mesh, 1, recipe, mode))
    gather, scatter = "all_gather_into_tensor", "reduce_scatter_tensor"
    assert large(block) == {
        ("forward", gather, size): 2,
        ("forward", scatter, 2): 2,
        ("backward", gather, size): 2 + gathers_again,
        ("backward", scatter, 2): 2 + scatters_again,
    }


def test_both_ends_of_the_model_gather_and_scatter_once_in_each_pass(tp_mesh: DeviceMesh) -> None:
    # The embedding's sum is scattered, and the last norm's output gathered; backward the reverse.
    ends = count(tp_mesh, 1, "bf16", "none")
    ends.update(count(tp_mesh, 1, "bf16", "none"))
    ends.subtract(count(tp_mesh, 2, "bf16", "none"))
    gather, scatter = "all_gather_into_tensor", "reduce_scatter_tensor"
    kinds = [("forward", scatter), ("forward", gather), ("backward", gather), ("backward", scatter)]
    assert large(ends) == {(*kind, 2): 1 for kind in kinds}
    assert ends["forward", "small", 0] == 1  # the loss: each rank's log-sum-exp


@pytest.mark.parametrize(
    ("recipe", "forward", "backward"), [("bf16", 0, 0), ("tensorwise", 11, 14), ("rowwise", 4, 10)]
)
def test_float8_reduces_the_amax_of_split_tensors(recipe, forward, backward, tp_mesh):
    # Of 4 inputs and 7 weights, and of 7 weights and 7 gradients, if there is a scale per tensor;
    # of what is split along its rows, if there is one per row.
    block = count(tp_mesh, 2, recipe, "none")
    block.subtract(count(tp_mesh, 1, recipe, "none"))
    assert [block[each, "small", 0] for each in ("forward", "backward")] == [forward, backward]
