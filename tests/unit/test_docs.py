"""The pages about figures and the planner say what the code computes now."""

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import matrix
import matrix_page
import pytest
from test_memory import PUBLISHED, build_rank, torchtitan_peak
from test_recipes import FLOORS, RECIPES

from torchtitan_lite.cli import build_parser
from torchtitan_lite.config import load_config
from torchtitan_lite.config.keys import KEYS, show
from torchtitan_lite.config.torchtitan import ALIASES, FOREIGN, current_name
from torchtitan_lite.metrics import figures
from torchtitan_lite.metrics.devices import DeviceSpec
from torchtitan_lite.models.flavors import FLAVORS
from torchtitan_lite.planner.constants import rates_of
from torchtitan_lite.planner.plan import find_device, make_plan

ROOT = Path(__file__).parents[2]
METRICS, PLAN, FLOAT8, TORCHTITAN = (
    (ROOT / "docs" / name).read_text()
    for name in ("metrics.md", "plan.md", "float8.md", "torchtitan.md")
)


def plan(config: str, *overrides: str, tps: float | None = None, **device: Any) -> dict[str, Any]:
    words = ["--job.config_file", str(ROOT / f"train_configs/{config}.toml"), *overrides]
    return make_plan(
        load_config(words, world_size=8),
        world_size=8,
        device=find_device("H100 SXM", **device),
        tps=tps,
    )


@pytest.fixture(scope="module")
def bf16() -> dict[str, Any]:
    return plan("llama3_8b", tps=6297)


@pytest.fixture(scope="module")
def float8() -> dict[str, Any]:
    return plan("llama3_8b_float8", tps=7773)


def assert_said(page: str, *sayings: str) -> None:
    """On `page`, wherever its lines break."""
    text = " ".join(page.split())
    assert [saying for saying in sayings if saying not in text] == []


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


def test_every_key_of_the_json_is_explained_and_no_other() -> None:
    reference = PLAN.partition("\n## JSON\n")[2]
    rows = re.findall(r"^\| `([^`]+)` \|", reference, flags=re.MULTILINE)
    explained = {key for row in rows for key in expand_braces(row)}
    too_large = plan(
        "llama3_8b", "--training.local_batch_size=4", "--activation_checkpoint.mode=none"
    )
    assert too_large["memory"]["would_fit"]
    measured = plan("debug_model", measured=(("bf16_matmul", 0.7, "a file"),))
    pipelined = plan(
        "llama3_8b",
        "--parallelism.pipeline_parallel_degree=2",
        "--parallelism.pipeline_parallel_last_stage_less_layers=9",
        "--training.local_batch_size=4",
    )
    plans = plan("debug_model"), too_large, measured, pipelined
    assert explained == {key for each in plans for key in key_paths(each)}


def test_every_option_of_the_command_is_explained() -> None:
    usage = build_parser("plan").format_help()
    options = re.findall(r"^  (--[\w-]+)", usage, flags=re.MULTILINE)
    assert len(options) >= 10
    assert [option for option in options if f"`{option}" not in PLAN] == []


def test_the_documented_command_prints_the_documented_report() -> None:
    command = re.search(r"^torchtitan-lite (plan .*)$", PLAN, flags=re.MULTILINE)
    sections = re.findall(r"^```text\n(.*?)\n```$", PLAN, flags=re.MULTILINE | re.DOTALL)
    assert command and sections
    words = [sys.executable, "-m", "torchtitan_lite", *shlex.split(command[1])]
    result = subprocess.run(
        words, cwd=ROOT, capture_output=True, text=True, timeout=100, check=True
    )
    assert [section for section in sections if section not in result.stdout] == []


def test_long_sequences() -> None:
    rows = re.findall(r"^\| ([\d,]+) \| (\d) \| (\w+) \| ([\d.]+) \|$", PLAN, flags=re.MULTILINE)
    assert len(rows) == 4
    shares = {8192: plan("llama3_8b_float8")["flops_per_token"]}
    for tokens, tp, mode, gib in rows:
        seq_len = int(tokens.replace(",", ""))
        found = plan(
            "llama3_8b_float8",
            f"--training.seq_len={seq_len}",
            f"--parallelism.tensor_parallel_degree={tp}",
            f"--activation_checkpoint.mode={mode}",
        )
        assert f"{found['memory']['reserved'] / 2**30:.1f}" == gib
        assert found["memory"]["fits"]
        shares[seq_len] = found["flops_per_token"]
    short, middle, long = (flops["attention"] / flops["total"] for flops in shares.values())
    said = f"they are {short:.0%} of 8B's at 8,192 tokens, {middle:.0%} at 32,768 and {long:.0%} at"
    assert_said(PLAN, said.replace("%", " %"))


