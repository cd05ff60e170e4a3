"""The page that `compare --html` writes: its curves, its tables, and texts that are not obeyed."""

import math
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from sample_records import NUMERICS
from test_comparison import make_run

from torchtitan_lite.base.errors import ConfigError, StorageError
from torchtitan_lite.base.jsonfile import strict_json
from torchtitan_lite.cli import run_command
from torchtitan_lite.config import load_config
from torchtitan_lite.run.run_folder import Status, write_status
from torchtitan_lite.tools import report
from torchtitan_lite.tools.comparison import group_seeds, read_runs
from torchtitan_lite.tools.curves import SIZE, draw_chart, find_ticks
from torchtitan_lite.tools.report import find_curve, plan_run, write_report

HOSTILE = "</td><script>alert(1)</script>\"'>&\x1b[2J\u202e"
VOID = {"meta", "link", "br", "img", "hr", "input"}


class Page(HTMLParser):
    """The elements and texts of a page; each element must end in the one that it began in."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.rows: list[list[str]] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self._open.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if {"td", "th"} & {*self._open}:
            self.rows[-1][-1] += data


def read_page(runs: list[Path], *options: str) -> Page:
    """The page that the command writes beside the first run."""
    file = runs[0].parent / "page.html"
    run_command(["compare", *map(str, runs), "--html", str(file), *options])
    return Page(file.read_text())


def configure(run: Path, *words: str, seed: int = 0) -> None:
    """Write the config of a run of the debug model."""
    settings = [f"--job.dump_folder={run}", f"--debug.seed={seed}", *words]
    config = load_config(["--job.config_file=debug_model", *settings])
    (run / "config.toml").write_text(config.to_toml())


def write_lines(file: Path, *lines: object) -> None:
    file.write_text("".join(f"{strict_json(line)}\n" for line in lines))


# ----- draw_chart -----


def points(path: str) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in re.findall(r"([\d.]+) ([\d.]+)", path)]


def curve(x: list[float], y: list[float]) -> np.ndarray:
    return np.array([x, y], float)


def test_draw_chart_fills_the_square_and_points_up():
    paths, x_ticks, y_ticks = draw_chart([[curve([0, 10, 20], [2, 6, 4])]])
    assert paths == [("M0 300.0h0L150 0.0h0L300 150.0h0", "")]
    assert x_ticks == [(75.0 * i, str(5 * i)) for i in range(5)]
    assert y_ticks == [(75.0 * i, str(2 + i)) for i in range(5)]


def test_draw_chart_bands_a_group_from_its_least_to_its_greatest():
    group = [curve([0, 1], [0, 2]), curve([0, 1], [3, 4]), curve([0, 1], [1.5, 3])]
    [(line, band)], _, _ = draw_chart([group])
    assert points(line) == [(0, 187.5), (300, 75)]
    assert band == "M0 75.0L300 0.0L300 150.0L0 300.0Z"


def test_draw_chart_goes_on_where_a_run_of_a_group_has_ended():
    [(line, band)], _, _ = draw_chart([[curve([0, 1, 2], [0, 2, 6]), curve([0, 1], [0, 4])]])
    assert points(line) == [(0, 300), (150, 150), (300, 0)]
    assert band.count("L") == 5


def test_draw_chart_keeps_the_extremes_of_a_long_curve():
    y = np.sin(np.arange(10_000) / 1000)
    y[4321], y[8765] = 50.0, -50.0
    [(line, band)], _, y_ticks = draw_chart([[np.stack([np.arange(10_000.0), y])]])
    assert len(points(line)) == SIZE + 1
    edge = [height for _, height in points(band)]
    assert (min(edge), max(edge)) == (0.0, SIZE)


def test_draw_chart_breaks_a_line_where_a_value_is_missing():
    [(line, _)], _, _ = draw_chart([[curve([0, 1, 2, 3], [1, math.nan, 1, 3])]])
    assert line == "M0 300.0h0M200 300.0h0L300 0.0h0"


def test_draw_chart_has_nothing_to_draw_without_values():
    nothing = curve([], [])
    assert draw_chart([[nothing], [curve([0, 1], [math.nan, math.nan])]]) is None
    paths, _, _ = draw_chart([[nothing], [curve([5], [7])]])
    assert paths == [("", ""), ("M150 150.0h0", "")]


@pytest.mark.filterwarnings("error")
def test_draw_chart_of_the_smallest_numbers():
    assert draw_chart([[curve([0, 1], [5e-324, 0])]]) is not None


@pytest.mark.filterwarnings("error")
def test_draw_chart_of_the_largest_numbers():
    [(line, _)], _, _ = draw_chart([[curve([0, 2**63], [-1.7e308, 1.7e308])]])
    assert points(line) == [(0, 300), (300, 0)]


@pytest.mark.parametrize(
    ("low", "high", "texts"),
    [
        (0, 1, "0 0.2 0.4 0.6 0.8 1"),
        (-3.5, 3.5, "-2 0 2"),
        (7950, 8130, "7,950 8,000 8,050 8,100"),
        (0.1, 0.1007, "0.1 0.1002 0.1004 0.1006"),
        (3e38, 3.4e38, "3e+38 3.1e+38 3.2e+38 3.3e+38 3.4e+38"),
    ],
)
def test_find_ticks(low: float, high: float, texts: str):
    ticks = find_ticks(low, high)
    assert [text for _, text in ticks] == texts.split()
    assert all(-1e-9 <= place <= SIZE + 1e-9 for place, _ in ticks)


# ----- group_seeds, find_curve -----


def test_group_seeds(tmp_path: Path):
    runs = [make_run(tmp_path / name, [5, 4]) for name in ("a0", "a1", "again", "b0", "bare", "c")]
    for run, lr, seed in zip(runs, (1e-2, 1e-2, 1e-2, 2e-2), (0, 1, 1, 0), strict=False):
        configure(run, f"--optimizer.lr={lr}", seed=seed)
    assert group_seeds(read_runs(runs)) == [["a0", "a1"], ["again"], ["b0"], ["bare"], ["c"]]


def test_find_curve(tmp_path: Path):
    path = make_run(tmp_path / "run", [8, 6, 4], tps=[1, 90, 100])
    write_lines(path / "validation.jsonl", {"step": 2, "validation_loss": 5.5})
    run = read_runs([path])["run"]
    assert find_curve(run, "loss").tolist() == [[0.001, 0.002, 0.003], [8, 6, 4]]
    assert find_curve(run, "tps").tolist() == [[0.002, 0.003], [90, 100]]
    assert find_curve(run, "validation_loss").tolist() == [[0.002], [5.5]]


# ----- write_report -----


def test_write_report(tmp_path: Path):
    runs = [make_run(tmp_path / name, [5, 4]) for name in ("bf16", "float8")]
    for run in runs:
        configure(run, f"--float8.enable_float8_linear={run.name == 'float8'}".lower())
    write_status(runs[1], Status("failed", 1.0, 2.0, cause="rank 1 was killed", exit_code=6))
    write_lines(
        runs[1] / "numerics.jsonl", {"step": 1, "kinds": {}}, {"step": 2, "kinds": NUMERICS}
    )
    samples = [{"step": step, "prompt": "Once", "text": f"upon {step}"} for step in range(1, 7)]
    write_lines(runs[1] / "samples.jsonl", *samples)

    rows = read_page(runs).rows
    assert [row[-2:] for row in rows[1:3]] == [["n/a", ""], ["failed", "rank 1 was killed"]]
    assert rows[2][:5] == ["float8", "2", "2,000", "4.5000", "n/a"]
    assert ["float8", "true"] in rows and ["bf16", "false"] in rows
    grad_output = ["float8", "2", "feed_forward.w2", "grad_output", "n/a", "n/a", "0.125", "0"]
    assert grad_output in rows
    assert [row for row in rows if "Once" in row] == [
        ["float8", f"{step}", "Once", f"upon {step}"] for step in (3, 4, 5, 6)
    ]


def test_write_report_of_one_run_without_validation_or_config(tmp_path: Path):
    page = read_page([make_run(tmp_path / "run", [5], grad_norm=[None], mfu=[None])])
    assert page.rows[1][:2] == ["run", "1"] and ["none"] in page.rows
    assert page.tags.count("figure") == 2  # loss, memory: no speed has a second step
    assert not any({"cast", "prompt"} & {*row} for row in page.rows)


def test_write_report_escapes_what_runs_say(tmp_path: Path):
    run = make_run(tmp_path / "<script>alert(1)<>", [5, 4])
    configure(run, f"--job.description={HOSTILE[:-1]}", "--validation.enable=false")
    text = (
        (run / "config.toml")
        .read_text()
        .replace("[validation]", '[x]\n"<script>" = "<b>"\n[validation]')
    )
    (run / "config.toml").write_text(text)
    other = make_run(tmp_path / "other", [5, 4])
    configure(other)
    write_status(run, Status("failed", 1.0, 2.0, cause=HOSTILE, device=HOSTILE, world_size=1))
    kinds = {HOSTILE: {HOSTILE: {"sqnr_db": 1.0}}}
    write_lines(run / "numerics.jsonl", {"step": 1, "kinds": kinds})
    write_lines(run / "samples.jsonl", {"step": 1, "prompt": HOSTILE, "text": HOSTILE})

    page = read_page([run, other])
    file = (tmp_path / "page.html").read_text()
    assert "<script" not in file.lower() and "\x1b" not in file and "\u202e" not in file
    assert {"script", "b"} & {*page.tags} == set()
    assert not any(name.startswith("on") or name in ("src", "href") for name, _ in page.attributes)
    shown = HOSTILE.replace("\x1b", "\\x1b").replace("\u202e", "\\u202e")
    assert any(row[-2:] == [shown, shown] for row in page.rows)
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    assert ("content", policy) in page.attributes
    assert not re.search(r"https?://|url\(|@import", file)


@pytest.mark.parametrize(
    "line",
    [
        {"step": 1, "kinds": 3},
        {"step": 1, "kinds": {"wq": {"input": ["x"]}}},
        {"step": 1, "text": 1},
    ],
)
def test_lines_of_another_form_are_left_out_by_last_lines(tmp_path: Path, line: dict):
    run = make_run(tmp_path / "run", [5, 4])
    for name in ("numerics", "samples"):
        write_lines(run / f"{name}.jsonl", line)
    assert report.last_lines(run / "numerics.jsonl", 1) == []
    read_page([run])


def test_write_report_replaces_a_page_and_no_other_file(tmp_path: Path):
    run = make_run(tmp_path / "run", [5, 4])
    (tmp_path / "page.html").write_text("old")
    assert "Comparison of 1 run<" in (read_page([run]), (tmp_path / "page.html").read_text())[1]
    before = (run / "metrics.jsonl").read_bytes()
    with pytest.raises(ConfigError, match=r"--html .*metrics\.jsonl must end in \.html"):
        write_report(run / "metrics.jsonl", read_runs([run]), last=1)
    assert (run / "metrics.jsonl").read_bytes() == before


def test_write_report_names_the_option_where_it_cannot_write(tmp_path: Path, monkeypatch):
    runs = read_runs([make_run(tmp_path / "run", [5, 4])])
    with pytest.raises(StorageError, match=r"--html .*none/page\.html cannot be written: No such"):
        write_report(tmp_path / "none/page.html", runs, last=1)
    (tmp_path / "folder.html").mkdir()
    with pytest.raises(ConfigError, match=r"--html .*folder\.html cannot be written: Is a dir"):
        write_report(tmp_path / "folder.html", runs, last=1)


@pytest.mark.slow
def test_write_report_of_25_runs_of_10_000_steps_is_below_3_mb(tmp_path: Path):
    rng = np.random.default_rng(0)
    runs = []
    for number in range(25):
        figures = {name: rng.gamma(2, 1, 10_000).tolist() for name in ("grad_norm", "tps", "mfu")}
        figures["memory_gib"] = rng.gamma(2, 1, 10_000).tolist()
        runs.append(
            make_run(tmp_path / f"run-{number}", rng.gamma(2, 1, 10_000).tolist(), **figures)
        )
        lines = [{"step": s, "validation_loss": rng.gamma(2, 1)} for s in range(1, 10_001, 10)]
        write_lines(runs[-1] / "validation.jsonl", *lines)
    assert read_page(runs).tags.count("figure") == 6
    assert 500_000 < (tmp_path / "page.html").stat().st_size < 3_000_000


# ----- plan_run -----

H100 = Status("done", 1.0, 2.0, device="NVIDIA H100 80GB HBM3", world_size=8)


def test_plan_run(tmp_path: Path):
    run = make_run(tmp_path / "run", [5, 4], tps=[1, 7773], mfu_bf16_peak=[1, 45.5])
    words = ["--job.config_file=llama3_8b_float8", "--float8.recipe_name=tensorwise"]
    (run / "config.toml").write_text(load_config(words, world_size=8).to_toml())
    write_status(run, H100)
    found = plan_run(read_runs([run])["run"], H100)
    assert found["tps"] == pytest.approx(13_000, rel=0.2)
    assert found["mfu_fp8_peak"] < found["mfu"] < found["mfu_bf16_peak"]
    assert found["memory_gib"] == pytest.approx(60, rel=0.2)

    rows = read_page([run]).rows
    at = rows.index(next(row for row in rows if "mfu_fp8_peak, %" in row))
    measured, planned = rows[at + 1 : at + 3]
    reached = ["7,773", "0.9", "40.00", "45.50", "n/a"]
    assert measured == ["run", "measured on 8 x NVIDIA H100 80GB HBM3", *reached]
    assert planned[:3] == ["", "plan", f"{found['tps']:,.0f}"]
    assert planned[4:] == [f"{found[key]:.2f}" for key in ("mfu", "mfu_bf16_peak", "mfu_fp8_peak")]


@pytest.mark.parametrize("status", [None, Status("done", 1, 2), replace(H100, device="CPU")])
def test_plan_run_without_a_data_sheet(tmp_path: Path, status: Status | None):
    run = make_run(tmp_path / "run", [5, 4])
    configure(run)
    assert plan_run(read_runs([run])["run"], status) == {"problem": "no data sheet of the device"}


def test_plan_run_says_why_a_config_has_no_plan(tmp_path: Path):
    run = make_run(tmp_path / "run", [5, 4])
    assert "no config.toml" in plan_run(read_runs([run])["run"], H100)["problem"]
    configure(run, "--training.global_batch_size=12", "--training.local_batch_size=4")
    assert "global_batch_size = 12" in plan_run(read_runs([run])["run"], H100)["problem"]
    with (run / "config.toml").open("a") as file:
        file.write("[zzz]\nkey = 1\n")
    assert "unknown table" in plan_run(read_runs([run])["run"], H100)["problem"]


def test_plan_run_loads_no_code_that_a_config_names(tmp_path: Path, monkeypatch):
    run = make_run(tmp_path / "run", [5, 4])
    (tmp_path / "evil.py").write_text("raise SystemExit('loaded')")
    monkeypatch.chdir(tmp_path)
    for key in ("float8.recipe_name", "training.loss", "optimizer.name", "lr_scheduler.decay_type"):
        table, name = key.split(".")
        own = "" if key.startswith("float8") else '[float8]\nrecipe_name = "tensorwise"\n'
        (run / "config.toml").write_text(f'{own}[{table}]\n{name} = "evil:x"\n')
        plan_run(read_runs([run])["run"], H100)
    (tmp_path / "base.toml").write_text('[float8]\nrecipe_name = "evil:x"\n')
    (run / "config.toml").write_text('base = "../base.toml"\n')
    plan_run(read_runs([run])["run"], H100)
    assert "evil" not in sys.modules


# ----- compare, the command -----


def test_compare_imports_torch_for_a_page_only(tmp_path: Path):
    run = make_run(tmp_path / "run", [5, 4])
    code = "import sys; from torchtitan_lite.cli import run_command; run_command(sys.argv[1:]); "
    code += "sys.exit(bool({'torch', 'jinja2'} & {*sys.modules}))"
    command = [sys.executable, "-c", code, "compare", str(run)]
    assert subprocess.run(command, timeout=60, capture_output=True).returncode == 0
