"""The search for a layout, against a plan of every config in a small space, and what it prints."""

import contextlib
import io
import itertools
import json
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from torchtitan_lite.base.errors import ConfigError
from torchtitan_lite.cli import run_command
from torchtitan_lite.config import given_keys, load_config
from torchtitan_lite.planner.plan import find_device, plan
from torchtitan_lite.planner.report import format_search
from torchtitan_lite.planner.search import Space, find_candidates
from torchtitan_lite.planner.time import StepTime
from torchtitan_lite.planner.workload import Workload

ROOT = Path(__file__).parents[2]
SMALL = ("--model.n_layers", "2")
KEPT = ("--activation_checkpoint.mode=none", "--parallelism.fsdp_reshard_after_forward=default")
FSDP = (*KEPT, "--parallelism.tensor_parallel_degree=1", "--training.local_batch_size=1")
NARROW = (*SMALL, *FSDP)
"""A search of replicas and recipes alone, which is quick."""
ODD = (*SMALL, "--model.ffn_dim=14344", "--model.vocab_size=128264", "--float8.convert_output")
"""A model of which float8 can multiply wq, wk, wv and wo alone: the other sizes are odd eights."""
TWO = (*SMALL, "--training.global_batch_size", "2")
TP_4 = "--parallelism.tensor_parallel_degree=4"


def words_of(config: str, *overrides: str) -> list[str]:
    return ["--job.config_file", str(ROOT / f"train_configs/{config}.toml"), *overrides]


def run(*arguments: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        run_command(["plan", "--search", *arguments])
    return printed.getvalue()


def search(
    config: str, *arguments: str, world_size: int = 8, device: str = "H100 SXM"
) -> dict[str, Any]:
    size = ("--world-size", str(world_size), "--device", device, "--json")
    return json.loads(run(*words_of(config), *size, *arguments))


def plan_of(words: Sequence[str], *, world_size: int, **device: Any) -> dict[str, Any]:
    config = load_config(list(words), world_size=world_size)
    return plan(config, world_size=world_size, device=find_device(**device))


# ----- make_search -----


def every_plan(words: Sequence[str], **device: Any) -> Iterator[dict[str, Any]]:
    """Plan every config for two GPUs that training accepts, each from a command line. What is
    recomputed and what stays gathered is "auto" in them, as `words` say."""
    on = "--float8.enable_float8_linear"
    recipes = [
        f"--float8.recipe_name={name}" for name in ("rowwise", "rowwise_with_gw_hp", "mxfp8")
    ]
    gather, filters = "--float8.enable_fsdp_float8_all_gather", "--float8.filter_fqns"
    in_float8 = itertools.product((on,), (*recipes, gather), (f"{filters}=auto",))
    all_float8 = [(f"{on}=false",), *in_float8]
    cp = "--parallelism.context_parallel_degree=2"
    for layout in itertools.product(
        ("", "--parallelism.tensor_parallel_degree=2", cp),
        ("", "--parallelism.data_parallel_replicate_degree=2"),
        [f"--training.local_batch_size={local}" for local in (1, 2)],
    ):
        for float8 in all_float8:
            with contextlib.suppress(ConfigError):
                yield plan_of([*words, *filter(None, layout), *float8], world_size=2, **device)


@pytest.mark.parametrize(
    ("device", "compiled", "memory"),
    [
        ("H100 SXM", "true", 17.0),
        pytest.param("H100 SXM", "false", 40.0, marks=pytest.mark.slow),
        pytest.param("B200", "true", 180.0, marks=pytest.mark.slow),
    ],
)
def test_it_finds_the_fastest_of_all_plans_that_fit(
    device: str, compiled: str, memory: float
) -> None:
    words = (*TWO, "--compile.enable", compiled)
    plans = [
        (round(each["schedule"]["tps"], 6), each["memory"]["fits"])
        for each in every_plan(words_of("llama3_8b", *words), name=device, memory_gib=memory)
    ]
    best = sorted({tps for tps, fits in plans if fits}, reverse=True)
    found = search("llama3_8b", *words, "--memory", str(memory), world_size=2, device=device)
    rates = [layout["tps"] for layout in found["layouts"]]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] == pytest.approx(best[0])
    assert set(best[:2]) <= {round(rate, 6) for rate in rates}
    assert all(layout["reserved_gib"] <= memory for layout in found["layouts"])
    if memory == 17:
        assert {fits for _, fits in plans} == {True, False}