def test_the_mfu_at_the_published_rate(float8: dict[str, Any]) -> None:
    assert_said(PLAN, f"`mfu` is {float8['schedule']['mfu']:.2f} %")


def test_the_links_of_an_unknown_gpu() -> None:
    unknown = DeviceSpec("unknown", 1, None, 1, 1)
    assert_said(
        PLAN,
        f"are {unknown.link_gb_s:g} GB/s within a node of {unknown.node_devices}, and "
        f"{unknown.network_gb_s:g} GB/s between nodes",
    )


def test_estimates_beside_what_gpus_reserved() -> None:
    for reserved, flavor, seq_len, batch, dp_shard, tp, checkpoint, changes in PUBLISHED:
        args = replace(FLAVORS[flavor], max_seq_len=seq_len)
        rank = build_rank(
            args,
            dp_shard,
            tp,
            batch=batch,
            activation_checkpoint=checkpoint,
            on_cpu=False,
            **changes,
        )
        estimate = torchtitan_peak(rank) / 2**30
        assert_said(PLAN, f"| {estimate:.1f} | {reserved:.1f} | {reserved / estimate:.2f} |")


def test_the_flops_of_the_example(float8: dict[str, Any]) -> None:
    flops = float8["flops_per_token"]
    assert_said(
        METRICS,
        f"A token takes {flops['total']:,} FLOPs: {flops['block_linears']:,} in the seven linears",
        f"{flops['output']:,} in the projection to the vocabulary, {flops['attention']:,} in "
        f"attention",
        f"{100 * flops['fp8'] / flops['total']:.2f} %, and leaves {flops['bf16']:,} in bf16",
    )


def test_the_times_of_the_example(bf16: dict[str, Any], float8: dict[str, Any]) -> None:
    flops, peaks = float8["flops_per_token"], float8["peaks"]
    ideal_bf16 = flops["total"] / peaks["bf16"] / 1e6
    fp8_part, bf16_part = flops["fp8"] / peaks["fp8"] / 1e6, flops["bf16"] / peaks["bf16"] / 1e6
    ideal = fp8_part + bf16_part
    real_bf16, real = 1e6 / 6297, 1e6 / 7773
    mfu_bf16, mfu = bf16["schedule"]["mfu"], float8["schedule"]["mfu"]
    assert_said(
        METRICS,
        f"{flops['total'] / 1e9:.3f} G / {peaks['bf16']} T = {ideal_bf16:.2f} us in bf16",
        f"{flops['fp8'] / 1e9:.3f} G / {peaks['fp8']} T + {flops['bf16'] / 1e9:.3f} G / "
        f"{peaks['bf16']} T",
        f"= {fp8_part:.2f} + {bf16_part:.2f} = {ideal:.2f} us in float8",
        f"effective peak of {peaks['effective']:.1f} TFLOPS, and an ideal speedup of "
        f"{ideal_bf16 / ideal:.3f}",
        f"1 / 6,297 s = {real_bf16:.2f} us in bf16 and 1 / 7,773 s = {real:.2f} us in float8",
        f"a speedup of {real_bf16 / real:.3f}",
        f"{ideal_bf16:.2f} / {real_bf16:.2f} = {mfu_bf16:.2f} % in bf16",
        f"{ideal:.2f} / {real:.2f} = {mfu:.2f} % in float8",
        f"trained {100 * (real_bf16 / real - 1):.1f} % more tokens",
        f"could have trained {100 * (ideal_bf16 / ideal - 1):.1f} % more",
    )


def test_the_floors_of_each_recipe() -> None:
    for recipe in RECIPES:
        clean, outliers = (", ".join(map(str, FLOORS[recipe, hard])) for hard in (False, True))
        assert re.search(
            rf"^\| `{recipe}` \|.*\| {clean} \| {outliers} \|$", FLOAT8, flags=re.MULTILINE
        )


def test_the_cost_of_padding() -> None:
    tokens, k, n = 8192, 4096, 14336
    h100 = find_device("H100 SXM")
    rates = rates_of(h100)
    assert h100.fp8_tflops
    traffic = 3 * tokens * (k + n) / (h100.bandwidth_tb_s * 1e12 * rates.contiguous)
    fp8_flops_per_s = h100.fp8_tflops * 1e12 * rates.fp8_matmul / rates.slow_accumulation
    matmul = 2 * tokens * k * n / fp8_flops_per_s
    assert traffic / matmul == pytest.approx(1 / 5, rel=0.1)
    assert_said(
        FLOAT8,
        "3 bytes of memory traffic for each element",
        "a fifth of the time of w1's weight gradient in 8B",
    )


def test_the_figures_of_the_example(float8: dict[str, Any]) -> None:
    rates, causal = (
        float8["schedule"],
        plan("llama3_8b_float8", "--metrics.flops_convention=causal", tps=7773),
    )
    assert_said(
        METRICS,
        f"`mfu_bf16_peak` {rates['mfu_bf16_peak']:.2f} %, `mfu_arithmetic_peak` "
        f"{rates['mfu_arithmetic_peak']:.2f} %",
        f"(of {float8['peaks']['arithmetic']:.1f} TFLOPS) and `mfu_fp8_peak` "
        f"{rates['mfu_fp8_peak']:.2f} %",
        f"float8 `mfu` is then {causal['schedule']['mfu']:.2f} %",
    )


@pytest.mark.parametrize(
    ("row", "override"),
    [
        ('`mode = "none"`', "--activation_checkpoint.mode=none"),
        ('`"selective"`, `"op"`', "--activation_checkpoint.mode=selective"),
        ('`"selective"`, `"2"`', "--activation_checkpoint.selective_ac_option=2"),
        ('`"full"`', "--activation_checkpoint.mode=full"),
    ],
)
def test_hfu_by_mode(row: str, override: str) -> None:
    mode = "--activation_checkpoint.mode=selective", override
    bf16, float8 = (
        plan("llama3_8b", *mode, tps=6297),
        plan("llama3_8b_float8", *mode, tps=7773),
    )
    on_top = 100 * bf16["flops_per_token"]["recompute"] / bf16["flops_per_token"]["total"]
    (line,) = (line for line in METRICS.splitlines() if line.startswith(f"| {row} |"))
    assert line.endswith(
        f"| {on_top:.2f} % | {bf16['schedule']['hfu']:.2f}, {float8['schedule']['hfu']:.2f} |"
    )


@pytest.mark.parametrize("group", ["STEP_FIGURES", "BETWEEN_STEPS", "CAST_FIGURES"])
def test_the_tables_of_figures_are_generated(group: str) -> None:
    """`python -m torchtitan_lite.metrics.figures` prints them."""
    assert figures.reference(getattr(figures, group)) in METRICS


def test_on_the_page_every_cell_of_the_matrix_trained_as_one_process_does() -> None:
    tables, _, _ = (ROOT / "docs/float8_matrix.md").read_text().partition("## Refused")
    rows = [line.strip("| ").split(" | ") for line in tables.splitlines() if line.startswith("| ")]
    figures = [cell for row in rows for cell in row if re.fullmatch(r"\d\.\de[-+]\d\d", cell)]
    context = matrix.usual_pairs(matrix.context_cells(steps=matrix_page.STEPS))
    pipelines = matrix.pairwise(matrix.pipeline_cells(steps=matrix_page.STEPS))
    others = [*context, *pipelines, *matrix.vocabulary_cells()]
    assert len(figures) == len(matrix.matrix_cells(steps=matrix_page.STEPS)) + len(others)
    assert max(map(float, figures)) <= matrix.TOLERANCE
    norms = re.findall(r"norm of the gradient differs most, by (\S+),", tables)
    assert len(norms) == 3 and max(map(float, norms)) <= matrix.NORM_TOLERANCE
    assert not {"failed", "refused"} & {cell for row in rows for cell in row}


def table_rows(page: str, section: str) -> list[list[str]]:
    """The cells of each row of the table in a section, without its head."""
    text = page.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    return [line.strip("| ").split(" | ") for line in text.splitlines() if line[:2] == "| "][2:]


def test_every_key_of_torchtitan_without_a_field_is_listed_and_no_other() -> None:
    rows = table_rows(TORCHTITAN, "Keys without effect here")
    listed = {key for row in rows for key in expand_braces(row[0].split("`")[1])}
    assert listed == {pattern.replace("[!d]", "") for pattern in FOREIGN}


def test_the_defaults_beside_torchtitans() -> None:
    shown = {key: here for key, _, here, _ in table_rows(TORCHTITAN, "Defaults that differ")}
    assert shown == {key: f"`{show(KEYS[key.strip('`')].default)}`" for key in shown}


def test_the_current_names_of_torchtitans_keys() -> None:
    rows = table_rows(TORCHTITAN, "Renamed keys")
    old_and_new = [
        (old, news) for olds, news in rows for old in re.findall(r"`([\w.]+\.\w+)", olds)
    ]
    assert len(old_and_new) > 12
    for old, news in old_and_new:
        assert f"`{current_name(old)}" in news
    moved = {name for name, new in ALIASES.items() if new.startswith("parallelism.")}
    assert ALIASES.keys() - moved <= {old for old, _ in old_and_new}


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#:]+)\)", page.read_text())
    assert [target for target in targets if not (page.parent / target).exists()] == []
