"""The search for a layout: against a plan of every config in a small space, and what it prints."""

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

from torchtitan_lite.cli import run_command
from torchtitan_lite.config import given_keys, load_config
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.planner.meta_model import Workload
from torchtitan_lite.planner.plan import find_device, make_plan
from torchtitan_lite.planner.prediction import Prediction
from torchtitan_lite.planner.search import Space, find_candidates
from torchtitan_lite.planner.step import StepTime

ROOT = Path(__file__).parents[2]


def MAIN(words: list[str]) -> None:
    run_command(["plan", *words])


SMALL = ("--model.n_layers", "2")
ODD = (*SMALL, "--model.ffn_dim=14344", "--model.vocab_size=128264", "--float8.convert_output")
"""A model of which float8 can multiply wq, wk, wv and wo alone: the other sizes are odd eights."""
SCALED = (
    "--float8.recipe_name=rowwise",
    "--float8.scale_gradients_in_matmul",
    "--float8.enable_fsdp_float8_all_gather=false",
    "--float8.precompute_float8_dynamic_scale_for_fsdp=false",
)
TWO = (*SMALL, "--training.global_batch_size", "2")


def words_of(config: str, *overrides: str) -> list[str]:
    return ["--job.config_file", str(ROOT / f"train_configs/{config}.toml"), *overrides]


def run(*arguments: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        MAIN(["--search", *arguments])
    return printed.getvalue()


def search(
    config: str, *arguments: str, world_size: int = 8, device: str = "H100 SXM"
) -> dict[str, Any]:
    size = ("--world-size", str(world_size), "--device", device, "--json")
    return json.loads(run(*words_of(config), *size, *arguments))


def every_plan(
    words: list[str], *, world_size: int, memory: float, device: str
) -> Iterator[dict[str, Any]]:
    """Plan every config of a small space that training accepts, each from a command line. What is
    recomputed and what stays gathered is "auto" in them, as `words` say."""
    spec = find_device(device, memory_gib=memory)
    axes = (
        [f"--parallelism.tensor_parallel_degree={tp}" for tp in range(1, world_size + 1)],
        [f"--parallelism.data_parallel_replicate_degree={n}" for n in range(1, world_size + 1)],
        [f"--training.local_batch_size={local}" for local in range(1, 5)],
        ["--float8.filter_fqns=[]", "--float8.filter_fqns=auto"],
        [
            "--float8.enable_float8_linear=false",
            "--float8.recipe_name=rowwise",
            "--float8.recipe_name=rowwise_with_gw_hp",
            "--float8.recipe_name=mxfp8",
            "--float8.enable_fsdp_float8_all_gather=true",
        ],
    )
    for overrides in itertools.product(*axes):
        with contextlib.suppress(ConfigError):
            all_words = [*words, "--float8.enable_float8_linear=true", *overrides]
            yield make_plan(
                load_config(all_words, world_size=world_size), world_size=world_size, device=spec
            )


@pytest.mark.parametrize(
    ("device", "compiled", "memory"),
    [
        ("H100 SXM", "true", 17.0),
        ("H100 SXM", "false", 40.0),
        ("B200", "true", 180.0),
    ],
)
def test_it_finds_the_fastest_of_all_plans_that_fit(
    device: str, compiled: str, memory: float
) -> None:
    words = (*TWO, "--compile.enable", compiled)
    plans = [
        (each["schedule"]["tps"], each["memory"]["fits"])
        for each in every_plan(
            words_of("llama3_8b", *words), world_size=2, memory=memory, device=device
        )
    ]
    best = sorted({round(tps, 6) for tps, fits in plans if fits}, reverse=True)
    found = search("llama3_8b", *words, "--memory", str(memory), world_size=2, device=device)
    rates = [layout["tps"] for layout in found["layouts"]]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] == pytest.approx(best[0])
    assert set(best[:2]) <= {round(rate, 6) for rate in rates}
    assert all(layout["reserved_gib"] <= memory for layout in found["layouts"])


def test_a_space_of_which_a_part_fits_leaves_the_rest_out() -> None:
    plans = every_plan(words_of("llama3_8b", *TWO), world_size=2, memory=17.0, device="H100 SXM")
    fits = [plan["memory"]["fits"] for plan in plans]
    assert any(fits)
    assert not all(fits)


