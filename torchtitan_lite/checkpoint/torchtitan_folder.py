"""Read the weights of a checkpoint of torchtitan, v0.1.0 to v0.2.2, in DCP's format without hashes.

v0.1.0 names a weight `model.<fqn>`; later versions, and saves of weights alone, `<fqn>`.
Names and order of rows are this model's: both follow Meta's checkpoints.
"""

import math
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from torchtitan_lite.base.logger import logger

from .folders import naming
from .manifest import TENSORS_SUFFIX, check_tensors
from .reading import TableReader, open_on_all_ranks, read_table
from .state import PREFIX, stage_entries

IGNORED = ("optimizer", "lr_scheduler", "dataloader", "train_state", "freqs_cis")
"""First part of the names of entries that are no weights."""
FLOATS = ("float64", "float32", "bfloat16", "float16")
"""Data types of weights."""


def load_torchtitan(
    folder: Path,
    state: dict[str, Tensor],
    *,
    stages: dist.ProcessGroup | None,
    group: dist.ProcessGroup | None,
) -> None:
    """Read the weights in `folder`, of any data type, into the model's weights `state`. `stages` is
    the group of ranks that share the model. Collective. Raises CheckpointError if the weights are
    broken or of another model."""
    # Lets torch load the wrapper of weights that a float8 run gathers; bf16 runs do without.
    import torchao.float8.fsdp_utils  # noqa: F401

    files = (path for path in folder.glob(f"*{TENSORS_SUFFIX}") if path.is_file())
    sizes = {path.name: path.stat().st_size for path in files}
    with naming(folder):
        reader = open_on_all_ranks(
            lambda: TableReader(folder, read_table(folder, sizes, rename=weight_name))
        )

    # Names and shapes must agree; any data type is converted.
    expected = stage_entries(state, stages=stages)
    found = dict(reader.tensors)
    for name in found.keys() & expected.keys():
        if found[name].dtype in FLOATS and found[name].shape == expected[name].shape:
            found[name] = expected[name]
    check_tensors(found, expected, path=folder)
    # Where parts of a weight overlap, others are missing. They stay NaN, which the caller refuses.
    for weight in state.values():
        weight.fill_(math.nan)
    with naming(folder):
        reader.load(state, group=group)
    logger.info(f"{folder} is unverified: torchtitan saves no hashes and no RoPE settings")


def weight_name(entry: str) -> str | None:
    """Return the name in our checkpoints of an entry; None for one that is no weight."""
    # torch.compile and activation checkpointing insert these into names.
    for wrapper in ("_orig_mod.", "_checkpoint_wrapped_module."):
        entry = entry.replace(wrapper, "")
    name = entry.removeprefix(PREFIX)
    return None if name.partition(".")[0] in IGNORED else f"{PREFIX}{name}"
