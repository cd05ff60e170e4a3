"""Job: the facts of a run, each derived once from its config."""

from dataclasses import dataclass, replace
from pathlib import Path

from torchtitan_lite.base.errors import ConfigError
from torchtitan_lite.catalog.flavors import ModelArgs

from . import (
    BatchSizes,
    Config,
    ParallelDegrees,
    Stages,
    resolve_batch,
    resolve_degrees,
    resolve_model,
    resolve_shares,
    resolve_stages,
    show_settings,
)


@dataclass(frozen=True)
class TokenizerValues:
    """Properties of the tokenizer that the model and the data depend on."""

    path: str
    vocab_size: int
    bos_id: int
    fingerprint: str
    """SHA-256 of the vocabulary and of the ids that frame a document."""


@dataclass(frozen=True)
class Job:
    """A run: its config and the numbers that follow from it.

    `planner.resolve_auto` replaces "auto" values; its result is what is trained, written and shown.
    """

    config: Config
    degrees: ParallelDegrees
    batch: BatchSizes
    dataset_shares: tuple[int, ...]
    """Samples of each dataset in one period of the mix."""
    model_args: ModelArgs
    tokenizer: TokenizerValues
    stages: Stages
    """The names of the modules of each pipeline stage."""

    @property
    def folder(self) -> Path:
        """The run folder."""
        return Path(self.config.job.dump_folder)

    @property
    def microbatch_tokens(self) -> int:
        """Tokens of a microbatch that the linears of one rank see: context parallelism splits
        sequences, and sequence parallelism gathers them before each matmul."""
        return self.batch.local_batch_size * self.config.training.seq_len // self.degrees.cp

    def rank_stages(self, rank: int) -> tuple[int, ...]:
        """Return which of `stages` a rank of the pipeline has."""
        return tuple(range(rank, len(self.stages), self.degrees.pp))

    @property
    def model_name(self) -> str:
        """The flavor and the keys that override it, such as `8B, n_layers = 16`."""
        model = self.config.model
        return ", ".join(filter(None, (model.flavor, show_settings(model.overrides))))

    def choose(self, table: str, **values: object) -> "Job":
        """Return the job with `values` in place of the "auto" values of a table."""
        section = getattr(self.config, table).model_copy(update=values)
        return replace(self, config=self.config.model_copy(update={table: section}))

    def layout(self) -> str:
        """Return the degrees and the batch, for the log."""
        degrees, batch = self.degrees, self.batch
        pipeline = ""
        if degrees.pp > 1:
            name = self.config.parallelism.pipeline_parallel_schedule
            pipeline = f"pp {degrees.pp} ({len(self.stages)} stages, {name}) x "
        return (
            f"{degrees.world_size} processes: {pipeline}dp_replicate {degrees.dp_replicate} "
            f"x dp_shard {degrees.dp_shard} x cp {degrees.cp} x tp {degrees.tp}; global batch "
            f"{batch.global_batch_size} x {self.config.training.seq_len} tokens in "
            f"{batch.grad_accum_steps} microbatches a rank"
        )


def build_job(config: Config, *, world_size: int, tokenizer: TokenizerValues) -> Job:
    """Derive the job of a run with `world_size` processes. Raises ConfigError if degrees or batch
    sizes do not fit them, or if the tokenizer has more ids than the model."""
    degrees = resolve_degrees(config.parallelism, world_size=world_size)
    batch = resolve_batch(config.training, config.parallelism, dp_degree=degrees.dp)
    shares = resolve_shares(config.training.datasets)

    # The model is the configured one with the run's vocabulary and longest sequences.
    validated_len = (config.validation.enable and config.validation.seq_len) or 0
    args = resolve_model(config.model)
    args = replace(
        args,
        vocab_size=args.vocab_size or tokenizer.vocab_size,
        max_seq_len=max(config.training.seq_len, validated_len),
        document_bos_id=tokenizer.bos_id if config.training.document_mask else None,
    )
    if tokenizer.vocab_size > args.vocab_size:
        raise ConfigError(
            f"[model] tokenizer_path = {tokenizer.path!r} has {tokenizer.vocab_size} ids, more "
            f"than the model's vocab_size = {args.vocab_size}; use a tokenizer with at most that "
            "many, or set [model] vocab_size."
        )
    stages = resolve_stages(config.parallelism, n_layers=args.n_layers)
    return Job(config, degrees, batch, shares, args, tokenizer, stages)
