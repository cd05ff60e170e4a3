"""The swap to MXFP8Linear. What it computes is in test_recipes.py, and on several ranks in
test_mxfp8_layouts.py."""

import subprocess
import sys
from importlib.metadata import version

import pytest
import torch
from torch import nn

from torchtitan_lite.errors import ConfigError
from torchtitan_lite.float8.convert import MXFP8Linear, convert_to_mxfp8


def build_model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 96, bias=False), nn.Linear(96, 64, bias=False))


def test_the_chosen_linears_and_no_others_are_swapped_and_keep_their_weights() -> None:
    model = build_model()
    weights = dict(model.named_parameters())
    convert_to_mxfp8(model, ["1"], emulate=True)
    assert [type(linear) for linear in model] == [nn.Linear, MXFP8Linear]
    assert (
        model[1].emulate
        and repr(model[1]) == "MXFP8Linear(in_features=96, out_features=64, bias=False)"
    )
    assert {name: id(weight) for name, weight in model.named_parameters()} == {
        name: id(weight) for name, weight in weights.items()
    }


def test_on_meta_there_are_shapes_also_without_a_device_that_has_the_kernels() -> None:
    model = build_model().to("meta")
    convert_to_mxfp8(model, ["0", "1"], emulate=False)
    output = model(torch.empty(2, 32, 64, device="meta"))
    output.sum().backward()
    assert output.shape == (2, 32, 64) and model[0].weight.grad.shape == (96, 64)


@pytest.mark.parametrize("tokens", [16, 48])
def test_tokens_that_are_no_multiple_of_32_have_no_weight_gradient(tokens: int) -> None:
    model = build_model()
    convert_to_mxfp8(model, ["0"], emulate=True)
    output = model(torch.randn(tokens, 64))
    with pytest.raises(AssertionError, match=f"{tokens}.* must be divisible by block_size 32"):
        output.sum().backward()


def test_a_torchao_without_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.prototype.moe_training.mxfp8_linear", None)
    monkeypatch.setattr("torchao.__version__", "0.17.0")
    message = (
        r"^\[float8\] MXFP8 needs torchao 0.18, and the installed torchao 0.17.0 does not offer it"
    )
    with pytest.raises(ConfigError, match=message):
        convert_to_mxfp8(build_model(), ["0"], emulate=True)


@pytest.mark.skipif(version("torchao").startswith("0.17."), reason="a torchao without MXFP8")
def test_the_prototype_is_loaded_for_its_users_alone_and_says_nothing() -> None:
    code = """
import sys, torch, torchtitan_lite.float8.convert as convert
print("torchao.prototype.moe_training" in sys.modules)
model = torch.nn.Sequential(torch.nn.Linear(32, 32, bias=False))
convert.convert_to_mxfp8(model, ["0"], emulate=False)
print("torchao.prototype.moe_training" in sys.modules)
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert (result.stdout, result.stderr) == ("False\nTrue\n", "")
