"""The longest sequences that fit."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from torchtitan_lite.base.errors import ConfigError
from torchtitan_lite.cli import run_command
from torchtitan_lite.config import load_config
from torchtitan_lite.planner.longest import format_longest, make_longest
from torchtitan_lite.planner.plan import find_device, make_plan
from torchtitan_lite.planner.search import Space

ROOT = Path(__file__).parents[2]
LONG = ["--job.config_file", str(ROOT / "train_configs/llama3_8b_long.toml")]
FULL = "--activation_checkpoint.mode=full"


def space_of(*overrides: str, memory_gib: float | None = None, world_size: int = 8) -> Space:
    config = load_config([*LONG, *overrides], world_size=world_size)
    return Space(config, world_size, find_device("H100 SXM", memory_gib=memory_gib))


@pytest.fixture(scope="module")
def answer() -> dict[str, Any]:
    return make_longest(space_of(FULL, memory_gib=40.0))


# ----- make_longest, format_longest -----


def plan_of(cp: int, seq_len: int) -> dict[str, Any]:
    layout = f"--training.seq_len={seq_len}", f"--parallelism.context_parallel_degree={cp}"
    space = space_of(FULL, *layout, memory_gib=40.0)
    return make_plan(space.config, world_size=8, device=space.device)


def test_lengths_fit_and_the_next_ones_do_not(answer: dict[str, Any]) -> None:
    lengths = {each["cp"]: each for each in answer["lengths"] if "seq_len" in each}
    assert lengths.keys() == {1, 2, 4, 8}
    assert lengths[1]["seq_len"] < lengths[2]["seq_len"] < lengths[4]["seq_len"] == 131072
    for cp in (1, 2):
        found = lengths[cp]["seq_len"]
        longest, longer = (plan_of(cp, seq_len) for seq_len in (found, found + 1024))
        assert longest["memory"]["fits"] and not longer["memory"]["fits"]
        assert lengths[cp]["tps"] == pytest.approx(longest["schedule"]["tps"])
        reserved_gib = longest["memory"]["reserved"] / 2**30
        assert lengths[cp]["reserved_gib"] == pytest.approx(reserved_gib)


def test_a_degree_that_does_not_divide_the_processes_is_left_out(answer: dict[str, Any]) -> None:
    (left_out,) = [each for each in answer["lengths"] if each["left_out"]]
    assert left_out["cp"] == 16
    assert "16 does not divide the world size, 8; run 16 or 32" in left_out["left_out"]


def test_the_text_has_80_columns_and_each_length(answer: dict[str, Any]) -> None:
    text = format_longest(answer)
    assert [line for line in text.splitlines() if len(line) > 80] == []
    for each in answer["lengths"]:
        assert each["left_out"] or f"{each['seq_len']:,}" in text


def test_lengths_are_multiples_of_what_the_degrees_divide() -> None:
    sizes = "dim=1536", "n_layers=1", "n_heads=24", "n_kv_heads=24", "ffn_dim=4608"
    model = [f"--model.{each}" for each in ("flavor=", "vocab_size=32256", *sizes)]
    thirds = "--parallelism.tensor_parallel_degree=3", "--parallelism.context_parallel_degree=1"
    found = make_longest(space_of(*model, *thirds, "--training.seq_len=3072", world_size=3))
    lengths = [each["seq_len"] for each in found["lengths"] if "seq_len" in each]
    assert lengths == [2**20 // 3072 * 3072]


def test_a_device_that_holds_no_length_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cp 1: even 1,024 tokens do not fit: [\d.]+ of 8 GiB"):
        make_longest(space_of(memory_gib=8.0))


# ----- plan --longest -----


def test_the_configs_own_layout_and_length_need_not_fit_the_processes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    # It shares each sequence among 8. Two ranks of tensor parallelism cannot split an odd length.
    batch = "--training.global_batch_size=8", "--training.local_batch_size=8"
    few = "--world-size", "4", "--model.n_layers=4", "--device", "H100 SXM"
    split = "--training.seq_len=8191", "--parallelism.tensor_parallel_degree=2"
    run_command(["plan", "--longest", "--json", *few, *LONG, *batch, *split])
    lengths = json.loads(capsys.readouterr().out)["lengths"]
    assert [each["cp"] for each in lengths if each["left_out"] is None] == [1, 2]


@pytest.mark.parametrize("other", [["--search"], ["--tps", "5"]])
def test_options_that_exclude_it(other: list[str]) -> None:
    with pytest.raises(ConfigError, match=f"--longest .* drop it, or {other[0]}"):
        run_command(["plan", "--longest", *other])


def test_the_documented_command_prints_what_is_documented(
    capsys: pytest.CaptureFixture[str],
) -> None:
    section = (ROOT / "docs/plan.md").read_text().partition("\n## The longest sequence\n")[2]
    command = re.search(r"^torchtitan-lite plan (--longest .*)$", section, flags=re.MULTILINE)
    shown = re.search(r"^```console\n(.*?)\n```$", section, flags=re.MULTILINE | re.DOTALL)
    run_command(
        ["plan", *shlex.split(command[1].replace("train_configs", f"{ROOT}/train_configs"))]
    )
    assert capsys.readouterr().out == f"{shown[1]}\n"


# ----- check_planned -----
def test_an_attention_kernel_that_has_no_parts_is_refused() -> None:
    space = space_of()
    with pytest.raises(ConfigError, match="--attention cudnn .* context_parallel_degree = 8; use"):
        make_plan(space.config, world_size=8, device=space.device, attention_kernel="cudnn")
