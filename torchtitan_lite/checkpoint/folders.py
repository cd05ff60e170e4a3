"""The folder of checkpoints: a folder a step, which gets its name once it is complete. Imports no
torch.

  step-00000100                      a checkpoint: it has a manifest, written last
  .tmp-step-00000100                 one being written or deleted, or left so by a killed process
  broken-step-00000100-<ns>          one that did not verify when its step was saved again
  superseded-step-00000100-<ns>      one past the step that a run went on from

Whatever else is in there is foreign, a folder with a file that no save makes too, and is never
touched. Where one of these names is a link, only the link is renamed or deleted, and its target
stays. At each moment a killed process leaves all checkpoints that were there, or those and the new
one.
"""

import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torchtitan_lite.checkpoint.manifest import (
    MANIFEST,
    SAVED_FILES,
    BrokenCheckpoint,
    Manifest,
    broken_files,
    read_manifest,
)
from torchtitan_lite.errors import StorageError
from torchtitan_lite.files import fsync_folder
from torchtitan_lite.logger import logger

STEP = re.compile(r"step-(\d{8})")
DRAFT_PREFIX = ".tmp-"
# Besides the files themselves, those that DCP and replace_file write first and rename then.
OURS = re.compile(
    rf"{SAVED_FILES}|{MANIFEST}|\.metadata\.tmp|\.(?:{MANIFEST}|rank-\d{{5}}\.json)\..+"
)


def step_folder(folder: Path, step: int) -> Path:
    """Where the checkpoint of `step` stands once it is complete."""
    return folder / f"step-{step:08d}"


def draft_folder(folder: Path, step: int) -> Path:
    """Where the checkpoint of `step` is written, and where it is deleted."""
    return folder / f"{DRAFT_PREFIX}step-{step:08d}"


def named_steps(folder: Path) -> list[int]:
    """Steps that have a folder in `folder`, ascending, whatever is in it."""
    names = [path.name for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []
    return sorted(int(match[1]) for match in map(STEP.fullmatch, names) if match)


def committed_steps(folder: Path) -> list[int]:
    """Steps of the checkpoints in `folder`, ascending."""
    return [
        step for step in named_steps(folder) if (step_folder(folder, step) / MANIFEST).is_file()
    ]


def read_step_manifest(path: Path) -> Manifest:
    """The manifest of the checkpoint at `path`. Raises BrokenCheckpoint as `read_manifest` does,
    and if the folder has the name of another step."""
    manifest = read_manifest(path)
    named = STEP.fullmatch(path.name)
    if named and int(named[1]) != manifest.progress.step:
        raise BrokenCheckpoint(f"{MANIFEST}: is of step {manifest.progress.step}")
    return manifest


def find_problems(path: Path, *, hashes: bool) -> list[str]:
    """What is wrong with the checkpoint at `path`, a line each; with `hashes`, all its bytes are
    read."""
    try:
        return broken_files(path, read_step_manifest(path), hashes=hashes)
    except BrokenCheckpoint as broken:
        return [str(broken)]


def start_draft(folder: Path, step: int) -> Path:
    """A new, empty folder to write the checkpoint of `step` into, in place of an earlier draft.

    Raises StorageError if the disk fails, or if that draft holds files that no save writes."""
    draft = draft_folder(folder, step)
    with storage_errors(folder):
        if os.path.lexists(draft):
            if foreign := _foreign_file(draft):
                raise StorageError(
                    f"[checkpoint] {foreign} is in the way of a save; move it out of {folder}."
                )
            _delete(draft)
        draft.mkdir(parents=True)
    return draft


def remove_drafts(folder: Path) -> None:
    """Delete what killed saves and killed deletions left in `folder`. Raises StorageError if the
    disk fails."""
    with storage_errors(folder):
        for draft in folder.glob(f"{DRAFT_PREFIX}step-*"):
            ours = draft.is_symlink() or (draft.is_dir() and not _foreign_file(draft))
            if ours and STEP.fullmatch(draft.name.removeprefix(DRAFT_PREFIX)):
                _delete(draft)


def commit(draft: Path, target: Path) -> None:
    """Give a complete draft the name of its checkpoint, for good.

    A checkpoint of that name that verifies, every byte read, is kept instead, and one that does not
    is renamed. Raises StorageError if the disk fails, or if a foreign folder has the name."""
    with storage_errors(target.parent):
        fsync_folder(draft)
        if os.path.lexists(target):
            if foreign := _foreign_file(target):
                raise StorageError(
                    f"[checkpoint] {target} is in the way of a save: {foreign.name} in it is of no save; move it out "
                    f"of {target.parent}."
                )
            problems = find_problems(target, hashes=True)
            if not problems:
                logger.info(f"{target} was there already, and is kept")
                _delete(draft)
                return
            aside = target.rename(target.with_name(f"broken-{target.name}-{time.time_ns()}"))
            logger.warning(
                f"{target} was there already, but broken: {problems[0]}; kept as {aside}"
            )
        draft.rename(target)
        fsync_folder(target.parent)


def prune(folder: Path, keep: int) -> None:
    """Delete the checkpoints in `folder` that are older than the newest `keep` whose sizes verify;
    0 keeps all.

    One that a foreign file was put into is kept, and told of. Raises StorageError if the disk
    fails."""
    steps = committed_steps(folder)
    sound = [step for step in steps if not find_problems(step_folder(folder, step), hashes=False)]
    oldest_kept = sound[-keep:][0] if keep and sound else 0
    with storage_errors(folder):
        for step in steps:
            path = step_folder(folder, step)
            if step >= oldest_kept:
                return
            if foreign := _foreign_file(path):
                logger.warning(f"{path} is not deleted: {foreign.name} in it is of no save")
                continue
            _delete(path.rename(draft_folder(folder, step)))


def set_aside_after(folder: Path, step: int) -> None:
    """Rename the checkpoints of later steps, broken ones too, as the run that goes on from `step`
    will train these steps anew. Raises StorageError if the disk fails."""
    with storage_errors(folder):
        for later in reversed(named_steps(folder)):
            old = step_folder(folder, later)
            if later > step and not _foreign_file(old):
                aside = old.rename(folder / f"superseded-{old.name}-{time.time_ns()}")
                logger.info(f"{old} is of a run past step {step}: kept as {aside}")


@contextmanager
def storage_errors(folder: Path) -> Iterator[None]:
    """Turns an OSError within it into the StorageError that names the path, the reason and the
    fix."""
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"[checkpoint] {error.filename or folder} cannot be written: {error.strerror}; "
            "make room or mend its permissions, or name another [job] dump_folder."
        ) from error


def _foreign_file(folder: Path) -> Path | None:
    """Return a file in `folder` that no save writes, or None. A link counts as ours: only the link
    is changed."""
    if folder.is_symlink():
        return None
    return next(
        (path for path in folder.iterdir() if not OURS.fullmatch(path.name) or path.is_dir()), None
    )


def _delete(draft: Path) -> None:
    """Delete a draft and its files, the manifest first: what a kill leaves of it is no checkpoint.
    Of a link, delete the link alone."""
    if draft.is_symlink():
        draft.unlink()
        return
    (draft / MANIFEST).unlink(missing_ok=True)
    for path in draft.iterdir():
        path.unlink()
    draft.rmdir()
