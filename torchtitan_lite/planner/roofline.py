"""Predict the device time of kernels, of linears and of the passes of a microbatch.

A roofline model: a kernel takes as long as its arithmetic or its memory traffic, whichever is
longer, plus a launch. constants.py has the rates and their sources; step.py adds communication.

catalog/recipes.py explains the three matmuls of a linear. Float8 halves their arithmetic,
M * N * K, and adds casts of M * K, N * K and M * N elements, so a linear gains if K and N are
large.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from operator import mul
from typing import NamedTuple

from torchtitan_lite.catalog.devices import DeviceSpec
from torchtitan_lite.catalog.flavors import OUTPUT
from torchtitan_lite.config.job import Job
from torchtitan_lite.float8.selection import LinearChoice

from .casts import RecipeCosts, Traffic, costs_of
from .constants import Rates
from .rank import Group, checkpointed_blocks, state_widths, without_fsdp

TILE = 128
"""Rows and columns of a result that a multiprocessor computes at a time: NVIDIA, Matrix
Multiplication Background User's Guide. A larger tile, at the same rate, is never faster."""
SPLITS = (1, 2, 4, 8)
"""Parts of the summed dimension that are computed side by side where there are few tiles."""
GATHERED_WEIGHT = Traffic(kernels=1), Traffic(transposing=2, kernels=1)
"""Casts under the float8 all-gather: grad_input reads the gathered weight transposed."""


class Pointwise(NamedTuple):
    """A block's kernels other than matmuls, attention and casts, as counted for sm_90."""

    elements: tuple[int, int, int]  # moved per token and unit of dim, of q_dim + kv_dim, of ffn_dim
    kernels: int


COMPILED_POINTWISE = Pointwise((9, 2, 3), 6), Pointwise((12, 2, 5), 7)  # forward and backward
EAGER_POINTWISE = Pointwise((10, 10, 5), 14), Pointwise((22, 10, 9), 19)


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
class Passes:
    """Cost of a forward pass, and of the backward pass with what it recomputes."""

    forward: Cost = Cost()
    backward: Cost = Cost()

    def __add__(self, other: "Passes") -> "Passes":
        return Passes(self.forward + other.forward, self.backward + other.backward)

    @property
    def both(self) -> Cost:
        """Cost of the two passes."""
        return self.forward + self.backward


