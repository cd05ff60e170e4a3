"""The runs behind docs/float8_parity.md, and the figures on the committed page."""

import json
import re
import subprocess
import time
from dataclasses import asdict, replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest
from sample_records import RECORD

from torchtitan_lite.config import Config, load_config, resolve_model
from torchtitan_lite.errors import ConfigError, RunError

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/float8_parity.md"


def load_script() -> ModuleType:
    spec = spec_from_file_location("float8_parity", ROOT / "scripts/float8_parity.py")
    assert spec and spec.loader
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SCRIPT = load_script()
RUNS: dict[str, tuple[str, ...]] = SCRIPT.list_runs()


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the runs that were launched. Each is done at once, with a loss of 4, and 4.02 where
    it is rowwise."""
    names = []

    def launch(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        folder = next(
            Path(word.partition("=")[2])
            for word in command
            if word.startswith("--job.dump_folder=")
        )
        names.append(folder.name)
        folder.mkdir()
        loss = 4.02 if folder.name.startswith("rowwise-") else 4.0
        lines = (json.dumps(asdict(replace(RECORD, step=n, tokens=n, loss=loss))) for n in (1, 2))
        (folder / "metrics.jsonl").write_text("\n".join(lines))
        (folder / "status.json").write_text(json.dumps({"state": "done", "started": 0, "time": 0}))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", launch)
    return names


def load(name: str) -> Config:
    path = ROOT / "train_configs/float8_parity.toml"
    return load_config([f"--job.config_file={path}", *RUNS[name]], world_size=1)


def test_each_recipe_runs_with_three_seeds_and_two_of_them_compiled() -> None:
    assert len(SCRIPT.RECIPES) == 6
    assert RUNS.keys() == {f"{recipe}-{seed}" for recipe in SCRIPT.RECIPES for seed in range(3)} | {
        f"{recipe}-compile{ac}"
        for recipe in ("bf16", "tensorwise_all_gather")
        for ac in ("", "_op_ac", "_full_ac")
    }


@pytest.mark.parametrize("name", RUNS)
def test_each_run_is_the_one_it_is_named_after(name: str) -> None:
    config = load(name)
    recipe, _, part = name.partition("-")
    float8 = config.float8
    assert float8.enable_float8_linear is (recipe != "bf16")
    assert float8.recipe_name == (
        "tensorwise" if recipe in ("bf16", "tensorwise_all_gather") else recipe
    )
    assert float8.precompute_float8_dynamic_scale_for_fsdp is (recipe == "tensorwise_all_gather")
    assert config.debug.seed == (int(part) if part.isdigit() else 0)
    assert config.compile.enable is part.startswith("compile")
    modes = {"compile_op_ac": "selective", "compile_full_ac": "full"}
    assert config.activation_checkpoint.mode == modes.get(part, "none")
    args = resolve_model(config.model)
    assert (args.n_layers, args.dim) == (4, 256)
    assert (config.training.steps, config.lr_scheduler.total_steps) == (
        100 if part not in "012" else 300,
        300,
    )


def test_runs_that_are_done_are_not_repeated(launched: list[str], tmp_path: Path) -> None:
    SCRIPT.train("bf16-0", RUNS["bf16-0"], out=tmp_path)
    SCRIPT.train("bf16-0", RUNS["bf16-0"], out=tmp_path)
    assert launched == ["bf16-0"]


def test_a_run_that_fails_ends_the_script_and_names_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        if not any(word.endswith("/bf16-0") for word in command):
            time.sleep(2)  # longer than the script takes to hear of the first failure
        return subprocess.CompletedProcess(command, 1)

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(RunError, match=r"ended with exit code 1: see \S+/bf16-0\.log"):
        SCRIPT.main(["--out", str(tmp_path)])
    assert len(list(tmp_path.iterdir())) <= 3  # two at a time, and what followed was not begun


def test_all_runs_end_in_a_page(launched: list[str], tmp_path: Path) -> None:
    SCRIPT.main(
        ["--out", str(tmp_path / "runs"), "--page", str(tmp_path / "page.md"), "--jobs", "3"]
    )
    assert set(launched) == RUNS.keys()
    page = (tmp_path / "page.md").read_text()
    assert (
        "| rowwise               | 4.0200 (+0.50 %) | 4.0200 (+0.50 %) | 4.0200 (+0.50 %) |" in page
    )
    assert "The farthest from bf16 is rowwise-0: +0.50 %." in page
    assert "| tensorwise_all_gather-compile_full_ac |" in page


def test_wrong_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="--jobs 0 must be at least 1"):
        SCRIPT.main(["--jobs", "0", "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match="0"):
        SCRIPT.main(["--help"])
    assert "python scripts/float8_parity.py [--out DIR]" in capsys.readouterr().out


def test_on_the_page_every_recipe_trains_within_a_percent_of_bf16() -> None:
    summary, _, rest = PAGE.read_text().partition("\n\nThe farthest")
    rows = dict(re.findall(r"^\| (\w+) +\| (\d.*) \|$", summary, re.MULTILINE))
    assert rows.keys() == SCRIPT.RECIPES.keys()
    percents = {
        recipe: [float(number) for number in re.findall(r"\((\S+) %\)", row)]
        for recipe, row in rows.items()
    }
    assert all(len(row) == 3 and max(map(abs, row)) <= 1 for row in percents.values())
    assert percents["bf16"] == [0, 0, 0]
    compiled = re.findall(r"^\| (\w+-compile\w*) ", rest, re.MULTILINE)
    assert compiled == [name for name in RUNS if "compile" in name]
