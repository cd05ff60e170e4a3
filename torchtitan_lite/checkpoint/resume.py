"""Choose the checkpoint that a run continues from, and check its files."""

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from torchtitan_lite.base.collectives import on_all_ranks, on_rank0
from torchtitan_lite.base.errors import CheckpointError
from torchtitan_lite.base.logger import logger
from torchtitan_lite.base.paths import open_path
from torchtitan_lite.config import CheckpointConfig

from . import folders
from .manifest import BrokenCheckpoint, CheckpointManifest, broken_files
from .reading import SafeReader


@dataclass(frozen=True)
class Resume:
    """The checkpoint that a run continues from. Its files are intact."""

    path: Path
    manifest: CheckpointManifest
    new_moments: bool = False
    """Whether the optimizer's state is left out, so that its moments start at zero."""

    def check_can_train(self, *, last_step: int) -> None:
        """Raise CheckpointError if the run has steps left and the checkpoint has only weights."""
        if self.manifest.progress.step < last_step and self.manifest.has_weights_only:
            raise CheckpointError(
                f"[checkpoint] load_step: {self.path} has only weights, as its run had "
                "last_save_model_only = true, and cannot be resumed. Set load_step to an earlier "
                "step, or in another [job] dump_folder start a run with initial_load_path = "
                f'"{self.path}".'
            )


def find_resume(checkpoint: CheckpointConfig, *, folder: Path) -> Resume | None:
    """Return the checkpoint to continue from, or None for a run that starts at step 1: the newest
    intact one in `folder`, or load_step's; without one, initial_load_path's if
    initial_load_model_only = false. Collective. Raises CheckpointError if the wanted one is
    missing, broken or has only weights, or if all are broken; StorageError if the disk fails."""
    if not checkpoint.enable:
        return None
    if checkpoint.load_step and (own := _find_own(checkpoint, folder=folder)):
        return own
    if checkpoint.initial_load_path is None or checkpoint.initial_load_model_only:
        return None

    path = open_path(checkpoint.initial_load_path)
    kind = on_rank0(lambda: folders.find_kind(path))
    manifest = verify(path) if kind == "torchtitan_lite" else None
    if manifest is None or manifest.has_weights_only:
        raise CheckpointError(
            f"[checkpoint] initial_load_model_only = false: {path}, of {kind}, has nothing but "
            "weights that can be loaded; set it to true."
        )
    return Resume(path, manifest, new_moments=bool(checkpoint.exclude_from_loading))


def _find_own(checkpoint: CheckpointConfig, *, folder: Path) -> Resume | None:
    """Return the checkpoint in the run's own `folder` to resume, or None."""
    wanted = f"[checkpoint] load_step = {checkpoint.load_step}"
    there = on_rank0(lambda: folders.steps_with_folder(folder))
    names = ", ".join(map(str, there)) or "none"
    if checkpoint.load_step not in (-1, *there):
        raise CheckpointError(
            f"{wanted}: {folder} has no checkpoint of that step (it has: {names}); use one of "
            "these, or -1 for the newest."
        )

    reason = None
    for step in reversed(there if checkpoint.load_step == -1 else [checkpoint.load_step]):
        path = folders.step_folder(folder, step)
        try:
            manifest = verify(path)
        except BrokenCheckpoint as broken:
            reason = str(broken)
            logger.info(reason)
            continue
        new_moments = manifest.has_weights_only or _leaves_out_moments(checkpoint, manifest)
        return Resume(path, manifest, new_moments=new_moments)
    if reason is None:
        return None
    raise CheckpointError(
        f"{wanted}: {reason.rstrip('.')}. No checkpoint that may be loaded verifies; {folder} has "
        f"the steps {names}: name another, or set load_step = 0 for a new run."
    )


def _leaves_out_moments(checkpoint: CheckpointConfig, manifest: CheckpointManifest) -> bool:
    """Return whether to leave out the moments of the run's own checkpoint: only the first time."""
    if not checkpoint.exclude_from_loading:
        return False
    saved = manifest.tables.get("checkpoint", {})
    if saved.get("exclude_from_loading") != list(checkpoint.exclude_from_loading):
        return True
    step = manifest.progress.step
    logger.info(f"[checkpoint] exclude_from_loading is ignored: the run that saved {step} had it")
    return False


def new_disk_group() -> dist.ProcessGroup:
    """Return a group of all ranks, on CPU, that waits for slow disks."""
    backend = "fake" if dist.get_backend() == "fake" else "gloo"  # fake: a process alone
    return dist.new_group(backend=backend, timeout=timedelta(hours=1))


def verify(path: Path) -> CheckpointManifest:
    """Return the manifest of the checkpoint at `path` after comparing every byte of the files with
    it; each rank reads a share. Collective. Raises BrokenCheckpoint with the path."""
    group = new_disk_group()
    share = (dist.get_rank(), dist.get_world_size())
    try:
        with folders.naming(path):
            manifest = on_rank0(lambda: SafeReader(path).manifest, group=group)
            found = on_all_ranks(
                lambda: broken_files(path, manifest.files, hashes=True, share=share), group=group
            )
            if problems := sum(found, []):
                raise BrokenCheckpoint(problems[0])
    finally:
        dist.destroy_process_group(group)
    return manifest
