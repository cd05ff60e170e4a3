"""Numbers that follow from the config: dimensions, degrees, batch sizes, shares of datasets."""

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from torchtitan_lite.base.errors import ConfigError
from torchtitan_lite.base.jsonfile import parse_toml
from torchtitan_lite.base.logger import logger
from torchtitan_lite.catalog.flavors import FLAVORS, ModelArgs, RopeScaling

from .keys import did_you_mean, show
from .sections import Config, DatasetConfig, ModelConfig, ParallelismConfig, TrainingConfig
from .types import MOST

AUTO = "auto"  # in filter_fqns: keep the linears that float8 would not make faster
MAX_PERIOD = 100_000
"""Longest period, in samples, after which a mix of datasets repeats the order of its turns."""


@dataclass(frozen=True)
class ParallelDegrees:
    """Size of each dimension of the device mesh."""

    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int
    pp: int = 1

    @property
    def dp(self) -> int:
        """Number of data-parallel ranks. Each of them sees different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def fsdp(self) -> int:
        """Number of ranks over which FSDP shards the weights."""
        return self.dp_shard * self.cp

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.pp * self.dp * self.cp * self.tp


@dataclass(frozen=True)
class BatchSizes:
    """Sequences per forward pass of a rank (in a pipeline, pipeline_parallel_microbatch_size),
    sequences per optimizer step, and passes per step."""

    local_batch_size: int
    global_batch_size: int
    grad_accum_steps: int


def resolve_model(model: ModelConfig) -> ModelArgs:
    """Return the dimensions of the flavor as changed by the other keys; without a flavor, theirs.

    `vocab_size` is 0 if it is the tokenizer's; `max_seq_len` is MOST with rotary embeddings other
    than the flavor's. Raises ConfigError for an unknown flavor and dimensions that do not fit."""
    given = model.overrides
    if (scaling := given.get("rope_scaling")) is not None:
        given["rope_scaling"] = RopeScaling(**scaling) if scaling["factor"] > 1 else None
    if {"rope_scaling", "rope_theta"} & given.keys():
        given["max_seq_len"] = MOST

    if model.flavor in FLAVORS:
        args = replace(FLAVORS[model.flavor], **given)
    elif model.flavor:
        raise ConfigError(
            f"[model] flavor = {show(model.flavor)} must be one of {', '.join(map(show, FLAVORS))}"
            f', or "" for none{did_you_mean(model.flavor, FLAVORS)}'
        )
    else:
        needed = ("dim", "n_layers", "n_heads", "ffn_dim")
        if missing := [key for key in needed if key not in given]:
            raise ConfigError(
                f'[model] flavor = "" has no dimensions of its own; set {", ".join(missing)} too'
            )
        defaults = {"n_kv_heads": given["n_heads"], "vocab_size": 0, "max_seq_len": MOST}
        args = ModelArgs(**defaults | given)
    _check_dimensions(args)
    return args


def _check_dimensions(args: ModelArgs) -> None:
    """Raise ConfigError unless the dimensions fit each other."""
    if args.dim % (2 * args.n_heads):
        raise ConfigError(
            f"[model] dim = {args.dim} is not a multiple of 2 * n_heads = {2 * args.n_heads}, as "
            f"rotary embeddings need; use {multiples_near(args.dim, 2 * args.n_heads)}"
        )
    if args.n_heads % args.n_kv_heads:
        raise ConfigError(
            f"[model] n_kv_heads = {args.n_kv_heads} does not divide n_heads = {args.n_heads}; "
            f"use {math.gcd(args.n_heads, args.n_kv_heads)}, or {args.n_heads}"
        )
    scaling = args.rope_scaling
    if scaling is not None and scaling.low_freq_factor >= scaling.high_freq_factor:
        raise ConfigError(
            f"[model] rope_scaling has low_freq_factor = {scaling.low_freq_factor}, which must be "
            f"below high_freq_factor = {scaling.high_freq_factor}; Llama 3.1 has 1.0 and 4.0"
        )


def resolve_degrees(parallelism: ParallelismConfig, *, world_size: int) -> ParallelDegrees:
    """Return the degrees, with -1 replaced by the number of ranks left. Raises ConfigError unless
    their product is the world size."""
    names = ("data_parallel_replicate", "pipeline_parallel", "context_parallel", "tensor_parallel")
    degrees = {f"{name}_degree": getattr(parallelism, f"{name}_degree") for name in names}
    product = math.prod(degrees.values())
    left, remainder = divmod(world_size, product)
    shown = f"[parallelism] {' * '.join(degrees)} = {' * '.join(map(str, degrees.values()))}"
    if remainder:
        raise ConfigError(
            f"{shown} = {product} does not divide the world size, {world_size}; "
            f"run {multiples_near(world_size, product)} processes"
        )
    if (shard := parallelism.data_parallel_shard_degree) not in (-1, left):
        raise ConfigError(
            f"{shown} = {product} leaves {left} of {world_size} processes, "
            f"not data_parallel_shard_degree = {shard}; set that to {left} or -1"
        )
    replicate, pp, cp, tp = degrees.values()
    return ParallelDegrees(replicate, left, cp, tp, pp)


