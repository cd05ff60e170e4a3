"""What cannot be planned on a device."""

from torchtitan_lite.base.errors import ConfigError
from torchtitan_lite.catalog.devices import DEVICES, DeviceSpec
from torchtitan_lite.config import Config


def check_planned(config: Config, device: DeviceSpec, attention_kernel: str) -> None:
    """Raise ConfigError for what cannot be planned on `device`."""
    float8, dtype = config.float8, config.training.mixed_precision_param
    cp = config.parallelism.context_parallel_degree
    # Attention, and the types that have known rates.
    if config.training.document_mask and attention_kernel not in ("", "flex"):
        raise ConfigError(
            f"--attention {attention_kernel} has no document mask; plan [training] document_mask = "
            "true with flex, which it trains with, or set it to false."
        )
    if attention_kernel == "cudnn" and cp > 1:
        raise ConfigError(
            "--attention cudnn has no causal mask for parts of a sequence, and [parallelism] "
            f"context_parallel_degree = {cp}; use flash, or set it to 1."
        )
    if attention_kernel == "cudnn" and device.architecture.startswith("CDNA"):
        raise ConfigError(f"--attention cudnn does not run on {device.name}; use flash or flex.")
    if dtype != "bfloat16":
        raise ConfigError(
            f'[training] mixed_precision_param = "{dtype}" cannot be planned: only bf16 and fp8 '
            'rates are known; plan with "bfloat16".'
        )

    # Float8: the device has its matrix units, and the kernels of the recipe.
    if float8.enable_float8_linear and device.fp8_tflops is None:
        raise ConfigError(
            f"[float8] enable_float8_linear = true, but the {device.name} has no float8 matrix "
            "units with a known peak; plan another --device, give [metrics] peak_tflops_fp8, or "
            "set it to false."
        )
    if float8.recipe.capability_major is not None and not device.mxfp8:
        having = ", ".join(known.name for known in DEVICES if known.mxfp8)
        raise ConfigError(
            f'[float8] recipe_name = "{float8.recipe_name}", but torchao has no kernels of it for '
            f"the {device.name}, only for {having}; plan another --device or recipe."
        )
    scaled = float8.scale_gradients_in_matmul and float8.recipe.scales_in_matmul
    if scaled and device.architecture != "Hopper":
        raise ConfigError(
            "[float8] scale_gradients_in_matmul = true needs a GPU of compute capability 9.x, and "
            f"{device.name} is none; plan another --device, or set it to false."
        )
