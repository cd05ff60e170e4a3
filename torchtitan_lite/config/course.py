"""The course of a run: its learning rates, and the global batch size that a resume keeps."""

from torchtitan_lite.base.errors import ConfigError
from torchtitan_lite.base.jsonfile import parse_toml
from torchtitan_lite.base.logger import logger
from torchtitan_lite.catalog.lr_schedule import lr_factor

from .arithmetic import multiples_near, resolve_batch, resolve_degrees
from .sections import Config, LRSchedulerConfig

BATCH_KEYS = {
    "training": ("local_batch_size", "global_batch_size"),
    "parallelism": (
        "data_parallel_replicate_degree",
        "data_parallel_shard_degree",
        "tensor_parallel_degree",
        "context_parallel_degree",
        "pipeline_parallel_degree",
        "pipeline_parallel_microbatch_size",
    ),
}
"""Keys that decide on the global batch size."""


def saved_batch(text: str, *, world_size: int) -> int:
    """Return the global batch size of a run of `world_size` processes with a config in TOML, which
    another version may have written."""
    tables = parse_toml(text.encode())
    config = Config.model_validate(
        {
            name: {key: value for key, value in tables.get(name, {}).items() if key in keys}
            for name, keys in BATCH_KEYS.items()
        }
    )
    dp = resolve_degrees(config.parallelism, world_size=world_size).dp
    return resolve_batch(config.training, config.parallelism, dp_degree=dp).global_batch_size


def keep_batch(config: Config, *, saved: int, world_size: int) -> Config:
    """Return the config with the global batch size that a checkpoint was `saved` with, if it has
    none and the processes would make another one. Raises ConfigError if they cannot make that."""
    training = config.training
    dp = resolve_degrees(config.parallelism, world_size=world_size).dp
    one_pass = training.local_batch_size * dp
    if training.global_batch_size != -1 or one_pass == saved:
        return config
    kept = f"[training] global_batch_size = -1 keeps the checkpoint's, {saved}"
    if saved % one_pass:
        raise ConfigError(
            f"{kept}, not a multiple of local_batch_size * dp_degree = "
            f"{training.local_batch_size} * {dp} = {one_pass}; lower local_batch_size or the "
            f"processes, or set global_batch_size = {multiples_near(saved, one_pass)}"
        )
    logger.info(f"{kept}, in {saved // one_pass} passes of {one_pass}")
    training = training.model_copy(update={"global_batch_size": saved})
    return config.model_copy(update={"training": training})


def log_odd_schedule(schedule: LRSchedulerConfig, *, steps: int) -> None:
    """Log it if the schedule of a run of `steps` is shorter than its warm-up."""
    total = schedule.total_steps or steps
    if total < schedule.warmup_steps:
        logger.info(
            f"[lr_scheduler] warmup_steps = {schedule.warmup_steps} is shortened to {total}, the "
            "steps of the schedule; for a longer one, set total_steps"
        )


def learning_rate(config: Config, step: int, *, last_step: int) -> float:
    """Return the learning rate of a step, from 1."""
    schedule = config.lr_scheduler.model_dump()
    return config.optimizer.lr * lr_factor(step, training_steps=last_step, **schedule)
