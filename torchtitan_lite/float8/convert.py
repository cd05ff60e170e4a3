"""Swap nn.Linear for its float8 kind, and update the weights' scales after each optimizer step."""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn

from torchtitan_lite.config import Float8Config
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.logger import logger
from torchtitan_lite.torchao_types import is_float8_linear

from .mxfp8 import MXFP8Linear, convert_to_mxfp8
from .selection import LinearChoice

if TYPE_CHECKING:
    from torchao.float8 import Float8LinearConfig

# The first GPUs with float8 matrix units: AMD's MI300 in ROCm's numbering, and NVIDIA's Ada.
MIN_CAPABILITY = (9, 4) if torch.version.hip else (8, 9)


def has_float8_units(device: torch.device) -> bool:
    """Return whether `device` multiplies float8 matrices."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= MIN_CAPABILITY


def resolve_emulate(float8: Float8Config, *, device: torch.device) -> bool:
    """Return whether to emulate float8 matmuls: always on CPU, on a GPU only if asked to.

    Raises ConfigError on a GPU that lacks the matrix units of the recipe, without `emulate`."""
    if device.type == "cpu" or float8.emulate:
        return True

    capability = torch.cuda.get_device_capability(device)
    needed = float8.recipe.capability_major
    if needed is not None and capability[0] != needed:
        key, needs = f'recipe_name = "{float8.recipe_name}"', f"{needed}.x"
        other = "use another recipe"
    elif not has_float8_units(device):
        key, needs = "enable_float8_linear = true", f"{'.'.join(map(str, MIN_CAPABILITY))} or newer"
        other = "enable_float8_linear = false"
    else:
        return False
    raise ConfigError(
        f"[float8] {key} needs a GPU of compute capability {needs}, and "
        f"{torch.cuda.get_device_name(device)} has {'.'.join(map(str, capability))}; set [float8] "
        f"emulate = true to try its numerics slowly, or {other}."
    )


def is_float8(module: nn.Module) -> bool:
    """Return whether `module` is a linear that trains in float8."""
    return is_float8_linear(module) or isinstance(module, MXFP8Linear)


def float8_linear_config(float8: Float8Config, *, emulate: bool) -> "Float8LinearConfig":
    """Return torchao's config for [float8]."""
    from torchao.float8 import Float8LinearConfig  # slow to import, and bf16 runs do not need it

    assert float8.recipe.torchao_recipe is not None, f"{float8.recipe_name} is none of torchao's"
    return dataclasses.replace(
        Float8LinearConfig.from_recipe_name(float8.recipe.torchao_recipe),
        emulate=emulate,
        enable_fsdp_float8_all_gather=float8.enable_fsdp_float8_all_gather,
        pad_inner_dim=float8.pad_inner_dim,
    )


def convert_linears(
    model: nn.Module, choices: list[LinearChoice], *, float8: Float8Config, emulate: bool
) -> None:
    """Swap the chosen linears of `model`, which is on meta, in place.

    Raises ConfigError if the installed torchao does not offer the recipe."""
    chosen = {name for choice in choices if choice.converted for name in choice.names}
    if float8.recipe.torchao_recipe is None:
        convert_to_mxfp8(model, chosen, emulate=emulate)
    else:
        from torchao.float8 import convert_to_float8_training  # slow to import

        convert_to_float8_training(
            model,
            config=float8_linear_config(float8, emulate=emulate),
            module_filter_fn=lambda module, name: name in chosen,
        )

    converted = {name for name, module in model.named_modules() if is_float8(module)}
    assert converted == chosen, f"converted and chosen differ in {sorted(converted ^ chosen)}"
    if emulate:
        logger.info(f"float8 is emulated: the numerics of {float8.recipe_name}, not its speed")


def build_scale_hook(model: nn.Module, *, float8: Float8Config) -> Callable[[], None]:
    """Return the function to call after each optimizer step. If asked for, it computes the scales
    of all weights for the next float8 all-gathers in one all-reduce; else it does nothing."""
    if float8.enable_float8_linear and float8.precompute_float8_dynamic_scale_for_fsdp:
        from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp  # slow to import

        return lambda: precompute_float8_dynamic_scale_for_fsdp(model)
    return lambda: None
