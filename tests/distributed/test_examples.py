"""The programs in examples/: code from outside the package, as its users write it."""

import json
import shutil
from pathlib import Path

import pytest
import warm
from launching import ENV, ROOT, launcher, read_losses, train_arguments

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
OUTSIDE = [
    "--training.loss=z_loss:z_loss",
    "--training.dataset=own_data:counting",
    "--training.after_step=weight_norms:log_norm",
    "--optimizer.name=own_optimizer:lion",
    "--optimizer.lr=1e-3",
    "--lr_scheduler.decay_type=outside:quadratic",
    "--lr_scheduler.warmup_steps=0",
    "--lr_scheduler.total_steps=12",
    "--float8.enable_float8_linear",
    "--float8.recipe_name=own_recipe:RECIPE",
    "--metrics.writers=mlflow_writer:MLflowWriter",
    "--experimental.custom_import=outside",
    "--training.global_batch_size=4",
    "--training.seq_len=32",
    "--checkpoint.enable",
    "--checkpoint.interval=10",
]
MODULES = {
    # What an LR decay of a user's is, and a module that is imported for what it does.
    "outside.py": """
print("outside was imported")

def quadratic(progress):
    return (1 - progress) ** 2
""",
    # What the example uses of MLflow, written to a file.
    "mlflow.py": """
import json
from types import SimpleNamespace

def note(name):
    def call(*arguments, **keys):
        with open("mlflow.jsonl", "a") as file:
            print(json.dumps([name, arguments, keys]), file=file)
        return SimpleNamespace(info=SimpleNamespace(run_id="run 1"))
    return call

start_run, log_text, log_metrics, end_run = map(
    note, ["start_run", "log_text", "log_metrics", "end_run"])
""",
}

pytestmark = [pytest.mark.quick, pytest.mark.timeout(300)]


# ----- examples -----


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_has_at_most_60_lines(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 60


def test_own_loop() -> None:
    done = warm.python([str(ROOT / "examples/own_loop.py")], cwd=ROOT, env=ENV, timeout=200)
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("step ")]
    assert done.returncode == 0 and len(lines) == 5, done.stderr
    assert float(lines[-1][3]) < float(lines[0][3])  # the loss
    assert 0 < float(lines[-1][7]) < 100  # the MFU


def train_outside(folder: Path, run: str, *overrides: str, processes: int = 2) -> str:
    """Train the tiny config in folder/run with every example, from within `folder`."""
    for path in EXAMPLES:
        shutil.copy(path, folder)
    for name, text in MODULES.items():
        (folder / name).write_text(text)
    arguments = train_arguments(folder / run, *OUTSIDE, *overrides)
    command = [*launcher(processes), *arguments]
    done = warm.python(command, cwd=folder, env=ENV, timeout=200)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    return done.stdout + done.stderr


def test_a_run_with_code_from_outside_resumes(tmp_path: Path) -> None:
    """A resumed run goes on where it ended: its batches, optimizer state and writer."""
    said = train_outside(tmp_path, "whole", "--training.steps=12")
    assert said.count("outside was imported") == 2
    train_outside(tmp_path, "parts", "--training.steps=10")
    train_outside(tmp_path, "parts", "--training.steps=12")
    whole = read_losses(tmp_path / "whole")
    assert read_losses(tmp_path / "parts") == whole and whole[-1] < whole[0]

    records = [json.loads(line) for line in (tmp_path / "parts/metrics.jsonl").open()]
    expected = [1e-3 * (1 - step / 13) ** 2 for step in range(1, 13)]  # the decay's
    assert [record["lr"] for record in records] == pytest.approx(expected)

    calls = [json.loads(line) for line in (tmp_path / "mlflow.jsonl").open()]
    started = [keys["run_id"] for name, _, keys in calls if name == "start_run"]
    assert started == [None, None, "run 1"]  # the last one continues
    norms = [(keys["step"], given[0]["weight_norm"]) for name, given, keys in calls
             if name == "log_metrics" and "weight_norm" in given[0]]  # fmt: skip
    assert [step for step, _ in norms] == [10, 10] and norms[0] == norms[1]


def test_code_from_outside_is_compared_between_ranks(tmp_path: Path) -> None:
    """Rank 1 finds another module of the same name first."""
    worker = tmp_path / "worker.py"
    worker.write_text(
        "import os, sys\n"
        f"sys.path.insert(0, {str(tmp_path)!r} + '/rank' + os.environ['RANK'])\n"
        "from torchtitan_lite.train import main\n"
        "main()\n"
    )
    for rank in range(2):
        (tmp_path / f"rank{rank}").mkdir()
        (tmp_path / f"rank{rank}/mine.py").write_text(f"def decay(progress): return {rank}")
    config = train_arguments(tmp_path / "run", "--lr_scheduler.decay_type=mine:decay")[2:]
    command = [*launcher(2), str(worker), *config]
    done = warm.python(command, cwd=tmp_path, env=ENV, timeout=200)
    assert done.returncode != 0
    assert "source of mine (SHA-256) differs between ranks" in done.stdout + done.stderr


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_what_an_example_says_to_run(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its overrides name itself and load as a config."""
    monkeypatch.syspath_prepend(path.parent)  # a recipe is imported to check its keys
    from torchtitan_lite import load_config
    from torchtitan_lite.config import outside_names

    docstring = (path.read_text().split('"""')[1]).replace("\\\n", " ")
    commands = [line for line in docstring.splitlines() if line.startswith("torchtitan-lite train")]
    for command in commands:
        named = outside_names(load_config(command.split()[2:]))
        assert path.stem in {name.partition(":")[0] for name in named}
    assert commands or f"python {path.name}" in docstring
