"""Read the weights of a checkpoint of torchtitan, v0.1.0 to v0.2.2.

DCP has written it, without a manifest, so that damage within a tensor is not noticed. Only weights
are read. All other entries, such as the state of the dataloader, stay pickled. v0.1.0 names a
weight `model.<fqn>`, later versions and saves of weights alone `<fqn>`. Names and order of rows are
this model's: both follow Meta's checkpoints, and torchtitan's `apply_rotary_emb` rotates
neighbouring dimensions.
"""

import math
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from torchtitan_lite.collectives import on_all_ranks
from torchtitan_lite.errors import CheckpointError
from torchtitan_lite.logger import logger

from .compare import check_tensors
from .folders import naming
from .manifest import TENSORS_SUFFIX
from .reading import TableReader, open_on_all_ranks, read_table
from .state import entries

IGNORED = ("optimizer", "lr_scheduler", "dataloader", "train_state", "freqs_cis")
"""States beside the model, and a buffer that follows from its dimensions."""
WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
"""What torch.compile and activation checkpointing may insert into names."""
FLOATS = ("float64", "float32", "bfloat16", "float16")
"""Data types of weights."""
EMBEDDING, OUTPUT = "model.tok_embeddings.weight", "model.output.weight"


def load_torchtitan(
    folder: Path, state: dict[str, Tensor], *, group: dist.ProcessGroup | None
) -> None:
    """Read the weights in `folder`, of any data type, into the model's weights `state`. Collective.
    Raises CheckpointError if they are broken or of another model."""
    # Allows torch to load the wrapper of weights that a float8 run gathers in float8. Imported here
    # because bf16 runs do not need it.
    import torchao.float8.fsdp_utils  # noqa: F401

    with naming(folder):
        reader = open_on_all_ranks(lambda: open_torchtitan(folder))

    # A tied projection may be stored too. Then it must equal the embedding.
    wanted = dict(state)
    if OUTPUT in reader.tensors and OUTPUT not in state:
        wanted[OUTPUT] = torch.empty_like(state[EMBEDDING])
    expected = entries(wanted)
    found = dict(reader.tensors)
    for name in found.keys() & expected.keys():
        if found[name].dtype in FLOATS and found[name].shape == expected[name].shape:
            found[name] = expected[name]
    check_tensors(found, expected, path=folder)
    # Where parts of a weight overlap, others are missing. They stay NaN, which the caller refuses.
    for weight in wanted.values():
        weight.fill_(math.nan)
    with naming(folder):
        reader.load(wanted, group=group)
    if len(wanted) > len(state):
        output, embedding = (
            tensor.to_local() if isinstance(tensor, DTensor) else tensor
            for tensor in (wanted[OUTPUT], wanted[EMBEDDING])
        )
        if not all(on_all_ranks(lambda: torch.equal(output, embedding))):
            raise CheckpointError(
                f"[model] tie_embeddings = true, and {folder} has an output.weight that differs "
                "from its tok_embeddings.weight; set it to false."
            )
    logger.info(f"{folder} is unverified: it has no manifest with hashes, nor with a RoPE")


def open_torchtitan(folder: Path) -> TableReader:
    """Return a reader of the weights in `folder` by this model's names. Raises BrokenCheckpoint."""
    files = (path for path in folder.glob(f"*{TENSORS_SUFFIX}") if path.is_file())
    sizes = {path.name: path.stat().st_size for path in files}
    return TableReader(folder, read_table(folder, sizes, rename=weight_name))


def weight_name(entry: str) -> str | None:
    """Return this model's name of a weight; None for an entry that is no weight."""
    for wrapper in WRAPPERS:
        entry = entry.replace(wrapper, "")
    name = entry.removeprefix("model.")
    return None if name.partition(".")[0] in IGNORED else f"model.{name}"
