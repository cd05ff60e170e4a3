"""The swap from nn.Linear to its float8 kind, and the scale hook that follows each optimizer
step."""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn

from torchtitan_lite.config import Float8Config
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.logger import logger
from torchtitan_lite.torchao_types import is_float8_linear

from .mxfp8 import MXFP8_MAJOR, MXFP8Linear, convert_to_mxfp8
from .selection import LinearChoice

if TYPE_CHECKING:
    from torchao.float8 import Float8LinearConfig

MIN_CAPABILITY = (9, 4) if torch.version.hip else (8, 9)
"""Compute capability of the first GPUs with float8 matrix units: NVIDIA's Ada; as ROCm counts,
AMD's MI300."""


def has_float8_units(device: torch.device) -> bool:
    """Whether `device` multiplies float8 matrices."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= MIN_CAPABILITY


def resolve_emulate(float8: Float8Config, *, device: torch.device) -> bool:
    """Whether float8 matmuls are emulated: on CPU always, on a GPU only if asked for.

    Raises ConfigError on a GPU without the matrix units that the recipe needs and without
    `emulate`."""
    if device.type == "cpu" or float8.emulate:
        return True
    major, minor = torch.cuda.get_device_capability(device)
    have = f"{torch.cuda.get_device_name(device)} has {major}.{minor}"
    if float8.recipe_name == "mxfp8" and major != MXFP8_MAJOR:
        raise ConfigError(
            f'[float8] recipe_name = "mxfp8" needs a GPU of compute capability {MXFP8_MAJOR}.x, Blackwell of data '
            f"centres, and {have}; set [float8] emulate = true to try its numerics slowly, or use another recipe."
        )
    if not has_float8_units(device):
        need = ".".join(map(str, MIN_CAPABILITY))
        raise ConfigError(
            f"[float8] enable_float8_linear = true needs a GPU of compute capability {need} or newer, and {have}; "
            "set [float8] emulate = true to try float8's numerics slowly, or enable_float8_linear = false."
        )
    return False


def is_float8(module: nn.Module) -> bool:
    """Whether `module` is a linear that trains in float8."""
    return is_float8_linear(module) or isinstance(module, MXFP8Linear)


def float8_linear_config(float8: Float8Config, *, emulate: bool) -> "Float8LinearConfig":
    """torchao's config of the recipe asked for, with emulation and the float8 all-gather as asked
    for."""
    from torchao.float8 import Float8LinearConfig

    recipe = Float8LinearConfig.from_recipe_name(float8.recipe_name)
    return dataclasses.replace(
        recipe,
        emulate=emulate,
        enable_fsdp_float8_all_gather=float8.enable_fsdp_float8_all_gather,
        pad_inner_dim=float8.pad_inner_dim,
    )


def convert_linears(
    model: nn.Module, choices: list[LinearChoice], *, float8: Float8Config, emulate: bool
) -> None:
    """Swap the chosen linears of `model`, which is on meta, for Float8Linear or MXFP8Linear, in
    place.

    Every choice is checked afterwards: what was chosen is converted, and nothing else is. Raises
    ConfigError where the installed torchao does not offer the recipe."""
    chosen = {choice.name for choice in choices if choice.converted}
    if float8.recipe_name == "mxfp8":
        convert_to_mxfp8(model, chosen, emulate=emulate)
    else:
        from torchao.float8 import convert_to_float8_training

        convert_to_float8_training(
            model,
            config=float8_linear_config(float8, emulate=emulate),
            module_filter_fn=lambda module, name: name in chosen,
        )
    converted = {name for name, module in model.named_modules() if is_float8(module)}
    assert converted == chosen, (
        f"other linears were converted than chosen: {sorted(converted ^ chosen)}"
    )
    if emulate:
        logger.info(f"float8 is emulated: the numerics of {float8.recipe_name}, not its speed")


def build_scale_hook(model: nn.Module, *, float8: Float8Config) -> Callable[[], None]:
    """What is called after each optimizer step: computes all weight scales of the next float8
    all-gathers in one all-reduce where that was asked for, and does nothing otherwise."""
    if float8.enable_float8_linear and float8.precompute_float8_dynamic_scale_for_fsdp:
        from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

        return lambda: precompute_float8_dynamic_scale_for_fsdp(model)
    return lambda: None
