"""The folder of checkpoints: one subfolder for each step, renamed into place when it is complete.

  step-00000100                      a checkpoint: it has a manifest, written last
  step-00000100-hf                   the last one as a Hugging Face model (last_save_in_hf)
  .tmp-step-00000100, ...-hf         a draft: being written or deleted, or left by a killed process
  broken-step-00000100-<ns>          a checkpoint that did not verify when its step was saved again
  superseded-step-00000100-<ns>      a checkpoint past the step that a run resumed from

Anything else is foreign and never touched; so is a folder with a file that no save writes. If one
of these names is a link, only the link is renamed or deleted; its target stays. A process killed at
any moment leaves all earlier checkpoints, with or without the new one. Does not import torch.
"""

import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from torchtitan_lite.base.errors import CheckpointError, StorageError
from torchtitan_lite.base.files import fsync_folder, remove_folder, storage_fix
from torchtitan_lite.base.jsonfile import parse_toml
from torchtitan_lite.base.logger import logger
from torchtitan_lite.base.tables import format_columns

from .manifest import MANIFEST, SAVED_FILES, STEP, BrokenCheckpoint, broken_files, read_manifest

DRAFT_PREFIX, HF_SUFFIX = ".tmp-", "-hf"
ANY_STEP = "*/*/step-" + 8 * "[0-9]"
"""Pattern of the checkpoints of all runs in a folder."""
KINDS = {
    "torchtitan_lite": (MANIFEST, "rank-*.json"),
    "torchtitan": (".metadata",),
    "Hugging Face": ("config.json", "*.safetensors"),
}
"""Who wrote a folder of weights: the first kind with a pattern that the name of a file matches."""
MOST_NAMED = 8
"""Most folders that a message names, the last ones."""
OURS = re.compile(
    rf"{SAVED_FILES}|{MANIFEST}|\.metadata\.tmp|\.(?:{MANIFEST}|rank-\d{{5}}\.json)\..+"
)
"""Names of the files of a checkpoint, and of the drafts that DCP and replace_file rename."""


def step_folder(folder: Path, step: int) -> Path:
    """Return the path of the checkpoint of `step`."""
    return folder / f"step-{step:08d}"


def draft_folder(folder: Path, step: int) -> Path:
    """Return the path at which the checkpoint of `step` is written, and at which it is deleted."""
    return folder / f"{DRAFT_PREFIX}step-{step:08d}"


def hf_folder(step_dir: Path) -> Path:
    """Return the path of the Hugging Face model with the weights of the checkpoint `step_dir`."""
    return step_dir.with_name(f"{step_dir.name}{HF_SUFFIX}")


def steps_with_folder(folder: Path) -> list[int]:
    """Return the steps that have a folder, ascending, whatever the folder contains."""
    if not folder.is_dir():
        return []
    # Path.glob would take a folder that cannot be read for an empty one.
    matches = (STEP.fullmatch(path.name) for path in folder.iterdir() if path.is_dir())
    return sorted(int(match[1]) for match in matches if match)


def steps_with_manifest(folder: Path) -> list[int]:
    """Return the steps whose folder has a manifest, ascending."""
    steps = steps_with_folder(folder)
    return [step for step in steps if (step_folder(folder, step) / MANIFEST).is_file()]


def find_problems(path: Path, *, hashes: bool) -> list[str]:
    """Return the problems of the files of the checkpoint at `path`, one line each. With `hashes`,
    every byte is read."""
    try:
        return broken_files(path, read_manifest(path).files, hashes=hashes)
    except BrokenCheckpoint as broken:
        return [str(broken)]


def start_draft(folder: Path, step: int) -> Path:
    """Create an empty folder for the checkpoint of `step`, after deleting all earlier drafts.
    Raises StorageError if the disk fails, or if a draft of this step has a foreign file."""
    remove_drafts(folder)
    draft = draft_folder(folder, step)
    with storage_errors(folder):
        if os.path.lexists(draft):
            foreign = _foreign_file(draft) or draft
            raise StorageError(
                f"[checkpoint] {foreign} is in the way of a save; move it out of {folder}."
            )
        draft.mkdir(parents=True)
    return draft


def remove_drafts(folder: Path) -> None:
    """Delete all drafts without foreign files. Raises StorageError if the disk fails."""
    with storage_errors(folder):
        for draft in folder.glob(f"{DRAFT_PREFIX}step-*"):
            name = draft.name.removeprefix(DRAFT_PREFIX)
            if not STEP.fullmatch(name.removesuffix(HF_SUFFIX)):
                continue
            if name.endswith(HF_SUFFIX) and draft.is_dir():
                remove_folder(draft)
            elif draft.is_symlink() or (draft.is_dir() and not _foreign_file(draft)):
                _delete(draft)


