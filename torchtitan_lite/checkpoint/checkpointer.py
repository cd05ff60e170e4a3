"""Save and resume with torch.distributed.checkpoint (DCP).

A save writes tensors, DCP's table and the manifest into a draft, which is renamed to its step. With
async_mode this happens on a thread, in a process group of its own, from a copy in CPU memory.
"""

import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import BlockingAsyncStager

from torchtitan_lite.base.collectives import on_all_ranks, on_rank0
from torchtitan_lite.base.errors import CheckpointError, RunError, StorageError
from torchtitan_lite.base.files import hash_file, is_remote
from torchtitan_lite.base.logger import logger
from torchtitan_lite.base.progress import progress
from torchtitan_lite.catalog.flavors import ModelArgs
from torchtitan_lite.config import CheckpointConfig

from . import folders
from . import state as states
from .manifest import (
    CheckpointManifest,
    FileEntry,
    TrainingProgress,
    broken_files,
    check_model,
    check_tensors,
    write_manifest,
)
from .reading import METADATA, SafeReader, first_failure, open_on_all_ranks
from .resume import Resume, new_disk_group, verify


class Checkpointer:
    """Saves and loads model, optimizer and progress in `folder`. `load`, `load_weights` and `save`
    are collective."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        settings: CheckpointConfig,
        *,
        folder: Path,
        device: torch.device,
        manifest: CheckpointManifest,
        stages: dist.ProcessGroup | None,
    ) -> None:
        """`manifest` has what is the same in all saves. `stages` is the group of ranks that share
        the model; None: all ranks."""
        self._model, self._optimizer, self._settings = model, optimizer, settings
        self._device, self._manifest, self._stages = device, manifest, stages
        self.folder = folder
        self.saves = settings.enable and not settings.load_only
        self.last_saved: Path | None = None
        """The last checkpoint that is known to be complete."""
        self.group: dist.ProcessGroup | None = None
        """All ranks, on CPU, for checkpoints alone; None if they are off."""
        self._saving: Future[Path] | None = None
        self._thread: ThreadPoolExecutor | None = None
        if not settings.enable:
            logger.info(
                "checkpoints are off: a run that stops or fails starts again from step 1; "
                f"[checkpoint] enable = true saves every {settings.interval} steps"
            )
            return
        if settings.load_only:
            logger.info("no checkpoint is saved: [checkpoint] load_only = true")

        self.group = new_disk_group()
        if settings.async_mode != "disabled":
            on_gpu = device.type == "cuda"
            # Without this, the thread would use the first GPU.
            use_device = partial(torch.cuda.set_device, device) if on_gpu else None
            self._thread = ThreadPoolExecutor(1, "checkpoint", initializer=use_device)
            pinned = settings.async_mode == "async_with_pinned_mem"
            stager = BlockingAsyncStager(cache_staged_state_dict=pinned)
            self._copy: Callable[[dict[str, Tensor]], Any] = (
                stager.stage if on_gpu else states.copy_of
            )

    def load(self, resume: Resume) -> None:
        """Load a checkpoint into model and optimizer. If it is in the run's own folder, set later
        ones aside. Raises CheckpointError if it is of another model."""
        path, manifest = resume.path, resume.manifest
        saved, state = manifest.tensors, states.model_state(self._model)
        if resume.new_moments:
            saved = {name: each for name, each in saved.items() if name.startswith(states.PREFIX)}
        else:
            state = states.training_state(self._model, self._optimizer)
        if not manifest.has_weights_only:  # they may have another data type, export_dtype
            check_tensors(saved, states.stage_entries(state, stages=self._stages), path=path)
        self._read(path, state)

        if path.parent == self.folder:
            self.last_saved = path
            if self.saves:
                on_rank0(lambda: folders.set_aside_after(self.folder, manifest.progress.step))
        without = ", without its optimizer" if resume.new_moments else ""
        logger.info(f"resumed from {path}{without}")

    def begin(self) -> None:
        """Set aside all checkpoints at a URL; those on a disk have moved to previous/ by now."""
        if self.saves:
            on_rank0(lambda: folders.set_aside_after(self.folder, 0))

    def load_weights(self, path: Path, args: ModelArgs) -> None:
        """Load the weights in a folder, of any kind and data type, into the model of dimensions
        `args`. Raises CheckpointError if they are broken, of another model or not finite."""
        state = states.model_state(self._model)
        kind = on_rank0(lambda: folders.find_kind(path))
        if self._settings.initial_load_in_hf and kind != "Hugging Face":
            raise CheckpointError(
                f"[checkpoint] initial_load_in_hf = true: {path} is of {kind}; set it to false, or "
                "name the folder of a Hugging Face model (config.json and .safetensors files)."
            )
        if kind == "torchtitan":
            # Imported here, as the next, because most runs start without such weights.
            from .torchtitan_folder import load_torchtitan

            load_torchtitan(path, state, stages=self._stages, group=self.group)
        elif kind == "Hugging Face":
            from .hf_folder import load_hf

            load_hf(path, state, args, group=self.group)
        else:
            manifest = verify(path)
            check_model(manifest.model, self._manifest.model, path=path)
            self._read(path, state)

        if bad := sum(on_all_ranks(lambda: states.not_finite(state)), []):
            raise CheckpointError(
                f"[checkpoint] initial_load_path: {path} cannot be trained from: {bad[0]} has "
                "values that are NaN or infinite; name another checkpoint."
            )
        logger.info(f"weights from {path}, of {kind}")

    def _read(self, path: Path, state: dict[str, Tensor]) -> None:
        with folders.naming(path):
            open_on_all_ranks(lambda: SafeReader(path)).load(state, group=self.group)

    def due(self, step: int, *, last: bool) -> bool:
        """Whether `step` ends with a save."""
        first = step == 1 and self._settings.enable_first_step_checkpoint
        return self.saves and (first or last or step % self._settings.interval == 0)

    def save(self, progress: TrainingProgress, *, last: bool) -> None:
        """Save the state after a step. With async_mode, wait for the previous save and start this
        one. With last_save_model_only, the `last` save has only weights, in export_dtype. Raises
        StorageError if this or the previous save fails; NumericError if the state is not finite."""
        self.wait()
        if weights_only := last and self._settings.last_save_model_only:
            weights, dtype = states.model_state(self._model), self._settings.export_dtype
            state = {name: each.to(getattr(torch, dtype)) for name, each in weights.items()}
        else:
            state = states.training_state(self._model, self._optimizer)
        tensors = states.stage_entries(state, stages=self._stages)
        manifest = replace(self._manifest, progress=progress, tensors=tensors)
        if self._thread is None or weights_only:  # nothing is trained beside the last save
            self.last_saved = self._write(state, manifest)
        else:
            self._saving = self._thread.submit(self._write, self._copy(state), manifest)

    def wait(self) -> None:
        """Wait for a save in the background. Raises as `save` does."""
        if self._saving is not None:
            saving, self._saving = self._saving, None
            self.last_saved = saving.result()

    def failure(self) -> RunError | None:
        """Return the error of a save that has failed in the background on this rank. Not
        collective, does not wait."""
        if self._saving is not None and self._saving.done():
            try:
                self.wait()
            except RunError as error:
                return error
        return None

    def _write(self, state: dict[str, Tensor], manifest: CheckpointManifest) -> Path:
        """Write a checkpoint and return its path. What a failed save has written is deleted."""
        group, step = self.group, manifest.progress.step
        on_all_ranks(lambda: states.check_finite(state, step=step), group=group)
        draft = on_rank0(lambda: folders.start_draft(self.folder, step), group=group)
        target = folders.step_folder(self.folder, step)
        try:
            # A copy is on the CPU already; copying ahead would wait for the training's stream.
            write_tensors(state, draft, group=group, copy_ahead=self._thread is None)
            hashed = on_all_ranks(lambda: self._hash_files(draft), group=group)
            files = {name: entry for of_rank in hashed for name, entry in of_rank.items()}
            complete = replace(manifest, files=files)
            on_rank0(lambda: self._commit(draft, target, complete), group=group)
        except RunError:
            if dist.get_rank() == 0:
                with suppress(StorageError):
                    folders.remove_drafts(self.folder)
            raise
        logger.info(f"saved {target}")
        return target

    def _hash_files(self, draft: Path) -> dict[str, FileEntry]:
        """Return size and hash of the files that this rank wrote."""
        rank = dist.get_rank()
        with folders.storage_errors(draft):
            files = [*draft.glob(f"__{rank}_*")]
            if rank == 0:
                files.append(draft / METADATA)
            total = sum(file.stat().st_size for file in files)
            with progress(f"hashing {draft}", total, shown=rank == 0) as bar:
                hashes = {file: hash_file(file, bar.update) for file in files}
            return {file.name: FileEntry(file.stat().st_size, hashes[file]) for file in files}

    def _commit(self, draft: Path, target: Path, manifest: CheckpointManifest) -> None:
        """Complete and rename the draft, then delete checkpoints that are too old; on rank 0."""
        if problems := broken_files(draft, manifest.files, hashes=False):
            raise StorageError(
                f"[checkpoint] {draft} does not contain on rank 0 what all ranks have written: "
                f"{problems[0]}; [job] dump_folder must be on a disk that all of them share."
            )
        with folders.storage_errors(draft):
            write_manifest(draft, manifest)
        folders.commit(draft, target)
        try:
            folders.prune(self.folder, self._settings.keep_latest_k)
        except RunError as error:
            logger.warning(f"{error} The new checkpoint is complete.")


def write_tensors(
    state: dict[str, Tensor], folder: Path, *, group: dist.ProcessGroup | None, copy_ahead: bool
) -> None:
    """Write tensors with DCP, together with all ranks of `group`. Raises StorageError."""
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    ahead = 10_000_000 if copy_ahead else 0
    writer: FileSystemWriter
    if is_remote(folder):
        from torch.distributed.checkpoint import _fsspec_filesystem  # of the [remote] extra

        writer = _fsspec_filesystem.FsspecWriter(
            str(folder), sync_files=False, per_thread_copy_ahead=ahead
        )
    else:
        writer = _Writer(folder, per_thread_copy_ahead=ahead)
    try:
        dcp.save(state, storage_writer=writer, planner=planner, process_group=group)
    except CheckpointException as error:
        # torch does not always say that the disk is full.
        room = "make room if needed"
        if not is_remote(folder):
            free_gib = shutil.disk_usage(folder.parent).free / 2**30
            room = f"{free_gib:,.2f} GiB are free there; {room}"
        raise folders.unwritable(folder, f"{first_failure(error)}; {room}") from error


class _Writer(FileSystemWriter):
    """Writer that fails with the disk's error instead of torch's error about its archive."""

    def write_data(self, *args: Any) -> Any:
        """Write this rank's tensors."""
        try:
            return super().write_data(*args)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise
