"""Commands, keys, options, tables and links of the pages in docs/ are those of the code."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matrix
import pytest

from torchtitan_lite.cli import build_parser, run_command
from torchtitan_lite.config import load_config
from torchtitan_lite.config.keys import KEYS, show
from torchtitan_lite.config.torchtitan import ALIASES, FOREIGN, current_name
from torchtitan_lite.metrics import figures
from torchtitan_lite.planner.plan import find_device, plan

ROOT = Path(__file__).parents[2]
METRICS, PLAN, TORCHTITAN = (
    (ROOT / "docs" / name).read_text() for name in ("metrics.md", "plan.md", "torchtitan.md")
)


def plan_of(config: str, *overrides: str, **device: Any) -> dict[str, Any]:
    words = ["--job.config_file", str(ROOT / f"train_configs/{config}.toml"), *overrides]
    job_config, h100 = load_config(words, world_size=8), find_device("H100 SXM", **device)
    return plan(job_config, world_size=8, device=h100)


def key_paths(value: Any, path: str = "") -> Iterator[str]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from key_paths(item, f"{path}.{key}" if path else key)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from key_paths(item, f"{path}[]")
    else:
        yield path


def expand_braces(text: str) -> list[str]:
    """All keys that `text` stands for: "a.{b,c}" for a.b and a.c."""
    if not (innermost := re.search(r"\{([^{}]*)\}", text)):
        return [text]
    head, tail = text[: innermost.start()], text[innermost.end() :]
    return [
        key for choice in innermost[1].split(",") for key in expand_braces(head + choice + tail)
    ]


def table_rows(page: str, section: str) -> list[list[str]]:
    """The cells of each row of the table in a section, without its head."""
    text = page.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    return [line.strip("| ").split(" | ") for line in text.splitlines() if line[:2] == "| "][2:]


# ----- plan.md, small_llama.md -----


def test_every_key_of_the_json_is_explained_and_no_other():
    explained = {key for row in table_rows(PLAN, "JSON") for key in expand_braces(row[0][1:-1])}
    pipelined = plan_of(
        "llama3_8b",
        "--parallelism.pipeline_parallel_degree=2",
        "--parallelism.pipeline_parallel_last_stage_less_layers=9",
        "--training.local_batch_size=4",
    )
    plans = plan_of("debug_model"), pipelined
    assert explained == {key for each in plans for key in key_paths(each)}


def test_every_option_of_the_command_is_explained():
    usage = build_parser("plan").format_help()
    options = re.findall(r"^  (--[\w-]+)", usage, flags=re.MULTILINE)
    assert len(options) >= 10
    assert [option for option in options if f"`{option}" not in PLAN] == []


@pytest.mark.parametrize("page", ["plan", "small_llama"])
def test_the_documented_commands_print_the_documented_reports(page, monkeypatch, capsys, tmp_path):
    text = (ROOT / f"docs/{page}.md").read_text()
    (tmp_path / "train_configs").symlink_to(ROOT / "train_configs")
    monkeypatch.chdir(tmp_path)
    for name, config in re.findall(r"^```toml\n# (my_\w+\.toml)\n(.*?)^```$", text, re.M | re.S):
        Path(name).write_text(config)

    # Sections of a report follow the command that prints it.
    shown = re.findall(r"^torchtitan-lite (plan [^\n]*)$|^```text\n(.*?)\n```$", text, re.M | re.S)
    assert any(section for _, section in shown)
    command, printed = "", ""
    for words, section in shown:
        if words:
            command, printed = words, ""
        elif not printed:
            run_command(shlex.split(command))
            printed = capsys.readouterr().out
        assert section in printed


@pytest.mark.parametrize("heading", ["Plan for an unknown GPU", "Plan for an unknown model"])
def test_the_commands_for_what_is_unknown_plan(heading, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    section = PLAN.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    (command,) = re.findall(r"^torchtitan-lite (plan [^\n]*)$", section, re.M)
    run_command(shlex.split(command))
    said = " ".join(capsys.readouterr().out.split())
    assert re.search(r"predicted: fits \(.* tokens/s per device", said)


# ----- float8.md -----


def test_the_gains_by_size_are_those_predicted():
    page = (ROOT / "docs/float8.md").read_text()
    for batch, seq_len in ((1, 8192), (16, 2048)):
        words = f"--training.seq_len={seq_len}", f"--training.local_batch_size={batch}"
        gains = [
            plan_of("llama3_8b_float8", f"--model.flavor={size}", *words)["prediction"]["speedup"]
            for size in ("150M", "350M", "1B", "3B", "8B")
        ]
        row = f"| {batch} x {seq_len} | {' | '.join(f'{gain:.2f}' for gain in gains)} |"
        assert row in page, f"docs/float8.md needs:\n{row}"


# ----- metrics.md -----
@pytest.mark.parametrize("group", ["STEP_FIGURES", "BETWEEN_STEPS", "CAST_FIGURES"])
def test_the_tables_of_figures_are_the_codes(group):
    rows = [
        (f"`{name}`", figure.meaning, figure.unit, f"`{figure.tag}`" if figure.tag else "")
        for name, figure in getattr(figures, group).items()
    ]
    cells = [("figure", "meaning", "unit", "TensorBoard"), ("---",) * 4, *rows]
    table = "\n".join(f"| {' | '.join(row)} |" for row in cells)
    assert table in METRICS, f"docs/metrics.md needs:\n{table}"


# ----- float8_matrix.md -----
def test_every_cell_of_the_matrix_trained_as_one_process_does():
    page = (ROOT / "docs/float8_matrix.md").read_text()
    for name, cells in matrix.table_groups(steps=20).items():
        (row,) = re.findall(rf"^\| {name} \| {len(cells)} \| (.*) \|$", page, re.M)
        loss, norm = row.split(" | ")
        assert float(loss) <= matrix.TOLERANCE
        assert norm == "not noted" or float(norm) <= matrix.NORM_TOLERANCE


# ----- torchtitan.md -----


def test_every_key_of_torchtitan_without_a_field_is_listed_and_no_other():
    rows = table_rows(TORCHTITAN, "Keys without effect here")
    listed = {key for row in rows for key in expand_braces(row[0].split("`")[1])}
    assert listed == {pattern.replace("[!d]", "") for pattern in FOREIGN}


def test_the_defaults_beside_torchtitans():
    shown = {key: here for key, _, here, _ in table_rows(TORCHTITAN, "Defaults that differ")}
    assert shown == {key: f"`{show(KEYS[key.strip('`')].default)}`" for key in shown}


def test_the_current_names_of_torchtitans_keys():
    rows = table_rows(TORCHTITAN, "Renamed keys")
    old_and_new = [
        (old, news) for olds, news in rows for old in re.findall(r"`([\w.]+\.\w+)", olds)
    ]
    assert len(old_and_new) > 12
    assert [old for old, news in old_and_new if f"`{current_name(old)}" not in news] == []
    moved = {name for name, new in ALIASES.items() if new.startswith("parallelism.")}
    assert ALIASES.keys() - moved <= {old for old, _ in old_and_new}


# ----- docs -----
def test_links_lead_somewhere():
    links = [
        (page, target)
        for page in (ROOT / "docs").glob("*.md")
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text())
    ]
    assert links
    assert [link for link in links if not (link[0].parent / link[1]).exists()] == []
