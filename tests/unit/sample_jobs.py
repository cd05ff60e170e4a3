"""Jobs for tests, without a tokenizer's file."""

from torchtitan_lite.catalog.flavors import ModelArgs
from torchtitan_lite.config import (
    Config,
    ParallelDegrees,
    resolve_batch,
    resolve_shares,
    resolve_stages,
)
from torchtitan_lite.config.job import Job, TokenizerValues, build_job

TOKENIZER = TokenizerValues(path="some.model", vocab_size=2256, bos_id=1, fingerprint="f" * 64)


def job_of(
    config: Config,
    args: ModelArgs | None = None,
    *,
    degrees: tuple[int, int, int] = (1, 1, 1),
    cp: int = 1,
    pp: int = 1,
) -> Job:
    """Return the job of a config whose degrees, (dp_replicate, dp_shard, tp), cp and pp, and
    dimensions may be given. `pp` is also the config's."""
    if args is None and (*degrees, cp, pp) == (1, 1, 1, 1, 1):
        return build_job(config, world_size=1, tokenizer=TOKENIZER)
    replicate, shard, tp = degrees
    parallel = ParallelDegrees(replicate, shard, cp, tp, pp)
    args = args or build_job(config, world_size=1, tokenizer=TOKENIZER).model_args
    return Job(
        config=config,
        degrees=parallel,
        batch=resolve_batch(config.training, config.parallelism, dp_degree=parallel.dp),
        dataset_shares=resolve_shares(config.training.datasets),
        model_args=args,
        tokenizer=TOKENIZER,
        stages=resolve_stages(config.parallelism, n_layers=args.n_layers),
    )
