"""What the casts of float8 move, by recipe."""

from typing import NamedTuple


class Traffic(NamedTuple):
    """What a cast adds to a block in bf16: bytes read and written per element of the tensor, by how
    the kernels access memory, and kernels launched.

    Some bytes are negative: a norm whose kernel also casts its output stores 1 byte instead of 2,
    and if that kernel stores the transposed output too, all its bytes change their kind."""

    contiguous: float = 0  # loads and stores run along the same axis
    transposing: float = 0  # tiles are loaded along one axis and stored along the other
    strided: float = 0  # a kernel that reduces rows also stores columns, or the reverse
    kernels: float = 0


class Casts(NamedTuple):
    """Costs of casting a linear's operands, in the forward and in the backward pass."""

    input: tuple[Traffic, Traffic]
    weight: tuple[Traffic, Traffic]
    grad_output: Traffic
    weight_before: Traffic = Traffic()
    """Of a weight that is cast before a step's microbatches, for both passes."""
    weight_when_cast: tuple[Traffic, Traffic] = (Traffic(), Traffic())
    """What is left of `weight` for a microbatch then. Negative bytes: the compiler fuses the casts
    of gradients better."""


# Eager, each operator of a cast reads and writes the whole tensor, mostly in float32: abs, max, to
# float32, multiply, clamp, to float8. The other kernels compute scales. Both gradients cast
# grad_output separately.
_TENSOR, _ROW = Traffic(33, kernels=11), Traffic(33, kernels=14)
# A weight with one scale is cast once for both matmuls. grad_input reads it transposed.
_TRANSPOSED = Traffic(kernels=1), Traffic(transposing=2, kernels=1)
# The casts of MXFP8 are kernels of torchao, compiled or not. Two more kernels, or one if compiled,
# bring the scales, a 32nd of the elements, into the order that the matmul takes.
_MX, _MX_EAGER = Traffic(3, kernels=2), Traffic(3, kernels=3)
# Of blocks the same operators, less a clamp, and one that transposes what is cast by columns.
_BLOCKS, _COLUMNS = Traffic(31, kernels=8), Traffic(31, transposing=2, kernels=8)

# Compiled, a cast reads 2 bytes and writes 1, and backward casts again, into the layout of its
# matmuls. Inductor fuses the casts of inputs and gradients with the norms, SwiGLU and rotary
# embeddings beside them, so that their figures are means over a block: counted in its kernels for a
# block of Llama 3 8B on Hopper (torch 2.13, torchao 0.18) and split between the tensors that a
# kernel casts. tests/deviceless/test_deviceless_kernels.py counts them again.
COMPILED = {
    # One scale per tensor needs its amax first: 2 bytes in two kernels. Backward computes that of
    # gradients only.
    "tensorwise": Casts(
        input=(Traffic(3, kernels=2.25), Traffic(-1.7, 3.6, kernels=1)),
        weight=(Traffic(5, kernels=3), Traffic(transposing=3, kernels=1)),
        grad_output=Traffic(-0.5, 4.4, kernels=2.3),
        weight_before=Traffic(5, kernels=3),
        weight_when_cast=_TRANSPOSED,
    ),
    # A row is scaled in one kernel, since it stays on the chip; a column needs an amax of its own.
    # torchao multiplies row-wise gradients unscaled, to avoid a slow kernel, and scales them
    # afterwards: grad_weight in a separate pass of 4 bytes, counted in the weight's; grad_input in
    # the kernel that reads it next, which then stores float32, and of a norm is not fused with the
    # weight's gradient.
    "rowwise": Casts(
        input=(Traffic(-0.4, kernels=0.25), Traffic(0.5, 3.6, kernels=2)),
        weight=(Traffic(3, kernels=1), Traffic(6, 3, kernels=3.7)),
        grad_output=Traffic(6.2, 8.1, kernels=4.2),
        weight_before=Traffic(5, 3, kernels=4),
        weight_when_cast=(Traffic(kernels=1), Traffic(2.9, -2.8, kernels=0.8)),
    ),
    # grad_weight needs each input in bf16 too, which is stored beside its cast.
    "rowwise_with_gw_hp": Casts(
        input=(Traffic(1.3, kernels=0.25), Traffic()),
        weight=(Traffic(3, kernels=1), Traffic(2, transposing=3, kernels=3)),
        grad_output=Traffic(3, kernels=1.3),
        weight_before=Traffic(5, 3, kernels=4),
        weight_when_cast=(Traffic(kernels=1), Traffic(1, kernels=0.1)),
    ),
    "mxfp8": Casts(
        input=(_MX, _MX),
        weight=(_MX, _MX),
        grad_output=Traffic(6, kernels=4),
        weight_before=Traffic(6, kernels=2),
        weight_when_cast=(Traffic(kernels=1), Traffic(kernels=1)),
    ),
    # A kernel more for each cast by rows brings the scales into columns. A weight is read twice.
    "blockwise": Casts(
        input=(Traffic(0.6, kernels=1.75), Traffic(0, 1.3, 2.6, kernels=2)),
        weight=(Traffic(5, kernels=2.3), Traffic(transposing=3, kernels=2)),
        grad_output=Traffic(-0.2, 1.3, 2.6, kernels=2),
        weight_before=Traffic(5, 3, kernels=4.3),
    ),
}
EAGER = {
    "tensorwise": Casts(
        (_TENSOR, _TENSOR), (_TENSOR, _TENSOR), Traffic(66, kernels=22), _TENSOR, _TRANSPOSED
    ),
    "rowwise": Casts((_ROW, _ROW), (_ROW, _ROW), Traffic(66, kernels=28), Traffic(66, kernels=28)),
    "rowwise_with_gw_hp": Casts((_ROW, Traffic()), (_ROW, _TENSOR), _ROW, Traffic(66, kernels=25)),
    "mxfp8": Casts(
        (_MX_EAGER, _MX_EAGER),
        (_MX_EAGER, _MX_EAGER),
        Traffic(6, kernels=6),
        Traffic(6, kernels=2),
        (Traffic(kernels=2), Traffic(kernels=2)),
    ),
    "blockwise": Casts(
        (_BLOCKS, _COLUMNS),
        (_BLOCKS, _COLUMNS),
        Traffic(62, transposing=2, kernels=16),
        Traffic(62, transposing=2, kernels=17),
    ),
}
