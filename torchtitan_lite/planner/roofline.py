"""What float8 gains: the time of each linear, and of a whole training step, in bf16 and under a
float8 recipe.

A roofline: a kernel takes as long as its arithmetic or its memory traffic, whichever is longer, and
a little to start; a step takes as long as its kernels, or as the host needs to issue them. Not
counted: communication, taken to hide behind compute; what eager operators move besides casts; and
that under tensor parallelism tensorwise casts an activation before it is gathered. The constants
are published or measured, and none is fitted to a speedup.

A linear multiplies three times, each with this rank's M tokens, K in_features and N out_features:
output [M, N] over K, grad_input [M, K] over N, grad_weight [N, K] over M. Float8 halves the
arithmetic, M*N*K, and casts the operands, M*K, N*K and M*N elements: a linear gains where K and N
both are large.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal, NamedTuple

GEMM_FRACTION = 0.78
"""Of the data sheet's matmul rate, what large matmuls reach (torchao's roofline_utils.py, for an
H100 and others)."""
BANDWIDTH_FRACTION = 0.92
"""Of the data sheet's memory bandwidth, what large pointwise kernels reach (the same)."""
KERNEL_SECONDS = 2e-6
"""Of the device for a kernel on one element (the same)."""
SLOW_ACCUMULATION = 1.15
"""Times as long as with fast accumulation takes a float8 matmul that promotes its sums to float32
on the way, as both gradients' do: fast accumulation is 1.1 to 1.2 times as fast (pytorch/ao#2377).
MXFP8's, on Blackwell alone, are taken to lose nothing by it."""
ATTENTION_FRACTION = 0.34
"""Of the bf16 matmul rate, what fused attention reaches: 335 of 989 TFLOPS on an H100, forward and
backward (FlashAttention-2, arXiv 2307.08691, section 4.1)."""
HOST_SECONDS_PER_KERNEL = 8e-6
"""Of the host to issue a kernel: 6.8 to 9.1 us under torch.compile (meta-pytorch/tritonbench#1017);
7.3 us for an eager operator, by how much CPU time the casts add to a step of the debug model on
next to no tokens."""
HOST_SECONDS_PER_BLOCK = 2e-3
"""Of the host for a transformer block in a step besides its kernels, for FSDP2's hooks, views,
autograd, clipping and the optimizer: the rest of that CPU time."""
RESOLUTION = 0.05
"""Share of a step's time below which a difference is called none: predictions are no better."""

Recipe = Literal["tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8"]


@dataclass(frozen=True)
class DeviceRates:
    """The data sheet's dense rates of one device, in FLOP/s and in bytes/s of its memory."""

    bf16_flops: float
    fp8_flops: float
    bandwidth: float


@dataclass(frozen=True)
class Scheme:
    """How a model trains in float8: the recipe, whether the blocks are compiled, which fuses the
    casts, and whether FSDP gathers float8 weights."""

    recipe: Recipe
    compiled: bool
    float8_all_gather: bool = False


@dataclass(frozen=True)
class Linear:
    """All linears of one kind, with each rank's shape. Those that share `reads` have one input."""

    kind: str
    out_features: int
    in_features: int
    count: int
    reads: str
    recomputed: int = 0
    """How many of `count` the backward pass runs forward again."""


@dataclass(frozen=True)
class Rest:
    """What one rank does in a step besides the linears of its blocks; dimensions after tensor
    parallelism."""

    tokens: int
    seq_len: int
    n_layers: int
    dim: int
    q_dim: int
    kv_dim: int
    ffn_dim: int
    vocab_size: int
    gathered_parameters: int
    """That FSDP gathers for this rank: all but what tensor parallelism keeps elsewhere."""
    sharded_parameters: int
    """That this rank's optimizer updates."""
    recomputed_layers: int = 0
    """Whose pointwise operators run again in the backward pass."""
    recomputed_attention: int = 0
    """Layers whose attention does."""
    output_among_linears: bool = False
    """The projection to the vocabulary is one of the linears, and none of the rest."""
    sequence_shards: int = 1
    """Ranks among which tensor parallelism splits norms and residuals along the sequence."""


@dataclass(frozen=True)
class Cost:
    """Seconds of the device, and the kernels that the host issues for them: their sum, and a
    multiple."""

    seconds: float = 0.0
    kernels: float = 0.0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.seconds + other.seconds, self.kernels + other.kernels)

    def __mul__(self, times: float) -> "Cost":
        return Cost(self.seconds * times, self.kernels * times)


