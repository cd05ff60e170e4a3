"""Predict the seconds of kernels and collectives on a device, and of the parts of a microbatch.

A kernel takes as long as its arithmetic or its memory traffic, whichever is longer, plus a launch;
a collective as long as a ring of NCCL's. catalog/recipes.py explains the three matmuls of a linear
and their sizes M, K and N.
"""

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from torchtitan_lite.catalog.devices import DeviceSpec
from torchtitan_lite.catalog.flavors import OUTPUT
from torchtitan_lite.catalog.recipes import DEFAULT_RECIPE
from torchtitan_lite.config.job import Job
from torchtitan_lite.float8.selection import LinearChoice
from torchtitan_lite.metrics.flops import MATMULS

from .casts import COMPILED, EAGER, Casts, Traffic
from .constants import Rates
from .share import Share

TILE = 128
"""Rows and columns of a result that a multiprocessor computes at a time: NVIDIA, Matrix
Multiplication Background User's Guide. A larger tile, at the same rate, is never faster."""
COMPILED_POINTWISE = (9, 2, 3), (12, 2, 5)
"""Elements that a block's other kernels move per token, in the forward and the backward pass: for
each unit of dim, of q_dim + kv_dim, and of ffn_dim. Counted for sm_90 by
tests/deviceless/test_deviceless_kernels.py."""
EAGER_POINTWISE = (10, 10, 5), (22, 10, 9)
Linears = Collection[LinearChoice]


