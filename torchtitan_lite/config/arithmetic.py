"""Numbers that follow from the config: dimensions of the model, parallel degrees, batch sizes,
shares of a dataset mix."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from torchtitan_lite.base.errors import ConfigError
from torchtitan_lite.catalog.flavors import FLAVORS, ModelArgs, RopeScaling, find_flavor

from .keys import did_you_mean, show
from .sections import DatasetConfig, ModelConfig, ParallelismConfig, TrainingConfig
from .types import MOST

MAX_PERIOD = 100_000
"""Longest period, in samples, after which a mix of datasets repeats the order of its turns."""
MASKED_FLAVOR = re.compile(r"(.+)_(?:flex|varlen)(?:_attn)?")
"""torchtitan's flavors with attention within documents."""


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
    """Sequences per forward pass of a rank, sequences per optimizer step, and passes per step.

    With pipeline parallelism, a pass is one of pipeline_parallel_microbatch_size sequences."""

    local_batch_size: int
    global_batch_size: int
    grad_accum_steps: int


def resolve_model(model: ModelConfig) -> ModelArgs:
    """Return the dimensions of the flavor as changed by the other keys; without a flavor, theirs.

    `vocab_size` is 0 if it is the tokenizer's. `max_seq_len` is the longest sequence that the
    rotary embeddings are made for; with other ones than the flavor's there is no limit. Raises
    ConfigError for an unknown flavor and for dimensions that fit no model.
    """
    given = model.overrides
    if (scaling := given.get("rope_scaling")) is not None:
        given["rope_scaling"] = RopeScaling(**scaling) if scaling["factor"] > 1 else None
    if {"rope_scaling", "rope_theta"} & given.keys():
        given["max_seq_len"] = MOST

    if model.flavor:
        args = replace(_find_flavor(model.flavor), **given)
    else:
        needed = ("dim", "n_layers", "n_heads", "ffn_dim")
        if missing := [key for key in needed if key not in given]:
            raise ConfigError(
                f'[model] flavor = "" has no dimensions of its own; set {", ".join(missing)} too'
            )
        defaults = {"n_kv_heads": given["n_heads"], "vocab_size": 0, "max_seq_len": MOST}
        args = ModelArgs(**defaults | given)

    # The dimensions must fit each other.
    if args.dim % (2 * args.n_heads):
        raise ConfigError(
            f"[model] dim = {args.dim} is not a multiple of 2 * n_heads = {2 * args.n_heads}, and "
            "the rotary embedding turns pairs of a head's dimensions; "
            f"use dim = {multiples_near(args.dim, 2 * args.n_heads)}"
        )
    if args.n_heads % args.n_kv_heads:
        raise ConfigError(
            f"[model] n_kv_heads = {args.n_kv_heads} does not divide n_heads = {args.n_heads}; "
            f"use n_kv_heads = {math.gcd(args.n_heads, args.n_kv_heads)}, or {args.n_heads}"
        )
    scaling = args.rope_scaling
    if scaling is not None and scaling.low_freq_factor >= scaling.high_freq_factor:
        raise ConfigError(
            f"[model] rope_scaling has low_freq_factor = {scaling.low_freq_factor}, which must be "
            f"below high_freq_factor = {scaling.high_freq_factor}; Llama 3.1 has 1.0 and 4.0"
        )
    return args


def _find_flavor(name: str) -> ModelArgs:
    """Return the dimensions of a flavor. Raises ConfigError if there is none of that name."""
    if (flavor := find_flavor(name)) is not None:
        return flavor
    masked = MASKED_FLAVOR.fullmatch(name)
    if masked and find_flavor(masked[1]):
        raise ConfigError(
            f"[model] flavor = {show(name)}, of torchtitan, keeps attention within documents; set "
            f"flavor = {show(masked[1])} and [training] document_mask = true"
        )
    raise ConfigError(
        f"[model] flavor = {show(name)} must be one of {', '.join(map(show, FLAVORS))}, "
        f'or "" for none{did_you_mean(name, FLAVORS)}'
    )