@pytest.mark.parametrize(
    ("config", "world_size", "device", "given"),
    [
        ("llama3_8b", 8, "A100 SXM 80GB", (*SMALL, "--training.global_batch_size", "64")),
        ("llama3_70b", 12, "B200", (TP_4, *SMALL)),
        ("llama3_8b", 1, "H100 SXM", ODD),
        pytest.param("debug_model", 7, "H100 SXM", (), marks=pytest.mark.slow),  # a prime number
        pytest.param("llama3_8b_float8", 8, "B200", (), marks=pytest.mark.slow),
    ],
)
def test_the_printed_options_plan_to_the_figures_that_are_printed(
    config: str, world_size: int, device: str, given: tuple[str, ...]
) -> None:
    best = search(config, *given, world_size=world_size, device=device)["layouts"][0]
    size = ("--world-size", str(world_size), "--device", device)
    text = run(*words_of(config, *given), *size)
    assert max(map(len, text.splitlines())) <= 80
    options = shlex.split(text[text.rindex("\n\n") :].partition(":")[2].replace("\\\n", " "))
    assert f" {best['tps']:,.0f} " in text

    plan = plan_of(words_of(config, *given, *options), world_size=world_size, name=device)
    for key in ("tps", "gpu_hours_per_trillion_tokens"):
        assert plan["schedule"][key] == pytest.approx(best[key])
    assert plan["memory"]["reserved"] == pytest.approx(best["reserved_gib"] * 2**30)
    same = ("dp_replicate", "dp_shard", "cp", "tp", "local_batch_size", "grad_accum_steps")
    for key in (*same, "activation_checkpoint", "float8_recipe"):
        assert plan["request"][key] == best[key]


def test_auto_keeps_what_float8_cannot_multiply() -> None:
    best = search("llama3_8b", *ODD, world_size=1)["layouts"][0]
    kept = ["feed_forward.w1", "feed_forward.w2", "feed_forward.w3"]
    assert sorted(best["changes"]["float8.filter_fqns"]) == kept


def test_scales_are_not_computed_ahead_of_weights_on_the_cpu() -> None:
    given = ("--training.enable_cpu_offload", "--float8.recipe_name=tensorwise")
    best = search("llama3_8b", *NARROW, *given, "--float8.enable_float8_linear")["layouts"][0]
    assert best["changes"]["float8.enable_fsdp_float8_all_gather"]
    assert "float8.precompute_float8_dynamic_scale_for_fsdp" not in best["changes"]


def test_the_global_batch_stays_as_it_is() -> None:
    bf16 = (*SMALL, *KEPT, "--float8.enable_float8_linear=false")
    open_batch = search("llama3_8b", *bf16, "--training.local_batch_size", "2", world_size=4)
    given = search("llama3_8b", *bf16, "--training.global_batch_size", "48", world_size=4)
    for found, total in ((open_batch, 8), (given, 48)):
        for layout in found["layouts"]:
            assert layout["global_batch_size"] == total
            dp = layout["dp_replicate"] * layout["dp_shard"]
            assert layout["local_batch_size"] * layout["grad_accum_steps"] * dp == total
            assert dp * layout["cp"] * layout["tp"] == 4
    assert {layout["local_batch_size"] for layout in open_batch["layouts"]} == {2}
    text = " ".join(format_search(given).split())
    said = (
        "the global batch of 48 sequences: to try a larger one, give --training.global_batch_size"
    )
    assert said in text


