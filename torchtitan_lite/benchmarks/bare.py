"""The trainer against the smallest honest PyTorch loop: the same model, data, optimizer, precision
and compilation, and nothing else. A hub."""

import copy
import gc
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from torchtitan_lite.benchmarks.comparable import FSDP_ALONE, check_only
from torchtitan_lite.benchmarks.estimates import Ratios, measure_pairs
from torchtitan_lite.benchmarks.loss import plain_loss
from torchtitan_lite.benchmarks.paired import time_steps
from torchtitan_lite.benchmarks.processes import read_records
from torchtitan_lite.build import build_batches
from torchtitan_lite.checkpoint.manifest import NEW_RUN
from torchtitan_lite.collectives import on_rank0
from torchtitan_lite.config import Config, resolve_batch
from torchtitan_lite.data.prefetch import Prefetcher
from torchtitan_lite.data.tokenizer import build_tokenizer
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.float8.convert import build_scale_hook, resolve_emulate
from torchtitan_lite.lr_schedule import lr_factor
from torchtitan_lite.meta import build_meta_model, device_rates, resolve_model_args
from torchtitan_lite.metrics.devices import lookup_device
from torchtitan_lite.models.attention import attention_backend
from torchtitan_lite.models.flavors import ModelArgs
from torchtitan_lite.models.init import init_weights
from torchtitan_lite.models.llama3 import Transformer
from torchtitan_lite.parallel.activation_checkpoint import apply_activation_checkpointing
from torchtitan_lite.trainer import Trainer

BareLoss = Literal["plain", "ours"]
"""The loss of the bare loop: as anyone would write it, or the trainer's."""
BARE = {
    "optimizer.implementation": ("fused",),
    "parallelism.fsdp_reshard_after_forward": ("default",),
}
"""The values, by key, that the bare loop has besides those of FSDP_ALONE."""
WARM_UP_STEPS = 3
"""At least, of each loop, before a block is timed: they compile, and fill what is allocated
once."""


def check_comparable(config: Config, *, world_size: int) -> None:
    """Raise ConfigError for what the bare loop has not: it shards, and that is all."""
    check_only(config, {**FSDP_ALONE, **BARE}, other="the bare loop")
    accum_steps = resolve_batch(config.training, dp_degree=world_size).grad_accum_steps
    if accum_steps > 1:
        raise ConfigError(
            f"[training] global_batch_size = {config.training.global_batch_size}: a step has {accum_steps} "
            "microbatches a rank, and the bare loop one; set it to -1."
        )


