"""The TOML surface: sections, loading, checks and help. Imports neither torch nor torchao."""

from .arithmetic import (
    AUTO,
    BatchSizes,
    ParallelDegrees,
    keep_batch,
    matches,
    matches_parameter,
    multiples_near,
    resolve_batch,
    resolve_degrees,
    resolve_model,
    resolve_shares,
    unmatched_filters,
)
from .checks import check_config, own_names
from .keys import config_schema, did_you_mean, format_help, show_settings
from .layers import find_config, given_keys, shipped_configs
from .loading import load_config, outside_names, read_table, shared_settings
from .sections import (
    ActivationCheckpointConfig,
    CheckpointConfig,
    CommConfig,
    CompileConfig,
    Config,
    DatasetConfig,
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
from .stages import Stages, resolve_stages
from .types import CROSS_ENTROPY
