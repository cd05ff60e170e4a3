"""Which checkpoint a run goes on from: one whose files are as they were written."""

from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from torchtitan_lite.checkpoint.folders import named_steps, read_step_manifest, step_folder
from torchtitan_lite.checkpoint.manifest import BrokenCheckpoint, Manifest, broken_files, naming
from torchtitan_lite.checkpoint.reading import SafeReader
from torchtitan_lite.collectives import on_all_ranks, on_rank0
from torchtitan_lite.config import CheckpointConfig
from torchtitan_lite.errors import CheckpointError
from torchtitan_lite.logger import logger

DISK_TIMEOUT = timedelta(hours=1)
"""That ranks wait for the one whose disk is slowest."""


def find_resume(checkpoint: CheckpointConfig, *, folder: Path) -> Manifest | None:
    """The manifest of the checkpoint to resume from, None for a new run: the newest that verifies,
    or load_step's. A broken one is told of. A collective call. Raises CheckpointError if
    load_step's is missing or broken, or if all are, and StorageError if the disk fails."""
    if not checkpoint.enable or checkpoint.load_step == 0:
        return None
    there = on_rank0(lambda: named_steps(folder))
    listed = ", ".join(map(str, there)) or "none"
    if checkpoint.load_step not in (-1, *there):
        raise CheckpointError(
            f"[checkpoint] load_step = {checkpoint.load_step}: {folder} has no checkpoint of that step "
            f"(it has: {listed}); use one of these, or -1 for the newest."
        )
    steps = there if checkpoint.load_step == -1 else [checkpoint.load_step]
    reason = None
    for step in reversed(steps):
        try:
            return verify(step_folder(folder, step), hashes=checkpoint.verify_hashes)
        except BrokenCheckpoint as broken:
            reason = str(broken)
            logger.info(reason)
    if reason is None:
        return None
    raise CheckpointError(
        f"[checkpoint] load_step = {checkpoint.load_step}: {reason.rstrip('.')}. Of {len(steps)} that may be loaded "
        f"none verifies; {folder} has the steps {listed}: name another, or load_step = 0 to start anew."
    )


def verify(path: Path, *, hashes: bool) -> Manifest:
    """The manifest of the checkpoint at `path`, whose files are as they were written: all sizes,
    the contents of small files, and with `hashes` of all, which the ranks share out. A collective
    call. Raises BrokenCheckpoint, with the path."""
    group = dist.new_group(backend="gloo", timeout=DISK_TIMEOUT)
    share = (dist.get_rank(), dist.get_world_size())
    try:
        with naming(path):
            manifest = on_rank0(lambda: open_checkpoint(path), group=group)
            found = on_all_ranks(
                lambda: broken_files(path, manifest, hashes=hashes, share=share), group=group
            )
            if problems := [problem for of_rank in found for problem in of_rank]:
                raise BrokenCheckpoint(problems[0])
    finally:
        dist.destroy_process_group(group)
    return manifest


def open_checkpoint(path: Path) -> Manifest:
    """The manifest of the checkpoint at `path`, which agrees with its table of tensors. Raises
    BrokenCheckpoint."""
    manifest = read_step_manifest(path)
    SafeReader(path)
    return manifest
