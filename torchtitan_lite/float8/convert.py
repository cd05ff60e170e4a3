"""The swap from nn.Linear to torchao's Float8Linear, and the scale hook that follows each optimizer step."""

import dataclasses
from collections.abc import Callable

import torch
from torch import nn
from torchao.float8 import (
    Float8LinearConfig,
    convert_to_float8_training,
    precompute_float8_dynamic_scale_for_fsdp,
)
from torchao.float8.float8_linear import Float8Linear

from torchtitan_lite.config import Float8Config
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.logger import logger

from .selection import LinearChoice

MIN_CAPABILITY = (9, 4) if torch.version.hip else (8, 9)
"""Compute capability of the first GPUs with float8 matrix units: NVIDIA's Ada; as ROCm counts, AMD's MI300."""


def has_float8_units(device: torch.device) -> bool:
    """Whether `device` multiplies float8 matrices."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= MIN_CAPABILITY


def resolve_emulate(float8: Float8Config, *, device: torch.device) -> bool:
    """Whether float8 matmuls are emulated in float32: on CPU always, on a GPU only if asked for.

    Raises ConfigError on a GPU without float8 matrix units and without `emulate`."""
    if device.type == "cpu" or float8.emulate:
        return True
    if not has_float8_units(device):
        name = torch.cuda.get_device_name(device)
        capability = torch.cuda.get_device_capability(device)
        have, need = (f"{major}.{minor}" for major, minor in (capability, MIN_CAPABILITY))
        raise ConfigError(
            f"[float8] enable_float8_linear = true needs a GPU of compute capability {need} or newer, and {name} has "
            f"{have}; set [float8] emulate = true to try float8's numerics slowly, or enable_float8_linear = false."
        )
    return False


def float8_linear_config(float8: Float8Config, *, emulate: bool) -> Float8LinearConfig:
    """torchao's config of the recipe asked for, with emulation and the float8 all-gather as asked for."""
    recipe = Float8LinearConfig.from_recipe_name(float8.recipe_name)
    return dataclasses.replace(
        recipe, emulate=emulate, enable_fsdp_float8_all_gather=float8.enable_fsdp_float8_all_gather
    )


def convert_linears(model: nn.Module, choices: list[LinearChoice], *, float8: Float8Config, emulate: bool) -> None:
    """Swap the chosen linears of `model`, which is on meta, for Float8Linear, in place.

    Every choice is checked afterwards: what was chosen is a Float8Linear, and nothing else is."""
    chosen = {choice.name for choice in choices if choice.converted}
    convert_to_float8_training(
        model,
        config=float8_linear_config(float8, emulate=emulate),
        module_filter_fn=lambda module, name: name in chosen,
    )
    from_torchao = {name for name, module in model.named_modules() if isinstance(module, Float8Linear)}
    assert from_torchao == chosen, f"torchao converted other linears than chosen: {sorted(from_torchao ^ chosen)}"
    if emulate:
        logger.info(f"float8 is emulated in float32: the numerics of {float8.recipe_name}, not its speed")


def build_scale_hook(model: nn.Module, *, float8: Float8Config) -> Callable[[], None]:
    """What is called after each optimizer step: computes all weight scales of the next float8 all-gathers in one
    all-reduce where that was asked for, and does nothing otherwise."""
    if float8.enable_float8_linear and float8.precompute_float8_dynamic_scale_for_fsdp:
        return lambda: precompute_float8_dynamic_scale_for_fsdp(model)
    return lambda: None
