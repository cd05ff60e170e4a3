"""The swap to Float8Linear: the recipe asked for, emulated with that recipe, and only what was
chosen."""

import pytest
import torch
import torchao.float8
from torch import nn
from torchao.float8.config import ScalingGranularity, ScalingType
from torchao.float8.float8_linear import Float8Linear
from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor

from torchtitan_lite.config import Float8Config
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.float8 import convert
from torchtitan_lite.float8.convert import (
    MXFP8Linear,
    convert_linears,
    must_emulate,
    update_scales,
)
from torchtitan_lite.float8.selection import LinearChoice, select_linears
from torchtitan_lite.models.flavors import ModelArgs
from torchtitan_lite.models.llama3 import Output, Transformer

ARGS = ModelArgs(
    dim=64, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=96, vocab_size=50, max_seq_len=16
)
CUDA = torch.device("cuda", 0)


def converted(float8: Float8Config, *, emulate: bool = True) -> nn.Module:
    with torch.device("meta"):
        model = Transformer(ARGS)
    choices = select_linears(model, filter_fqns=float8.filter_fqns, tp_degree=1, tokens=64)
    convert_linears(model, choices, float8=float8, emulate=emulate)
    return model


def test_the_chosen_linears_and_no_others_are_converted_and_emulate() -> None:
    model = converted(Float8Config(filter_fqns=("wk", "output")))
    swapped = {name for name, module in model.named_modules() if isinstance(module, Float8Linear)}
    parts = (
        "attention.wq",
        "attention.wv",
        "attention.wo",
        "feed_forward.w1",
        "feed_forward.w2",
        "feed_forward.w3",
    )
    assert swapped == {f"layers.{i}.{part}" for i in range(2) for part in parts}
    assert type(model.output) is Output
    assert all(model.get_submodule(name).config.emulate for name in swapped)


@pytest.mark.parametrize("emulate", [True, False])
def test_recipes_keep_their_scaling_with_and_without_emulation(emulate: bool) -> None:
    configs = {
        name: converted(Float8Config(recipe_name=name), emulate=emulate)
        .layers["0"]
        .attention.wq.config
        for name in ("tensorwise", "rowwise", "rowwise_with_gw_hp")
    }
    assert all(config.emulate is emulate for config in configs.values())
    granularity = {
        name: config.cast_config_input.scaling_granularity for name, config in configs.items()
    }
    assert granularity["tensorwise"] is ScalingGranularity.TENSORWISE
    assert (
        granularity["rowwise"] is granularity["rowwise_with_gw_hp"] is ScalingGranularity.AXISWISE
    )
    high = {
        name: c.cast_config_input_for_grad_weight.scaling_type is ScalingType.DISABLED
        for name, c in configs.items()
    }
    assert high == {"tensorwise": False, "rowwise": False, "rowwise_with_gw_hp": True}


@pytest.mark.parametrize("all_gather", [True, False])
def test_weights_are_wrapped_for_the_float8_all_gather_only_where_asked_for(
    all_gather: bool,
) -> None:
    model = converted(Float8Config(enable_fsdp_float8_all_gather=all_gather))
    wrapped = isinstance(model.layers["0"].attention.wq.weight, WeightWithDynamicFloat8CastTensor)
    assert wrapped is all_gather
    assert not isinstance(model.output.weight, WeightWithDynamicFloat8CastTensor)


def test_float8_is_emulated_on_cpu_and_on_a_gpu_where_asked_for() -> None:
    assert must_emulate(Float8Config(), device=torch.device("cpu"))
    assert must_emulate(Float8Config(emulate=True), device=CUDA)


def test_a_gpu_without_float8_is_refused_by_name_and_capability(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100-SXM4-80GB")
    with pytest.raises(
        ConfigError,
        match=r"capability 8\.9 or newer, and NVIDIA A100-SXM4-80GB has 8\.0; set \[float8\] em",
    ):
        must_emulate(Float8Config(), device=CUDA)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert not must_emulate(Float8Config(), device=CUDA)


@pytest.mark.parametrize("capability", [(9, 0), (12, 0)])
def test_a_gpu_without_mxfp8_is_refused_by_name_and_capability(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA GPU")
    have = ".".join(map(str, capability))
    with pytest.raises(
        ConfigError,
        match=rf"capability 10\.x, and NVIDIA GPU has {have}; set \[float8\] emulate",
    ):
        must_emulate(Float8Config(recipe_name="mxfp8"), device=CUDA)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 3))
    assert not must_emulate(Float8Config(recipe_name="mxfp8"), device=CUDA)


