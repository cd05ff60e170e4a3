"""The swap of linears: the recipe asked for, emulated with that recipe, and only what was chosen.
What they compute is in test_recipes.py, and on several ranks in test_scaled_layouts.py."""

import pytest
import torch
import torchao.float8
from sample_models import SMALL, on_meta
from torch import nn
from torchao.float8.config import ScalingGranularity, ScalingType
from torchao.float8.float8_linear import Float8Linear
from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor

from torchtitan_lite.base.errors import ConfigError
from torchtitan_lite.catalog.recipes import Recipe
from torchtitan_lite.config import Float8Config
from torchtitan_lite.float8.convert import convert_linears, must_emulate, update_scales
from torchtitan_lite.float8.mxfp8 import MXFP8
from torchtitan_lite.float8.scaled_linear import ScaledLinear, swap_linears
from torchtitan_lite.float8.selection import LinearChoice
from torchtitan_lite.models.llama3 import Output

CHOSEN = (
    "attention.wq",
    "attention.wv",
    "attention.wo",
    *(f"feed_forward.w{i}" for i in (1, 2, 3)),
)


# ----- convert_linears -----


@pytest.mark.parametrize(
    ("recipe", "kind"), [("tensorwise", Float8Linear), ("mxfp8", ScaledLinear)]
)
def test_the_chosen_linears_and_no_others_are_swapped(recipe: str, kind: type[nn.Module]) -> None:
    model = on_meta(SMALL, recipe, filter_fqns=("wk", "output"))
    swapped = {name for name, module in model.named_modules() if isinstance(module, kind)}
    assert swapped == {f"layers.{i}.{part}" for i in range(2) for part in CHOSEN}
    assert type(model.layers["0"].attention.wk) is nn.Linear and type(model.output) is Output


@pytest.mark.parametrize("emulate", [True, False])
@pytest.mark.parametrize(
    ("recipe", "granularity", "high_precision"),
    [
        ("tensorwise", ScalingGranularity.TENSORWISE, False),
        ("rowwise", ScalingGranularity.AXISWISE, False),
        ("rowwise_with_gw_hp", ScalingGranularity.AXISWISE, True),
    ],
)
def test_recipes_keep_their_scaling(recipe, granularity, high_precision, emulate):
    config = on_meta(SMALL, recipe, emulate=emulate).layers["0"].attention.wq.config
    assert config.emulate is emulate
    assert config.cast_config_input.scaling_granularity is granularity
    grad_weight = config.cast_config_input_for_grad_weight.scaling_type
    assert (grad_weight is ScalingType.DISABLED) is high_precision


@pytest.mark.parametrize("fast", [True, False])
def test_use_fast_accum_in_backward_is_of_both_gradients_and_outputs_always_are_fast(fast):
    model = on_meta(SMALL, "rowwise", use_fast_accum_in_backward=fast)
    wq = model.layers["0"].attention.wq
    configs = wq.linear_mm_config
    assert configs.output.use_fast_accum
    assert configs.grad_input.use_fast_accum is configs.grad_weight.use_fast_accum is fast


@pytest.mark.parametrize("all_gather", [True, False])
def test_weights_are_wrapped_for_the_float8_all_gather_only_where_asked_for(all_gather):
    model = on_meta(SMALL, "tensorwise", enable_fsdp_float8_all_gather=all_gather)
    wrapped = isinstance(model.layers["0"].attention.wq.weight, WeightWithDynamicFloat8CastTensor)
    assert wrapped is all_gather
    assert not isinstance(model.output.weight, WeightWithDynamicFloat8CastTensor)


@pytest.mark.parametrize(("padded", "summed"), [(False, 24), (True, 32)])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_weight_gradients_sum_over_padded_tokens(recipe, padded, summed, monkeypatch):
    seen: list[tuple[torch.Size, torch.Size]] = []

    def multiply(a: torch.Tensor, b: torch.Tensor, **scales: object) -> torch.Tensor:
        seen.append((a.shape, b.shape))
        return (a.float() @ b.float()).bfloat16()

    monkeypatch.setattr(torch, "_scaled_mm", multiply)
    model = nn.ModuleDict({"linear": nn.Linear(64, 32, bias=False, dtype=torch.bfloat16)})
    choices = [LinearChoice("linear", ("linear",), (32, 64), (32, 64))]
    float8 = Float8Config(recipe_name=recipe, pad_inner_dim=padded)
    convert_linears(model, choices, float8=float8, emulate=False)
    tokens = torch.randn(24, 64, dtype=torch.bfloat16, requires_grad=True)
    model["linear"](tokens).sum().backward()
    assert seen == [((24, 64), (64, 32)), ((24, 32), (32, 64)), ((32, summed), (summed, 64))]


