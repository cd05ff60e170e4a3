"""The collectives of tensor parallelism, counted in a process group that sends nothing."""

from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torchao.float8.float8_training_tensor import Float8TrainingTensor

from torchtitan_lite.config import ActivationCheckpointConfig, Float8Config
from torchtitan_lite.float8.convert import convert_linears
from torchtitan_lite.float8.recipes import RECIPES
from torchtitan_lite.float8.selection import select_linears
from torchtitan_lite.models.flavors import ModelArgs
from torchtitan_lite.models.llama3 import Transformer
from torchtitan_lite.models.loss import CrossEntropy
from torchtitan_lite.parallel.activation_checkpoint import apply_activation_checkpointing
from torchtitan_lite.parallel.tensor_parallel import apply_tensor_parallel

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


@pytest.fixture(autouse=True)
def process_group() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=TP)
    yield
    dist.destroy_process_group()


def count(n_layers: int, recipe: str, mode: str) -> Counts:
    """What a rank's microbatch communicates."""
    args = ModelArgs(
        dim=DIM,
        n_layers=n_layers,
        n_heads=8,
        n_kv_heads=4,
        ffn_dim=256,
        vocab_size=320,
        max_seq_len=TOKENS,
    )
    with torch.device("meta"):
        model = Transformer(args)
    if recipe != "bf16":
        float8 = Float8Config.model_validate({"recipe_name": recipe})
        choices = select_linears(
            model, filter_fqns=(), tp_degree=TP, tokens=TOKENS, recipe=RECIPES[recipe]
        )
        convert_linears(model, choices, float8=float8, emulate=True)
    mesh = init_device_mesh("cpu", (TP,), mesh_dim_names=("tp",))
    apply_tensor_parallel(model, mesh, loss_parallel=True)
    apply_activation_checkpointing(model, MODES[mode])
    model.to_empty(device="cpu").bfloat16()
    for tensor in (*model.parameters(), *model.buffers()):
        nn.init.zeros_(tensor)

    tokens = torch.zeros(1, TOKENS, dtype=torch.long)
    loss = partial(CrossEntropy(compiled=False).of_linear, labels=tokens)
    with Collectives() as collectives:
        total = model(tokens, loss)
        collectives.of_pass = "backward"
        total.backward()
    return collectives.counts


def large(counts: Counts) -> dict[tuple[str, str, int], int]:
    return {key: n for key, n in counts.items() if n and key[1] != "small"}


@pytest.mark.parametrize("recipe", ["bf16", "tensorwise", "rowwise", "rowwise_with_gw_hp"])
@pytest.mark.parametrize(
    ("mode", "gathers_again", "scatters_again"), [("none", 0, 0), ("op", 2, 0), ("full", 2, 1)]
)
def test_a_block_gathers_and_scatters_its_activations_twice_in_each_pass(
    recipe: str, mode: str, gathers_again: int, scatters_again: int
) -> None:
    # What is gathered is the input of wq, wk and wv, that of w1 and w3, and, in backward, the
    # gradients of the outputs of wo and w2. Recomputed are both inputs, and the sum after wo.
    size = 1 if recipe == "tensorwise" else 2
    block = count(2, recipe, mode)
    block.subtract(count(1, recipe, mode))
    gather, scatter = "all_gather_into_tensor", "reduce_scatter_tensor"
    assert large(block) == {
        ("forward", gather, size): 2,
        ("forward", scatter, 2): 2,
        ("backward", gather, size): 2 + gathers_again,
        ("backward", scatter, 2): 2 + scatters_again,
    }


def test_both_ends_of_the_model_gather_and_scatter_once_in_each_pass() -> None:
    # The embedding's sum is scattered, and the last norm's output gathered; backward the reverse.
    ends = count(1, "bf16", "none")
    ends.update(count(1, "bf16", "none"))
    ends.subtract(count(2, "bf16", "none"))
    gather, scatter = "all_gather_into_tensor", "reduce_scatter_tensor"
    kinds = [("forward", scatter), ("forward", gather), ("backward", gather), ("backward", scatter)]
    assert large(ends) == {(*kind, 2): 1 for kind in kinds}
    assert ends["forward", "small", 0] == 1  # the loss: each rank's log-sum-exp


@pytest.mark.parametrize(
    ("recipe", "forward", "backward"), [("bf16", 0, 0), ("tensorwise", 11, 14), ("rowwise", 4, 10)]
)
def test_float8_reduces_the_amax_of_split_tensors(recipe: str, forward: int, backward: int) -> None:
    # Of 4 inputs and 7 weights, and of 7 weights and 7 gradients, if there is a scale per tensor;
    # of what is split along its rows, if there is one per row.
    block = count(2, recipe, "none")
    block.subtract(count(1, recipe, "none"))
    assert [block[each, "small", 0] for each in ("forward", "backward")] == [forward, backward]
