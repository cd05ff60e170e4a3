"""Find the checkpoint that a run resumes from, and verify it on all ranks."""

from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from torchtitan_lite.collectives import on_all_ranks, on_rank0
from torchtitan_lite.config import CheckpointConfig
from torchtitan_lite.errors import CheckpointError
from torchtitan_lite.logger import logger

from .folders import named_steps, step_folder
from .manifest import BrokenCheckpoint, CheckpointManifest, broken_files, naming
from .reading import SafeReader

DISK_TIMEOUT = timedelta(hours=1)
"""How long ranks wait for the one with the slowest disk."""


def find_resume(checkpoint: CheckpointConfig, *, folder: Path) -> CheckpointManifest | None:
    """Return the manifest of the checkpoint to resume from, or None for a new run.

    That is the newest checkpoint that verifies, or load_step's; broken ones are logged. Collective.
    Raises CheckpointError if load_step's is missing or broken, or if all are broken; StorageError
    if the disk fails."""
    if not checkpoint.enable or checkpoint.load_step == 0:
        return None
    wanted = f"[checkpoint] load_step = {checkpoint.load_step}"
    there = on_rank0(lambda: named_steps(folder))
    names = ", ".join(map(str, there)) or "none"
    if checkpoint.load_step not in (-1, *there):
        raise CheckpointError(
            f"{wanted}: {folder} has no checkpoint of that step (it has: {names}); use one of "
            "these, or -1 for the newest."
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
        f"{wanted}: {reason.rstrip('.')}. None of the {len(steps)} checkpoints that may be loaded "
        f"verifies; {folder} has the steps {names}: name another, or set load_step = 0 for a new "
        "run."
    )


def verify(path: Path, *, hashes: bool) -> CheckpointManifest:
    """Return the manifest of the checkpoint at `path` after comparing its files with it.

    All sizes are compared, and the contents of the small files; with `hashes` of all, and each rank
    reads a share. Collective. Raises BrokenCheckpoint with the path."""
    group = dist.new_group(backend="gloo", timeout=DISK_TIMEOUT)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    try:
        with naming(path):
            manifest = on_rank0(lambda: SafeReader(path).manifest, group=group)
            found = on_all_ranks(
                lambda: broken_files(
                    path, manifest.files, hashes=hashes, rank=rank, world_size=world_size
                ),
                group=group,
            )
            if problems := [problem for of_rank in found for problem in of_rank]:
                raise BrokenCheckpoint(problems[0])
    finally:
        dist.destroy_process_group(group)
    return manifest
