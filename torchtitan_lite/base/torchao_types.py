"""Type checks for torchao's modules and tensors, which bf16 runs do not import: if a module has not
been imported, no object has its types."""

import sys
from typing import TYPE_CHECKING, TypeGuard

if TYPE_CHECKING:
    from torch import Tensor
    from torchao.float8.config import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear
    from torchao.float8.float8_training_tensor import Float8TrainingTensor
    from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor


def is_float8_linear(module: object) -> "TypeGuard[Float8Linear]":
    """Return whether `module` is a Float8Linear."""
    return _is_instance(module, "float8_linear", "Float8Linear")


def is_float8_tensor(tensor: object) -> "TypeGuard[Float8TrainingTensor]":
    """Return whether `tensor` is float8 data with a scale."""
    return _is_instance(tensor, "float8_training_tensor", "Float8TrainingTensor")


def is_gathered_in_float8(weight: object) -> "TypeGuard[WeightWithDynamicFloat8CastTensor]":
    """Return whether FSDP casts `weight` to float8 before gathering it."""
    return _is_instance(weight, "fsdp_utils", "WeightWithDynamicFloat8CastTensor")


def has_one_scale(config: "Float8LinearConfig") -> bool:
    """Return whether both matmuls with a weight take one cast of it, with one scale."""
    return config.cast_config_weight.scaling_granularity.name == "TENSORWISE"


def data_of(tensor: "Tensor") -> "list[Tensor]":
    """Return what holds the elements of `tensor`: itself, or the data of its casts to float8."""
    return [cast._data for cast in casts_of(tensor)] if is_float8_tensor(tensor) else [tensor]


def casts_of(tensor: "Float8TrainingTensor") -> "list[Float8TrainingTensor]":
    """Return the casts of a weight in float8: itself, or both of a TwiceCastWeight."""
    return getattr(tensor, "casts", [tensor])


def replace_data(tensor: "Float8TrainingTensor", new: "Float8TrainingTensor") -> None:
    """Give `tensor` the data and scales of `new`, of the same type, in place."""
    for name in new.__tensor_flatten__()[0]:
        setattr(tensor, name, getattr(new, name))


def refill(tensor: "Float8TrainingTensor", new: "Float8TrainingTensor") -> None:
    """Give the storages of `tensor` the data of `new`, of the same type and sizes, and itself the
    scales. Whoever has kept its data has the new one too."""
    for old, fresh in zip(casts_of(tensor), casts_of(new), strict=True):
        storage = old._data.untyped_storage()
        storage.resize_(fresh._data.untyped_storage().size())
        storage.copy_(fresh._data.untyped_storage())
        old._scale = fresh._scale


def _is_instance(thing: object, module: str, name: str) -> bool:
    imported = sys.modules.get(f"torchao.float8.{module}")
    return imported is not None and isinstance(thing, getattr(imported, name))