@dataclass(frozen=True)
class Roofline:
    """Costs of kernels on one device, and of the parts of a job's microbatch there."""

    device: DeviceSpec
    rates: Rates
    job: Job
    recomputed: frozenset[str] = frozenset()  # modules whose forward the backward pass runs again
    attention_kernel: str = ""  # cudnn, flash or flex; "": what PyTorch takes on the device

    @property
    def tokens(self) -> int:
        """Tokens of a microbatch."""
        return self.job.microbatch_tokens

    @property
    def compiled(self) -> bool:
        """Whether the blocks are compiled, which fuses the casts."""
        return self.job.config.compile.covers("model")

    @property
    def runs_attention_in(self) -> str:
        """The kernel given, or the one that PyTorch takes."""
        if self.attention_kernel:
            return self.attention_kernel
        if self.job.model_args.document_bos_id is not None:
            return "flex"
        # cuDNN cannot align a causal mask with the last key, as parts of a sequence need it.
        on_cudnn = self.device.architecture in ("Hopper", "Blackwell") and self.job.degrees.cp == 1
        return "cudnn" if on_cudnn else "flash"

    @property
    def costs(self) -> RecipeCosts:
        """What the recipe costs beside its matmuls."""
        return costs_of(self.job.config.float8.recipe)

    def gathers_float8(self, linear: LinearChoice) -> bool:
        """Whether FSDP gathers the linear's weight in float8, if it is converted. The embedding
        reads a tied one too."""
        tied = linear.kind == OUTPUT and self.job.model_args.tie_embeddings
        return self.job.config.float8.enable_fsdp_float8_all_gather and not tied

    # Kernels.

    def move(self, nbytes: float, kernels: float) -> Cost:
        """Cost of kernels that read and write `nbytes` in total and compute next to nothing."""
        bandwidth = self.device.bandwidth_tb_s * 1e12 * self.rates.contiguous
        return Cost(nbytes / bandwidth + kernels * self.rates.kernel_seconds, kernels)

    def gemm(
        self, rows: int, columns: int, inner: int, *, fp8: bool = False, slowdown: float = 1.0
    ) -> Cost:
        """Cost of a matmul [rows, inner] @ [inner, columns] with a bf16 result."""
        tflops = self.device.fp8_tflops if fp8 else self.device.bf16_tflops
        assert tflops is not None, "float8 is planned only where its peak is known"
        fraction = self.rates.fp8_matmul if fp8 else self.rates.bf16_matmul
        flops_per_s = tflops * 1e12 * fraction / slowdown / self.device.multiprocessors

        # Multiprocessors compute a wave of tiles at a time, and the last wave leaves some idle. A
        # split sum needs another pass over its parts, in float32.
        arithmetic = math.inf
        tiles = math.ceil(rows / TILE) * math.ceil(columns / TILE)
        for parts in SPLITS:
            waves = math.ceil(tiles * parts / self.device.multiprocessors)
            tile = 2 * TILE**2 * inner / parts / flops_per_s
            added = self.move(8 * parts * rows * columns, 1).seconds if parts > 1 else 0.0
            arithmetic = min(arithmetic, waves * tile + added)

        nbytes = (1 if fp8 else 2) * inner * (rows + columns) + 2 * rows * columns
        return Cost(max(arithmetic, self.move(nbytes, 0).seconds) + self.rates.matmul_seconds, 1)

    # Linears.

    def bf16(self, linear: LinearChoice) -> Passes:
        """Cost of all linears of a kind in bf16."""
        m, (n, k) = self.tokens, linear.local_shape
        backward = self.gemm(m, k, n) + self.gemm(n, k, m)
        return self._of_all(linear, self.gemm(m, n, k), backward)

    def float8(self, linear: LinearChoice, readers: int = 1) -> Passes:
        """Cost of the same in float8. Compiled, `readers` linears share the casts of an input."""
        m, (n, k), recipe = self.tokens, linear.local_shape, self.job.config.float8.recipe
        casts = self.costs.compiled if self.compiled else self.costs.eager
        scaled_in_matmul = self.job.config.float8.scale_gradients_in_matmul
        if scaled_in_matmul and self.compiled:
            casts = self.costs.scaled_in_matmul or casts
        weight = GATHERED_WEIGHT if self.gathers_float8(linear) else casts.weight
        share = 1 / readers if self.compiled else 1.0

        def cast(elements: int, traffic: Traffic) -> Cost:
            rates = self.rates
            nbytes = traffic.contiguous
            nbytes += traffic.transposing * rates.contiguous / rates.transposing
            nbytes += traffic.strided * rates.contiguous / rates.strided
            return self.move(elements * nbytes, traffic.kernels)

        fast = 1.0 if recipe.gathers_float8 else self.rates.row_scales
        forward = cast(m * k, casts.input[0]) * share + cast(n * k, weight[0])
        forward += self.gemm(m, n, k, fp8=True, slowdown=fast)

        # grad_input [M, K] over N, then grad_weight [N, K] over M
        slow = self.rates.slow_accumulation if self.costs.slow_accumulation else fast
        slow *= self.rates.row_scales if scaled_in_matmul else 1.0
        fp8 = recipe.divides_tokens
        backward = cast(m * k, casts.input[1]) * share + cast(n * k, weight[1])
        backward += cast(m * n, casts.grad_output)
        backward += self.gemm(m, k, n, fp8=True, slowdown=slow)
        backward += self.gemm(n, k, m, fp8=fp8, slowdown=slow if fp8 else 1.0)
        return self._of_all(linear, forward, backward)

    def _of_all(self, linear: LinearChoice, forward: Cost, backward: Cost) -> Passes:
        count, again = len(linear.names), sum(name in self.recomputed for name in linear.names)
        return Passes(forward * count, forward * again + backward * count)

    def linears(
        self, linears: Iterable[LinearChoice], converted: Collection[LinearChoice]
    ) -> list[Passes]:
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
        bf16 = self._seconds([linear], [])
        if linear in converted:
            return self.linears([linear], converted)[0].both.seconds / bf16
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
        return sum(cost.both.seconds for cost in self.linears(linears, converted))

    # Other parts of the model.

    def attention(self) -> Passes:
        """Cost of causal attention, which multiplies half the square: 2 matmuls forward, and 5
        backward, which recomputes the scores. All ranks that share a sequence have equal parts of
        it, in two chunks without a mask."""
        args, fraction = self.job.model_args, f"attention_{self.runs_attention_in}"
        again = sum(name.endswith(".attention") for name in self.recomputed)
        rate = self.device.bf16_tflops * 1e12 * getattr(self.rates, fraction)

        heads = args.q_dim // self.job.degrees.tp
        chunks = 1 if self.job.degrees.cp == 1 or args.document_bos_id is not None else 2
        matmul = Cost(self.tokens * args.max_seq_len * heads / rate, 0.5 * chunks)
        return Passes(matmul * (2 * args.n_layers), matmul * (5 * args.n_layers + 2 * again))

    def pointwise(self) -> Passes:
        """Cost of norms, rotary embeddings, SwiGLU and residuals in bf16. Tensor parallelism splits
        norms and residuals along the sequence."""
        args, tp = self.job.model_args, self.job.degrees.tp
        widths = args.dim / tp, args.q_dim // tp + args.kv_dim // tp, args.ffn_dim // tp

        def cost(moved: Pointwise) -> Cost:
            elements = sum(map(mul, moved.elements, widths))
            return self.move(2 * self.tokens * elements, moved.kernels)

        forward, backward = map(cost, COMPILED_POINTWISE if self.compiled else EAGER_POINTWISE)
        n_layers, again = args.n_layers, len(checkpointed_blocks(self.job))
        return Passes(forward * n_layers, backward * n_layers + forward * again)

    def loss(self) -> Cost:
        """Cost of the cross-entropy and its gradient, beside the matmuls of the projection."""
        whole = self.job.config.parallelism.disable_loss_parallel
        logits = self.tokens * self.job.model_args.vocab_size
        logits //= 1 if whole else self.job.degrees.tp
        if self.job.config.compile.covers("loss"):
            return self.move(8 * logits, 1)
        # Eager, 9 kernels for each piece of dim / 4 tokens.
        return self.move(26 * logits, 36 * self.tokens / self.job.model_args.dim)

    def optimizer(self, parameters: int) -> Cost:
        """Cost of clipping and AdamW on a rank's `parameters`: a weight is read and written, its
        gradient read three times and written once, and the optimizer's state read and
        written."""
        weight, state = state_widths(self.job.config)
        return self.move((6 * weight + 2 * state) * parameters, 37)

    def gather_copies(self, group: Group) -> Cost:
        """Cost of the copies around a gather of `group`, in bytes of the whole and of a shard. One
        rank casts its weights."""
        if not group.weights:
            return Cost()
        casts = 21 if group.in_float8 else 0  # kernels
        if without_fsdp(self.job):
            return self.move(6 * group.weights + 19 * group.in_float8, 2 + casts)
        whole = 4 * group.weights - 2 * group.in_float8
        shard = (10 * group.weights + 13 * group.in_float8) / self.job.degrees.fsdp
        return self.move(whole + shard, 6 + casts)

    def gradient_copies(self, parameters: int, reductions: int) -> Cost:
        """Cost of the copies of gradients in a step: a cast, to reduce them or to add others of
        later microbatches to them. These sums are read and written, as shards if each microbatch
        is reduced. Else FSDP copies them to be reduced."""
        accum, n_layers = self.job.batch.grad_accum_steps, self.job.model_args.n_layers
        nbytes = 6 + 10 * (accum - 1)
        if without_fsdp(self.job):
            return self.move(nbytes * parameters, 9 * accum * n_layers)
        if reductions == accum:
            shards = parameters / self.job.degrees.fsdp
            each = self.move(6 * parameters, 2 * n_layers)
            return each * accum + self.move(12 * shards, 9 * n_layers) * (accum - 1)
        return self.move((nbytes + 8) * parameters, (9 * accum + 2) * n_layers)