def test_the_best_in_bf16_is_shown_with_its_rank() -> None:
    *five, bf16 = search("llama3_8b", *FSDP)["layouts"]
    assert [each["rank"] for each in five] == [1, 2, 3, 4, 5]
    assert all(each["float8_recipe"] for each in five)
    assert bf16["rank"] > 5
    assert bf16["float8_recipe"] is None
    alone = search("llama3_8b", *FSDP, "--float8.enable_float8_linear=false")["layouts"]
    assert alone[0] == bf16 | {"rank": 1}


def test_keys_of_the_command_line_are_kept() -> None:
    kept = {
        "parallelism.tensor_parallel_degree": "2",
        "float8.enable_float8_linear": "true",
        "float8.recipe_name": "rowwise",
        "activation_checkpoint.mode": "full",
    }
    given = [f"--{key}={value}" for key, value in kept.items()]
    found = search("llama3_8b", *SMALL, *given)
    assert set(found["request"]["kept"]) == {*kept, "model.n_layers"}
    for layout in found["layouts"]:
        assert (layout["tp"], layout["float8_recipe"]) == (2, "rowwise")
        assert layout["activation_checkpoint"] == "full"
    assert found["layouts"][0]["rank"] < found["layouts"][1]["rank"] <= found["request"]["fitting"]
    rates = [layout["tps"] for layout in found["layouts"]]
    assert len(set(rates)) == len(rates)  # no config is there twice
    text = " ".join(run(*words_of("llama3_8b", *SMALL, *given), "--device", "H100 SXM").split())
    assert re.search(r"Kept as given: .*parallelism\.tensor_parallel_degree", text)

    # "auto", and all ranks left, keep nothing.
    auto = ("--activation_checkpoint.mode=auto", "--parallelism.data_parallel_shard_degree=-1")
    words = words_of("llama3_8b", *auto, "--training.batch_size=2")
    assert given_keys(words) == {"training.local_batch_size"}


def test_a_huge_number_of_processes_is_searched() -> None:
    layouts = search("debug_model", world_size=999_983)["layouts"]  # a prime number
    sizes = {(each["tp"] * each["cp"], each["dp_replicate"] * each["dp_shard"]) for each in layouts}
    assert sizes == {(1, 999_983)}


def test_rates_and_gpu_hours(monkeypatch: pytest.MonkeyPatch) -> None:
    """2 s for 8 sequences of 8,192 tokens on 8 devices: 4,096 tokens/s on each."""
    step = StepTime({"linears": 1.5}, {"FSDP": 0.5}, 0.0)
    monkeypatch.setattr(Workload, "time", lambda self, device: step)
    for name in ("RATE_RANGE", "SPLIT_RATE_RANGE"):
        monkeypatch.setattr(f"torchtitan_lite.planner.plan.{name}", (0.5, 1.25))
    layout = search("llama3_8b", *NARROW)["layouts"][0]
    assert layout["tps"] == 4096
    assert layout["tps_range"] == [2048, 5120]
    assert layout["gpu_hours_per_trillion_tokens"] == pytest.approx(67_816.84, abs=0.01)
    text = run(*words_of("llama3_8b", *NARROW), "--device", "H100 SXM")
    assert re.search(r" 4,096 +\d+\.\d$", text, re.MULTILINE)


# ----- Space, find_candidates -----


def test_a_layout_of_one_rank_a_shard_switches_async_tensor_parallelism_off() -> None:
    words = words_of("llama3_8b", "--parallelism.enable_async_tensor_parallel", TP_4)
    space = Space(load_config(words, world_size=8), 8, find_device("H100 SXM"))
    layouts = [settings["parallelism"] for settings in space.settings()]
    found = {
        each["tensor_parallel_degree"]: each["enable_async_tensor_parallel"] for each in layouts
    }
    assert found == {1: False, 2: True, 4: True, 8: True}


