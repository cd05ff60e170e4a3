"""Published parameter counts, and linear shapes that agree with the model's own."""

import dataclasses

import pytest
import torch
from torch import nn

from torchtitan_lite.catalog.flavors import FLAVORS, ModelArgs, block_linear_shapes
from torchtitan_lite.models.llama3 import Transformer

# ----- FLAVORS, block_linear_shapes -----


def on_meta(args: ModelArgs) -> Transformer:
    with torch.device("meta"):
        return Transformer(args)


# The counts of the model cards, in full: 1.24 B, 3.21 B, 8.03 B, 70.6 B and 405.9 B; then those
# with the vocabulary of a tokenizer, the first as torchtitan logs it.
@pytest.mark.parametrize(
    ("flavor", "vocab_size", "parameters"),
    [
        ("1B", 128256, 1_235_814_400),
        ("3B", 128256, 3_212_749_824),
        ("3-8B", 128256, 8_030_261_248),
        ("8B", 128256, 8_030_261_248),
        ("3-70B", 128256, 70_553_706_496),
        ("70B", 128256, 70_553_706_496),
        ("405B", 128256, 405_853_388_800),
        ("debugmodel", 2256, 6_270_208),
        ("debugmodel_gqa", 2256, 5_876_992),
        ("150M", 32000, 150_436_608),
        ("350M", 32000, 348_447_744),
    ],
)
def test_flavors_have_the_published_numbers_of_parameters(flavor, vocab_size, parameters):
    args = FLAVORS[flavor]
    assert args.vocab_size == (vocab_size if vocab_size == 128256 else 0)
    model = on_meta(dataclasses.replace(args, vocab_size=vocab_size))
    assert sum(p.numel() for p in model.parameters()) == parameters


@pytest.mark.parametrize("flavor", FLAVORS)
def test_linear_shapes_are_those_of_the_model(flavor: str) -> None:
    args = dataclasses.replace(FLAVORS[flavor], n_layers=1, vocab_size=16)
    linears = {
        name: tuple(module.weight.shape)
        for name, module in on_meta(args).layers["0"].named_modules()
        if isinstance(module, nn.Linear)
    }
    assert block_linear_shapes(args) == linears


def test_the_context_of_each_generation() -> None:
    scaled = {name: args.rope_scaling for name, args in FLAVORS.items() if args.rope_scaling}
    assert {name: dataclasses.astuple(scaling) for name, scaling in scaled.items()} == {
        **dict.fromkeys(("1B", "3B"), (32.0, 1.0, 4.0, 8192)),
        **dict.fromkeys(("debugmodel", "8B", "70B", "405B"), (8.0, 1.0, 4.0, 8192)),
    }
    contexts = {name: args.max_seq_len for name, args in FLAVORS.items()}
    assert contexts == {name: 131072 if name in scaled else 8192 for name in FLAVORS}
    tied = {name for name, args in FLAVORS.items() if args.tie_embeddings}
    assert tied == {"150M", "350M", "1B", "3B"}