def resolve_batch(
    training: TrainingConfig, parallelism: ParallelismConfig, *, dp_degree: int
) -> BatchSizes:
    """Return the batch sizes, with a global batch size of -1 replaced. Raises ConfigError unless
    it is a whole number of local batches, and a local batch of a pipeline's microbatches."""
    local, total = training.local_batch_size, training.global_batch_size
    one_pass = local * dp_degree
    if total == -1:
        total = one_pass
    if total == 0 or total % one_pass:
        raise ConfigError(
            f"[training] global_batch_size = {total} is not a multiple of local_batch_size times "
            f"the data-parallel degree of [parallelism] = {local} * {dp_degree} = {one_pass}; "
            f"use {multiples_near(total, one_pass)}"
        )

    # A pipeline works on its microbatches one after the other, as on accumulated gradients.
    if parallelism.pipeline_parallel_degree > 1:
        size = parallelism.pipeline_parallel_microbatch_size
        if local % size:
            raise ConfigError(
                f"[training] local_batch_size = {local} is not a multiple of [parallelism] "
                f"pipeline_parallel_microbatch_size = {size}; use {multiples_near(local, size)}"
            )
        local = size
    return BatchSizes(local, total, total // (local * dp_degree))


def keep_batch(config: Config, *, saved: str, saved_dp: int, world_size: int) -> Config:
    """Return the config with the global batch size of a checkpoint, if it has none and the
    processes would make another one. `saved` is the checkpoint's config, which another version may
    have written, and `saved_dp` its data-parallel degree."""
    before = TrainingConfig().model_dump() | parse_toml(saved.encode()).get("training", {})
    total = before["global_batch_size"]
    if total == -1:
        total = before["local_batch_size"] * saved_dp

    training = config.training
    dp = resolve_degrees(config.parallelism, world_size=world_size).dp
    if training.global_batch_size != -1 or training.local_batch_size * dp == total:
        return config
    logger.info(f"[training] global_batch_size = -1 keeps the checkpoint's, {total}")
    training = training.model_copy(update={"global_batch_size": total})
    return config.model_copy(update={"training": training})


def resolve_shares(datasets: Sequence[DatasetConfig]) -> tuple[int, ...]:
    """Return the weights of the datasets as the smallest whole numbers in that proportion; (1,)
    without a list. Raises ConfigError if they add up to more than MAX_PERIOD."""
    weights = [Fraction(str(dataset.weight)) for dataset in datasets] or [Fraction(1)]
    common = math.lcm(*(weight.denominator for weight in weights))  # 0.3 is exactly 3/10
    whole = [int(weight * common) for weight in weights]
    shares = tuple(number // math.gcd(*whole) for number in whole)

    if sum(shares) > MAX_PERIOD:
        raise ConfigError(
            f"[training] datasets: the weights {', '.join(str(each.weight) for each in datasets)} "
            f"are as {' : '.join(map(str, shares))} in whole numbers, whose sum must be at most "
            f"{MAX_PERIOD:,}; round them"
        )
    return shares


def multiples_near(value: int, step: int) -> str:
    """Return the multiples of `step` on both sides of `value`, such as "32 or 64"."""
    below = max(value // step, 1) * step
    return f"{below} or {below + step}"


def matches(pattern: str, name: str) -> bool:
    """Return whether the parts of a pattern of filter_fqns follow each other in `name`."""
    return f".{pattern}." in f".{name}."


def matches_parameter(part: str, name: str) -> bool:
    """Return whether `part` follows in the `name` of a parameter; "norm" means every norm."""
    return matches(part, name) or (part == "norm" and "_norm." in name)


def unmatched_filters(patterns: Iterable[str], linears: Collection[str]) -> list[str]:
    """Return a message for each pattern of filter_fqns that matches none of the `linears`."""
    last_parts = ", ".join(sorted({name.rpartition(".")[2] for name in linears}))
    return [
        f"[float8] filter_fqns holds {pattern!r}, which matches no linear; use parts of the names "
        f'{last_parts}, layers.0 and the like, or "auto" for what float8 would slow down.'
        for pattern in patterns
        if pattern != AUTO and not any(matches(pattern, name) for name in linears)
    ]
