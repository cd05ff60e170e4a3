"""Published parameter counts, and linear shapes that agree with the model's own."""

import dataclasses

import pytest
import torch
from torch import nn

from torchtitan_lite.models.flavors import FLAVORS, ModelArgs, block_linear_shapes, find_flavor
from torchtitan_lite.models.llama3 import Transformer


def on_meta(args: ModelArgs) -> Transformer:
    with torch.device("meta"):
        return Transformer(args)


# The counts of the model cards, in full: 8.03 B, 70.6 B and 405.9 B.
@pytest.mark.parametrize(
    ("flavor", "parameters"),
    [("8B", 8_030_261_248), ("70B", 70_553_706_496), ("405B", 405_853_388_800)],
)
def test_flavors_have_the_published_numbers_of_parameters(flavor: str, parameters: int) -> None:
    assert sum(p.numel() for p in on_meta(FLAVORS[flavor]).parameters()) == parameters


def test_without_its_input_embedding_8b_has_the_parameters_of_the_flops_formulas() -> None:
    model = on_meta(FLAVORS["8B"])
    total = sum(p.numel() for p in model.parameters())
    assert total - model.tok_embeddings.weight.numel() == 7_504_924_672


@pytest.mark.parametrize("flavor", FLAVORS)
def test_linear_shapes_are_those_of_the_model(flavor: str) -> None:
    args = dataclasses.replace(FLAVORS[flavor], n_layers=1, vocab_size=16)
    linears = {
        name: tuple(module.weight.shape)
        for name, module in on_meta(args).layers[0].named_modules()
        if isinstance(module, nn.Linear)
    }
    assert block_linear_shapes(args) == linears


def test_the_debug_model_takes_the_tokenizers_vocabulary() -> None:
    args = FLAVORS["debugmodel"]
    assert (args.dim, args.n_layers, args.n_heads, args.n_kv_heads, args.ffn_dim) == (
        256,
        6,
        16,
        8,
        768,
    )
    assert args.vocab_size == 0


def test_a_flavor_can_have_another_number_of_layers() -> None:
    assert find_flavor("8B") == FLAVORS["8B"]
    assert find_flavor("8B_16layers") == dataclasses.replace(FLAVORS["8B"], n_layers=16)
    assert find_flavor("debugmodel_4layers") == dataclasses.replace(
        FLAVORS["debugmodel"], n_layers=4
    )
    for name in ("8B_0layers", "8B_layers", "7B_16layers", "8B_16", "16layers", "8B_16layers "):
        assert find_flavor(name) is None
