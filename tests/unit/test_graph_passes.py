"""The faults of compiled float8 graphs that graph_passes.py works around, without its passes and
with them. The passes are taken out after each test, in tests/conftest.py."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._inductor import config
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.exc import InductorError

from torchtitan_lite.float8.graph_passes import add_passes

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
X = torch.randn(32, 64).bfloat16()
ONE = torch.ones(())
WEIGHTS = [torch.randn(48, 64).to(E4M3).t() for _ in range(2)]


def count_casts(kernels: list[Any]) -> int:
    """Float8 elements that the kernels of a graph write."""
    written = [out.node for each in kernels if not each.is_extern() for out in each.get_outputs()]
    return sum(int(out.get_numel()) for out in written if out.get_dtype() in (E4M3, E5M2))


def count_reductions(kernels: list[Any]) -> int:
    return sum(one.is_reduction() for each in kernels for one in each.get_nodes())


class Planned(Exception):
    """The kernels of a graph are known, and code would be generated for them."""


def compile_to_kernels(
    function: Callable[..., Any], count: Callable[[list[Any]], int]
) -> tuple[Any, list[int]]:
    """Compile `function` up to its kernels, whose C++ would take seconds: its graphs run eagerly.
    Return it, and a list that gets a `count` of the kernels of each graph."""
    counts: list[int] = []

    def stop(kernels: list[Any]) -> None:
        counts.append(count(kernels))
        raise Planned

    def plan(graph: torch.fx.GraphModule, inputs: Any, **options: Any) -> Any:
        settings = {"force_disable_caches": True, "_post_fusion_custom_pass": stop}
        with config.patch(settings), pytest.raises(InductorError, match="Planned"):
            compile_fx_inner(copy.deepcopy(graph), inputs, **options)
        return make_boxed_func(graph)

    torch._dynamo.reset()
    backend = partial(compile_fx, inner_compile=plan)
    return torch.compile(function, fullgraph=True, backend=backend), counts


# ----- keep_shared_casts -----


def multiply_twice(x: Tensor) -> list[Tensor]:
    cast = (x * 2).to(E4M3)
    return [torch._scaled_mm(cast, each, ONE, ONE, out_dtype=torch.bfloat16) for each in WEIGHTS]


def test_a_cast_is_computed_once_for_all_matmuls_that_read_it() -> None:
    written: list[int] = []

    def note(kernels: list[Any]) -> list[Any]:
        written.append(count_casts(kernels))
        return kernels

    for passes, casts in (([], 2), (["post_grad_custom_post_pass"], 1)):
        add_passes(passes)
        torch._dynamo.reset()
        with config.patch(force_disable_caches=True, _post_fusion_custom_pass=note):
            results = torch.compile(multiply_twice, fullgraph=True)(X)
        assert written.pop() == casts * X.numel()
        assert all(map(torch.equal, results, multiply_twice(X)))


# ----- recompute_transposed_casts -----


class Linear(torch.autograd.Function):
    """A linear in float8 whose backward pass copies the weight to transpose it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return torch._scaled_mm(x.to(weight.dtype), weight.t(), ONE, ONE, out_dtype=torch.bfloat16)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (weight,) = ctx.saved_tensors
        transposed = weight.t().contiguous().t()
        cast = grad.to(weight.dtype)
        return torch._scaled_mm(cast, transposed, ONE, ONE, out_dtype=torch.bfloat16), None


def test_the_transpose_of_a_weight_in_float8_is_not_kept() -> None:
    weight, gradients = WEIGHTS[0].t(), []
    saved: list[Tensor] = []

    def save(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    for passes, copies in (([], [(48, 64)]), (["joint_custom_post_pass"], [])):
        add_passes(passes)
        linear, _ = compile_to_kernels(Linear.apply, count_casts)
        x = X.clone().requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
            linear(x, weight).sum().backward()
        float8 = [each for each in saved if each.dtype is E4M3]
        assert [each.shape for each in float8 if each.data_ptr() != weight.data_ptr()] == copies
        gradients.append(x.grad)
        saved.clear()
    assert torch.equal(*gradients)


# ----- keep_input_amax -----


class Scaled(torch.autograd.Function):
    """x [2, 16, 64] times its amax; the gradient is multiplied by the amax of x as [32, 64]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x.abs().max()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * x.view(-1, 64).abs().max()


def test_the_amax_of_an_input_is_not_computed_again_for_its_view() -> None:
    gradients = []
    for passes, expected in (([], 2), (["joint_custom_pre_pass"], 1)):
        add_passes(passes)
        scaled, reductions = compile_to_kernels(Scaled.apply, count_reductions)
        x = X.view(2, 16, 64).clone().requires_grad_()
        scaled(x).backward(torch.ones_like(x))
        assert sum(reductions) == expected
        gradients.append(x.grad)
    assert torch.equal(*gradients)