@pytest.mark.parametrize(
    ("capability", "cuda"),
    [((8, 9), (13, 0)), ((10, 0), (13, 0)), ((9, 0), (12, 8)), ((9, 4), (0,))],
)
def test_gradients_are_scaled_in_matmul_only_on_hopper(
    capability: tuple[int, int], cuda: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA GPU")
    float8 = Float8Config(recipe_name="rowwise", scale_gradients_in_matmul=True)
    for found, version, works in (((9, 0), (12, 9), True), (capability, cuda, False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=found: found)
        monkeypatch.setattr(convert, "CUDA_VERSION", version)
        if works:
            assert not must_emulate(float8, device=CUDA)
            continue
        with pytest.raises(
            ConfigError,
            match=r"scale_gradients_in_matmul = true needs .* 9\.x, with CUDA 12\.9 or newer .*; "
            r"set scale_gradients_in_matmul = false",
        ):
            must_emulate(float8, device=CUDA)


@pytest.mark.parametrize(
    ("device", "emulate", "why"), [("cpu", False, "on CPU all are"), ("cuda", True, "emulate = tr")]
)
def test_emulated_matmuls_do_not_scale_gradients(device: str, emulate: bool, why: str) -> None:
    float8 = Float8Config(recipe_name="rowwise", scale_gradients_in_matmul=True, emulate=emulate)
    with pytest.raises(
        ConfigError, match=rf"scale_gradients_in_matmul = true has no effect .*, and {why}"
    ):
        must_emulate(float8, device=torch.device(device))


def test_mxfp8_is_another_linear() -> None:
    model = converted(Float8Config(recipe_name="mxfp8", filter_fqns=("wk",)))
    kinds = {
        name: type(module)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
    }
    assert {name for name, kind in kinds.items() if kind is nn.Linear} == {
        f"layers.{i}.attention.wk" for i in range(2)
    }
    assert {name for name, kind in kinds.items() if kind is Output} == {"output"}
    assert set(kinds.values()) == {nn.Linear, Output, MXFP8Linear}


@pytest.mark.parametrize(
    ("float8", "calls"),
    [
        ({"enable_float8_linear": True}, 0),
        ({"enable_float8_linear": False, "precompute_float8_dynamic_scale_for_fsdp": True}, 0),
        ({"enable_float8_linear": True, "precompute_float8_dynamic_scale_for_fsdp": True}, 1),
    ],
)
def test_scales_are_precomputed_only_where_asked_for(
    float8: dict[str, bool], calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[nn.Module] = []
    monkeypatch.setattr(torchao.float8, "precompute_float8_dynamic_scale_for_fsdp", seen.append)
    update_scales(nn.Linear(1, 1), Float8Config(**float8))
    assert len(seen) == calls


@pytest.mark.parametrize(("padded", "summed"), [(False, 24), (True, 32)])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_weight_gradients_sum_over_tokens_padded_to_a_multiple_where_asked_for(
    recipe: str, padded: bool, summed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[torch.Size, torch.Size]] = []

    def multiply(a: torch.Tensor, b: torch.Tensor, **scales: object) -> torch.Tensor:
        seen.append((a.shape, b.shape))
        return (a.float() @ b.float()).bfloat16()

    monkeypatch.setattr(torch, "_scaled_mm", multiply)
    model = nn.ModuleDict({"linear": nn.Linear(64, 32, bias=False, dtype=torch.bfloat16)})
    float8 = Float8Config(recipe_name=recipe, pad_inner_dim=padded)
    convert_linears(
        model,
        [LinearChoice("linear", ("linear",), (32, 64), (32, 64))],
        float8=float8,
        emulate=False,
    )
    tokens = torch.randn(24, 64, dtype=torch.bfloat16, requires_grad=True)
    model["linear"](tokens).sum().backward()
    assert seen == [((24, 64), (64, 32)), ((24, 32), (32, 64)), ((32, summed), (summed, 64))]