def commit(draft: Path, target: Path) -> None:
    """Rename a complete draft to its checkpoint, durably.

    A checkpoint that exists already is kept instead if every byte of it verifies, and set aside if
    not. Raises StorageError if the disk fails, or if the folder has a foreign file."""
    with storage_errors(target.parent):
        fsync_folder(draft)

        if os.path.lexists(target):
            if foreign := _foreign_file(target):
                raise StorageError(
                    f"[checkpoint] {target} is in the way of a save: {foreign.name} in it was "
                    f"written by no save; move it out of {target.parent}."
                )
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
    """Delete all checkpoints older than the newest `keep` whose sizes verify; 0 keeps all.

    Warns about a checkpoint with a foreign file, and keeps it. Raises StorageError if the disk
    fails."""
    steps = steps_with_manifest(folder)
    sound = [step for step in steps if not find_problems(step_folder(folder, step), hashes=False)]
    oldest_kept = sound[-keep:][0] if keep and sound else 0
    with storage_errors(folder):
        for step in (step for step in steps if step < oldest_kept):
            path = step_folder(folder, step)
            if foreign := _foreign_file(path):
                warning = f"{path} is not deleted: {foreign.name} in it was written by no save"
                logger.warning(warning)
            else:
                _delete(path.rename(draft_folder(folder, step)))


def set_aside_after(folder: Path, step: int) -> None:
    """Rename the checkpoints of later steps, broken ones too, and their Hugging Face models,
    because a run that resumes from `step` trains these steps again. Raises StorageError if the disk
    fails."""
    with storage_errors(folder):
        for path in sorted(folder.iterdir(), reverse=True):
            exported = path.name.endswith(HF_SUFFIX)
            named = STEP.fullmatch(path.name.removesuffix(HF_SUFFIX))
            later = named is not None and int(named[1]) > step and path.is_dir()
            if later and (exported or not _foreign_file(path)):
                kept = _set_aside(path, "superseded")
                logger.info(f"{path} is of a run past step {step}: kept as {kept}")


@contextmanager
def storage_errors(folder: Path) -> Iterator[None]:
    """Turn an OSError in the block into a StorageError with its path and the fix."""
    try:
        yield
    except OSError as error:
        reason = f"{error.strerror}; {storage_fix(error)}"
        raise unwritable(error.filename or folder, reason) from error


def unwritable(path: Path | str, reason: object) -> StorageError:
    """Return the error for a folder or file that cannot be written."""
    return StorageError(
        f"[checkpoint] {path} cannot be written: {reason}, or write to another folder, in training "
        "another [job] dump_folder."
    )


def _foreign_file(folder: Path) -> Path | None:
    """Return a file in `folder` that no save writes, or None. A link has none: only the link itself
    is renamed or deleted."""
    files = [] if folder.is_symlink() else folder.iterdir()
    return next((path for path in files if not OURS.fullmatch(path.name) or path.is_dir()), None)


def _set_aside(path: Path, reason: str) -> Path:
    return path.rename(path.with_name(f"{reason}-{path.name}-{time.time_ns()}"))


def _delete(draft: Path) -> None:
    """Delete a draft; of a link, only the link. The manifest goes first, so that a kill leaves no
    checkpoint with missing files."""
    if draft.is_symlink():
        draft.unlink()
        return
    (draft / MANIFEST).unlink(missing_ok=True)
    for path in draft.iterdir():
        path.unlink()
    draft.rmdir()


@dataclass(frozen=True)
class CheckpointSummary:
    """Figures of a checkpoint, for a table. Most are None if its manifest cannot be read."""

    path: str
    step: int
    problems: list[str]
    """Damage to its manifest, its small files, or the sizes of its files."""
    tokens: int | None = None
    time: float | None = None
    """When it was written, in Unix seconds."""
    size: int | None = None
    """Size of its files in bytes."""
    world_size: int | None = None
    mesh: dict[str, int] | None = None
    float8: str | None = None
    """Float8 recipe of the run; None in bfloat16."""
    weights_only: bool = False


def find_checkpoints(path: Path) -> list[Path]:
    """Return the checkpoint at `path`, or the checkpoints in it, by step, if it is a run folder or
    its folder of checkpoints. Raises CheckpointError if there is none."""
    if path.exists() and (STEP.fullmatch(path.name) or (path / MANIFEST).is_file()):
        return [path]
    if found := _checkpoints_in(path):
        return found
    rule = "name a run folder, its folder of checkpoints, or a step's"
    raise CheckpointError(f"{explain(path, f'has no checkpoints: {rule}')}.")


