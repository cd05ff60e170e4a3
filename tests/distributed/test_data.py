"""What real processes train on: the same samples in the same order on any number of them, through
resumes; the end of the data; data that changes under a run."""

import json
from collections import Counter
from pathlib import Path

import launching
import pytest
from faults import checkpoint, reported, root_cause
from launching import FOLDER, torchrun, train_arguments

from torchtitan_lite.checkpoint.manifest import read_manifest

SEQ_LEN = 64


def write_text(path: Path, *, lines: int) -> None:
    text = (f"{path.stem}: line {number} of what there is to learn\n" for number in range(lines))
    path.write_text("".join(text))


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The override that mixes two texts 3 to 1, so that a run of 34 samples reads the second more
    than twice."""
    folder = tmp_path_factory.mktemp("texts")
    write_text(folder / "code.txt", lines=120)
    write_text(folder / "prose.txt", lines=16)
    code = f'{{path="{folder}/code.txt",weight=0.3}}'
    prose = f'{{path="{folder}/prose.txt",weight=0.1}}'
    return f"--training.datasets=[{code},{prose}]"


def arguments(folder: Path, *overrides: str) -> list[str]:
    """The arguments of torchrun for a run of the tiny config, which saves at its end and notes what
    each process trained on."""
    _, _, *words = train_arguments(folder, "--checkpoint.enable", *overrides)
    return [str(FOLDER / "samples_worker.py"), *words]


def finish(folder: Path, *overrides: str, processes: int) -> str:
    return launching.finish(*arguments(folder, *overrides), processes=processes)


def trained(folder: Path) -> dict[int, list[tuple[int, str]]]:
    """Of each step the samples of all processes, by number, each with the hash of its window."""
    steps: dict[int, list[tuple[int, str]]] = {}
    for path in sorted(folder.glob("samples-*.jsonl")):
        for line in map(json.loads, path.read_text().splitlines()):
            steps.setdefault(line["step"], []).extend(
                (int(i), window) for i, window in line["samples"].items()
            )
    return {step: sorted(samples) for step, samples in sorted(steps.items())}


def in_order(folder: Path) -> list[tuple[int, str]]:
    """All samples of a run, step by step."""
    return [sample for samples in trained(folder).values() for sample in samples]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, datasets: str) -> list[tuple[int, str]]:
    """The samples of a run of one process."""
    folder = tmp_path_factory.mktemp("uninterrupted") / "run"
    finish(folder, datasets, "--training.global_batch_size=-1", "--training.steps=17", processes=1)
    return in_order(folder)


# ----- TrainingBatches -----
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("global_batch_size", "runs"),
    [(-1, [(2, 3, 12), (1, 5, 20), (2, 8, 32)]), (8, [(2, 2, 16), (4, 3, 24), (1, 4, 32)])],
)
def test_samples_are_in_one_order_on_any_processes_through_resumes(
    global_batch_size: int,
    runs: list[tuple[int, int, int]],
    uninterrupted: list,
    datasets: str,
    tmp_path: Path,
) -> None:
    assert [sample for sample, _ in uninterrupted] == list(range(34))
    windows = Counter(window for _, window in uninterrupted)
    assert max(windows.values()) >= 3 and len(windows) > 20
    for processes, steps, samples in runs:
        size = f"--training.global_batch_size={global_batch_size}"
        finish(tmp_path / "run", datasets, size, f"--training.steps={steps}", processes=processes)
        progress = read_manifest(checkpoint(tmp_path / "run", steps)).progress
        assert (progress.samples, progress.tokens) == (samples, samples * SEQ_LEN)
        assert in_order(tmp_path / "run") == uninterrupted[:samples]


# ----- epochs -----
@pytest.mark.timeout(300)
def test_the_end_of_the_data_ends_all_processes_at_one_step_with_a_checkpoint(
    tmp_path: Path,
) -> None:
    write_text(tmp_path / "text.txt", lines=40)
    folder = tmp_path / "run"
    settings = [f"--training.dataset_path={tmp_path}/text.txt", "--training.epochs=2"]
    settings.append("--training.steps=1000")
    output = finish(folder, *settings, processes=2)
    samples = [sample for sample, _ in in_order(folder)]
    last_step = len(samples) // 8
    assert samples == list(range(8 * last_step))
    windows = Counter(window for _, window in in_order(folder))
    left_over = 2 * len(windows) - len(samples)
    assert 0 < left_over < 8 and set(windows.values()) == {1, 2}
    assert f"epochs = 2 end the run at step {last_step} of 1,000; {left_over} samples" in output
    assert f"2 epochs done: the data ended the run at step {last_step}" in output
    assert reported(folder, "state", "step") == ["done", last_step]
    assert reported(folder, "last_checkpoint") == [str(checkpoint(folder, last_step))]
    again = finish(folder, *settings, processes=1)
    assert f"all {last_step} steps are done; raise --training.steps (or epochs" in again


# ----- allow_data_change -----
@pytest.mark.timeout(300)
def test_data_that_changed_is_refused_on_resume_unless_allowed(tmp_path: Path) -> None:
    write_text(tmp_path / "text.txt", lines=100)
    folder = tmp_path / "run"
    settings = [f"--training.dataset_path={tmp_path}/text.txt"]
    finish(folder, *settings, "--training.steps=2", processes=2)
    before = read_manifest(checkpoint(folder, 2)).progress.data
    write_text(tmp_path / "text.txt", lines=101)
    refused = torchrun(*arguments(folder, *settings, "--training.steps=3"), processes=2)
    code, cause = root_cause(refused)
    assert (code, *reported(folder, "state")) == (3, "done")
    for changed in ("store 1 tokens", "store 1 fingerprint"):
        assert f"{changed}: {before[changed]} -> " in cause
    assert "sample 16 of the new order" in cause
    finish(folder, *settings, "--training.steps=3", "--training.allow_data_change", processes=2)
    assert [sample for sample, _ in trained(folder)[3]] == list(range(16, 24))
    # The same text in another place is the same data.
    moved = (tmp_path / "text.txt").rename(tmp_path / "moved.txt")
    finish(folder, f"--training.dataset_path={moved}", "--training.steps=4", processes=2)
    assert [sample for sample, _ in trained(folder)[4]] == list(range(24, 32))
