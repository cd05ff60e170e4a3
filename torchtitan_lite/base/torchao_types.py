"""Type checks for torchao's modules and tensors, which bf16 runs do not import: if a module has not
been imported, no object has its types."""

import sys
from typing import TYPE_CHECKING, Any, TypeGuard

if TYPE_CHECKING:
    from torch import Tensor
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


def has_one_scale(linear: object) -> bool:
    """Return whether `linear` is a Float8Linear whose input and weight have one scale each: both
    matmuls with the weight take one cast of it, and shards can be cast before they are gathered."""
    if not is_float8_linear(linear):
        return False
    casts = linear.config.cast_config_input, linear.config.cast_config_weight
    return all(cast.scaling_granularity.name == "TENSORWISE" for cast in casts)


def data_of(tensor: "Tensor") -> "list[Tensor]":
    """Return what holds the elements of `tensor`: itself, or the data of its casts to float8."""
    if not is_float8_tensor(tensor):
        return [tensor]
    return [getattr(cast, _parts(cast)[0]) if _parts(cast) else cast for cast in _casts(tensor)]


def _casts(tensor: "Float8TrainingTensor") -> list[Any]:
    """Return the casts of a weight in float8: itself, or both of a TwiceCastWeight."""
    return getattr(tensor, "casts", [tensor])


def _parts(cast: Any) -> list[str]:
    """Return the names of a cast's data and scale: torchao's float8 and MX tensors have others, and
    a plain tensor has none."""
    return cast.__tensor_flatten__()[0] if hasattr(cast, "__tensor_flatten__") else []


def replace_data(tensor: "Float8TrainingTensor", new: "Float8TrainingTensor") -> None:
    """Give `tensor` the data and scales of `new`, of the same type, in place."""
    for name in new.__tensor_flatten__()[0]:
        setattr(tensor, name, getattr(new, name))


def refill(tensor: "Float8TrainingTensor", new: "Float8TrainingTensor") -> None:
    """Give the storages of `tensor` the data of `new`, of the same type and sizes, and itself the
    scales. Whoever has kept its data has the new one too."""
    for old, fresh in zip(data_of(tensor), data_of(new), strict=True):
        storage, filled = old.untyped_storage(), fresh.untyped_storage()
        storage.resize_(filled.size())
        storage.copy_(filled)
    for cast, fresh in zip(_casts(tensor), _casts(new), strict=True):
        for scale in _parts(cast)[1:]:
            setattr(cast, scale, getattr(fresh, scale))


def _is_instance(thing: object, module: str, name: str) -> bool:
    imported = sys.modules.get(f"torchao.float8.{module}")
    return imported is not None and isinstance(thing, getattr(imported, name))
