"""The config of a run: sections, loading, checks and help. Imports neither torch nor torchao."""

from torchtitan_lite.config.checks import BatchSizes, ParallelDegrees, check_config, resolve_batch, resolve_degrees
from torchtitan_lite.config.help import format_config_table, format_help
from torchtitan_lite.config.loading import dump_config, load_config
from torchtitan_lite.config.sections import (
    ActivationCheckpointConfig,
    CheckpointConfig,
    CommConfig,
    CompileConfig,
    Config,
    DebugConfig,
    Float8Config,
    JobConfig,
    LRSchedulerConfig,
    MetricsConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelismConfig,
    ProfilingConfig,
    TrainingConfig,
    ValidationConfig,
)

__all__ = [
    "ActivationCheckpointConfig",
    "BatchSizes",
    "CheckpointConfig",
    "CommConfig",
    "CompileConfig",
    "Config",
    "DebugConfig",
    "Float8Config",
    "JobConfig",
    "LRSchedulerConfig",
    "MetricsConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelDegrees",
    "ParallelismConfig",
    "ProfilingConfig",
    "TrainingConfig",
    "ValidationConfig",
    "check_config",
    "dump_config",
    "format_config_table",
    "format_help",
    "load_config",
    "resolve_batch",
    "resolve_degrees",
]
