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


# The counts of the model cards, in full: 1.24 B, 3.21 B, 8.03 B, 70.6 B and 405.9 B.
@pytest.mark.parametrize(
    ("flavor", "parameters"),
    [
        ("1B", 1_235_814_400),
        ("3B", 3_212_749_824),
        ("3-8B", 8_030_261_248),
        ("8B", 8_030_261_248),
        ("3-70B", 70_553_706_496),
        ("70B", 70_553_706_496),
        ("405B", 405_853_388_800),
    ],
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
        for name, module in on_meta(args).layers["0"].named_modules()
        if isinstance(module, nn.Linear)
    }
    assert block_linear_shapes(args) == linears


@pytest.mark.parametrize(
    ("flavor", "vocab_size", "parameters"),
    [
        ("debugmodel", 2256, 6_270_208),  # as torchtitan logs it
        ("debugmodel_gqa", 2256, 5_876_992),
        ("150M", 32000, 150_436_608),
        ("350M", 32000, 348_447_744),
    ],
)
def test_small_flavors_take_the_tokenizers_vocabulary(
    flavor: str, vocab_size: int, parameters: int
) -> None:
    assert FLAVORS[flavor].vocab_size == 0
    model = on_meta(dataclasses.replace(FLAVORS[flavor], vocab_size=vocab_size))
    assert sum(p.numel() for p in model.parameters()) == parameters


def test_the_context_of_each_generation() -> None:
    scaled = {name: args.rope_scaling for name, args in FLAVORS.items() if args.rope_scaling}
    assert {name: scaling.factor for name, scaling in scaled.items()} == {
        **dict.fromkeys(("1B", "3B"), 32.0),
        **dict.fromkeys(("debugmodel", "8B", "70B", "405B"), 8.0),
    }
    for scaling in scaled.values():
        others = scaling.low_freq_factor, scaling.high_freq_factor
        assert (*others, scaling.original_max_position_embeddings) == (1.0, 4.0, 8192)
    assert {name for name, args in FLAVORS.items() if args.max_seq_len == 131072} == set(scaled)
    assert {args.max_seq_len for name, args in FLAVORS.items() if name not in scaled} == {8192}
    tied = {name for name, args in FLAVORS.items() if args.tie_embeddings}
    assert tied == {"150M", "350M", "1B", "3B"}


def test_a_flavor_can_have_another_number_of_layers() -> None:
    assert find_flavor("8B") == FLAVORS["8B"]
    assert find_flavor("8B_16layers") == dataclasses.replace(FLAVORS["8B"], n_layers=16)
    assert find_flavor("debugmodel_4layers") == dataclasses.replace(
        FLAVORS["debugmodel"], n_layers=4
    )
    for name in ("8B_0layers", "8B_layers", "7B_16layers", "8B_16", "16layers", "8B_16layers "):
        assert find_flavor(name) is None
