"""Linears in float8 in the format of compressed-tensors, which vLLM and transformers load: each
weight [R, C] comes with the scales, [1] or [R, 1], that multiply it."""

from typing import Any

import torch
from torch import Tensor

from torchtitan_lite.base.errors import ConfigError
from torchtitan_lite.catalog.flavors import ModelArgs
from torchtitan_lite.config import Float8Config
from torchtitan_lite.float8.selection import select_linears

from .hf_llama import HEAD, hf_names
from .llama3 import Transformer

SCALE = "_scale"  # suffix of a weight's name in the name of its scales


def trained_in_float8(args: ModelArgs, float8: Float8Config) -> tuple[list[str], list[str]]:
    """Return the weights of the linears that a run trained in float8, and the other linears as
    Hugging Face names them. The output is among the latter: vLLM takes none in float8. Raises
    ConfigError for a run without float8."""
    if not float8.enable_float8_linear:
        raise ConfigError(
            "[float8] enable_float8_linear = false in the checkpoint's config: only linears that "
            "trained in float8 are exported in it; use --dtype bfloat16."
        )
    float8 = float8.model_copy(update={"convert_output": False})
    with torch.device("meta"):
        choices = select_linears(Transformer(args), float8, tp_degree=1, tokens=None)
    linears = {f"{name}.weight": each.converted for each in choices for name in each.names}
    names = {"output.weight": HEAD, **hf_names(args)}
    others = [names[name].removesuffix(".weight") for name in linears if not linears[name]]
    return [name for name in linears if linears[name]], others


def quantize(weight: Tensor, float8: Float8Config) -> list[Tensor]:
    """Return a weight [R, C] in float8, and its scales: [1] if the recipe has one scale per tensor,
    else [R, 1]."""
    from torchtitan_lite.float8.blockwise import scale_blocks  # slow to import

    rows, columns = weight.shape
    if float8.recipe.gathers_float8:
        data, scale = scale_blocks(weight, rows, columns)
        return [data, scale[0]]
    return [*scale_blocks(weight, 1, columns)]


def quantization_config(float8: Float8Config, *, ignore: list[str]) -> dict[str, Any]:
    """Return the `quantization_config` of config.json, for all linears but those to `ignore`."""
    number = {"num_bits": 8, "type": "float", "symmetric": True}
    strategy = "tensor" if float8.recipe.gathers_float8 else "channel"
    group = {
        "targets": ["Linear"],
        "weights": {**number, "strategy": strategy, "dynamic": False},
        "input_activations": {**number, "strategy": "token", "dynamic": True},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ignore,
    }
