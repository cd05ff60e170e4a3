"""Saving and resuming around torch.distributed.checkpoint (DCP).

A save writes into a draft folder, in this order: the tensors and DCP's table of them; each rank's
random state; the manifest, with the size and hash of each file as the rank that wrote it reads it
back. Then the draft gets its step's name. With async_mode, all that is done on a thread, in a
process group of its own, from a snapshot in CPU memory.
"""

import json
import shutil
import uuid
from collections.abc import Callable, Mapping
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
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult

from torchtitan_lite.checkpoint.changes import check_model
from torchtitan_lite.checkpoint.folders import (
    commit,
    prune,
    remove_drafts,
    set_aside_after,
    start_draft,
    step_folder,
    storage_errors,
)
from torchtitan_lite.checkpoint.manifest import (
    FileEntry,
    Manifest,
    Progress,
    broken_files,
    hash_file,
    installed_versions,
    naming,
    write_manifest,
)
from torchtitan_lite.checkpoint.reading import METADATA, SafePlanner, SafeReader, load_failure
from torchtitan_lite.checkpoint.resume import DISK_TIMEOUT, verify
from torchtitan_lite.checkpoint.state import (
    Snapshot,
    check_tensors,
    entries,
    first_non_finite,
    load_random_state,
    model_state,
    training_state,
)
from torchtitan_lite.collectives import on_all_ranks, on_rank0
from torchtitan_lite.config import CheckpointConfig
from torchtitan_lite.errors import CheckpointError, NumericError, RunError, StorageError
from torchtitan_lite.files import replace_file
from torchtitan_lite.logger import logger


