"""MXFP8 for training, by torchao's prototype: e4m3 with a power-of-two scale for each 32 elements
of the dimension that a matmul sums over (OCP Microscaling Formats 1.0). All three matmuls of a
linear have both operands so, and round the scale up: nothing saturates.
"""

from collections.abc import Callable, Collection

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from torchtitan_lite.errors import ConfigError

MXFP8_MAJOR = 10
"""Of the compute capability of the GPUs that torchao's kernels are built for: Blackwell of data
centres."""


class MXFP8Linear(nn.Linear):
    """`linear` with its weight as it is, of which `multiply`, given an input [..., K] and the
    weight [N, K], computes the output [..., N]."""

    def __init__(
        self, linear: nn.Linear, multiply: Callable[[Tensor, Tensor], Tensor], *, emulate: bool
    ) -> None:
        assert linear.bias is None, "no linear of the model has a bias"
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.weight = linear.weight
        self.emulate = emulate
        self._multiply: Callable[[Tensor, Tensor], Tensor] = multiply

    def forward(self, input: Tensor) -> Tensor:
        """The output for `input`; a DTensor for a DTensor, under tensor parallelism. Each rank then
        multiplies what it has, as torchao's casts of DTensors would gather the scales of every
        matmul."""
        weight = self.weight
        if not isinstance(weight, DTensor):
            return self._multiply(input, weight)
        assert isinstance(input, DTensor), (
            "styles of tensor parallelism make a DTensor of the input"
        )
        last = Shard(input.ndim - 1)
        by_column = weight.placements == (Shard(0),)
        given, input_grad, output = (
            (Replicate(), Partial(), last) if by_column else (last, last, Partial())
        )
        assert input.placements == (given,), f"an input split as {input.placements}, not {given}"
        local_output = self._multiply(
            input.to_local(grad_placements=[input_grad]), weight.to_local()
        )
        return DTensor.from_local(local_output, weight.device_mesh, [output], run_check=False)


def convert_to_mxfp8(model: nn.Module, chosen: Collection[str], *, emulate: bool) -> None:
    """Swap the linears of `model` that are named in `chosen` for MXFP8Linear, in place.

    Raises ConfigError where the installed torchao has no MXFP8 for training."""
    multiply = _load_multiply(emulate=emulate)
    for name in chosen:
        linear = model.get_submodule(name)
        assert isinstance(linear, nn.Linear), f"{name} is a linear"
        model.set_submodule(name, MXFP8Linear(linear, multiply, emulate=emulate))


def _load_multiply(*, emulate: bool) -> Callable[[Tensor, Tensor], Tensor]:
    import torchao

    try:
        # A prototype: loaded for its users alone, as it may change or fail.
        from torchao.prototype.moe_training.mxfp8_linear import _to_mxfp8_then_scaled_mm
        from torchao.prototype.mx_formats.config import ScaleCalculationMode
        from torchao.quantization.quantize_.common.kernel_preference import KernelPreference
    except ImportError as error:
        raise ConfigError(
            f'[float8] recipe_name = "mxfp8" needs torchao 0.18, and the installed torchao {torchao.__version__} does '
            f"not offer it for training ({error}); install that, or use another recipe."
        ) from error

    def multiply(input: Tensor, weight: Tensor) -> Tensor:
        # On meta nothing is computed, and torchao's kernels know no such device.
        kernels = KernelPreference.EMULATED if emulate or input.is_meta else KernelPreference.AUTO
        return _to_mxfp8_then_scaled_mm(input, weight, kernels, ScaleCalculationMode.RCEIL)

    return multiply
