"""Which configs another loop can be held against: those that ask for nothing that it does not do
too."""

import json
from collections.abc import Mapping, Sequence

from torchtitan_lite.config import Config
from torchtitan_lite.errors import ConfigError

FSDP_ALONE: Mapping[str, Sequence[object]] = {
    "parallelism.tensor_parallel_degree": (1,),
    "parallelism.data_parallel_replicate_degree": (1,),
    "activation_checkpoint.mode": ("none", "selective", "full"),
    "optimizer.state_dtype": ("float32",),
    "training.enable_cpu_offload": (False,),
}
"""The values, by key, of what both of the other loops do too."""


def check_only(config: Config, values: Mapping[str, Sequence[object]], *, other: str) -> None:
    """Raise ConfigError where a key of `config`, by its dotted name in `values`, has none of the
    values there, which are those that the loop called `other` trains with too."""
    for name, allowed in values.items():
        table, key = name.split(".")
        value = getattr(getattr(config, table), key)
        if value not in allowed:
            told = " or ".join(map(json.dumps, allowed))
            raise ConfigError(
                f"[{table}] {key} = {json.dumps(value)} is not the same in {other}; set it to {told}."
            )
