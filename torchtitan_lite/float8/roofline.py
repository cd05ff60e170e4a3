"""What float8 gains: the seconds of each linear, and of a whole training step, in bf16 and under a float8 recipe.

A roofline: a kernel takes as long as its arithmetic or its memory traffic, whichever is longer, and a little to start;
a step takes as long as its kernels, or as the host needs to issue them. It knows the data sheet's rates and a few
measured constants, and nothing of a particular model.

A linear multiplies three times, each with this rank's M tokens, K in_features and N out_features:
output [M, N] over K, grad_input [M, K] over N, grad_weight [N, K] over M. Float8 halves a matmul's arithmetic and costs
casts of its operands, which grow with M*K, N*K and M*N only: a linear gains where K and N are large.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

GEMM_FRACTION = 0.78
"""Of the data sheet's matmul rate, what large matmuls reach (torchao, roofline_utils.py, for H100 and others)."""
BANDWIDTH_FRACTION = 0.92
"""Of the data sheet's memory bandwidth, what large pointwise kernels reach (the same)."""
KERNEL_SECONDS = 2e-6
"""Of a kernel on one element, on the device (the same)."""
SLOW_ACCUMULATION = 1.15
"""Times longer that a float8 matmul takes when it promotes its sums to float32 every few products, as torchao has it
for both gradients: fast accumulation is 1.1 to 1.2 times as fast (pytorch/ao#2377)."""
ATTENTION_FRACTION = 0.34
"""Of the bf16 matmul rate, what fused attention reaches, forward and backward: 335 of 989 TFLOPS on an H100
(FlashAttention-2, arXiv 2307.08691, section 4.1)."""
HOST_SECONDS_PER_KERNEL = 8e-6
"""Of the host to issue a kernel: 6.8 to 9.1 us from torch.compile (tritonbench#1017); an eager operator takes as
long: 7.3 us, as two runs of the debug model on a CPU differ that only casts tell apart."""
HOST_SECONDS_PER_BLOCK = 2e-3
"""Of the host for a block in a step besides its kernels: FSDP2's hooks, autograd, clipping, the optimizer. What is left
of the debug model's CPU time in a step on next to no tokens."""

Recipe = Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"]


@dataclass(frozen=True)
class Device:
    """The data sheet's dense rates of one device."""

    bf16_flops: float
    """FLOP/s."""
    fp8_flops: float
    """FLOP/s."""
    bandwidth: float
    """Bytes/s of its memory."""


@dataclass(frozen=True)
class Scheme:
    """How linears train in float8: the recipe, whether torch.compile fuses its casts, and whether FSDP gathers the
    weights as float8."""

    recipe: Recipe
    compiled: bool
    float8_all_gather: bool = False


@dataclass(frozen=True)
class Linear:
    """All linears of one kind, with the shape that each rank has of them."""

    kind: str
    out_features: int
    in_features: int
    count: int
    recomputed: int = 0
    """How many of them the backward pass runs forward again."""
    readers: int = 1
    """Kinds, this one included, that read the same input; torch.compile casts it once for all."""


@dataclass(frozen=True)
class Cost:
    """Seconds of the device, and the number of kernels that the host issues for them."""

    seconds: float = 0.0
    kernels: float = 0.0

    def __add__(self, other: "Cost") -> "Cost":
        """Both, one after the other."""
        return Cost(self.seconds + other.seconds, self.kernels + other.kernels)

    def __mul__(self, times: float) -> "Cost":
        """The same, `times` over."""
        return Cost(self.seconds * times, self.kernels * times)


class Traffic(NamedTuple):
    """Memory traffic of an operand's casts in one pass: bytes read and written per element, and kernels."""

    bytes: int = 0
    kernels: int = 0


class Casts(NamedTuple):
    """What the casts of a linear's operands move. An amax reads a tensor, 2 bytes an element; a cast reads it and
    writes 1; each matmul wants its operands in a layout of its own, hence a cast in each pass."""

    input: tuple[Traffic, Traffic]
    """Forward, backward."""
    weight: tuple[Traffic, Traffic]
    """Forward, backward."""
    grad_output: Traffic


