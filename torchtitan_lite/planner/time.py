"""Predict the time of an optimizer step: computation, communication that it waits for, the host.

A kernel takes as long as its arithmetic or its memory traffic, whichever is longer; a collective as
long as a ring of NCCL's. All but the optimizer runs once in each of a step's microbatches. Blocks
are equal, so that a step takes n blocks' time on the rank that computes longest. docs/plan.md says
what communication is waited for; catalog/recipes.py explains the three matmuls of a linear.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from torchtitan_lite.catalog.devices import DeviceSpec
from torchtitan_lite.catalog.flavors import BLOCK_LINEARS, OUTPUT, block_linear_shapes
from torchtitan_lite.catalog.recipes import DEFAULT_RECIPE
from torchtitan_lite.config.job import Job
from torchtitan_lite.float8.selection import LinearChoice
from torchtitan_lite.metrics.flops import MATMULS

from .constants import COMPILED, EAGER, Casts, Rates
from .share import Share

TENSOR, CONTEXT, SHARDING = "tensor parallelism", "context parallelism", "FSDP"
PIPELINE, HOST = "pipeline", "host"


@dataclass(frozen=True)
class Roofline:
    """Seconds of kernels and collectives on one device, and of the parts of a job's microbatch."""

    device: DeviceSpec
    rates: Rates
    job: Job
    recomputed: frozenset[str] = frozenset()  # modules whose forward the backward pass runs again

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
        """The casts of the recipe; those of the default recipe if nobody has counted its own."""
        recipe = self.job.config.float8.recipe_name
        counted = self.compiled or recipe == "mxfp8"
        return COMPILED.get(recipe, COMPILED[DEFAULT_RECIPE]) if counted else EAGER

    @cached_property
    def weight_bytes(self) -> float:
        """Bytes that a microbatch moves per element of a weight to cast it."""
        share = Share(self.job, ())
        return self.casts.weight * share.weight_casts / share.microbatches

    # ----- Kernels and collectives -----

    def move_s(self, nbytes: float) -> float:
        """Seconds of a kernel that reads and writes `nbytes` and computes next to nothing."""
        bandwidth = self.device.bandwidth_tb_s * 1e12 * self.rates.contiguous
        return nbytes / bandwidth + self.rates.kernel_seconds if nbytes else 0.0

    def gemm_s(
        self, rows: int, columns: int, inner: int, *, fp8: bool = False, slowdown: float = 1.0
    ) -> float:
        """Seconds of a matmul [rows, inner] @ [inner, columns] with a bf16 result."""
        tflops = self.device.fp8_tflops if fp8 else self.device.bf16_tflops
        assert tflops is not None, "float8 is planned only where its peak is known"
        fraction = self.rates.fp8_matmul if fp8 else self.rates.bf16_matmul
        arithmetic = slowdown * 2 * rows * columns * inner / (tflops * 1e12 * fraction)
        nbytes = (1 if fp8 else 2) * inner * (rows + columns) + 2 * rows * columns
        return max(arithmetic + self.rates.kernel_seconds, self.move_s(nbytes))

    def gather_s(self, nbytes: float, ranks: int, stride: int = 1) -> float:
        """Seconds to gather `nbytes` on each of `ranks`, or to reduce and scatter as many. The next
        rank of the ring is `stride` ranks away.

        A rank sends a part of 1 / ranks in each of ranks - 1 steps (NCCL, src/graph/tuning.cc)."""
        if ranks == 1 or not nbytes:
            return 0.0
        # The ranks of a node bring one network adapter each.
        gb_s = self.device.link_gb_s * self.rates.link
        in_node = min(ranks, max(1, self.device.node_devices // stride))
        if ranks > in_node:
            network = self.device.network_gb_s * self.rates.network * in_node
            gb_s = network if in_node == 1 else min(gb_s, network)
        return ranks * self.rates.hop_seconds + nbytes * (ranks - 1) / ranks / (1e9 * gb_s)

    # ----- Linears, with what the backward pass recomputes -----

    def linears_s(
        self, linears: Iterable[LinearChoice], in_float8: Collection[LinearChoice]
    ) -> float:
        """Seconds of `linears`, of which some are `in_float8`, the others in bf16."""
        return sum(self.linear_s(each, fp8=each in in_float8) for each in linears)

    def linear_s(self, linear: LinearChoice, *, fp8: bool) -> float:
        """Seconds of the three matmuls of all linears of a kind, in float8 with their casts."""
        m, (n, k) = self.job.microbatch_tokens, linear.local_shape
        recipe = self.job.config.float8.recipe
        fast = 1.0 if recipe.gathers_float8 else self.rates.row_scales
        slow = max(fast, self.rates.slow_accumulation)
        shapes = ((m, n, k), fast), ((m, k, n), slow), ((n, k, m), slow)
        output, *gradients = (
            self.gemm_s(*shape, fp8=True, slowdown=slowdown)
            if fp8 and name in recipe.matmuls
            else self.gemm_s(*shape)
            for name, (shape, slowdown) in zip(MATMULS, shapes, strict=True)
        )

        # Compiled, the linears that read the same input share its casts.
        if fp8:
            readers = sum(each.reads == linear.reads for each in BLOCK_LINEARS.values())
            inputs = m * k / (max(1, readers) if self.compiled else 1)
            output += self.move_s(inputs * self.casts.input[0])
            gradients.append(self.move_s(inputs * self.casts.input[1]))
            gradients.append(self.move_s(m * n * self.casts.grad_output))
            gradients.append(self.move_s(n * k * self.weight_bytes))
        again = sum(name in self.recomputed for name in linear.names)
        return len(linear.names) * (output + sum(gradients)) + again * output

    def ratio(self, linear: LinearChoice) -> float:
        """Time of `linear` in float8 over its time in bf16."""
        return self.linear_s(linear, fp8=True) / self.linear_s(linear, fp8=False)

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
        matmul = self.job.microbatch_tokens * seq_len * args.q_dim / job.degrees.tp / rate
        again = sum(name.endswith(".attention") for name in self.recomputed)
        return matmul * (7 * args.n_layers + 2 * again)

    def pointwise_s(self) -> float:
        """Seconds of norms, rotary embeddings, SwiGLU and residuals in bf16, counted for sm_90 by
        tests/deviceless/test_deviceless_kernels.py. Eager they move twice as much. Tensor
        parallelism splits norms and residuals along the sequence."""
        args, n_layers = self.job.model_args, self.job.model_args.n_layers
        heads = args.q_dim + args.kv_dim
        forward = 9 * args.dim + 2 * heads + 3 * args.ffn_dim  # elements a token
        backward = 12 * args.dim + 2 * heads + 5 * args.ffn_dim
        elements = (n_layers + self.checkpointed) * forward + n_layers * backward
        nbytes = (2 if self.compiled else 4) * self.job.microbatch_tokens * elements
        return self.move_s(nbytes / self.job.degrees.tp)

    def loss_s(self) -> float:
        """Seconds of the cross-entropy and its gradient, beside the matmuls of the projection."""
        logits = self.job.microbatch_tokens * self.job.model_args.vocab_size
        if not self.job.config.parallelism.disable_loss_parallel:
            logits //= self.job.degrees.tp
        return self.move_s((8 if self.job.config.compile.covers("loss") else 26) * logits)

    # ----- Communication -----

    def tensor_parallel_s(self, share: Share) -> float:
        """Seconds in which all blocks gather two inputs of their linears [N, D] and scatter two
        sums, and the reverse in the backward pass. Activation checkpointing repeats the gathers of
        the forward pass, and the sums if it does not keep them."""
        nbytes = share.residual * share.tp
        one = self.gather_s(nbytes, share.tp)
        inputs, gradients = (
            sum(one / (share.width if share.gathers_float8(each) else 1) for each in tensors)
            for tensors in (("attention_norm", "ffn_norm"), ("attention", "gated"))
        )
        sums = 2 * (one + self.move_s(2 * nbytes))  # from copies that are ordered by ranks
        again = inputs + (0.0 if share.config.activation_checkpoint.keeps_by_op else sums)

        # Async collectives hide a part, unless the matmuls beside them scale rows afterwards.
        in_rows = share.float8_linears and not share.config.float8.recipe.gathers_float8
        hides = share.config.parallelism.enable_async_tensor_parallel and not in_rows
        left = 1 - (self.rates.async_tensor_parallel if hides else 0.0)
        n_layers = share.model.n_layers
        return left * (n_layers * (inputs + gradients + 2 * sums) + self.checkpointed * again)

    def context_parallel_s(self) -> float:
        """Seconds in which keys and values of whole sequences are gathered and their gradients
        reduced, with the copies around them. Activation checkpointing keeps none of them."""
        cp, tp, args = self.job.degrees.cp, self.job.degrees.tp, self.job.model_args
        whole = 2 * 2 * cp * self.job.microbatch_tokens * args.kv_dim // tp  # bytes
        one_way = self.gather_s(whole, cp, tp) + self.move_s(3 * whole)
        return (2 * args.n_layers + self.checkpointed) * one_way


# ----- A step -----


@dataclass(frozen=True)
class StepTime:
    """Seconds of an optimizer step on the device that computes longest."""

    compute_s: Mapping[str, float]  # by part
    waits_s: Mapping[str, float]  # in which the device computes nothing, by what it waits for
    hidden_s: float  # FSDP's collectives beside computation, which take no time themselves

    @property
    def step_s(self) -> float:
        """Seconds of the step: all that is computed and waited for."""
        return sum(self.compute_s.values()) + sum(self.waits_s.values())


def time_step(
    roofline: Roofline, linears: Sequence[LinearChoice], in_float8: Collection[LinearChoice]
) -> StepTime:
    """Time a step of a model of `linears`, of which some train `in_float8`."""
    job, rates, n_layers = roofline.job, roofline.rates, roofline.job.model_args.n_layers
    kinds = {each.kind for each in in_float8}
    shares = [Share(job, kinds, rank=rank) for rank in range(job.degrees.pp)]
    n, slow = shares[0].microbatches, rates.in_training

    # Seconds of a microbatch in all blocks, and of the projection and the loss.
    in_blocks = [each for each in linears if each.kind != OUTPUT]
    output = [each for each in linears if each.kind == OUTPUT]
    compute = {
        "linears": slow * roofline.linears_s(in_blocks, in_float8),
        "attention": slow * roofline.attention_s(),
        "pointwise": slow * roofline.pointwise_s(),
    }
    waits = {
        TENSOR: roofline.tensor_parallel_s(shares[0]) if job.degrees.tp > 1 else 0.0,
        CONTEXT: roofline.context_parallel_s() if job.degrees.cp > 1 else 0.0,
    }
    blocks_s = sum(compute.values()) + sum(waits.values())
    head_s = slow * (roofline.linears_s(output, in_float8) + roofline.loss_s())

    # The rank that computes longest, and its part of the blocks.
    def microbatch_s(share: Share) -> float:
        return share.blocks / n_layers * blocks_s + (head_s if share.has_output else 0.0)

    share = max(shares, key=microbatch_s)
    part = share.blocks / n_layers
    exposed, hidden = _sharded_s(roofline, share, n * part * blocks_s)
    compute_s = {name: n * part * each for name, each in compute.items()}
    compute_s["output and loss"] = n * head_s if share.has_output else 0.0
    compute_s["weights and optimizer"] = slow * _update_s(roofline, share)
    if job.config.optimizer.name == "Muon":
        compute_s["Newton-Schulz"] = slow * _newton_schulz_s(roofline, share)
    compute_s["beside communication"] = rates.overlap_slowdown * hidden

    # What it waits for. Each of p ranks with v stages pauses for (p - 1) / v microbatches (arXiv
    # 2104.04473, section 2.2).
    waits_s = {name: n * part * each for name, each in waits.items()} | {SHARDING: exposed}
    pauses = (len(shares) - 1) / len(job.stages)
    waits_s[PIPELINE] = pauses * sum(map(microbatch_s, shares))
    host_s = (n + 1) * share.blocks * rates.host_seconds_per_block  # the update is as long as one
    waits_s[HOST] = max(0.0, host_s - sum(compute_s.values()) - sum(waits_s.values()))
    return StepTime(compute_s, waits_s, hidden)


def _update_s(roofline: Roofline, share: Share) -> float:
    """Seconds of clipping and the optimizer, and of a step's copies of weights and gradients.

    Copies read and write what is gathered, and take 10 bytes of each weight of a shard; a gradient
    takes 6 to be cast, or 10 to be added to another."""
    weights, fsdp = share.weights, roofline.job.degrees.fsdp
    gathered = share.gathers * (2 * share.gathered + 10 * weights / fsdp)
    added = share.microbatches - share.reductions
    gradients = (6 * share.reductions + 10 * added) * weights
    update = (6 * share.weight_width + 2 * share.state_width) * weights / fsdp
    return roofline.move_s(update + gathered + gradients)


def _newton_schulz_s(roofline: Roofline, share: Share) -> float:
    """Seconds of Muon's iterations in bf16, and of the exchanges around them, whatever the recipe.

    Each of five iterations on [M, N], M <= N, has 2 (2 M^2 N + M^3) FLOPs. In a round each of the
    ranks that shard a matrix takes one."""
    seconds, n = 0.0, share.blocks * len(BLOCK_LINEARS)
    for sizes in block_linear_shapes(share.model).values():
        few, many = sorted(sizes)
        matmuls = (few, few, many), (few, few, few), (few, many, few)
        seconds += 5 * share.blocks * sum(roofline.gemm_s(*matmul) for matmul in matmuls)
    ranks = roofline.job.degrees.fsdp * share.tp
    exchanged = 2 * roofline.gather_s(2 * share.matrices / roofline.job.degrees.fsdp, ranks)
    return seconds * math.ceil(n / ranks) / n + exchanged


def _sharded_s(roofline: Roofline, share: Share, blocks_s: float) -> tuple[float, float]:
    """Seconds of FSDP's collectives in a step, with the sums over replicas: those that the device
    waits for, and those beside the computation of all blocks, `blocks_s`. Nothing hides the
    collectives of one block of a step: the first gather and the last reduction."""
    degrees = roofline.job.degrees
    reduced = share.reduce_width * share.weights / (share.blocks + 1)
    gather_s = roofline.gather_s(share.gathered / (share.blocks + 1), degrees.fsdp, degrees.tp)
    reduce_s = roofline.gather_s(reduced, degrees.fsdp, degrees.tp)
    reduce_s += 2 * roofline.gather_s(
        reduced / degrees.fsdp, degrees.dp_replicate, degrees.tp * degrees.fsdp
    )
    one = share.gathers * gather_s + share.reductions * reduce_s
    hidden = min(share.blocks * one, blocks_s)
    return (share.blocks + 1) * one - hidden, hidden