def build_bare_model(config: Config, args: ModelArgs, *, device: torch.device) -> Transformer:
    """The trainer's model with the trainer's weights, sharded as PyTorch's own examples do: each
    block, then the rest."""
    training, float8 = config.training, config.float8
    dtype = getattr(torch, training.mixed_precision_param)
    spec = lookup_device(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    model = build_meta_model(
        config,
        args,
        tp_degree=1,
        emulate=float8.enable_float8_linear and resolve_emulate(float8, device=device),
        fused_attention=attention_backend(args, tp_degree=1, dtype=dtype, device=device) != "MATH",
        rates=device_rates(spec, config.metrics),
    ).model
    apply_activation_checkpointing(model, config.activation_checkpoint)
    shard = partial(
        fully_shard,
        mesh=init_device_mesh(device.type, (dist.get_world_size(),)),
        mp_policy=MixedPrecisionPolicy(
            param_dtype=dtype,
            reduce_dtype=getattr(torch, training.mixed_precision_reduce),
            cast_forward_inputs=False,  # the rotary tables stay float32
        ),
    )
    for block in model.layers:
        if config.compile.covers("model"):
            block.compile(fullgraph=True)
        shard(block)
    shard(model)
    model.to_empty(device=device)
    init_weights(model, seed=config.debug.seed, buffer_device=device)
    return model


class BareLoop:
    """A training loop without metrics, guards, a watchdog, checkpoints or anything else that a run
    may need."""

    def __init__(self, trainer: Trainer, *, loss: BareLoss) -> None:
        """Made to train what `trainer` trains, on the same batches, which a prefetcher of its own
        assembles."""
        config, self.device = trainer.config, trainer.device
        training, optimizer, world_size = config.training, config.optimizer, dist.get_world_size()
        tokenizer = build_tokenizer(config.model.tokenizer_path)
        args = resolve_model_args(config, tokenizer)
        batches, _ = build_batches(
            config,
            tokenizer,
            resolve_batch(training, dp_degree=world_size),
            vocab_size=args.vocab_size,
            dp_rank=dist.get_rank(),
            dp_degree=world_size,
            progress=NEW_RUN,
        )
        self.batches = Prefetcher(batches, device=self.device)
        self.model = build_bare_model(config, args, device=self.device)
        self.max_norm = training.max_norm
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=optimizer.lr,
            betas=(optimizer.beta1, optimizer.beta2),
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
            fused=True,
        )
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer,
            lambda done: lr_factor(
                done + 1,
                training_steps=trainer.last_step,
                **config.lr_scheduler.model_dump(),
            ),
        )
        self.scale_hook = build_scale_hook(self.model, float8=config.float8)
        self.scale_hook()
        self.backward = self._backward_of(trainer, loss=loss)
        self.losses: list[Tensor] = []
        """Of each step, this rank's mean."""

    def _backward_of(
        self, trainer: Trainer, *, loss: BareLoss
    ) -> Callable[[Tensor, Tensor], Tensor]:
        """What takes tokens and labels, has the gradients of their mean loss computed, and returns
        it."""
        if loss == "ours":
            with_our_loss = copy.copy(
                trainer
            )  # its loss is a method, and reads the model where it is called
            with_our_loss.model = self.model
            scale = 1 / trainer.config.training.microbatch_tokens
            return lambda tokens, labels: with_our_loss.loss(tokens, labels, scale=scale)
        loss_fn = torch.compile(plain_loss) if trainer.config.compile.covers("loss") else plain_loss

        def backward(tokens: Tensor, labels: Tensor) -> Tensor:
            mean = loss_fn(self.model(tokens), labels)
            mean.backward()
            return mean.detach()

        return backward

    def step(self) -> None:
        """Train on the next batch."""
        tokens, labels = (t.to(self.device, non_blocking=True) for t in next(self.batches))
        self.losses.append(self.backward(tokens, labels))
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        self.scale_hook()

    def mean_losses(self) -> list[float]:
        """Of each step, the mean over the ranks. A collective call."""
        losses = torch.stack(self.losses).float()
        dist.all_reduce(losses)
        return (losses / dist.get_world_size()).tolist()


@dataclass(frozen=True)
class BareCost:
    """What the trainer costs beside the bare loop."""

    ratios: Ratios
    """The trainer's tokens per second over the bare loop's."""
    step_s: float
    """Median seconds of a step of the bare loop."""
    loss_gap: float
    """The largest difference of their losses at the same step, relative: that they do the same
    work."""

    def __str__(self) -> str:
        """The figures, in a few lines."""
        return (
            f"the trainer's tokens/s over the bare loop's: {self.ratios}\n"
            f"a step of the bare loop takes {self.step_s:.4f} s; the losses of the two differ by {self.loss_gap:.1e} "
            "at most, relative"
        )


def measure_bare_cost(
    trainer: Trainer, *, loss: BareLoss, pairs: int, block_steps: int
) -> BareCost:
    """The trainer against a bare loop with `loss`, from `pairs` pairs of blocks of steps, in
    alternating order. A collective call; the trainer logs each step, and has trained none yet."""
    bare = BareLoop(trainer, loss=loss)
    gc.disable()  # of both alike, as the trainer does; its own collections, now and then, are in its time
    steps = iter(range(trainer.first_step, trainer.last_step + 1))

    def ours() -> None:
        trainer.advance(next(steps))

    timed = partial(time_steps, device=trainer.device)
    for step in (ours, bare.step):
        timed(step, warm_up_steps(block_steps))
    ours_s, bare_s = measure_pairs(
        partial(timed, ours, block_steps), partial(timed, bare.step, block_steps), pairs=pairs
    )
    trainer.metrics.settle()
    bare.batches.close()
    losses = bare.mean_losses()
    return BareCost(
        Ratios.of(bare_s, ours_s),
        statistics.median(bare_s) / block_steps,
        on_rank0(lambda: _loss_gap(trainer, losses)),
    )


def warm_up_steps(block_steps: int) -> int:
    """Steps that each loop takes before blocks of `block_steps` are timed."""
    return max(WARM_UP_STEPS, block_steps)


def _loss_gap(trainer: Trainer, losses: list[float]) -> float:
    """The largest relative difference of `losses` to those that the trainer has logged."""
    logged = [record["loss"] for record in read_records(trainer.path)]
    return max(abs(ours / bare - 1) for ours, bare in zip(logged, losses, strict=True))
