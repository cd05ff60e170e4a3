"""The three matmuls of one linear, in each recipe: M tokens, K in_features, N out_features."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from torchtitan_lite.catalog.recipes import RECIPES as RECIPES
from torchtitan_lite.config import Float8Config
from torchtitan_lite.float8.convert import convert_linears
from torchtitan_lite.float8.selection import LinearChoice

M, K, N = 256, 384, 512


class Data(NamedTuple):
    """What a linear reads."""

    input: Tensor
    """[M, K]"""
    weight: Tensor
    """[N, K]"""
    grad_output: Tensor
    """[M, N]"""


class Gemms(NamedTuple):
    """What a linear computes from it, or a figure of each."""

    output: Tensor | float
    grad_input: Tensor | float
    grad_weight: Tensor | float


def make_data(*, outliers: bool, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Data:
    """Gaussian data; with `outliers` four rows of each, tokens or out_features, are 10,000 times as
    large, as the massive activations of a language model are (arXiv 2402.17762)."""
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(shape, generator=generator) for shape in ((M, K), (N, K), (M, N))]
    for tensor in tensors:
        if outliers:
            tensor[torch.randperm(len(tensor), generator=generator)[:4]] *= 1e4
    return Data(*(tensor.to(dtype) for tensor in tensors))


def run_linear(
    recipe: str | None,
    data: Data,
    *,
    device: str = "cpu",
    emulate: bool = True,
    compiled: bool = False,
) -> Gemms:
    """What a linear computes on `device`, in a recipe or, if that is None, as it is; on CPU
    afterwards."""
    model = nn.ModuleDict({"linear": nn.Linear(K, N, bias=False)})
    input, weight, grad_output = (tensor.to(device, copy=True) for tensor in data)
    model["linear"].weight = nn.Parameter(weight)
    if recipe is not None:
        choice = LinearChoice("linear", ("linear",), (N, K), (N, K))
        convert_linears(model, [choice], float8=Float8Config(recipe_name=recipe), emulate=emulate)
    linear = model["linear"]
    if compiled:
        linear.compile(fullgraph=True)
    input.requires_grad_()
    output = linear(input)
    output.backward(grad_output)
    assert input.grad is not None
    return Gemms(*(tensor.detach().cpu() for tensor in (output, input.grad, linear.weight.grad)))


def exact_gemms(data: Data) -> Gemms:
    """The three in float64."""
    input, weight, grad_output = (tensor.double() for tensor in data)
    return Gemms(input @ weight.T, grad_output @ weight, grad_output.T @ input)


def sqnr(actual: Gemms, expected: Gemms) -> Gemms:
    """Of each matmul the ratio of signal to noise in dB, as the mean over its rows: large rows hide
    no small ones."""
    pairs = (
        (theirs.double(), ours.double()) for theirs, ours in zip(actual, expected, strict=True)
    )
    ratios = (right.norm(dim=1) / (wrong - right).norm(dim=1) for wrong, right in pairs)
    return Gemms(*(20 * ratio.clamp(max=1e10).log10().mean().item() for ratio in ratios))
