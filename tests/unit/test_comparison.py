"""Runs beside each other at equal tokens: figures by hand, the table, what a folder may lack."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from sample_records import RECORD

from torchtitan_lite.errors import ConfigError
from torchtitan_lite.metrics.comparison import compare, format_comparison, format_runs, read_runs

ROOT = Path(__file__).parents[2]


def make_run(
    folder: Path, losses: Sequence[float | None], **figures: Sequence[float | None]
) -> Path:
    """A run folder of as many steps, 1000 tokens each where `figures` do not say otherwise."""
    columns = {
        "loss": losses,
        "tokens": [1000 * step for step in range(1, len(losses) + 1)],
        **figures,
    }
    record = replace(RECORD, grad_norm=1.0, tps=100.0, mfu=40.0).to_json()
    lines = [
        json.dumps(record | {"step": step} | dict(zip(columns, values, strict=True)))
        for step, values in enumerate(zip(*columns.values(), strict=True), start=1)
    ]
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return folder


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    """bf16, which was validated, and a float8 run that is faster and two steps ahead."""
    runs = [
        make_run(tmp_path / "bf16", [8, 6, 4, 5], grad_norm=[2, 1, 1, 1], tps=[1, 90, 110, 100]),
        make_run(
            tmp_path / "float8",
            [8, 6.6, 4.04, 4.96, 1, 1],
            grad_norm=[1, 1, 1, 1.1, 9, 9],
            tps=[1, 150, 150, 150, 150, 250],
            mfu=[1, 30, 20, 20, 20, 30],
        ),
    ]
    lines = '{"step": 2, "validation_loss": 5.5}\n{"step": 4, "validation_loss": 4.75}\n{"st'
    (runs[0] / "validation.jsonl").write_text(lines)
    return runs


def test_losses_are_compared_at_equal_tokens(runs: list[Path]) -> None:
    bf16, float8 = compare(read_runs(runs), last=2)
    assert bf16 | {"tps": 0, "mfu": 0} == {
        "run": "bf16",
        "steps": 4,
        "tokens": 4000,
        "final loss": 4.5,
        "validation loss": 4.75,
        "to first": 0,
        "loss at most off": 0,
        "grad norm at most off": 0,
        "tps": 0,
        "times first": 1,
        "mfu": 0,
    }
    assert (float8["steps"], float8["tokens"]) == (6, 6000)
    assert float8["final loss"] == 4.5  # of 4.04 and 4.96, not of the last two
    assert float8["to first"] == 0
    assert float8["loss at most off"] == pytest.approx(10)
    assert float8["grad norm at most off"] == pytest.approx(50)


def test_speeds_are_medians_without_the_first_step(runs: list[Path]) -> None:
    names = ("tps", "times first", "mfu")
    bf16, float8 = compare(read_runs(runs), last=20)
    assert [bf16[name] for name in names] == [100, 1, 40]
    assert [float8[name] for name in names] == [150, 1.5, 20]


def test_nothing_is_interpolated(tmp_path: Path) -> None:
    a = make_run(tmp_path / "a", [5, 9, 4], tokens=[2000, 3000, 4000])
    b = make_run(tmp_path / "b", [6, 5], tokens=[2000, 4000])
    assert [run["final loss"] for run in compare(read_runs([a, b]), last=2)] == [4.5, 5.5]


def test_the_table(runs: list[Path]) -> None:
    assert format_runs(read_runs(runs), last=2).splitlines() == [
        "At 4 equal token counts, the last one 4,000; final loss: mean of the last 2.",
        "",
        "| run    | steps | tokens | final loss | validation loss | to first | loss at most off "
        "| grad norm at most off | tps | times first |    mfu |",
        "|--------|------:|-------:|-----------:|----------------:|---------:|-----------------:"
        "|----------------------:|----:|------------:|-------:|",
        "| bf16   |     4 |  4,000 |     4.5000 |          4.7500 |  +0.00 % |           0.00 % "
        "|                0.00 % | 100 |        1.00 | 40.0 % |",
        "| float8 |     6 |  6,000 |     4.5000 |             n/a |  +0.00 % |          10.00 % "
        "|               50.00 % | 150 |        1.50 | 20.0 % |",
    ]


def test_a_figure_that_is_not_known_is_said_to_be(tmp_path: Path) -> None:
    a = make_run(tmp_path / "a", [5], mfu=[None])
    b = make_run(tmp_path / "b", [None, 4], mfu=[None, None])
    cells = [
        [cell.strip() for cell in line.split("|")]
        for line in format_runs(read_runs([a, b]), last=1).splitlines()
    ]
    assert cells[-1][4:-1] == ["n/a", "n/a", "n/a", "n/a", "0.00 %", "100", "n/a", "n/a"]


def write_config(run: Path, *, recipe: str, seed: int) -> None:
    tables = [f'[job]\ndump_folder = "{run}"', f'[float8]\nrecipe_name = "{recipe}"']
    (run / "config.toml").write_text("\n".join([*tables, f"[debug]\nseed = {seed}\n"]))


def test_seeds_and_settings_of_several_runs(tmp_path: Path) -> None:
    losses = {"bf16-0": 5.0, "bf16-1": 6.0, "float8-0": 5.5, "float8-1": 6.6}
    paths = [make_run(tmp_path / name, [8, loss]) for name, loss in losses.items()]
    for path in paths:
        recipe, _, seed = path.name.partition("-")
        write_config(path, recipe=recipe, seed=int(seed))

    figures, seeds, settings, curves = (
        part.splitlines() for part in format_comparison(read_runs(paths), last=1).split("\n\n")[1:]
    )
    assert len(figures) == 2 + 4
    assert [re.split(r" *\| *", line)[1:-1] for line in seeds[2:]] == [
        ["bf16-0, bf16-1", "5.5000", "0.7071", "+0.00 %"],
        ["float8-0, float8-1", "6.0500", "0.7778", "+10.00 %"],
    ]
    assert [re.split(r" *\| *", line)[1:-1] for line in settings if "--" not in line] == [
        ["run", "[float8] recipe_name", "[debug] seed"],
        ["bf16-0", '"bf16"', "0"],
        ["bf16-1", '"bf16"', "1"],
        ["float8-0", '"float8"', "0"],
        ["float8-1", '"float8"', "1"],
    ]
    assert curves[0].endswith(f" --logdir {tmp_path}")


def test_runs_without_a_config_are_compared_by_their_figures(runs: list[Path]) -> None:
    write_config(runs[0], recipe="bf16", seed=0)
    parts = format_comparison(read_runs(runs), last=2).split("\n\n")
    assert parts[:2] == format_runs(read_runs(runs), last=2).split("\n\n")
    assert '| bf16   | "bf16"               | 0            |' in parts[2]
    assert "| float8 | unset                | unset        |" in parts[2]


def test_a_broken_config_is_refused(runs: list[Path]) -> None:
    (runs[1] / "config.toml").write_text("[training\n")
    with pytest.raises(ConfigError, match=r"float8/config\.toml: "):
        read_runs(runs)


def test_names_tell_runs_apart(tmp_path: Path) -> None:
    paths = [
        make_run(tmp_path / name, [1.0]) for name in ("a/seed-0", "b/seed-0", "b/previous/seed-0")
    ]
    assert list(read_runs(paths)) == ["a/seed-0", "b/seed-0", "b/previous/seed-0"]
    beside = make_run(tmp_path / "a/x", [1.0])
    assert list(read_runs([paths[0] / "metrics.jsonl", beside])) == ["seed-0", "x"]


def test_the_torn_line_of_a_live_run_is_left_out(runs: list[Path]) -> None:
    file = runs[1] / "metrics.jsonl"
    file.write_text(file.read_text()[:-30])
    assert read_runs(runs)["float8"].figures["tokens"].tolist() == [1000, 2000, 3000, 4000, 5000]


@pytest.mark.parametrize("content", ["", '{"step": 1, "tok'], ids=["empty", "torn"])
def test_a_run_without_a_step_is_refused(runs: list[Path], content: str) -> None:
    (runs[1] / "metrics.jsonl").write_text(content)
    with pytest.raises(ConfigError, match=r"float8/metrics\.jsonl: no step has been logged yet\.$"):
        read_runs(runs)


NO_RECORD = [
    "\x00",
    "[]",
    "3",
    '{"step": 3}',
    '{"step": "three"}',
    '{"step": 1' + "0" * 400 + "}",
    "1" * 5000,
    "[" * 400 + "]" * 400,
    "[" * 100_000,
    "\udcff",
]


@pytest.mark.parametrize("line", NO_RECORD, ids=range(len(NO_RECORD)))
def test_a_line_that_is_no_record_is_refused(runs: list[Path], line: str) -> None:
    file = runs[0] / "metrics.jsonl"
    first, *rest = file.read_text().splitlines(keepends=True)
    file.write_text("".join([first, f"{line}\n", *rest]), errors="surrogateescape")
    shown = repr(line[:60].replace("\udcff", "\ufffd"))
    with pytest.raises(
        ConfigError,
        match=rf"metrics\.jsonl: line 2 is not the record of a step: {re.escape(shown)}",
    ):
        read_runs(runs)


def test_a_whole_last_line_that_is_no_record_is_refused(runs: list[Path]) -> None:
    file = runs[0] / "metrics.jsonl"
    file.write_text(file.read_text() + "garbage\n")
    with pytest.raises(ConfigError, match="is not the record of a step: 'garbage'"):
        read_runs(runs)


@pytest.mark.parametrize("figure", ["step", "tokens", "loss", "grad_norm", "tps", "mfu"])
@pytest.mark.parametrize("value", ["true", '"1"', "[1]", "1e999", "NaN", "1" + "0" * 400])
def test_a_figure_of_another_type_is_refused(runs: list[Path], figure: str, value: str) -> None:
    file = runs[0] / "metrics.jsonl"
    first, *rest = file.read_text().splitlines(keepends=True)
    damaged = re.sub(rf'"{figure}": [^,}}]+', f'"{figure}": {value}', first)
    file.write_text("".join([damaged, *rest]))
    with pytest.raises(ConfigError, match=r"line 1 is not the record of a step"):
        read_runs(runs)


@pytest.mark.parametrize("exists", [False, True])
def test_a_run_that_is_not_there_is_refused(runs: list[Path], tmp_path: Path, exists: bool) -> None:
    missing = tmp_path / "typo"
    if exists:
        missing.mkdir()
    with pytest.raises(
        ConfigError, match=r"typo/metrics\.jsonl: No such file or directory; name a run folder"
    ):
        read_runs([*runs, missing])


@pytest.mark.parametrize("kind", ["folder", "pipe", "device"])
def test_what_is_no_file_is_refused_without_waiting(
    runs: list[Path], tmp_path: Path, kind: str
) -> None:
    path = tmp_path / "other" / "metrics.jsonl"
    path.parent.mkdir()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    with pytest.raises(ConfigError, match=r"metrics\.jsonl: is not a file; name a run folder"):
        read_runs([*runs, path.parent])


@pytest.mark.parametrize("chosen", [[], [0], [0, 1, 0]])
def test_two_different_runs_are_needed(runs: list[Path], chosen: list[int]) -> None:
    with pytest.raises(ConfigError, match=r"two different runs or more, and got: (none|\S+/bf16)"):
        read_runs([runs[index] for index in chosen])


def test_runs_without_equal_tokens_are_refused(runs: list[Path], tmp_path: Path) -> None:
    other = make_run(tmp_path / "other", [5, 4], tokens=[1500, 2500])
    with pytest.raises(
        ConfigError, match="at which all runs logged: bf16 1,000 to 4,000, other 1,500 to 2,500"
    ):
        compare(read_runs([runs[0], other]), last=20)


def script(*words: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "scripts/compare_runs.py", *map(str, words)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_the_script_prints_the_table(runs: list[Path]) -> None:
    result = script(*runs, "--last", "2")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == format_comparison(read_runs(runs), last=2) + "\n"


def test_the_script_reports_errors_in_a_line(runs: list[Path]) -> None:
    for words, message in (
        ([*runs, "--last", "0"], "--last 0 must be at least 1"),
        (runs[:1], "two different runs"),
    ):
        result = script(*words)
        assert (result.returncode, result.stdout) == (2, "")
        assert message in result.stderr
        assert len(result.stderr.splitlines()) == 1


def test_the_comparison_needs_no_torch() -> None:
    code = "import sys, torchtitan_lite.metrics.comparison; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60).returncode == 0