@dataclass(frozen=True)
class LinearTime:
    """DeviceRates seconds of a kind of linear in one step, forward, recomputed and backward."""

    kind: str
    bf16: float
    float8: float

    @property
    def ratio(self) -> float:
        """Float8's time over bf16's: below 1 float8 pays."""
        return self.float8 / self.bf16


@dataclass(frozen=True)
class StepTime:
    """Where a step's time goes: the device's seconds by part, and the host's."""

    parts: Mapping[str, float]
    host: float

    @property
    def seconds(self) -> float:
        """Of the step: the device waits for the host, or the host for the device."""
        return max(sum(self.parts.values()), self.host)


@dataclass(frozen=True)
class Prediction:
    """A step in bf16 and with the kinds `converted` in float8, of which `better_kept` would be
    faster in bf16."""

    bf16: StepTime
    float8: StepTime
    converted: tuple[str, ...]
    better_kept: tuple[str, ...]

    @property
    def step_speedup(self) -> float:
        """Bf16's time over float8's: above 1 float8 pays."""
        return self.bf16.seconds / self.float8.seconds

    @property
    def verdict(self) -> str:
        """One sentence for the user."""
        if not self.converted:
            return "float8 gains nothing: no linear would be faster in it."
        gain = self.step_speedup - 1
        effect = "is neutral" if abs(gain) < RESOLUTION else "helps" if gain > 0 else "hurts"
        keep = (
            f"keep {', '.join(self.better_kept)} in bf16"
            if self.better_kept
            else "no linear is better kept in bf16"
        )
        return (
            f"float8 {effect}: a step runs at {self.step_speedup:.2f}x the speed of bf16; {keep}."
        )


class Traffic(NamedTuple):
    """What casts move: bytes read and written per element of the tensor, and kernels."""

    bytes: int = 0
    kernels: int = 0


class Casts(NamedTuple):
    """The casts of a linear's operands, in the forward and in the backward pass."""

    input: tuple[Traffic, Traffic]
    weight: tuple[Traffic, Traffic]
    grad_output: Traffic


# As a compiled block's graphs have them. Each pass casts anew, in the layout that its matmul takes:
# 2 bytes read, 1 written; grad_output is written in both layouts at once. One scale for a tensor
# takes an amax first, 2 bytes in two kernels, which is kept for the backward pass. A row is scaled
# in one kernel, as it stays on the chip; a column takes the amax of its own. Row-wise gradients are
# multiplied unscaled, and scaled afterwards (torchao's way around a slow kernel): grad_input in the
# kernel that reads it next, grad_weight, in the weight's 9 bytes, in a pass of 4. MXFP8's casts are
# kernels of torchao's, compiled or not; another two bring the scales, a 32nd of the elements, into
# the order that the matmul takes, or one if they are compiled.
_COMPILED: dict[str, Casts] = {
    "tensorwise": Casts(
        (Traffic(5, 3), Traffic(3, 1)), (Traffic(5, 3), Traffic(3, 1)), Traffic(6, 3)
    ),
    "rowwise": Casts((Traffic(3, 1), Traffic(5, 2)), (Traffic(3, 1), Traffic(9, 3)), Traffic(8, 3)),
    "rowwise_with_gw_hp": Casts(
        (Traffic(3, 1), Traffic()), (Traffic(3, 1), Traffic(5, 3)), Traffic(3, 1)
    ),
    "mxfp8": Casts((Traffic(3, 2), Traffic(3, 2)), (Traffic(3, 2), Traffic(3, 2)), Traffic(6, 4)),
}
# Eager, each operator of each cast reads and writes all of its tensor, mostly in float32: abs, max,
# to float32, multiply, clamp, to float8; the other kernels compute scales. Both gradients cast
# grad_output for themselves.
_TENSOR, _ROW = Traffic(33, 11), Traffic(33, 14)
_EAGER: dict[str, Casts] = {
    "tensorwise": Casts((_TENSOR, _TENSOR), (_TENSOR, _TENSOR), Traffic(66, 22)),
    "rowwise": Casts((_ROW, _ROW), (_ROW, _ROW), Traffic(66, 28)),
    "rowwise_with_gw_hp": Casts((_ROW, Traffic()), (_ROW, _TENSOR), _ROW),
    "mxfp8": Casts((Traffic(3, 3), Traffic(3, 3)), (Traffic(3, 3), Traffic(3, 3)), Traffic(6, 6)),
}
# The float8 all-gather casts each shard once, for all passes; grad_input reads the gathered weight
# transposed.
_GATHERED_WEIGHT = Traffic(), Traffic(2, 1)


