"""The folder of checkpoints: one subfolder for each step, renamed into place when it is complete.

  step-00000100                      a checkpoint: it has a manifest, written last
  step-00000100-hf                   the last one as a Hugging Face model (last_save_in_hf)
  .tmp-step-00000100, ...-hf         a draft: being written or deleted, or left by a killed process
  broken-step-00000100-<ns>          a checkpoint that did not verify when its step was saved again
  superseded-step-00000100-<ns>      a checkpoint past the step that a run resumed from

Anything else is never touched. A step's folder may not be a link, and one with a file that no save
writes is neither deleted nor renamed. A kill at any moment leaves all earlier checkpoints, with or
without the new one. An object store cannot rename: there a draft has its step's name, and becomes a
checkpoint by its manifest. Does not import torch.
"""

import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torchtitan_lite.base.errors import CheckpointError, StorageError
from torchtitan_lite.base.files import fsync_folder, is_remote, os_errors, storage_fix
from torchtitan_lite.base.logger import logger

from .manifest import MANIFEST, SAVED_FILES, STEP, BrokenCheckpoint, broken_files, read_manifest

DRAFT_PREFIX, HF_SUFFIX = ".tmp-", "-hf"
OURS = re.compile(
    rf"{SAVED_FILES}|{MANIFEST}|\.metadata\.tmp|\.(?:{MANIFEST}|rank-\d{{5}}\.json)\..+"
)
"""Names of the files of a checkpoint, and of the drafts that DCP and replace_file rename."""


def step_folder(folder: Path, step: int) -> Path:
    """Return the path of the checkpoint of `step`."""
    return folder / f"step-{step:08d}"


def draft_folder(folder: Path, step: int) -> Path:
    """Return the path at which the checkpoint of `step` is written, and at which it is deleted."""
    path = step_folder(folder, step)
    return path if is_remote(folder) else path.with_name(f"{DRAFT_PREFIX}{path.name}")


def steps_with_folder(folder: Path) -> list[int]:
    """Return the steps that have a folder, ascending. Raises CheckpointError for a link."""
    # Path.glob would take a folder that cannot be read for an empty one.
    with os_errors(folder):
        paths = folder.iterdir() if folder.is_dir() else []
        steps = {path: int(named[1]) for path in paths if (named := STEP.fullmatch(path.name))}
        for path in steps:
            if path.is_symlink():
                rule = "is a link, and links are not followed; move the folder itself there"
                raise CheckpointError(f"[checkpoint] {path} {rule}.")
        if is_remote(folder):
            # is_file would be False for a store's error too, and the next save deletes drafts.
            return sorted(steps[path] for path in steps if path / MANIFEST in path.iterdir())
        return sorted(step for path, step in steps.items() if path.is_dir())


def steps_with_manifest(folder: Path) -> list[int]:
    """Return the steps whose folder has a manifest, ascending."""
    steps = steps_with_folder(folder)
    if is_remote(folder):  # they have one
        return steps
    return [step for step in steps if (step_folder(folder, step) / MANIFEST).is_file()]


def find_problems(path: Path, *, hashes: bool) -> list[str]:
    """Return the problems of a checkpoint's files, one line each; `hashes`: read every byte."""
    try:
        return broken_files(path, read_manifest(path).files, hashes=hashes)
    except BrokenCheckpoint as broken:
        return [str(broken)]


# ----- Save -----


def start_draft(folder: Path, step: int) -> Path:
    """Delete all drafts, and create an empty one for `step`. Raises StorageError."""
    remove_drafts(folder)
    draft = draft_folder(folder, step)
    with storage_errors(folder):
        _refuse_foreign(draft)
        if not is_remote(draft):
            draft.mkdir(parents=True)
        elif draft.exists():
            logger.info(f"{draft} was there already: kept as {_set_aside(draft, 'superseded')}")
    return draft


def remove_drafts(folder: Path) -> None:
    """Delete all drafts without foreign files. Raises StorageError."""
    with storage_errors(folder):
        if is_remote(folder):
            for path in folder.iterdir() if folder.exists() else []:
                named = STEP.fullmatch(path.name.removesuffix(HF_SUFFIX))
                is_model = path.name.endswith(HF_SUFFIX)
                last = path / ("config.json" if is_model else MANIFEST)
                if named and last not in path.iterdir() and (is_model or not _foreign_file(path)):
                    _delete(path)
            return
        for draft in folder.glob(f"{DRAFT_PREFIX}step-*"):
            name = draft.name.removeprefix(DRAFT_PREFIX)
            if draft.is_symlink() or not draft.is_dir():
                continue
            if STEP.fullmatch(name.removesuffix(HF_SUFFIX)) and name.endswith(HF_SUFFIX):
                shutil.rmtree(draft)
            elif STEP.fullmatch(name) and not _foreign_file(draft):
                _delete(draft)


def commit(draft: Path, target: Path) -> None:
    """Rename a complete draft to its checkpoint, durably.

    A checkpoint that exists already is kept instead if every byte of it verifies, and set aside if
    not. In an object store it is one already, by its manifest. Raises StorageError."""
    if draft == target:
        return
    with storage_errors(target.parent):
        fsync_folder(draft)
        _refuse_foreign(target)
        if target.exists():
            problems = find_problems(target, hashes=True)
            if not problems:
                logger.info(f"{target} was there already, and is kept")
                _delete(draft)
                return
            kept = _set_aside(target, "broken")
            logger.warning(f"{target} was there already, but broken: {problems[0]}; kept as {kept}")
        draft.rename(target)
        fsync_folder(target.parent)