@dataclass(frozen=True)
class Roofline:
    """Seconds of kernels and collectives on one device, and of the parts of a job's microbatch."""

    device: DeviceSpec
    rates: Rates
    job: Job
    recomputed: frozenset[str] = frozenset()  # modules whose forward the backward pass runs again

    @property
    def tokens(self) -> int:
        """Tokens of a microbatch."""
        return self.job.microbatch_tokens

    @property
    def checkpointed(self) -> int:
        """Number of blocks that recompute, apart from the compiler's choices."""
        ac = self.job.config.activation_checkpoint
        return len(ac.checkpointed_layers(self.job.model_args.n_layers))

    @property
    def compiled(self) -> bool:
        """Whether the blocks are compiled, which fuses the casts."""
        return self.job.config.compile.covers("model")

    @property
    def runs_attention_in(self) -> str:
        """The kernel of attention that PyTorch takes: cudnn, flash or flex."""
        if self.job.model_args.document_bos_id is not None:
            return "flex"
        # cuDNN cannot align a causal mask with the last key, as parts of a sequence need it.
        on_cudnn = self.device.architecture in ("Hopper", "Blackwell") and self.job.degrees.cp == 1
        return "cudnn" if on_cudnn else "flash"

    @property
    def casts(self) -> Casts:
        """The casts of the recipe; of the default one if nobody has counted its own."""
        table = COMPILED if self.compiled else EAGER
        return table.get(self.job.config.float8.recipe_name, table[DEFAULT_RECIPE])

    @cached_property
    def weights_are_cast(self) -> tuple[bool, float]:
        """Whether weights are in float8 before a microbatch, and the part of the casts before a
        step that it pays for: 0 if FSDP gathers them in float8, after casts of shards."""
        share = Share(self.job, ())
        return share.casts_before, 1 / share.microbatches if share.casts_once else 0.0

    # ----- Kernels and collectives -----

    def move_s(self, nbytes: float, kernels: float = 1) -> float:
        """Seconds of kernels that read and write `nbytes` in total and compute next to nothing."""
        bandwidth = self.device.bandwidth_tb_s * 1e12 * self.rates.contiguous
        return nbytes / bandwidth + kernels * self.rates.kernel_seconds

    def gemm_s(
        self, rows: int, columns: int, inner: int, *, fp8: bool = False, slowdown: float = 1.0
    ) -> float:
        """Seconds of a matmul [rows, inner] @ [inner, columns] with a bf16 result."""
        tflops = self.device.fp8_tflops if fp8 else self.device.bf16_tflops
        assert tflops is not None, "float8 is planned only where its peak is known"
        fraction = self.rates.fp8_matmul if fp8 else self.rates.bf16_matmul
        flops_per_s = tflops * 1e12 * fraction / slowdown / self.device.multiprocessors

        # Multiprocessors compute a wave of tiles at a time, and the last wave leaves some idle.
        tiles = math.ceil(rows / TILE) * math.ceil(columns / TILE)
        waves = math.ceil(tiles / self.device.multiprocessors)
        arithmetic = waves * 2 * TILE**2 * inner / flops_per_s

        nbytes = (1 if fp8 else 2) * inner * (rows + columns) + 2 * rows * columns
        return max(arithmetic, self.move_s(nbytes, 0)) + self.rates.matmul_seconds

    def gather_s(self, nbytes: float, ranks: int, stride: int = 1) -> float:
        """Seconds to gather `nbytes` on each of `ranks`, or to reduce and scatter as many. The next
        rank of the ring is `stride` ranks away.

        A rank sends a part of 1 / ranks in each of ranks - 1 steps (NCCL, src/graph/tuning.cc)."""
        if ranks == 1 or not nbytes:
            return 0.0
        latency = self.rates.collective_seconds + (ranks - 1) * self.rates.hop_seconds
        sent = nbytes * (ranks - 1) / ranks
        return latency + sent / (1e9 * self.ring_gb_s(ranks, stride))

    def ring_gb_s(self, ranks: int, stride: int = 1) -> float:
        """GB/s (10^9 bytes per second) that each rank of a ring sends of large messages."""
        link = self.device.link_gb_s * self.rates.link
        in_node = min(ranks, max(1, self.device.node_devices // stride))
        if ranks == in_node:
            return link
        # The ranks of a node bring one network adapter each.
        network = self.device.network_gb_s * self.rates.network * in_node
        return network if in_node == 1 else min(link, network)

    # ----- Linears, with what the backward pass recomputes -----

    def linears_s(self, linears: Iterable[LinearChoice], converted: Linears) -> float:
        """Seconds of `linears`, in float8 those that are among `converted`, the others in bf16."""
        return sum(sum(self.matmuls_s(each, converted).values()) for each in linears)

    def matmuls_s(self, linear: LinearChoice, converted: Linears) -> dict[str, float]:
        """Seconds of each matmul of all linears of a kind, in float8 with its casts if `linear` is
        among `converted`. The cast of grad_output, for both gradients, is in grad_input."""
        m, (n, k), recipe = self.tokens, linear.local_shape, self.job.config.float8.recipe
        in_float8 = recipe.matmuls if linear in converted else ()
        casts_s = self._casts_s(linear, converted) if in_float8 else (0.0, 0.0, 0.0)
        fast = 1.0 if recipe.gathers_float8 else self.rates.row_scales
        slow = max(fast, self.rates.slow_accumulation)
        rows = ((m, n, k), fast), ((m, k, n), slow), ((n, k, m), slow)
        seconds = {}
        for name, (shape, slowdown), cast_s in zip(MATMULS, rows, casts_s, strict=True):
            fp8 = name in in_float8
            gemm_s = self.gemm_s(*shape, fp8=fp8, slowdown=slowdown if fp8 else 1.0)
            again = sum(each in self.recomputed for each in linear.names) if name == "output" else 0
            seconds[name] = (len(linear.names) + again) * (gemm_s + cast_s)
        return seconds

    def _casts_s(self, linear: LinearChoice, converted: Linears) -> tuple[float, float, float]:
        """Seconds of the casts of a linear's operands, by the MATMULS before which they run.
        Compiled, the linears that are `converted` and read the same input share its casts."""
        m, (n, k) = self.tokens, linear.local_shape
        readers = len({each.kind for each in converted if each.reads == linear.reads})
        share = 1 / readers if self.compiled else 1.0
        output, grad_weight = (share * self._cast_s(m * k, each) for each in self.casts.input)
        grad_input = self._cast_s(m * n, self.casts.grad_output)

        # The embedding reads a tied weight too, so that it stays in high precision.
        tied = linear.kind == OUTPUT and self.job.model_args.tie_embeddings
        cast, paid = (False, 0.0) if tied else self.weights_are_cast
        weight = self.casts.weight_when_cast if cast else self.casts.weight
        forward, backward = (self._cast_s(n * k, each) for each in weight)
        forward += paid * self._cast_s(n * k, self.casts.weight_before)
        return output + forward, grad_input + backward, grad_weight

    def _cast_s(self, elements: int, traffic: Traffic) -> float:
        rates = self.rates
        nbytes = traffic.contiguous
        nbytes += traffic.transposing * rates.contiguous / rates.transposing
        nbytes += traffic.strided * rates.contiguous / rates.strided
        return self.move_s(elements * nbytes, traffic.kernels)

    def ratio(self, linear: LinearChoice, converted: Linears) -> float:
        """Time of `linear` in float8 over its time in bf16, beside the other linears `converted`
        that read the same input."""
        return self.linears_s([linear], [*converted, linear]) / self.linears_s([linear], [])

    def choose(self, linears: Sequence[LinearChoice]) -> list[LinearChoice]:
        """Return the `linears` that float8 makes faster. Those that read the same input share its
        casts: all of them are chosen or none."""
        chosen: list[LinearChoice] = []
        for reads in dict.fromkeys(linear.reads for linear in linears):
            group = [linear for linear in linears if linear.reads == reads]
            faster = self.linears_s(group, group) < self.linears_s(group, [])
            chosen += group if faster else []
        return chosen

    # ----- Other parts of all blocks, and the loss -----

    def attention_s(self, kernel: str = "") -> float:
        """Seconds of causal attention, by default in the kernel that PyTorch takes. It multiplies
        half the square: 2 matmuls forward, and 5 backward, which recomputes the scores. All ranks
        that share a sequence have equal parts of it."""
        job, fraction = self.job, f"attention_{kernel or self.runs_attention_in}"
        rate = self.device.bf16_tflops * 1e12 * getattr(self.rates, fraction)
        seq_len, args = job.config.training.seq_len, job.model_args
        matmul = self.tokens * seq_len * args.q_dim / job.degrees.tp / rate
        again = sum(name.endswith(".attention") for name in self.recomputed)
        return matmul * (7 * args.n_layers + 2 * again)

    def pointwise_s(self) -> float:
        """Seconds of norms, rotary embeddings, SwiGLU and residuals in bf16. Tensor parallelism
        splits norms and residuals along the sequence."""
        args, kernels = self.job.model_args, 7 if self.compiled else 17
        widths = args.dim, args.q_dim + args.kv_dim, args.ffn_dim
        passes = COMPILED_POINTWISE if self.compiled else EAGER_POINTWISE
        forward, backward = (
            2 * self.tokens * sum(map(math.prod, zip(moved, widths, strict=True)))
            for moved in passes
        )
        runs = args.n_layers + self.checkpointed  # of the forward pass
        nbytes = runs * forward + args.n_layers * backward
        return self.move_s(nbytes / self.job.degrees.tp, kernels * (runs + args.n_layers))

    def loss_s(self) -> float:
        """Seconds of the cross-entropy and its gradient, beside the matmuls of the projection."""
        logits = self.tokens * self.job.model_args.vocab_size
        if not self.job.config.parallelism.disable_loss_parallel:
            logits //= self.job.degrees.tp
        return self.move_s((8 if self.job.config.compile.covers("loss") else 26) * logits)