class Checkpointer:
    """Saves and loads the model, the optimizer, the progress and the random states in `folder`.
    `load`, `load_weights` and `save` are collective calls."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        checkpoint: CheckpointConfig,
        *,
        folder: Path,
        device: torch.device,
        mesh: Mapping[str, int],
        model_args: Mapping[str, Any],
        config_toml: str,
    ) -> None:
        """The last three go into the manifests. What killed saves left in `folder` is removed.
        Raises StorageError if that fails."""
        self._model, self._optimizer = model, optimizer
        self.folder, self._device = folder, device
        self.enabled, self._interval, self._keep = (
            checkpoint.enable,
            checkpoint.interval,
            checkpoint.keep_latest_k,
        )
        self._stops_on_failure = checkpoint.on_failure == "stop"
        self._model_args = dict(model_args)
        self._manifest = partial(
            Manifest, mesh=dict(mesh), model=self._model_args, config=config_toml
        )
        self.last_saved: Path | None = None
        """The last checkpoint that is known to be complete."""
        self.last_failure: RunError | None = None
        """Why the last save failed; None if it did not."""
        self._saving: Future[Path] | None = None
        self.group: dist.ProcessGroup | None = None
        """Of all ranks, on CPU, for saves alone; None if checkpoints are off."""
        if not self.enabled:
            return
        on_rank0(lambda: remove_drafts(folder))
        self.group = dist.new_group(backend="gloo", timeout=DISK_TIMEOUT)
        self._thread: ThreadPoolExecutor | None = None
        if checkpoint.async_mode != "disabled":
            on_gpu = device.type == "cuda"
            # A thread has a device of its own, the first GPU.
            use_device = partial(torch.cuda.set_device, device) if on_gpu else None
            self._thread = ThreadPoolExecutor(1, "checkpoint", initializer=use_device)
            self._snapshot = Snapshot(
                pinned=on_gpu and checkpoint.async_mode == "async_with_pinned_mem"
            )

    def load(self, manifest: Manifest) -> None:
        """Read the checkpoint of `manifest` into the model, the optimizer and the random
        generators. Later ones are renamed, as their steps will be trained anew. Raises
        CheckpointError for one of another model."""
        path = step_folder(self.folder, manifest.progress.step)
        state = training_state(self._model, self._optimizer)
        check_tensors(manifest.tensors, entries(state), path=path)
        self._read(path, state)
        # On more ranks than saved it, some go on from the same random state.
        random_file = path / random_file_name(dist.get_rank() % manifest.world_size)
        with naming(path):
            on_all_ranks(lambda: load_random_state(random_file, device=self._device))
        on_rank0(lambda: set_aside_after(self.folder, manifest.progress.step))
        self.last_saved = path
        logger.info(f"resumed from {path}")

    def load_weights(self, path: Path, *, hashes: bool) -> None:
        """Read the weights alone of the checkpoint at `path` into the model, of whatever data type
        they are there. Raises CheckpointError for one that is broken, or of another model."""
        manifest = verify(path, hashes=hashes)
        check_model(manifest.model, self._model_args, path=path)
        state = model_state(self._model)
        wanted = entries(state)
        saved = {
            name: replace(entry, dtype=wanted[name].dtype if name in wanted else entry.dtype)
            for name, entry in manifest.tensors.items()
            if name.startswith("model.")
        }
        check_tensors(saved, wanted, path=path)
        self._read(path, state)
        logger.info(f"weights from {path}")

    def _read(self, path: Path, state: dict[str, Tensor]) -> None:
        readers: list[
            SafeReader
        ] = []  # not sent to other ranks: a table of many tensors and ranks is large
        with naming(path):
            on_all_ranks(lambda: readers.append(SafeReader(path)))
        try:
            dcp.load(
                state, storage_reader=readers[0], planner=SafePlanner(), process_group=self.group
            )
        except CheckpointException as error:
            raise CheckpointError(
                f"[checkpoint] {path} cannot be loaded: {load_failure(error)}."
            ) from error

    def due(self, step: int, *, last: bool) -> bool:
        """Whether `step` ends with a save."""
        return self.enabled and (last or step % self._interval == 0)

    def save(self, progress: Progress, random_state: dict[str, Any]) -> None:
        """Save the state after a step; with async_mode, begin to, once the save before has ended. A
        failure raises StorageError, or is told of and kept in `last_failure`, as on_failure says;
        NumericError is raised for a state that is not finite, which is not saved."""
        self.wait()
        state = training_state(self._model, self._optimizer)
        if self._thread is None:
            self._settle(lambda: self._write(state, progress, random_state))
        else:
            self._saving = self._thread.submit(
                self._write, self._snapshot.take(state), progress, random_state
            )

    def wait(self) -> None:
        """Return once a save that was begun has ended, raising what `save` does."""
        if self._saving is not None:
            saving, self._saving = self._saving, None
            self._settle(saving.result)

    def failure(self) -> RunError | None:
        """Why the run must stop for a save that ended since the last call, as far as this rank
        knows. Not collective, and does not wait."""
        if self._saving is None or not self._saving.done():
            return None
        try:
            self.wait()
        except RunError as error:
            return error
        return None

    def _settle(self, outcome: Callable[[], Path]) -> None:
        """Take how a save ended."""
        try:
            self.last_saved, self.last_failure = outcome(), None
        except StorageError as error:
            self.last_failure = error
            if self._stops_on_failure:
                raise
            logger.warning(f'{error} Training goes on, as [checkpoint] on_failure = "warn".')

    def _write(
        self, state: dict[str, Tensor], progress: Progress, random_state: dict[str, Any]
    ) -> Path:
        """Path of the complete checkpoint of `state`. Raises StorageError, after removing what was
        written, or NumericError."""
        target = step_folder(self.folder, progress.step)
        on_all_ranks(lambda: check_finite(state, step=progress.step), group=self.group)
        draft = on_rank0(lambda: start_draft(self.folder, progress.step), group=self.group)
        try:
            self._write_tensors(state, draft)
            hashed = on_all_ranks(
                lambda: self._write_random_state(draft, random_state), group=self.group
            )
            manifest = self._manifest(
                save_id=uuid.uuid4().hex,
                progress=progress,
                world_size=dist.get_world_size(),
                versions=installed_versions(),
                files={name: entry for of_rank in hashed for name, entry in of_rank.items()},
                tensors=entries(state),
            )
            on_rank0(lambda: self._commit(draft, target, manifest), group=self.group)
        except RunError:
            if dist.get_rank() == 0:
                with suppress(StorageError):
                    remove_drafts(self.folder)
            raise
        logger.info(f"saved {target}")
        return target

    def _write_random_state(
        self, draft: Path, random_state: dict[str, Any]
    ) -> dict[str, FileEntry]:
        """Size and hash of each file of this rank's, after the last of them is written."""
        rank = dist.get_rank()
        with storage_errors(draft):
            replace_file(draft / random_file_name(rank), json.dumps(random_state))
            own = [random_file_name(rank), *(path.name for path in draft.glob(f"__{rank}_*"))]
            return {
                name: hash_file(draft / name) for name in [*own, *([METADATA] if rank == 0 else [])]
            }

    def _commit(self, draft: Path, target: Path, manifest: Manifest) -> None:
        """Complete the draft, give it its name, and delete what is too old by now; on rank 0."""
        if problems := broken_files(draft, manifest, hashes=False):
            raise StorageError(
                f"[checkpoint] {draft} does not hold on rank 0 what all ranks have written: {problems[0]}; [job] "
                "dump_folder must be on a disk that all of them share."
            )
        with storage_errors(draft):
            write_manifest(draft, manifest)
        commit(draft, target)
        try:
            prune(self.folder, self._keep)
        except StorageError as error:
            logger.warning(f"{error} The new checkpoint is complete.")

    def _write_tensors(self, state: dict[str, Tensor], draft: Path) -> None:
        # flat names as they are, and one file a rank
        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        # A snapshot is on the CPU already; to copy ahead would wait for the training's stream.
        writer = _Writer(draft)
        if self._thread is not None:
            writer.per_thread_copy_ahead = 0
        try:
            dcp.save(state, storage_writer=writer, planner=planner, process_group=self.group)
        except CheckpointException as error:
            free_gib = (
                shutil.disk_usage(self.folder).free / 2**30
            )  # rank 0 may have removed the draft
            raise StorageError(
                f"[checkpoint] {draft} cannot be written: {load_failure(error)}; {free_gib:,.2f} GiB are free there. "
                "Make room, or name another [job] dump_folder."
            ) from error


class _Writer(FileSystemWriter):
    """Fails with the disk's error, which torch hides behind that of an archive that it could not
    complete."""

    def write_data(
        self, plan: SavePlan, planner: SavePlanner
    ) -> torch.futures.Future[list[WriteResult]]:
        """As it is."""
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise


def random_file_name(rank: int) -> str:
    """Name of a checkpoint's file with the state of a rank's random generators."""
    return f"rank-{rank:05d}.json"


def check_finite(state: Mapping[str, Tensor], *, step: int) -> None:
    """Raise NumericError if a tensor holds a value that is not finite, in this rank's part of
    it."""
    if (name := first_non_finite(state)) is not None:
        raise NumericError(
            f"{name} is no longer finite after step {step}, so that step is not saved. Go on from an earlier "
            "checkpoint with a lower [optimizer] lr or a longer [lr_scheduler] warmup_steps."
        )