def prune(folder: Path, keep: int) -> None:
    """Delete all checkpoints older than the newest `keep` whose sizes verify; 0 keeps all. One with
    a foreign file is kept, with a warning. Raises StorageError."""
    with storage_errors(folder):
        steps = steps_with_manifest(folder)
        sound = [n for n in steps if not find_problems(step_folder(folder, n), hashes=False)]
        oldest_kept = sound[-keep:][0] if keep and sound else 0
        for step in (step for step in steps if step < oldest_kept):
            path = step_folder(folder, step)
            if foreign := _foreign_file(path):
                logger.warning(f"{path} is not deleted: no save has written {foreign.name} in it")
            else:
                draft = draft_folder(folder, step)
                _delete(path if path == draft else path.rename(draft))


def set_aside_after(folder: Path, step: int) -> None:
    """Rename the checkpoints after `step` and their Hugging Face models: a run that resumes from
    `step` trains these steps again. Raises StorageError, also if a bucket cannot be written: known
    at the start, not at the first save."""
    with storage_errors(folder):
        if is_remote(folder):
            (folder / ".write-test").write_bytes(b"")
            (folder / ".write-test").unlink()
        for path in sorted(folder.iterdir() if folder.exists() else [], reverse=True):
            named = STEP.fullmatch(path.name.removesuffix(HF_SUFFIX))
            if named and int(named[1]) > step and path.is_dir():
                if not path.name.endswith(HF_SUFFIX):
                    _refuse_foreign(path)
                kept = _set_aside(path, "superseded")
                logger.info(f"{path} is past step {step}: kept as {kept}")


@contextmanager
def storage_errors(folder: Path) -> Iterator[None]:
    """Turn an OSError in the block into a StorageError with its path and the fix."""
    try:
        with os_errors(folder):
            yield
    except OSError as error:
        reason = f"{error.strerror}; {storage_fix(error)}"
        raise unwritable(error.filename or folder, reason) from error


def unwritable(path: Path | str, reason: str) -> StorageError:
    """Return the error for a folder or file that cannot be written."""
    return StorageError(
        f"[checkpoint] {path} cannot be written: {reason}, or write to another folder (of a run: "
        "[job] dump_folder, [checkpoint] folder)."
    )


def _foreign_file(folder: Path) -> Path | None:
    """Return a file in `folder` that no save writes, or a link in its place; None without one."""
    if folder.is_symlink():
        return folder
    files = folder.iterdir() if folder.exists() else []
    return next((path for path in files if not OURS.fullmatch(path.name) or path.is_dir()), None)


def _refuse_foreign(folder: Path) -> None:
    """Raise StorageError if a foreign file or a link is in the way."""
    if foreign := _foreign_file(folder):
        raise StorageError(
            f"[checkpoint] {foreign} is in the way of a save, and no save has written it; move it "
            f"out of {folder.parent}."
        )


def _set_aside(path: Any, reason: str) -> Path:
    kept = path.with_name(f"{reason}-{path.name}-{time.time_ns()}")
    if not is_remote(path):
        return path.rename(kept)
    for file in path.iterdir():
        path.fs.copy(file.path, (kept / file.name).path)  # within the store
    _delete(path)
    return kept


def _delete(draft: Path) -> None:
    """Delete a draft, the manifest first: a kill leaves no checkpoint with missing files."""
    (draft / MANIFEST).unlink(missing_ok=True)
    for path in draft.iterdir():
        path.unlink()
    if not is_remote(draft):
        draft.rmdir()


# ----- Find -----


def find_checkpoints(path: Path) -> list[Path]:
    """Return the checkpoint at `path`, or those in it, by step, if it is a run folder or its folder
    of checkpoints. Raises CheckpointError if there is none."""
    with os_errors(path):
        if path.exists() and (STEP.fullmatch(path.name) or (path / MANIFEST).is_file()):
            return [path]
        children = [child for child in path.iterdir() if child.is_dir()] if path.is_dir() else []
    for folder in (path, *sorted(children)):
        if steps := steps_with_folder(folder):
            return [step_folder(folder, step) for step in steps]
    problem = "is missing;"
    if path.exists():
        problem = "has no checkpoints; train with --checkpoint.enable, or"
    raise CheckpointError(
        f"{path} {problem} name a run folder, its folder of checkpoints, or a step's."
    )


@contextmanager
def naming(path: Path, *, fix: str = "") -> Iterator[None]:
    """Add the path of the checkpoint and a `fix` to the message of a BrokenCheckpoint."""
    try:
        yield
    except BrokenCheckpoint as broken:
        raise BrokenCheckpoint(f"{path} is broken: {broken}{fix}") from broken


def find_kind(path: Path) -> str:
    """Return who wrote a folder of weights: "torchtitan_lite", "torchtitan" or "Hugging Face".
    Raises CheckpointError, with what the folder has, if there are none."""
    try:
        with os_errors(path):
            names = sorted(child.name for child in path.iterdir())
    except OSError as error:
        names, reason = [], f"cannot be listed: {error.strerror}"
    else:
        reason = f"holds {', '.join(names[-8:]) or 'nothing'}"

    # One of this project that has lost its manifest is broken, and not of torchtitan, which does
    # not fill the step with zeros.
    if MANIFEST in names or STEP.search((path if is_remote(path) else path.resolve()).name):
        return "torchtitan_lite"
    if ".metadata" in names:
        return "torchtitan"
    if any(name == "config.json" or name.endswith(".safetensors") for name in names):
        return "Hugging Face"
    raise CheckpointError(
        f"[checkpoint] initial_load_path: {path} {reason}. It takes the folder of a checkpoint of "
        f"torchtitan_lite (with {MANIFEST}) or torchtitan (.metadata and .distcp files), or of a "
        "Hugging Face model (config.json and .safetensors files)."
    )