# As the graphs of a compiled block have them. A tensor's amax takes two kernels. Rows are scaled in one kernel, since
# a row stays on the chip; columns take an amax first. For slow accumulation torchao multiplies row-wise operands
# without their scales and applies these afterwards: to grad_input in the kernel that reads it next, to grad_weight, of
# the weight's size, in 4 more bytes.
_COMPILED = {
    "tensorwise": Casts((Traffic(5, 3), Traffic(3, 1)), (Traffic(5, 3), Traffic(3, 1)), Traffic(6, 3)),
    "rowwise": Casts((Traffic(3, 1), Traffic(5, 2)), (Traffic(3, 1), Traffic(9, 3)), Traffic(8, 3)),
    "rowwise_with_gw_hp": Casts((Traffic(3, 1), Traffic()), (Traffic(3, 1), Traffic(5, 3)), Traffic(3, 1)),
}
# Without fusion every operator of a cast reads and writes its whole tensor, twice in float32: abs, max, two
# conversions, multiply, clamp, convert; the rest work on scales. Both gradients cast grad_output for themselves.
_EAGER_BYTES, _EAGER_KERNELS = 33, {"tensorwise": 11, "rowwise": 14, "rowwise_with_gw_hp": 14}


def _casts(scheme: Scheme) -> Casts:
    """The casts of a linear under `scheme`."""
    casts = _COMPILED[scheme.recipe]
    if not scheme.compiled:
        once = Traffic(_EAGER_BYTES, _EAGER_KERNELS[scheme.recipe])
        if scheme.recipe == "rowwise_with_gw_hp":
            casts = Casts((once, Traffic()), (once, once), once)
        else:
            casts = Casts((once, once), (once, once), Traffic(2 * once.bytes, 2 * once.kernels))
    if scheme.float8_all_gather:  # cast shard by shard before the gather; grad_input reads it transposed
        casts = casts._replace(weight=(Traffic(), Traffic(2, 1)))
    return casts


def _move(device: Device, nbytes: float, kernels: float = 1) -> Cost:
    """Kernels that read and write `nbytes` in all and compute next to nothing."""
    return Cost(nbytes / (device.bandwidth * BANDWIDTH_FRACTION) + kernels * KERNEL_SECONDS, kernels)


def _gemm(device: Device, rows: int, columns: int, inner: int, *, fp8: bool, slowdown: float = 1.0) -> Cost:
    """A matmul [rows, inner] @ [inner, columns], whose result is bf16."""
    flops = device.fp8_flops if fp8 else device.bf16_flops
    compute = slowdown * 2 * rows * columns * inner / (flops * GEMM_FRACTION)
    nbytes = (1 if fp8 else 2) * inner * (rows + columns) + 2 * rows * columns
    return Cost(max(compute, nbytes / (device.bandwidth * BANDWIDTH_FRACTION)) + KERNEL_SECONDS, 1)


def linear_cost(linear: Linear, device: Device, *, tokens: int, scheme: Scheme | None) -> Cost:
    """Forward, recomputation and backward of `linear`'s kind in one step of `tokens` tokens; in bf16 without
    `scheme`."""
    m, n, k = tokens, linear.out_features, linear.in_features
    fp8 = scheme is not None
    forward = _gemm(device, m, n, k, fp8=fp8)
    slow = SLOW_ACCUMULATION if fp8 else 1.0
    backward = _gemm(device, m, k, n, fp8=fp8, slowdown=slow)
    if scheme is None or scheme.recipe == "rowwise_with_gw_hp":
        backward += _gemm(device, n, k, m, fp8=False)
    else:
        backward += _gemm(device, n, k, m, fp8=True, slowdown=slow)
    if scheme is not None:
        casts = _casts(scheme)
        share = 1 / linear.readers if scheme.compiled else 1.0
        (input_forward, input_backward), (weight_forward, weight_backward), grad_output = casts
        forward += _cast(device, m * k, input_forward) * share + _cast(device, n * k, weight_forward)
        backward += _cast(device, m * k, input_backward) * share + _cast(device, n * k, weight_backward)
        backward += _cast(device, m * n, grad_output)
    return forward * (linear.count + linear.recomputed) + backward * linear.count


def _cast(device: Device, elements: int, traffic: Traffic) -> Cost:
    return _move(device, traffic.bytes * elements, traffic.kernels)