def _move(device: DeviceRates, nbytes: float, kernels: float) -> Cost:
    """Kernels that read and write `nbytes` in all and compute next to nothing."""
    return Cost(
        nbytes / (device.bandwidth * BANDWIDTH_FRACTION) + kernels * KERNEL_SECONDS, kernels
    )


def _gemm(
    device: DeviceRates,
    rows: int,
    columns: int,
    inner: int,
    *,
    fp8: bool = False,
    slowdown: float = 1.0,
) -> Cost:
    """A matmul [rows, inner] @ [inner, columns] with a bf16 result."""
    rate = (device.fp8_flops if fp8 else device.bf16_flops) * GEMM_FRACTION
    nbytes = (1 if fp8 else 2) * inner * (rows + columns) + 2 * rows * columns
    memory = nbytes / (device.bandwidth * BANDWIDTH_FRACTION)
    return Cost(max(slowdown * 2 * rows * columns * inner / rate, memory) + KERNEL_SECONDS, 1)


def _bf16_cost(linear: Linear, device: DeviceRates, tokens: int) -> Cost:
    m, n, k = tokens, linear.out_features, linear.in_features
    forward = _gemm(device, m, n, k)
    backward = _gemm(device, m, k, n) + _gemm(device, n, k, m)
    return forward * (linear.count + linear.recomputed) + backward * linear.count


def _float8_cost(
    linear: Linear, device: DeviceRates, tokens: int, scheme: Scheme, readers: int
) -> Cost:
    """`readers` linears share the casts of the input if they are compiled."""
    m, n, k = tokens, linear.out_features, linear.in_features
    casts = (_COMPILED if scheme.compiled else _EAGER)[scheme.recipe]
    weight = _GATHERED_WEIGHT if scheme.float8_all_gather else casts.weight
    share = 1 / readers if scheme.compiled else 1.0

    def cast(elements: int, traffic: Traffic) -> Cost:
        return _move(device, elements * traffic.bytes, traffic.kernels)

    forward, backward = (
        cast(m * k, of_input) * share + cast(n * k, of_weight)
        for of_input, of_weight in zip(casts.input, weight, strict=True)
    )
    slowdown = 1.0 if scheme.recipe == "mxfp8" else SLOW_ACCUMULATION
    forward += _gemm(device, m, n, k, fp8=True)
    backward += cast(m * n, casts.grad_output) + _gemm(device, m, k, n, fp8=True, slowdown=slowdown)
    if scheme.recipe == "rowwise_with_gw_hp":
        backward += _gemm(device, n, k, m)
    else:
        backward += _gemm(device, n, k, m, fp8=True, slowdown=slowdown)
    return forward * (linear.count + linear.recomputed) + backward * linear.count


def time_linears(
    linears: Sequence[Linear], device: DeviceRates, *, tokens: int, scheme: Scheme
) -> list[LinearTime]:
    """The times of each kind if all of `linears`, and no others, train in float8 on `tokens` tokens
    a rank."""
    readers = Counter(linear.reads for linear in linears)
    return [
        LinearTime(
            linear.kind,
            _bf16_cost(linear, device, tokens).seconds,
            _float8_cost(linear, device, tokens, scheme, readers[linear.reads]).seconds,
        )
        for linear in linears
    ]


def _seconds(
    linears: Sequence[Linear],
    converted: Collection[Linear],
    device: DeviceRates,
    tokens: int,
    scheme: Scheme,
) -> float:
    """Of `linears` in a step, those `converted` in float8."""
    float8 = time_linears(
        [x for x in linears if x in converted], device, tokens=tokens, scheme=scheme
    )
    bf16 = time_linears(
        [x for x in linears if x not in converted], device, tokens=tokens, scheme=scheme
    )
    return sum(time.float8 for time in float8) + sum(time.bf16 for time in bf16)


def choose_linears(
    linears: Sequence[Linear], device: DeviceRates, *, tokens: int, scheme: Scheme
) -> list[Linear]:
    """Those of `linears` that are to train in float8 for the shortest step. The ones that read
    the same input share its casts, so that they gain or lose together: every subset of them is
    timed."""
    chosen: list[Linear] = []
    for reads in dict.fromkeys(linear.reads for linear in linears):
        group = [linear for linear in linears if linear.reads == reads]
        subsets = [subset for size in range(len(group) + 1) for subset in combinations(group, size)]
        seconds = [_seconds(group, subset, device, tokens, scheme) for subset in subsets]
        chosen += subsets[seconds.index(min(seconds))]
    return chosen


