"""Compare the trainer with a bare PyTorch loop that trains the same model on the same batches.

python scripts/benchmarks/bare_loop.py --job.config_file train_configs/debug_model.toml [options]

The loop below is FSDP2, the loss, gradient clipping, fused AdamW and a line of log a step. Runs of
both take turns. Prints the ratios of their speed, start and memory, and the largest difference of
their losses. All other options are overrides of the config, as in training.
"""

import argparse
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import (
    ALIKE,
    STEP_LINE,
    Figures,
    check_values,
    describe_machine,
    format_comparison,
    measure_pairs,
    run_config,
    tokens_a_step,
)
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from torchtitan_lite.base.errors import ConfigError
from torchtitan_lite.base.terminal import run_script
from torchtitan_lite.catalog.flavors import ModelArgs
from torchtitan_lite.checkpoint.manifest import NEW_RUN
from torchtitan_lite.config import Config, load_config, resolve_batch
from torchtitan_lite.models.init import init_weights
from torchtitan_lite.models.llama3 import Transformer
from torchtitan_lite.models.loss import CrossEntropy
from torchtitan_lite.parallel.activation_checkpoint import apply_activation_checkpointing
from torchtitan_lite.parallel.mesh import set_determinism
from torchtitan_lite.planner.prepare import prepare_job
from torchtitan_lite.run.process_group import end_process, init_distributed
from torchtitan_lite.training.build import build_batches

BARE = {
    **ALIKE,
    "optimizer.implementation": ("fused",),
    "parallelism.fsdp_reshard_after_forward": ("default",),
    "float8.enable_fsdp_float8_all_gather": (False,),
    "float8.filter_fqns": ((),),
    "float8.convert_output": (False,),
}
"""Values, by key, that the bare loop implements."""
SETTINGS = (
    *("--metrics.log_freq=1", "--metrics.enable_tensorboard", "--float8.log_numerics_freq=0"),
    *("--checkpoint.enable=false", "--validation.enable=false", "--training.epochs="),
)
"""Overrides of both runs: train, and log every step."""


def check_comparable(config: Config, *, processes: int) -> None:
    """Raise ConfigError for what the bare loop does not implement."""
    check_values(config, BARE, other="the bare loop")
    if resolve_batch(config.training, config.parallelism, dp_degree=processes).grad_accum_steps > 1:
        size = config.training.global_batch_size
        raise ConfigError(
            f"[training] global_batch_size = {size} needs gradient accumulation, which the bare "
            "loop does not have; set it to -1."
        )


def build_model(config: Config, args: ModelArgs, device: torch.device) -> Transformer:
    """Build the trainer's model with the trainer's weights by PyTorch's and torchao's own API."""
    with torch.device("meta"):
        model = Transformer(args)
    if config.float8.enable_float8_linear:
        # Slow to import, and not needed in bf16.
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        recipe = Float8LinearConfig.from_recipe_name(config.float8.recipe_name)
        emulate = device.type == "cpu"
        convert_to_float8_training(
            model,
            config=replace(recipe, emulate=emulate),
            module_filter_fn=lambda module, name: name != "output",
        )
    apply_activation_checkpointing(model, config.activation_checkpoint)

    # Each block is sharded, then the rest. The rotary tables stay in float32.
    training = config.training
    policy = MixedPrecisionPolicy(
        param_dtype=getattr(torch, training.mixed_precision_param),
        reduce_dtype=getattr(torch, training.mixed_precision_reduce),
        cast_forward_inputs=False,
    )
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for block in model.layers.values():
        if config.compile.covers("model"):
            block.compile(fullgraph=True)
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)

    model.to_empty(device=device)
    init_weights(model, seed=config.debug.seed, buffer_device=device)
    return model


def plain_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy of `labels` [B, S] under `logits` [B, S, V], as anyone would write it."""
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def build_loss(
    config: Config, model: Transformer, *, ours: bool
) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a function of tokens and labels: the plain loss, or the trainer's."""
    compiled = config.compile.covers("loss")
    if ours:
        tokens = config.training.local_batch_size * config.training.seq_len
        fused = partial(CrossEntropy(compiled=compiled), scale=1 / tokens)
        return lambda tokens, labels: model(tokens, partial(fused, labels=labels))
    plain = torch.compile(plain_loss) if compiled else plain_loss
    return lambda tokens, labels: plain(model(tokens), labels)


def train(config: Config, *, our_loss: bool) -> None:
    """Train in the processes that torchrun started, and print each step's loss on rank 0."""
    set_determinism(config.debug)
    device = init_distributed(config.comm)
    job, tokenizer = prepare_job(config, device=device)
    batches, _ = build_batches(job, tokenizer, dp_rank=dist.get_rank(), progress=NEW_RUN)
    model = build_model(config, job.model_args, device)
    loss_fn = build_loss(config, model, ours=our_loss)
    settings = config.optimizer
    optimizer = torch.optim.AdamW(
        model.parameters(),
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        fused=True,
    )

    for step, (tokens, labels) in enumerate(batches, start=1):
        factor = config.lr_scheduler.factor(step, training_steps=config.training.steps)
        for group in optimizer.param_groups:
            group["lr"] = settings.lr * factor
        loss = loss_fn(tokens.to(device), labels.to(device))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.training.max_norm)
        optimizer.step()
        optimizer.zero_grad()

        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if dist.get_rank() == 0:
            print(f"step {step}  loss {mean.item() / dist.get_world_size():.8f}", flush=True)
    end_process(0)


def compare(config: Config, *, processes: int, pairs: int, our_loss: bool) -> str:
    """Run both in pairs, and return their ratios and the largest difference of their losses."""
    loop = [str(Path(__file__)), "--our-loss"] if our_loss else [str(Path(__file__))]
    tokens = tokens_a_step(config, processes=processes)
    gaps: list[float] = []
    losses: list[float] = []

    def run_ours() -> Figures:
        run, records = run_config(config, processes=processes)
        losses[:] = [record["loss"] for record in records]
        return Figures.of(run, tokens=tokens)

    def run_bare() -> Figures:
        run, _ = run_config(config, processes=processes, program=loop)
        matches = [STEP_LINE.search(line) for _, line in run.lines]
        bare = [float(match[2]) for match in matches if match]
        gaps.extend(abs(a / b - 1) for a, b in zip(losses, bare, strict=True))
        return Figures.of(run, tokens=tokens)

    run_ours()  # not counted: it makes the token store
    ours, bare = measure_pairs(run_ours, run_bare, pairs=pairs)
    return f"{format_comparison(ours, 'bare loop', bare)}\nlosses differ by {max(gaps):.1e} at most"


def main(argv: list[str]) -> None:
    """Compare; or, under torchrun, be the bare loop. Raises RunError."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=2, help="of each run (default: 2)")
    parser.add_argument("--pairs", type=int, default=8, help="of runs, at least 2 (default: 8)")
    parser.add_argument(
        "--our-loss", action="store_true", help="give the bare loop the trainer's loss too"
    )
    options, overrides = parser.parse_known_args(argv)

    # In a process that torchrun started.
    if "RANK" in os.environ:
        config = load_config(overrides, world_size=int(os.environ["WORLD_SIZE"]))
        train(config, our_loss=options.our_loss)

    if options.pairs < 2:
        raise ConfigError(f"--pairs {options.pairs} must be at least 2")
    config = load_config([*overrides, *SETTINGS], world_size=options.processes)
    check_comparable(config, processes=options.processes)
    print(describe_machine())
    print(compare(config, **vars(options)))


if __name__ == "__main__":
    run_script(main)