@pytest.mark.parametrize(
    ("config", "world_size", "device", "given"),
    [
        ("llama3_8b", 8, "H100 SXM", ()),
        ("llama3_8b", 8, "A100 SXM 80GB", ("--training.global_batch_size", "64")),
        ("llama3_8b_float8", 8, "B200", ()),
        (
            "llama3_70b",
            8,
            "H100 SXM",
            ("--float8.enable_float8_linear", "--float8.recipe_name=rowwise", *SMALL),
        ),
        ("llama3_70b", 12, "B200", ("--parallelism.tensor_parallel_degree", "4", *SMALL)),
        ("llama3_8b", 1, "H100 SXM", ODD),
        ("debug_model", 7, "H100 SXM", ()),  # a prime number
        ("debug_model", 1, "H100 SXM", ()),
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

    words = words_of(config, *given, *options)
    plan = make_plan(
        load_config(words, world_size=world_size),
        world_size=world_size,
        device=find_device(device),
    )
    assert plan["schedule"]["tps"] == pytest.approx(best["tps"])
    assert plan["schedule"]["gpu_hours_per_trillion_tokens"] == pytest.approx(
        best["gpu_hours_per_trillion_tokens"]
    )
    assert plan["memory"]["reserved"] == pytest.approx(best["reserved_gib"] * 2**30)
    request = plan["request"]
    for key in ("dp_replicate", "dp_shard", "tp", "local_batch_size", "grad_accum_steps"):
        assert request[key] == best[key]
    assert request["activation_checkpoint"] == best["activation_checkpoint"]
    assert request["float8_recipe"] == best["float8_recipe"]
    assert f"{best['tps']:,.0f} tokens/s per device" in " ".join(text.split("\n\n")[0].split())


def test_auto_keeps_what_float8_cannot_multiply() -> None:
    best = search("llama3_8b", *ODD, world_size=1)["layouts"][0]
    assert best["filter_fqns"] == ["auto"]
    assert best["kept_in_bf16"] == ["feed_forward.w1", "feed_forward.w2", "feed_forward.w3"]
    text = run(*words_of("llama3_8b", *ODD), "--device", "H100 SXM", "--world-size", "1")
    assert f"{best['float8_recipe']}, auto\n" in text
    assert "w1 w2 w3 in bf16" in " ".join(text.split())


def test_scales_are_not_computed_ahead_of_weights_on_the_cpu() -> None:
    given = ("--training.enable_cpu_offload", "--float8.recipe_name=tensorwise")
    best = search("llama3_8b", *SMALL, *given, "--float8.enable_float8_linear")["layouts"][0]
    assert best["changes"]["float8.enable_fsdp_float8_all_gather"]
    assert "float8.precompute_float8_dynamic_scale_for_fsdp" not in best["changes"]


def test_a_slower_attention_kernel_is_slower_in_a_search() -> None:
    cudnn, flash = (
        search("llama3_8b", *SMALL, "--attention", kernel)["layouts"][0]["tps"]
        for kernel in ("cudnn", "flash")
    )
    assert flash < cudnn


def test_the_global_batch_stays_as_it_is() -> None:
    open_batch = search("llama3_8b", *SMALL, "--training.local_batch_size", "2", world_size=4)
    assert open_batch["request"]["global_batch_size"] == 8
    assert not open_batch["request"]["global_batch_size_given"]
    given = search("llama3_8b", *SMALL, "--training.global_batch_size", "48", world_size=4)
    assert given["request"]["global_batch_size_given"]
    for found, total in ((open_batch, 8), (given, 48)):
        for layout in found["layouts"]:
            dp = layout["dp_replicate"] * layout["dp_shard"]
            assert layout["local_batch_size"] * layout["grad_accum_steps"] * dp == total
            assert dp * layout["tp"] == 4
    assert {layout["local_batch_size"] for layout in open_batch["layouts"]} == {2}


def test_the_best_in_bf16_is_shown_with_its_rank() -> None:
    *five, bf16 = search("llama3_8b")["layouts"]
    assert [each["rank"] for each in five] == [1, 2, 3, 4, 5]
    assert all(each["float8_recipe"] for each in five)
    assert bf16["rank"] > 5
    assert bf16["float8_recipe"] is None
    alone = search("llama3_8b", "--float8.enable_float8_linear=false")["layouts"]
    assert alone[0] == bf16 | {"rank": 1}
    assert len(alone) == 5


def test_keys_of_the_command_line_are_kept() -> None:
    given = (
        "--parallelism.tensor_parallel_degree=2",
        "--float8.enable_float8_linear",
        "--float8.recipe_name=rowwise",
        "--activation_checkpoint.mode=full",
    )
    found = search("llama3_8b", *SMALL, *given)
    assert set(found["request"]["kept"]) == {
        "parallelism.tensor_parallel_degree",
        "float8.enable_float8_linear",
        "float8.recipe_name",
        "activation_checkpoint.mode",
    }
    for layout in found["layouts"]:
        assert (layout["tp"], layout["float8_recipe"]) == (2, "rowwise")
        assert layout["activation_checkpoint"] == "full"
    text = " ".join(run(*words_of("llama3_8b", *SMALL, *given), "--device", "H100 SXM").split())
    assert "Kept as given: " in text
    assert "parallelism.tensor_parallel_degree" in text


def test_auto_and_all_ranks_left_keep_nothing() -> None:
    words = words_of(
        "llama3_8b",
        "--activation_checkpoint.mode=auto",
        "--parallelism.data_parallel_shard_degree=-1",
        "--training.batch_size=2",
    )
    assert given_keys(words) == {"training.local_batch_size"}


def test_a_layout_of_one_rank_a_shard_switches_async_tensor_parallelism_off() -> None:
    config = load_config(words_of("llama3_8b"), world_size=8)
    parallelism = config.parallelism.model_copy(
        update={"tensor_parallel_degree": 2, "enable_async_tensor_parallel": True}
    )
    space = Space(
        config.model_copy(update={"parallelism": parallelism}), 8, find_device("H100 SXM")
    )
    overlap = {
        settings["parallelism.tensor_parallel_degree"]: settings[
            "parallelism.enable_async_tensor_parallel"
        ]
        for settings, _ in space.settings()
    }
    assert overlap == {1: False, 2: True, 4: True, 8: True}


@pytest.mark.parametrize(
    ("device", "words", "recipes"),
    [
        ("A100 SXM 80GB", [], {"bf16"}),
        ("H100 SXM", [], {"bf16", "tensorwise", "rowwise", "rowwise_with_gw_hp"}),
        ("B200", [], {"bf16", "tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8"}),
        ("H100 SXM", SCALED, {"bf16", "tensorwise", "rowwise", "rowwise_with_gw_hp"}),
        ("B200", SCALED, {"bf16", "tensorwise", "mxfp8"}),
    ],
)
def test_recipes_are_those_of_the_device(
    device: str, words: Sequence[str], recipes: set[str]
) -> None:
    config = load_config(words_of("llama3_8b", *SMALL, *words), world_size=1)
    candidates = find_candidates(Space(config, 1, find_device(device)))
    trained = {
        each.work.job.config.float8.recipe_name if each.work.converted else "bf16"
        for each in candidates
    }
    assert trained == recipes


def test_cost_and_gpu_hours(monkeypatch: pytest.MonkeyPatch) -> None:
    """2 s for 8 sequences of 8,192 tokens on 8 devices: 4,096 tokens/s on each."""
    step = StepTime(2.0, 1.0, {}, {"sharding": 0.1, "replicas": 0.4}, {"": 0.5}, {})
    prediction = Prediction(
        "rowwise", 1.5, (1.2, 1.6), (1.6, 4.0), ["attention.wq"], [], step, step, {}
    )
    monkeypatch.setattr(Workload, "predict", lambda self, device, attention_kernel: prediction)
    layout = search("llama3_8b", *SMALL, "--gpu-hour", "2.5")["layouts"][0]
    assert layout["tps"] == 4096
    assert layout["tps_band"] == [2048, 5120]
    assert layout["exposed_pct"] == pytest.approx(25)
    assert layout["gpu_hours_per_trillion_tokens"] == pytest.approx(67_816.84, abs=0.01)
    assert layout["days_per_trillion_tokens"] == pytest.approx(353.21, abs=0.01)
    assert layout["cost_per_trillion_tokens"] == pytest.approx(169_542.10, abs=0.01)
    text = run(*words_of("llama3_8b", *SMALL), "--device", "H100 SXM", "--gpu-hour", "2.5")
    assert re.search(r"4,096 +2,048 to 5,120 .* 25 % +353.2 +67,817 +169,542$", text, re.MULTILINE)
    assert (
        "cost" not in run(*words_of("llama3_8b", *SMALL), "--device", "H100 SXM").split("\n\n")[2]
    )


def test_without_a_layout_that_fits_it_says_what_would() -> None:
    memory = ("--memory", "60", "--model.n_layers", "16", "--training.global_batch_size=-1")
    with pytest.raises(
        ConfigError, match=r"nothing fits: 405B.* on --world-size 8 reserves at"
    ) as (raised):
        search("llama3_405b", *memory)
    assert "of the 60 of the H100 SXM" in str(raised.value)
    sizes = [int(size) for size in re.findall(r"(\d+) GPUs with", str(raised.value))]
    assert sizes
    fewest = min(sizes)
    assert search("llama3_405b", *memory, world_size=fewest)["request"]["fitting"] > 0


def test_a_model_that_no_number_of_gpus_holds() -> None:
    with pytest.raises(
        ConfigError, match="would fit: no number of GPUs, or a lower .training. seq_len"
    ):
        search("llama3_405b", *SMALL, "--memory", "0.1", "--training.global_batch_size=-1")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--gpu-hour", "-1"), r"--gpu-hour -1.0 must be a positive number"),
        (("--gpu-hour", "0"), r"--gpu-hour 0.0 must be a positive number"),
        (("--gpu-hour", "nan"), r"--gpu-hour nan must be a positive number"),
        (("--world-size", "0"), r"--world-size 0 must be 1 to 1000000"),
        (("--world-size", "1000001"), r"--world-size 1000001 must be 1 to 1000000"),
        (("--tps", "7000"), r"--tps 7000.0 is of one layout, and --search compares"),
        (("--parallelism.tensor_parallel_degree=3",), r"does not divide the world size, 8"),
        (("--training.global_batch_size=7",), r"global_batch_size = 7 is not a multiple of"),
        (("--training.mixed_precision_param=float32",), r'"float32" cannot be planned'),
    ],
)
def test_bad_inputs(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(*words_of("llama3_8b", *SMALL), "--device", "H100 SXM", *arguments)


def test_float8_that_is_given_is_refused_where_the_device_has_none() -> None:
    with pytest.raises(ConfigError, match="but the A100 SXM 80GB has no float8 matrix units"):
        search("llama3_8b", *SMALL, "--float8.enable_float8_linear", device="A100 SXM 80GB")


def test_a_price_needs_a_search() -> None:
    with pytest.raises(ConfigError, match="--gpu-hour 2.0 is for --search; add that, or drop it"):
        MAIN([*words_of("debug_model"), "--device", "H100 SXM", "--gpu-hour", "2"])


def test_a_huge_number_of_processes_is_searched() -> None:
    found = search("debug_model", world_size=999_983)  # a prime number
    assert {layout["tp"] for layout in found["layouts"]} == {1}
    assert {layout["dp_replicate"] * layout["dp_shard"] for layout in found["layouts"]} == {999_983}


def test_the_documented_search_prints_what_is_documented() -> None:
    section = (ROOT / "docs/plan.md").read_text().partition("\n## Search for a layout\n")[2]
    command = re.search(r"^torchtitan-lite plan --search (.*)$", section, flags=re.MULTILINE)
    shown = re.search(r"^```console\n(.*?)\n```$", section, flags=re.MULTILINE | re.DOTALL)
    assert command and shown
    assert (
        shown[1]
        == run(*shlex.split(command[1].replace("train_configs", f"{ROOT}/train_configs"))).strip()
    )


def test_every_key_of_the_json_is_documented() -> None:
    section = (ROOT / "docs/plan.md").read_text().partition("\n## Search for a layout\n")[2]
    found = search("llama3_8b", *SMALL, world_size=2)
    names = {*found["request"], *(name for layout in found["layouts"] for name in layout)}
    section = section.partition("\n## ")[0]
    assert [name for name in names if not re.search(rf"\b{name}\b", section)] == []


@pytest.mark.parametrize(
    ("row", "config", "gpus"),
    [("8B, 8", "llama3_8b", 8), ("70B, 64", "llama3_70b", 64), ("405B, 512", "llama3_405b", 512)],
)
def test_the_first_choices_are_those_documented(row: str, config: str, gpus: int) -> None:
    first = search(config, world_size=gpus)["layouts"][0]
    layout = f"{first['dp_replicate']} x {first['dp_shard']} x {first['tp']}"
    choice = f"{layout}, {first['activation_checkpoint']}, {first['float8_recipe']}"
    assert f"| {row} | {choice} | {first['tps']:,.0f} |" in (ROOT / "docs/plan.md").read_text()