def _checkpoints_in(path: Path) -> list[Path]:
    """Return the checkpoints in a folder of checkpoints or a run folder, by step."""
    children = sorted(child for child in path.iterdir() if child.is_dir()) if path.is_dir() else []
    for folder in (path, *children):
        if steps := steps_with_folder(folder):
            return [step_folder(folder, step) for step in steps]
    return []


def explain(path: Path, reason: str) -> str:
    """Return a message that names `path` and says why no checkpoint can be read there: `reason`,
    unless the path is missing or is something else. Then it names checkpoints or runs nearby."""
    if (path / MANIFEST).exists():
        return f"{path} {reason}"
    there = next(folder for folder in (path, *path.parents) if folder.exists())
    found: list[Path] = []
    if there == path or there != there.parent:  # not "/" or "." for whatever is missing
        with suppress(OSError):
            steps = [*there.glob(ANY_STEP), *there.glob(f"previous/{ANY_STEP}")]
            found = _checkpoints_in(there) or sorted({step.parents[1] for step in steps})
    problem = ("is no checkpoint" if found else reason) if path.exists() else "is missing"
    if not found:
        return f"{path} {problem}"
    return f"{path} {problem}; {there} holds {', '.join(map(str, found[-MOST_NAMED:]))}: name one"


def find_kind(path: Path) -> str:
    """Return the kind of weights in a folder, a key of KINDS. Raises CheckpointError, with what the
    folder has, if there are none."""
    try:
        names = sorted(child.name for child in path.iterdir())
    except OSError as error:
        names, reason = [], f"cannot be listed: {error.strerror}"
    else:
        inside = [*path.glob("*/.metadata"), *path.glob("*/*/.metadata")]  # steps of torchtitan
        held = sorted(str(metadata.parent) for metadata in inside) or names
        reason = f"holds {', '.join(held[-MOST_NAMED:]) or 'nothing'}"

    for kind, patterns in KINDS.items():
        if any(fnmatch(name, pattern) for name in names for pattern in patterns):
            return kind

    found = f"{path} {reason}"
    with suppress(PermissionError):
        found = explain(path, reason)
    raise CheckpointError(
        f"[checkpoint] initial_load_path: {found}. It takes the folder of a checkpoint of "
        f"torchtitan_lite (with {MANIFEST}) or torchtitan (.metadata and .distcp files), or of a "
        "Hugging Face model (config.json and .safetensors files)."
    )


@contextmanager
def naming(path: Path, *, fix: str = "") -> Iterator[None]:
    """Add the path of the checkpoint and a `fix` to the message of a BrokenCheckpoint. `explain`
    may replace both."""
    try:
        yield
    except BrokenCheckpoint as broken:
        raise BrokenCheckpoint(explain(path, f"is broken: {broken}{fix}")) from broken


def summarize(path: Path) -> CheckpointSummary:
    """Return the figures of the checkpoint at `path`."""
    try:
        manifest = read_manifest(path)
    except BrokenCheckpoint as broken:
        named = STEP.fullmatch(path.name)
        return CheckpointSummary(str(path), int(named[1]) if named else 0, [str(broken)])
    float8 = parse_toml(manifest.config.encode()).get("float8", {})
    recipe = str(float8.get("recipe_name"))
    return CheckpointSummary(
        path=str(path),
        step=manifest.progress.step,
        problems=broken_files(path, manifest.files, hashes=False),
        tokens=manifest.progress.tokens,
        time=(path / MANIFEST).stat().st_mtime,
        size=sum(entry.size for entry in manifest.files.values()),
        world_size=manifest.world_size,
        mesh=manifest.mesh,
        float8=recipe if float8.get("enable_float8_linear") else None,
        weights_only=manifest.has_weights_only,
    )


def format_summaries(summaries: list[CheckpointSummary]) -> str:
    """Return a table with one line for each checkpoint."""
    rows = [["step", "tokens", "written", "GiB", "ranks", "mesh", "float8", "state"]]
    for each in summaries:
        cells = ["-"] * 6
        if each.mesh is not None and each.size is not None:
            degrees = (f"{name}={degree}" for name, degree in each.mesh.items() if degree > 1)
            cells = [
                str(each.tokens),
                time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(each.time)),
                f"{each.size / 2**30:.3f}",
                str(each.world_size),
                " ".join(degrees) or "-",
                each.float8 or "no",
            ]
        sound = "ok, weights only" if each.weights_only else "ok"
        state = f"broken: {each.problems[0]}" if each.problems else sound
        rows.append([str(each.step), *cells, state])
    return format_columns(rows)