def added_ratio(
    linear: Linear, beside: Sequence[Linear], device: DeviceRates, *, tokens: int, scheme: Scheme
) -> float:
    """How many times its time in bf16 `linear` would take in float8, if it were converted beside
    those that are."""
    every = [*beside, linear]
    with_it, without = (
        _seconds(every, converted, device, tokens, scheme) for converted in (every, beside)
    )
    bf16 = _seconds([linear], [], device, tokens, scheme)
    return (with_it - without + bf16) / bf16


def _rest_costs(rest: Rest, device: DeviceRates, compiled: bool) -> dict[str, Cost]:
    """The parts of a step that float8 leaves alone, by name."""
    tokens, dim, ffn_dim, rotated = rest.tokens, rest.dim, rest.ffn_dim, rest.q_dim + rest.kv_dim
    # Causal attention multiplies half the square: 2 matmuls forward, 5 backward, which recomputes
    # the scores.
    matmul = tokens * rest.seq_len * rest.q_dim
    attention_matmuls = 7 * rest.n_layers + 2 * rest.recomputed_attention
    attention_seconds = matmul * attention_matmuls / (device.bf16_flops * ATTENTION_FRACTION)
    # What norms, rotary embeddings, SwiGLU and residuals read and write in bf16 if they are fused,
    # and how many kernels Inductor makes of a block, or the profiler counts in an eager one,
    # besides matmuls and attention.
    forward = 9 * dim / rest.sequence_shards + 2 * rotated + 3 * ffn_dim
    backward = 11 * dim / rest.sequence_shards + 2 * rotated + 5 * ffn_dim
    pointwise = (
        2 * tokens * (forward * (rest.n_layers + rest.recomputed_layers) + backward * rest.n_layers)
    )
    output = Cost()
    if not rest.output_among_linears:
        output += _gemm(device, tokens, rest.vocab_size, dim)
        output += _gemm(device, tokens, dim, rest.vocab_size) + _gemm(
            device, rest.vocab_size, dim, tokens
        )
    return {
        "attention": Cost(attention_seconds, 4 * rest.n_layers),
        "output": output,
        "pointwise": _move(device, pointwise, rest.n_layers * (34 if compiled else 130)),
        # Logits to float32 and log-softmax, their gradient, and that to bf16.
        "loss": _move(device, 28 * tokens * rest.vocab_size, 6),
        # AdamW reads weight, gradient and two moments in float32 and writes three; clipping takes
        # 12 bytes.
        "optimizer": _move(device, 40 * rest.sharded_parameters, 8),
    }


def step_time(
    linears: Sequence[Linear],
    rest: Rest,
    device: DeviceRates,
    *,
    scheme: Scheme,
    converted: Collection[str],
) -> StepTime:
    """A step in which the kinds `converted` train in float8 as `scheme` says, and the other linears
    in bf16."""
    float8 = [linear for linear in linears if linear.kind in converted]
    readers = Counter(linear.reads for linear in float8)
    costs = _rest_costs(rest, device, scheme.compiled)
    costs["linears"] = Cost()
    for linear in linears:
        if linear.kind in converted:
            costs["linears"] += _float8_cost(
                linear, device, rest.tokens, scheme, readers[linear.reads]
            )
        else:
            costs["linears"] += _bf16_cost(linear, device, rest.tokens)
    # FSDP copies what it gathered, before the forward and the backward pass, and gradients to
    # float32 to reduce them.
    in_float8 = (
        sum(x.count * x.out_features * x.in_features for x in float8)
        if scheme.float8_all_gather
        else 0
    )
    costs["fsdp copies"] = _move(
        device, 14 * rest.gathered_parameters - 4 * in_float8, 10 * rest.n_layers
    )
    host = sum(cost.kernels for cost in costs.values()) * HOST_SECONDS_PER_KERNEL
    host += rest.n_layers * HOST_SECONDS_PER_BLOCK
    return StepTime({part: cost.seconds for part, cost in costs.items()}, host)


def predict(
    linears: Sequence[Linear],
    rest: Rest,
    device: DeviceRates,
    *,
    scheme: Scheme,
    converted: Collection[str],
) -> Prediction:
    """The gain of training the kinds `converted` of `linears` in float8, and which of them had
    better be kept."""
    float8 = [linear for linear in linears if linear.kind in converted]
    chosen = choose_linears(float8, device, tokens=rest.tokens, scheme=scheme)
    return Prediction(
        bf16=step_time(linears, rest, device, scheme=scheme, converted=()),
        float8=step_time(linears, rest, device, scheme=scheme, converted=converted),
        converted=tuple(linear.kind for linear in float8),
        better_kept=tuple(linear.kind for linear in float8 if linear not in chosen),
    )
