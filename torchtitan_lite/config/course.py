"""The course of a run: its batches and learning rates, and how a resume keeps or changes them."""

from dataclasses import dataclass

from torchtitan_lite.base.errors import ConfigError
from torchtitan_lite.base.jsonfile import parse_toml
from torchtitan_lite.base.logger import logger
from torchtitan_lite.catalog.lr_schedule import lr_factor

from .arithmetic import multiples_near, resolve_batch, resolve_degrees
from .differences import changes
from .sections import Config, LRSchedulerConfig

DECISIVE = {
    "optimizer": ("lr",),
    "lr_scheduler": tuple(LRSchedulerConfig.model_fields),
    "training": ("local_batch_size", "global_batch_size", "steps", "epochs"),
    "parallelism": (
        "data_parallel_replicate_degree",
        "data_parallel_shard_degree",
        "tensor_parallel_degree",
        "context_parallel_degree",
        "pipeline_parallel_degree",
        "pipeline_parallel_microbatch_size",
    ),
}
"""Keys that decide on the course of a run."""


def read_decisive(text: str, *, world_size: int) -> Config:
    """Return a config with the DECISIVE keys of a TOML text, which another version may have
    written. A global batch size of -1 becomes the one of a run of `world_size` processes."""
    tables = parse_toml(text.encode())
    config = Config.model_validate(
        {
            name: {key: value for key, value in tables.get(name, {}).items() if key in keys}
            for name, keys in DECISIVE.items()
        }
    )
    dp = resolve_degrees(config.parallelism, world_size=world_size).dp
    batch = resolve_batch(config.training, config.parallelism, dp_degree=dp)
    return _with_batch(config, batch.global_batch_size)


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
    return _with_batch(config, saved)


def log_odd_schedule(schedule: LRSchedulerConfig, *, steps: int) -> None:
    """Log it if the schedule of a run of `steps` is shorter than its warm-up."""
    total = schedule.total_steps or steps
    if total < schedule.warmup_steps:
        logger.info(
            f"[lr_scheduler] warmup_steps = {schedule.warmup_steps} is shortened to {total}, the "
            "steps of the schedule; for a longer one, set total_steps"
        )


def _with_batch(config: Config, global_batch_size: int) -> Config:
    training = config.training.model_copy(update={"global_batch_size": global_batch_size})
    return config.model_copy(update={"training": training})


@dataclass(frozen=True)
class Course:
    """What decides on the samples and on the learning rate of each step."""

    config: Config
    global_batch_size: int
    last_step: int

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of a step, from 1."""
        schedule = self.config.lr_scheduler.model_dump()
        return self.config.optimizer.lr * lr_factor(step, training_steps=self.last_step, **schedule)

    def changes(self, before: "Course", *, step: int) -> list[str]:
        """Return how the course differs in `step` from `before`, which has trained it."""
        old, new = (
            {
                "global batch": f"{each.global_batch_size} sequences",
                f"learning rate in step {step}": f"{each.learning_rate(step):.3g}",
            }
            for each in (before, self)
        )
        return changes(old, new, text=str)
