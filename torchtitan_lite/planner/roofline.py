"""Predict what float8 gains: the time of each linear and of a step, in bf16 and in float8.

A roofline model: a kernel takes as long as its arithmetic or its memory traffic, whichever is
longer, plus a launch; a step as long as its kernels, or as the host needs to issue them. Not
modelled are communication, which is assumed to overlap with compute, the memory traffic of eager
operators other than casts, and, under tensor parallelism, that a cast before the gather reads only
a shard. The constants are published or measured; none is fitted to a speedup.

float8/recipes.py explains the three matmuls of a linear. Float8 halves their arithmetic, M * N * K,
and adds casts of M * K, N * K and M * N elements, so a linear gains if K and N are large.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations

from torchtitan_lite.float8.recipes import Traffic
from torchtitan_lite.float8.selection import LinearChoice
from torchtitan_lite.job import Job
from torchtitan_lite.metrics.devices import DeviceSpec
from torchtitan_lite.models.flavors import OUTPUT

# Each with its source.
GEMM_FRACTION = 0.78  # of the matmul peak that large matmuls reach: torchao's roofline_utils.py
BANDWIDTH_FRACTION = 0.92  # of the memory bandwidth that large pointwise kernels reach: the same
TRANSPOSING_FRACTION, STRIDED_FRACTION = 0.72, 0.45  # of it that such casts reach: guessed
KERNEL_SECONDS = 2e-6  # device time of a kernel on one element: the same
SLOW_ACCUMULATION = 1.15  # in float32, as in both gradients; fast is 1.1 to 1.2x: pytorch/ao#2377
ATTENTION_FRACTION = 0.34  # 335 of 989 TFLOPS: FlashAttention-2 on H100, arXiv 2307.08691, 4.1
HOST_SECONDS_PER_KERNEL = 8e-6  # 6.8 to 9.1 us compiled: meta-pytorch/tritonbench#1017; 7.3 eager
HOST_SECONDS_PER_BLOCK = 2e-3  # hooks, autograd, clipping and AdamW in a step: measured on CPU
RESOLUTION = 0.05  # a smaller relative difference is reported as none
GATHERED_WEIGHT = Traffic(kernels=1), Traffic(transposing=2, kernels=0.6)
"""Casts under the float8 all-gather: grad_input reads the gathered weight transposed."""


@dataclass(frozen=True)
class Cost:
    """Device seconds, and the number of kernels that the host issues for them."""

    seconds: float = 0.0
    kernels: float = 0.0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.seconds + other.seconds, self.kernels + other.kernels)

    def __mul__(self, times: float) -> "Cost":
        return Cost(self.seconds * times, self.kernels * times)


@dataclass(frozen=True)
class StepTime:
    """Seconds of a microbatch."""

    microbatch_s: float  # the slower of device and host
    host_s: float
    device_parts_s: Mapping[str, float]


@dataclass(frozen=True)
class Prediction:
    """What float8 gains over bf16."""

    without_communication: bool  # whether the times leave some out: on several devices
    step_speedup: float  # time in bf16 over time in float8: above 1 float8 pays
    verdict: str
    converted: list[str]  # kinds of linears in float8
    better_kept: list[str]  # those of them that bf16 would make faster
    bf16: StepTime
    float8: StepTime


def format_verdict(
    step_speedup: float, where: str, converted: Sequence[str], better_kept: Sequence[str]
) -> str:
    """Return the prediction in one sentence. `where` says what it leaves out."""
    if not converted:
        return "float8 gains nothing: no linear would be faster in it."
    gain = step_speedup - 1
    effect = "is neutral" if abs(gain) < RESOLUTION else "helps" if gain > 0 else "hurts"
    keep = f"keep {', '.join(better_kept)}" if better_kept else "no linear is better kept"
    speed = f"a step runs at {step_speedup:.2f}x the speed of bf16{where}"
    return f"float8 {effect}: {speed}; {keep} in bf16."


@dataclass(frozen=True)
class Roofline:
    """Costs of kernels on one device, and of a job's linears and steps there."""

    device: DeviceSpec
    job: Job
    recomputed: Collection[str] = ()  # modules whose forward the backward pass runs again

    @property
    def tokens(self) -> int:
        """Tokens of a microbatch."""
        return self.job.config.training.microbatch_tokens

    @property
    def compiled(self) -> bool:
        """Whether the blocks are compiled, which fuses the casts."""
        return self.job.config.compile.covers("model")

    def gathers_float8(self, linear: LinearChoice) -> bool:
        """Whether FSDP gathers the linear's weight in float8, if it is converted. The embedding
        reads a tied one too."""
        tied = linear.kind == OUTPUT and self.job.model_args.tie_embeddings
        return self.job.config.float8.enable_fsdp_float8_all_gather and not tied

    def move(self, nbytes: float, kernels: float) -> Cost:
        """Cost of kernels that read and write `nbytes` in total and compute next to nothing."""
        bandwidth = self.device.bandwidth_tb_s * 1e12 * BANDWIDTH_FRACTION
        return Cost(nbytes / bandwidth + kernels * KERNEL_SECONDS, kernels)

    def gemm(
        self, rows: int, columns: int, inner: int, *, fp8: bool = False, slow: bool = False
    ) -> Cost:
        """Cost of a matmul [rows, inner] @ [inner, columns] with a bf16 result."""
        tflops = self.device.fp8_tflops if fp8 else self.device.bf16_tflops
        assert tflops is not None, "float8 is planned only where its peak is known"
        rate = tflops * 1e12 * GEMM_FRACTION
        arithmetic = (SLOW_ACCUMULATION if slow else 1.0) * 2 * rows * columns * inner / rate
        nbytes = (1 if fp8 else 2) * inner * (rows + columns) + 2 * rows * columns
        return Cost(max(arithmetic, self.move(nbytes, 0).seconds) + KERNEL_SECONDS, 1)

    def bf16(self, linear: LinearChoice) -> Cost:
        """Cost of all linears of a kind in bf16: forward, recomputed and backward."""
        m, (n, k) = self.tokens, linear.local_shape
        return self._passes(linear, self.gemm(m, n, k), self.gemm(m, k, n) + self.gemm(n, k, m))

    def float8(self, linear: LinearChoice, readers: int = 1) -> Cost:
        """Cost of the same in float8. Compiled, `readers` linears share the casts of an input."""
        m, (n, k), float8 = self.tokens, linear.local_shape, self.job.config.float8
        casts = float8.recipe.compiled_casts if self.compiled else float8.recipe.eager_casts
        weight = GATHERED_WEIGHT if self.gathers_float8(linear) else casts.weight
        share = 1 / readers if self.compiled else 1.0

        def cast(elements: int, traffic: Traffic) -> Cost:
            nbytes = traffic.contiguous
            nbytes += traffic.transposing * BANDWIDTH_FRACTION / TRANSPOSING_FRACTION
            nbytes += traffic.strided * BANDWIDTH_FRACTION / STRIDED_FRACTION
            return self.move(elements * nbytes, traffic.kernels)

        forward = cast(m * k, casts.input[0]) * share + cast(n * k, weight[0])
        forward += self.gemm(m, n, k, fp8=True)

        # grad_input [M, K] over N, then grad_weight [N, K] over M
        slow, fp8 = float8.recipe.slow_accumulation, float8.recipe.divides_tokens
        backward = cast(m * k, casts.input[1]) * share + cast(n * k, weight[1])
        backward += cast(m * n, casts.grad_output) + self.gemm(m, k, n, fp8=True, slow=slow)
        backward += self.gemm(n, k, m, fp8=fp8, slow=slow and fp8)
        return self._passes(linear, forward, backward)

    def _passes(self, linear: LinearChoice, forward: Cost, backward: Cost) -> Cost:
        count, again = len(linear.names), sum(name in self.recomputed for name in linear.names)
        return forward * (count + again) + backward * count

    def linears(
        self, linears: Iterable[LinearChoice], converted: Collection[LinearChoice]
    ) -> list[Cost]:
        """Cost of each of `linears`, in float8 if it is among those `converted`, else in bf16."""
        readers = Counter(linear.reads for linear in converted)
        return [
            self.float8(linear, readers[linear.reads]) if linear in converted else self.bf16(linear)
            for linear in linears
        ]

    def ratio(self, linear: LinearChoice, converted: Collection[LinearChoice]) -> float:
        """Time of `linear` in float8 over its time in bf16, beside the other linears `converted`.

        A linear that is not among them is timed as if it were added: it also makes the others
        faster that read the same input."""
        bf16 = self.bf16(linear).seconds
        if linear in converted:
            return self.linears([linear], converted)[0].seconds / bf16
        every = [*converted, linear]
        return (self._seconds(every, every) - self._seconds(every, converted) + bf16) / bf16

    def choose(self, linears: Sequence[LinearChoice]) -> list[LinearChoice]:
        """Return the `linears` that make the shortest step if they train in float8.

        Linears that read the same input share its casts, so that the gain of one depends on the
        others: every subset of them is timed."""
        chosen: list[LinearChoice] = []
        for reads in dict.fromkeys(linear.reads for linear in linears):
            group = [linear for linear in linears if linear.reads == reads]
            subsets = [each for size in range(len(group) + 1) for each in combinations(group, size)]
            chosen += min(subsets, key=partial(self._seconds, group))
        return chosen

    def _seconds(
        self, linears: Sequence[LinearChoice], converted: Collection[LinearChoice]
    ) -> float:
        return sum(cost.seconds for cost in self.linears(linears, converted))

    def step(self, linears: Sequence[LinearChoice], parameters: int, *, float8: bool) -> StepTime:
        """Time a microbatch of a model with that many `parameters`, with the converted ones of its
        `linears` in float8, or with all in bf16.

        The projection to the vocabulary, unless converted, is a part of its own."""
        args, degrees, tokens = self.job.model_args, self.job.degrees, self.tokens
        converted = [linear for linear in linears if linear.converted]
        kept = [linear for linear in linears if not linear.converted and linear.kind != OUTPUT]
        output = [linear for linear in linears if not linear.converted and linear.kind == OUTPUT]
        in_float8 = converted if float8 else []

        # FSDP copies what it gathered, before the forward and the backward pass, and casts
        # gradients to float32 to reduce them. The optimizer runs once a step.
        gathered = parameters // degrees.tp
        updated = gathered // (degrees.dp_shard * self.job.batch.grad_accum_steps)
        in_bytes = [each for each in in_float8 if self.gathers_float8(each)]
        copied = 14 * gathered
        copied -= 4 * sum(len(each.names) * math.prod(each.local_shape) for each in in_bytes)

        costs = {
            "attention": self._attention(),
            "output": sum(map(self.bf16, output), Cost()),
            "pointwise": self._pointwise(),
            # The logits in float32, their log-softmax, its gradient, and that in bf16.
            "loss": self.move(28 * tokens * (args.vocab_size // degrees.tp), 6),
            # AdamW reads weight, gradient and two moments in float32 and writes three of them;
            # clipping takes another 12 bytes.
            "optimizer": self.move(40 * updated, 8),
            "linears": sum(self.linears([*converted, *kept], in_float8), Cost()),
            "fsdp copies": self.move(copied, 10 * args.n_layers),
        }
        host_s = sum(cost.kernels for cost in costs.values()) * HOST_SECONDS_PER_KERNEL
        host_s += args.n_layers * HOST_SECONDS_PER_BLOCK
        device_parts_s = {part: cost.seconds for part, cost in costs.items()}
        return StepTime(max(sum(device_parts_s.values()), host_s), host_s, device_parts_s)

    def _attention(self) -> Cost:
        """Causal attention multiplies half the square: 2 matmuls forward, 5 backward, which
        recomputes the scores."""
        args = self.job.model_args
        again = sum(name.endswith(".attention") for name in self.recomputed)
        matmuls = 7 * args.n_layers + 2 * again
        flops = self.tokens * args.max_seq_len * (args.q_dim // self.job.degrees.tp) * matmuls
        rate = self.device.bf16_tflops * 1e12 * ATTENTION_FRACTION
        return Cost(flops / rate, 4 * args.n_layers)

    def _pointwise(self) -> Cost:
        """Fused norms, rotary embeddings, SwiGLU and residuals, in bf16. Tensor parallelism splits
        norms and residuals along the sequence."""
        args, tp, n_layers = self.job.model_args, self.job.degrees.tp, self.job.model_args.n_layers
        rotated, ffn_dim = args.q_dim // tp + args.kv_dim // tp, args.ffn_dim // tp
        forward = 9 * args.dim / tp + 2 * rotated + 3 * ffn_dim
        backward = 11 * args.dim / tp + 2 * rotated + 5 * ffn_dim
        again = len(self.job.config.activation_checkpoint.checkpointed_layers(n_layers))
        elements = forward * (n_layers + again) + backward * n_layers
        # Other kernels of a block, as Inductor generates them or the profiler counts them eager.
        return self.move(2 * self.tokens * elements, n_layers * (34 if self.compiled else 130))

    def predict(self, linears: Sequence[LinearChoice], parameters: int) -> Prediction:
        """Predict the gain of the float8 linears, and which of them would be faster in bf16."""
        linears_in_float8 = [linear for linear in linears if linear.converted]
        chosen = self.choose(linears_in_float8)
        converted = [linear.kind for linear in linears_in_float8]
        better_kept = [linear.kind for linear in linears_in_float8 if linear not in chosen]
        bf16, float8 = (self.step(linears, parameters, float8=on) for on in (False, True))
        speedup, alone = bf16.microbatch_s / float8.microbatch_s, self.job.degrees.world_size == 1
        where = "" if alone else ", without communication"
        verdict = format_verdict(speedup, where, converted, better_kept)
        return Prediction(not alone, speedup, verdict, converted, better_kept, bf16, float8)