@pytest.mark.parametrize(
    ("device", "recipes"),
    [
        ("A100 SXM 80GB", "bf16"),
        ("H100 SXM", "bf16 tensorwise rowwise rowwise_with_gw_hp blockwise"),
        ("B200", "bf16 tensorwise rowwise rowwise_with_gw_hp mxfp8"),
    ],
)
def test_recipes_are_those_of_the_device(device: str, recipes: str) -> None:
    config = load_config(words_of("llama3_8b", *SMALL), world_size=1)
    works = find_candidates(Space(config, 1, find_device(device)))
    trained = {work.job.config.float8.recipe_name if work.converted else "bf16" for work in works}
    assert trained == set(recipes.split())


# ----- ConfigError -----


def test_without_a_layout_that_fits_it_names_the_smallest() -> None:
    open_batch = ("--training.global_batch_size=-1", "--float8.enable_float8_linear=false")
    full = ("--activation_checkpoint.mode=full", KEPT[1], "--training.local_batch_size=1")
    memory = ("--memory", "60", "--model.n_layers", "16", *full, *open_batch)
    message = r"nothing fits: 405B.* on --world-size 8 reserves at .* of the 58.5 of the H100 SXM"
    with pytest.raises(ConfigError, match=message):
        search("llama3_405b", *memory)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--world-size 1000001", r"--world-size: 1000001 must be .* 1 to 1000000;"),
        (
            "--float8.enable_float8_linear --compile.enable=false --training.local_batch_size=1 "
            "--parallelism.tensor_parallel_degree=1",
            r"enable_float8_linear = true makes no linear faster",
        ),
        ("--parallelism.tensor_parallel_degree=3", r"does not divide the world size, 8"),
        ("--training.global_batch_size=7", r"global_batch_size = 7 is not a multiple of"),
        ("--training.mixed_precision_param=float32", r'"float32" cannot be planned'),
        (
            "--device 'A100 SXM 80GB' --float8.enable_float8_linear",
            r"A100 .* no float8 kernels",
        ),
    ],
)
def test_bad_inputs(arguments: str, message: str) -> None:
    words = (*words_of("llama3_8b", *SMALL), "--device", "H100 SXM", *shlex.split(arguments))
    with pytest.raises(ConfigError, match=message):
        run(*words)


# ----- plan.md -----

PAGE = (ROOT / "docs/plan.md").read_text()


def console(heading: str) -> tuple[list[str], str]:
    """The arguments of the command in a section of the page, and what it prints."""
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    command = re.search(r"^torchtitan-lite plan (.*)$", section, flags=re.MULTILINE)
    shown = re.search(r"^```console\n(.*?)\n```$", section, flags=re.MULTILINE | re.DOTALL)
    return shlex.split(command[1].replace("train_configs", f"{ROOT}/train_configs")), shown[1]


@pytest.mark.slow
def test_a_documented_command_prints_what_is_documented(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words, shown = console("Search for a layout")
    run_command(["plan", *words])
    assert capsys.readouterr().out.strip() == shown
    assert max(map(len, shown.splitlines())) <= 80


@pytest.mark.slow
@pytest.mark.parametrize(
    ("row", "config", "gpus"),
    [("8B, 8", "llama3_8b", 8), ("70B, 64", "llama3_70b", 64), ("405B, 512", "llama3_405b", 512)],
)
def test_the_first_choices_are_those_documented(row: str, config: str, gpus: int) -> None:
    first = search(config, world_size=gpus)["layouts"][0]
    layout = f"{first['dp_replicate']} x {first['dp_shard']} x {first['tp']}"
    choice = f"{layout}, {first['activation_checkpoint']}, {first['float8_recipe']}"
    assert f"| {row} | {choice} | {first['tps']:,.0f} |" in PAGE


def test_every_key_of_the_json_is_documented() -> None:
    found = search("llama3_8b", *NARROW, world_size=2)
    names = {*found["request"], *found["layouts"][0]}
    assert [name for name in names if not re.search(rf"\b{name}\b", PAGE)] == []
