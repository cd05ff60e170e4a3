"""Runs compared at equal tokens: figures by hand, the tables, and run folders that are refused."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from sample_records import NO_RECORDS, RECORD

from torchtitan_lite.base.errors import ConfigError
from torchtitan_lite.cli import run_command
from torchtitan_lite.tools.comparison import compare, format_comparison, format_runs, read_runs

ROOT = Path(__file__).parents[2]


def make_run(folder: Path, losses: Sequence[float | None], **figures: Sequence) -> Path:
    """A run folder of as many steps, 1000 tokens each where `figures` do not say otherwise."""
    tokens = [1000 * step for step in range(1, len(losses) + 1)]
    columns = {"loss": losses, "tokens": tokens, **figures}
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
    norms, tps = [2, 1, 1, 1], [1, 90, 110, 100]
    bf16 = make_run(tmp_path / "bf16", [8, 6, 4, 5], grad_norm=norms, tps=tps)
    float8 = make_run(
        tmp_path / "float8",
        [8, 6.6, 4.04, 4.96, 1, 1],
        grad_norm=[1, 1, 1, 1.1, 9, 9],
        tps=[1, 150, 150, 150, 150, 250],
        mfu=[1, 30, 20, 20, 20, 30],
    )
    lines = '{"step": 2, "validation_loss": 5.5}\n{"step": 4, "validation_loss": 4.75}\n{"st'
    (bf16 / "validation.jsonl").write_text(lines)
    return [bf16, float8]


def cells(table: str) -> list[list[str]]:
    """The cells of a Markdown table without its rule, a row per run in either form."""
    rows = [re.split(r" *\| *", line)[1:-1] for line in table.splitlines() if line[:1] == "|"]
    rows = [row for row in rows if not row[0].startswith("--")]
    by_figure = rows[1][0] in ("steps", "[float8] recipe_name")
    return [list(column) for column in zip(*rows, strict=True)] if by_figure else rows


# ----- compare -----


def test_compare_does_not_interpolate(tmp_path: Path) -> None:
    a = make_run(tmp_path / "a", [5, 9, 4], tokens=[2000, 3000, 4000])
    b = make_run(tmp_path / "b", [6, 5], tokens=[2000, 4000])
    assert [run["final loss"] for run in compare(read_runs([a, b]), last=2)] == [4.5, 5.5]


@pytest.mark.filterwarnings("error")
def test_compare_with_a_run_whose_figures_are_0(tmp_path: Path) -> None:
    none = make_run(tmp_path / "a", [0, 0, 0], grad_norm=[0, 0, 0], tps=[0, 0, 0])
    runs = read_runs([none, make_run(tmp_path / "b", [5, 5, 5])])
    same, other = compare(runs, last=2)
    assert np.isnan([same["to first"], same["times first"], same["grad norm at most off"]]).all()
    assert np.isinf([other["to first"], other["times first"], other["loss at most off"]]).all()


def test_compare_refuses_runs_without_equal_tokens(runs: list[Path], tmp_path: Path) -> None:
    other = make_run(tmp_path / "other", [5, 4], tokens=[1500, 2500])
    with pytest.raises(ConfigError, match="bf16 1,000 to 4,000, other 1,500 to 2,500"):
        compare(read_runs([runs[0], other]), last=20)


# ----- format_runs, format_comparison -----


def test_format_runs(runs: list[Path]) -> None:
    text = format_runs(read_runs(runs), last=2)
    assert re.match("At 4 equal .* 4,000; .* last 2", text)
    assert "last 4." in format_runs(read_runs(runs), last=9)
    same = ["+0.00 %", "0.00 %", "0.00 %", "n/a", "0.00 %"]
    off = ["+0.00 %", "0.90 %", "10.00 %", "2", "50.00 %"]
    titles = (
        "run steps tokens final loss validation loss to first median loss off loss at most off "
    )
    titles += "at step grad norm at most off tps times first mfu memory"
    assert " ".join(cells(text)[0]) == titles
    assert cells(text)[1:] == [
        ["bf16", "4", "4,000", "4.5000", "4.7500", *same, "100", "1.00", "40.0 %", "0.9 GiB"],
        ["float8", "6", "6,000", "4.5000", "n/a", *off, "150", "1.50", "20.0 %", "0.9 GiB"],
    ]  # speeds are medians without the first step


def test_format_runs_has_a_column_per_run_if_that_is_narrower(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / f"run-{number:02}", [5, 4]) for number in range(25)]
    for count, first, longest in ((2, "| run  ", 50), (25, "| run    | steps |", 210)):
        table = format_runs(read_runs(runs[:count]), last=1).split("\n\n")[1]
        assert table.startswith(first)
        assert max(map(len, table.splitlines())) <= longest


def test_format_runs_has_na_for_unknown_figures(tmp_path: Path) -> None:
    a = make_run(tmp_path / "a", [5], mfu=[None])
    b = make_run(tmp_path / "b", [None, 4], mfu=[None, None])
    row = cells(format_runs(read_runs([a, b]), last=1))[-1]
    unknown = ["n/a"] * 5  # losses; the first one is the farthest
    assert row[3:] == [*unknown, "1", "0.00 %", "100", "n/a", "n/a", "0.9 GiB"]


def write_config(run: Path, *, recipe: str, seed: int) -> None:
    tables = [f'[job]\ndump_folder = "{run}"', f'[float8]\nrecipe_name = "{recipe}"']
    tables += ["[training]\nsteps = 10", f"[debug]\nseed = {seed}\n"]
    (run / "config.toml").write_text("\n".join(tables))


def test_format_comparison_has_the_settings_that_differ(runs: list[Path]) -> None:
    for run, recipe, seed in zip(runs, ("bf16", "float8"), (0, 1), strict=True):
        write_config(run, recipe=recipe, seed=seed)
    figures, settings, curves = format_comparison(read_runs(runs), last=2).split("\n\n")[1:]
    assert [row[0] for row in cells(figures)] == ["run", "bf16", "float8"]
    assert cells(settings) == [
        ["run", "[float8] recipe_name", "[debug] seed"],
        ["bf16", '"bf16"', "0"],
        ["float8", '"float8"', "1"],
    ]
    assert curves.endswith(f" --logdir {runs[0].parent}")


def test_format_comparison_says_that_tokenizers_differ(runs: list[Path]) -> None:
    for run, tokenizer in zip(runs, ("", "other.model"), strict=True):
        (run / "config.toml").write_text(f'[model]\ntokenizer_path = "{tokenizer}"\n')
    note = "\n\nTokenizers differ: losses of their tokens do not compare,"
    assert note in format_comparison(read_runs(runs), last=2)
    (run / "config.toml").write_text('[model]\ntokenizer_path = ""\n')
    assert note not in format_comparison(read_runs(runs), last=2)


def test_tokenizers_are_compared_by_where_their_paths_lead(runs: list[Path], tmp_path) -> None:
    (tmp_path / "link").symlink_to("other.model")
    for run, tokenizer in zip(runs, ("x/../other.model", "link"), strict=True):
        path = os.path.relpath(tmp_path / tokenizer)
        (run / "config.toml").write_text(f'[model]\ntokenizer_path = "{path}"\n')
    assert "Tokenizers" not in format_comparison(read_runs(runs), last=2)


def test_a_run_without_a_config_has_no_settings_to_compare(runs: list[Path], tmp_path) -> None:
    write_config(runs[0], recipe="bf16", seed=0)
    with (runs[0] / "config.toml").open("a") as file:
        file.write('[model]\ntokenizer_path = "other.model"\n')
    parts = format_comparison(read_runs(runs), last=2).split("\n\n")
    assert parts[:2] == format_runs(read_runs(runs), last=2).split("\n\n")
    assert len(parts) == 3 and parts[2].startswith("curves: ")

    runs.append(make_run(tmp_path / "third", [5, 4]))
    write_config(runs[2], recipe="bf16", seed=1)
    parts = format_comparison(read_runs(runs), last=2).split("\n\n")
    assert [row[0] for row in cells(parts[-2])[1:]] == ["bf16", "third"]


# ----- read_runs -----


def test_names_of_runs_differ(tmp_path: Path) -> None:
    names = ["a/seed-0", "b/seed-0", "b/previous/seed-0"]
    paths = [make_run(tmp_path / name, [1.0]) for name in names]
    assert list(read_runs(paths)) == names
    beside = make_run(tmp_path / "a/x", [1.0])
    assert list(read_runs([paths[0] / "metrics.jsonl", beside])) == ["seed-0", "x"]


def test_the_torn_line_of_a_live_run_is_left_out(runs: list[Path]) -> None:
    file = runs[1] / "metrics.jsonl"
    file.write_text(file.read_text()[:-30])
    assert read_runs(runs)["float8"].figures["tokens"].tolist() == [1000, 2000, 3000, 4000, 5000]


def test_a_run_without_a_step_is_refused(runs: list[Path]) -> None:
    (runs[1] / "metrics.jsonl").write_text('{"step": 1, "tok')
    with pytest.raises(ConfigError, match=r"float8 has no metrics\.jsonl with a logged step"):
        read_runs(runs)


def test_of_a_token_count_that_is_there_twice_the_last_line_counts(runs: list[Path]) -> None:
    with (runs[0] / "metrics.jsonl").open("a") as file:
        print(json.dumps(replace(RECORD, tokens=2000, loss=7.0).to_json()), file=file)
    assert read_runs(runs)["bf16"].figures["loss"][1] == 7.0
    format_comparison(read_runs(runs), last=2)


NUMBERS = ('"1"', "[1]", "true", "1e999", "NaN", "1" + "0" * 400)
LINE = json.dumps(RECORD.to_json())
OTHERS = [re.sub('"loss": [^,]+', f'"loss": {number}', LINE) for number in NUMBERS]


@pytest.mark.parametrize("at", [1, 4], ids=["within", "last"])
def test_lines_that_are_no_records_are_left_out_with_a_warning(runs, notices, at) -> None:
    whole = read_runs(runs)["bf16"].figures["loss"].tolist()
    notices.records.clear()
    lines = (runs[0] / "metrics.jsonl").read_bytes().splitlines()
    lines[at:at] = [*NO_RECORDS, *map(str.encode, OTHERS)]
    (runs[0] / "metrics.jsonl").write_bytes(b"\n".join([*lines, b""]))
    assert read_runs(runs)["bf16"].figures["loss"].tolist() == whole
    warning = f"metrics.jsonl: lines .* left out: {len(NO_RECORDS + OTHERS)}"
    assert re.search(warning, notices.messages[0])


def test_a_broken_config_is_refused(runs: list[Path]) -> None:
    (runs[1] / "config.toml").write_text("[training\n")
    with pytest.raises(ConfigError, match=r"float8/config\.toml: "):
        read_runs(runs)


@pytest.mark.parametrize("kind", ["missing", "empty folder", "folder", "pipe", "device"])
def test_a_path_that_is_no_run_is_refused_without_waiting(runs, tmp_path, kind) -> None:
    path = tmp_path / "typo" / "metrics.jsonl"
    if kind != "missing":
        path.parent.mkdir()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    reason = "has no metrics.jsonl" if kind in ("missing", "empty folder") else "not a regular file"
    with pytest.raises(ConfigError, match=reason):
        read_runs([*runs, path.parent])


@pytest.mark.parametrize("chosen", ["", "bf16 float8 bf16", "bf16 x/../bf16", "link bf16"])
def test_different_runs_are_needed(runs: list[Path], chosen: str, monkeypatch) -> None:
    monkeypatch.chdir(runs[0].parent)
    Path("x").mkdir()
    Path("link").symlink_to("bf16")
    given = chosen.replace(" ", ", ") or "none"
    with pytest.raises(ConfigError, match=rf"needs different runs, and got: {given}\.$"):
        read_runs([Path(name) for name in chosen.split()])


# ----- compare, the command -----


def test_the_command(runs: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    run_command(["compare", *map(str, runs), "--last", "2"])
    assert capsys.readouterr() == (f"{format_comparison(read_runs(runs), last=2)}\n", "")
    with pytest.raises(ConfigError, match="--last: 0 must be a whole number from 1 to"):
        run_command(["compare", *map(str, runs), "--last", "0"])


def test_comparison_imports_no_torch() -> None:
    code = "import sys, torchtitan_lite.tools.comparison; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60).returncode == 0