def resolve_degrees(parallelism: ParallelismConfig, *, world_size: int) -> ParallelDegrees:
    """Return the degrees, with -1 replaced by the number of ranks left.

    Raises ConfigError unless the product of the degrees is the world size.
    """
    names = ("data_parallel_replicate", "pipeline_parallel", "context_parallel", "tensor_parallel")
    degrees = {f"{name}_degree": getattr(parallelism, f"{name}_degree") for name in names}
    shard = parallelism.data_parallel_shard_degree

    fixed = math.prod(degrees.values())
    left, remainder = divmod(world_size, fixed)
    if remainder:
        raise ConfigError(
            f"[parallelism] {_show_product(degrees)} does not divide the world size, {world_size}; "
            f"run {multiples_near(world_size, fixed)} processes"
        )
    if shard not in (-1, left):
        degrees = {"data_parallel_shard_degree": shard, **degrees}
        raise ConfigError(
            f"[parallelism] {_show_product(degrees)}, but the run has {world_size} processes; "
            f"set data_parallel_shard_degree to {left} or -1"
        )
    replicate, pp, cp, tp = degrees.values()
    return ParallelDegrees(replicate, left, cp, tp, pp)


def _show_product(factors: Mapping[str, int]) -> str:
    """Show a product of the values of keys: `a * b = 2 * 3 = 6`."""
    values = factors.values()
    return f"{' * '.join(factors)} = {' * '.join(map(str, values))} = {math.prod(values)}"


def sequence_parts(*, cp: int, tp: int) -> int:
    """Return the number that divides seq_len: each rank of context parallelism has two chunks of a
    sequence, and tensor parallelism splits each of them."""
    return tp if cp == 1 else 2 * cp * tp


def resolve_batch(
    training: TrainingConfig, parallelism: ParallelismConfig, *, dp_degree: int
) -> BatchSizes:
    """Return the batch sizes, with a global batch size of -1 replaced.

    Raises ConfigError if the global batch is not a whole number of local batches, or a local batch
    of a pipeline's microbatches.
    """
    local, total = training.local_batch_size, training.global_batch_size
    one_pass = local * dp_degree
    if total == -1:
        total = one_pass
    if total == 0 or total % one_pass:
        raise ConfigError(
            f"[training] global_batch_size = {total} is not a multiple of "
            f"local_batch_size * dp_degree = {local} * {dp_degree} = {one_pass}; "
            f"use {multiples_near(total, one_pass)}"
        )
    if parallelism.pipeline_parallel_degree > 1:
        size = parallelism.pipeline_parallel_microbatch_size
        if local % size:
            raise ConfigError(
                f"[training] local_batch_size = {local} is not a multiple of [parallelism] "
                f"pipeline_parallel_microbatch_size = {size}; use {multiples_near(local, size)}"
            )
        local = size
    return BatchSizes(local, total, total // (local * dp_degree))


def resolve_shares(datasets: Sequence[DatasetConfig]) -> tuple[int, ...]:
    """Return the weights of the datasets as the smallest whole numbers in that proportion.

    Without a list of datasets there is one dataset, and the result is (1,). Raises ConfigError if
    the numbers add up to more than MAX_PERIOD.
    """
    weights = [Fraction(str(dataset.weight)) for dataset in datasets] or [Fraction(1)]
    common = math.lcm(*(weight.denominator for weight in weights))  # 0.3 is exactly 3/10
    whole = [int(weight * common) for weight in weights]
    shares = tuple(number // math.gcd(*whole) for number in whole)

    if sum(shares) > MAX_PERIOD:
        scale = (MAX_PERIOD - 2 * len(weights)) / sum(weights)
        rounded = ", ".join(str(max(1, round(weight * scale))) for weight in weights)
        raise ConfigError(
            f"[training] datasets: the weights {', '.join(str(each.weight) for each in datasets)} "
            "must be in the proportion of whole numbers with a sum of at most "
            f"{MAX_PERIOD:,}; use {rounded}, which is near"
        )
    return shares


def multiples_near(value: int, step: int) -> str:
    """Return the multiples of `step` on both sides of `value`, such as "32 or 64"."""
    below = max(value // step, 1) * step
    return f"{below} or {below + step}"
