"""What the casts of float8 cost, by recipe: a row in COMPILED for a recipe that was counted."""

from typing import NamedTuple


class Casts(NamedTuple):
    """Bytes that casting a linear's operands adds to a block in bf16, per element of the tensor.

    They are bytes of kernels that read and write rows. A byte counts 1.5 if the kernel writes the
    transpose of what it reads, and 3 if its stores are not coalesced: such kernels reach 0.6 and
    0.3 of an H100's bandwidth (pytorch/pytorch#133242, #149982, #194310)."""

    input: tuple[float, float]  # in the forward and in the backward pass
    grad_output: float  # for both gradients
    weight: float  # in each microbatch, for all three matmuls
    weight_once: float  # the same of a weight that is cast once for all microbatches of a step


# A cast reads 2 bytes and writes 1, and backward casts again, into the layout of its matmuls.
# Inductor fuses the casts of inputs and gradients with the norms, SwiGLU and rotary embeddings
# beside them, so that their figures are means over a block: counted in its kernels for a block of
# Llama 3 8B on Hopper (torch 2.13, torchao 0.18). tests/deviceless/test_deviceless_kernels.py
# counts them again.
COMPILED = {
    # One scale per tensor needs its amax first: 2 bytes more.
    "tensorwise": Casts(input=(3, 3.6), grad_output=6, weight=9.5, weight_once=8),
    # A column needs an amax of its own. torchao multiplies row-wise gradients unscaled, to avoid a
    # slow kernel, and scales them afterwards.
    "rowwise": Casts(input=(-0.4, 5.9), grad_output=18.4, weight=13.5, weight_once=8),
    # grad_weight needs each input in bf16 too, which is stored beside its cast.
    "rowwise_with_gw_hp": Casts(input=(1.3, 0), grad_output=3, weight=9.5, weight_once=10.5),
    "mxfp8": Casts(input=(3, 3), grad_output=6, weight=6, weight_once=6),
    # The stores of a cast by columns are not coalesced. A weight is read twice.
    "blockwise": Casts(input=(0.6, 9.8), grad_output=9.6, weight=9.5, weight_once=9.5),
}
# Eager, each operator of a cast reads and writes the whole tensor, mostly in float32: abs, max, to
# float32, multiply, clamp, to float8. The casts of MXFP8 are kernels of torchao, compiled or not.
EAGER = Casts(input=(33, 33), grad_output=66, weight=66, weight_once=66)