# ----- must_emulate, update_scales -----


@pytest.mark.parametrize(
    ("keys", "capability", "refused"),
    [
        ({}, (8, 0), r"capability 8\.9 or newer; H1 has 8\.0\. .* emulate = true"),
        ({}, (8, 9), ""),
        ({"recipe_name": "mxfp8"}, (9, 0), r"10\.x by NVIDIA; H1 has 9\.0\. .* emulate"),
        ({"recipe_name": "mxfp8"}, (12, 0), r"10\.x by NVIDIA; H1 has 12\.0\."),
        ({"recipe_name": "mxfp8"}, (10, 3), ""),
        ({"recipe_name": "blockwise"}, (10, 0), r"9\.x by NVIDIA; H1 has 10\.0\. .* emulate"),
        ({"recipe_name": "blockwise"}, (9, 0), ""),
    ],
)
def test_gpus_that_a_recipe_runs_on(keys, capability, refused, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H1")
    if not refused:
        assert not must_emulate(Float8Config(**keys), device=torch.device("cuda"))
        monkeypatch.setattr(torch.version, "hip", "7.0")  # an MI300 has 9.4
        refused = r"\d\.x by NVIDIA; H1 has" if keys else ""
    if not refused:
        return
    with pytest.raises(ConfigError, match=refused):
        must_emulate(Float8Config(**keys), device=torch.device("cuda"))


KEYS = "enable_float8_linear", "enable_fsdp_float8_all_gather"
KEYS += ("precompute_float8_dynamic_scale_for_fsdp",)


@pytest.mark.parametrize("unset", [None, *KEYS])
def test_scales_are_precomputed_only_where_asked_for(unset, monkeypatch):
    seen: list[nn.Module] = []
    monkeypatch.setattr(torchao.float8, "precompute_float8_dynamic_scale_for_fsdp", seen.append)
    update_scales(nn.Linear(1, 1), Float8Config(**{key: key != unset for key in KEYS}))
    assert len(seen) == (unset is None)


# ----- swap_linears, ScaledLinear -----


def two_linears() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 96, bias=False), nn.Linear(96, 64, bias=False))


def test_scaled_linears_keep_their_weights() -> None:
    model = two_linears()
    weights = dict(model.named_parameters())
    swap_linears(model, ["1"], MXFP8(emulate=True))
    assert [type(linear) for linear in model] == [nn.Linear, ScaledLinear]
    assert repr(model[1]) == "ScaledLinear(in_features=96, out_features=64, bias=False)"
    found = dict(model.named_parameters())
    assert found.keys() == weights.keys() and all(found[name] is weights[name] for name in weights)


class Exact:
    """The Scaling of a recipe from outside, which casts to nothing less."""

    def rows(self, x: torch.Tensor, *, is_weight: bool) -> torch.Tensor:
        return x

    def columns(self, x: torch.Tensor, *, is_weight: bool) -> torch.Tensor:
        return x.t()

    def mm(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return left @ right


def convert_exactly(
    model: nn.Module, chosen: set[str], float8: Float8Config, emulate: bool
) -> None:
    swap_linears(model, chosen, Exact())


EXACT = Recipe(name="exact", converter=f"{__name__}:convert_exactly")


@pytest.mark.parametrize("compiled", [False, True])
def test_a_recipe_from_outside_needs_casts_and_a_matmul(compiled: bool) -> None:
    model, plain = (nn.ModuleDict({"linear": two_linears()[0]}) for _ in range(2))
    plain.load_state_dict(model.state_dict())
    choices = [LinearChoice("linear", ("linear",), (96, 64), (96, 64))]
    float8 = Float8Config(recipe_name=f"{__name__}:EXACT")
    convert_linears(model, choices, float8=float8, emulate=True)
    assert isinstance(model["linear"], ScaledLinear)

    found = []
    for linear in model["linear"], plain["linear"]:
        x = torch.linspace(-1, 1, 16 * 64).reshape(2, 8, 64).requires_grad_()
        output = torch.compile(linear, backend="aot_eager", disable=not compiled)(x)
        output.square().sum().backward()
        found.append([output, x.grad, linear.weight.grad])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_on_meta_there_are_shapes_also_without_a_device_that_has_the_kernels() -> None:
    model = two_linears().to("meta")
    swap_linears(model, ["0", "1"], MXFP8(emulate=False))
    output = model(torch.empty(2, 32, 64, device="meta"))
    output.sum().backward()
    assert output.shape == (2, 32, 64) and model[0].weight.grad.shape == (96, 64)
