"""Swap nn.Linear for its float8 kind, and update the weights' scales after each optimizer step."""

import dataclasses
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import nn

from torchtitan_lite.base.errors import ConfigError
from torchtitan_lite.base.logger import logger
from torchtitan_lite.base.outside import check_outside, load_object
from torchtitan_lite.base.torchao_types import is_float8_linear
from torchtitan_lite.catalog.recipes import RECIPES, Matmul
from torchtitan_lite.config import Float8Config, matches

from .scaled_linear import ScaledLinear
from .selection import LinearChoice, converted_names, select_linears

if TYPE_CHECKING:
    from torchao.float8.float8_linear import Float8Linear

# The first GPUs with float8 matrix units: AMD's MI300 in ROCm's numbering, and NVIDIA's Ada.
MIN_CAPABILITY = (9, 4) if torch.version.hip else (8, 9)


def has_float8_units(device: torch.device) -> bool:
    """Return whether `device` multiplies float8 matrices."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= MIN_CAPABILITY


def must_emulate(float8: Float8Config, *, device: torch.device) -> bool:
    """Return whether to emulate float8 matmuls: always on CPU, on a GPU only if asked to.

    Raises ConfigError for a GPU without the matmuls that [float8] asks for."""
    if device.type == "cpu" or float8.emulate:
        return True

    capability, major = torch.cuda.get_device_capability(device), float8.recipe.capability_major
    if major is not None and (capability[0] != major or torch.version.hip):
        needs = f"{major}.x by NVIDIA"
    elif not has_float8_units(device):
        needs = f"{'.'.join(map(str, MIN_CAPABILITY))} or newer"
    else:
        return False
    raise ConfigError(
        f'[float8] recipe_name = "{float8.recipe_name}" needs a GPU of compute capability {needs}; '
        f"{torch.cuda.get_device_name(device)} has {'.'.join(map(str, capability))}. Change it, "
        "set emulate = true to try the numerics slowly, or enable_float8_linear = false."
    )


def is_float8(module: object) -> "TypeGuard[Float8Linear | ScaledLinear]":
    """Return whether `module` is a linear that trains in float8."""
    return is_float8_linear(module) or isinstance(module, ScaledLinear)


def convert_linears(
    model: nn.Module, choices: list[LinearChoice], *, float8: Float8Config, emulate: bool
) -> None:
    """Swap the chosen linears of `model`, which is on meta, in place."""
    chosen = set(converted_names(choices))
    convert = load_object("[float8] recipe_name", float8.recipe.converter)
    convert(model, chosen, float8, emulate)

    converted = {name for name, module in model.named_modules() if is_float8(module)}
    assert converted == chosen, f"converted and chosen differ in {sorted(converted ^ chosen)}"
    if emulate:
        fast = float8.use_fast_accum_in_backward
        left_out = ", nor its fast accumulation" if fast else ""
        logger.info(
            f"float8 is emulated: the numerics of {float8.recipe_name}, not its speed{left_out}"
        )


def convert_to_torchao(
    model: nn.Module, chosen: Collection[str], float8: Float8Config, emulate: bool
) -> None:
    """Swap the linears of `model` that are named in `chosen` for torchao's, in place."""
    # Slow to import.
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.float8.config import Float8GemmConfig

    accumulation = Float8GemmConfig(use_fast_accum=float8.use_fast_accum_in_backward)
    settings = dataclasses.replace(
        Float8LinearConfig.from_recipe_name(float8.recipe.name),
        emulate=emulate,
        enable_fsdp_float8_all_gather=float8.enable_fsdp_float8_all_gather,
        pad_inner_dim=float8.pad_inner_dim,
        gemm_config_grad_input=accumulation,
        gemm_config_grad_weight=accumulation,
    )
    convert_to_float8_training(
        model, config=settings, module_filter_fn=lambda module, name: name in chosen
    )


def convert_to_float8(
    model: nn.Module,
    recipe_name: str = "tensorwise",
    *,
    keep: Sequence[str] = ("lm_head",),
    tokens: int | None = None,
) -> dict[str, Collection[Matmul]]:
    """Swap the linears of `model`, of any class, for linears that train in float8, in place. Return
    the matmuls of each that run in float8, by its name, as `count_flops` takes them.

    Linears stay that are called `output`, and those whose name has a part in `keep`. `tokens` is
    the number that the model sees at a time. On a CPU float8 is emulated. Raises ConfigError for
    sizes that are no multiple of the recipe's, and on a GPU without its matmuls."""
    known = recipe_name in RECIPES or ":" in recipe_name
    check_outside("recipe_name", recipe_name, known, f"is none of {', '.join(RECIPES)}")
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    patterns = tuple(each for each in keep if any(matches(each, name) for name in names))
    float8 = Float8Config(enable_float8_linear=True, recipe_name=recipe_name, filter_fqns=patterns)

    # Choose, then swap.
    choices = select_linears(model, float8, tp_degree=1, tokens=tokens)
    device = next(model.parameters()).device
    convert_linears(model, choices, float8=float8, emulate=must_emulate(float8, device=device))
    return dict.fromkeys(converted_names(choices), float8.recipe.matmuls)


def update_scales(model: nn.Module, float8: Float8Config) -> None:
    """Compute the scales of the next float8 all-gathers in one all-reduce, if [float8] says so."""
    gathered = float8.enable_float8_linear and float8.enable_fsdp_float8_all_gather
    if gathered and float8.precompute_float8_dynamic_scale_for_fsdp:
        from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp  # slow to import

        precompute_float8_dynamic_scale_for_fsdp(model)
