"""The planner through its command: METRICS' reference values, what auto keeps, memory, rates and
refusals."""

import contextlib
import io
import json
import math
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from torchtitan_lite.cli import build_parser, run_command
from torchtitan_lite.errors import ConfigError, DataError
from torchtitan_lite.planner.constants import constants_of, rates_of
from torchtitan_lite.planner.plan import find_device
from torchtitan_lite.planner.report import format_plan

ROOT = Path(__file__).parents[2]


def MAIN(words):
    run_command(["plan", *words])


AUTO = '--float8.filter_fqns=["auto"]'


def run_plan(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torchtitan_lite", "plan", *arguments]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
    )


def plan(config: str, *arguments: str, device: str = "H100 SXM") -> dict[str, Any]:
    """What the command prints, run in this process, as it imports much."""
    file = str(ROOT / f"train_configs/{config}.toml")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        MAIN(["--job.config_file", file, "--device", device, "--json", *arguments])
    return json.loads(printed.getvalue())


@pytest.fixture(scope="module")
def float8_8b() -> dict[str, Any]:
    return plan("llama3_8b_float8", "--tps", "7773")


@pytest.fixture(scope="module")
def bf16_8b() -> dict[str, Any]:
    return plan("llama3_8b", "--tps", "6297")


def test_a_document_mask_changes_attention_alone_and_the_report_says_what_is_counted():
    masked, plain = (
        plan("debug_model", f"--training.document_mask={on}") for on in ("true", "false")
    )
    assert masked["request"] == plain["request"] | {
        "document_mask": True,
        "attention_kernel": "flex",
    }
    for section in ("model", "flops_per_token", "linears", "peaks", "memory"):
        assert masked[section] == plain[section]
    report = " ".join(format_plan(masked).split())
    parts = [each["prediction"]["float8"]["device_parts_s"] for each in (masked, plain)]
    attention = [each.pop("attention") for each in parts]
    assert parts[0] == parts[1] and attention[0] > attention[1]
    assert "document mask (attention counts as if documents were one)" in report


def test_keys_of_float8_that_its_recipe_excludes_have_no_effect_while_it_is_off(bf16_8b):
    rowwise = ["llama3_8b", "--tps", "6297", "--float8.recipe_name=rowwise"]
    with_gather = plan(*rowwise, "--float8.enable_fsdp_float8_all_gather")
    assert with_gather["prediction"] == plan(*rowwise)["prediction"]
    assert with_gather["prediction"]["bf16"] == bf16_8b["prediction"]["bf16"]


def test_the_report_says_that_what_a_memory_budget_recomputes_is_not_counted():
    words = ["llama3_8b", "--activation_checkpoint.memory_budget=0.0", RESHARD_DEFAULT]
    none, budget = (
        plan(*words, f"--activation_checkpoint.mode={mode}") for mode in ("none", "memory_budget")
    )
    assert budget["schedule"]["tps"] == none["schedule"]["tps"]
    said = "memory_budget (the time of what it recomputes is not counted), compile on"
    assert said in " ".join(format_plan(budget).split())
    assert "is not counted" not in format_plan(none)


def test_hidden_sums_over_replicas_are_never_below_zero():
    found = plan(
        *("debug_model", "--world-size=6", "--parallelism.data_parallel_replicate_degree=3"),
        *("--model.flavor=", "--model.dim=1536", "--model.n_heads=16", "--model.n_kv_heads=1"),
        *("--model.n_layers=1", "--model.ffn_dim=100", "--model.vocab_size=32000"),
        *("--model.tie_embeddings", "--training.seq_len=64", "--training.local_batch_size=1"),
        *("--float8.enable_float8_linear=false", "--compile.enable", "--training.dtype=bfloat16"),
        *("--activation_checkpoint.mode=full", "--training.document_mask"),
        "--parallelism.fsdp_reshard_after_forward=always",
        device="A100 SXM 80GB",
    )
    assert found["prediction"]["bf16"]["hidden_s"]["replicas"] >= 0


def rounded(values: dict[str, Any], *names: str) -> tuple[str, ...]:
    return tuple(f"{values[name]:.2f}" for name in names)


def test_reference_values_of_8b_in_float8(float8_8b):
    model, flops = float8_8b["model"], float8_8b["flops_per_token"]
    assert (model["parameters"], model["parameters_without_embedding"]) == (
        8_030_261_248,
        7_504_924_672,
    )
    assert flops["total"] == 57_912_852_480
    assert (flops["block_linears"], flops["output"], flops["attention"]) == (
        41_875_931_136,
        3_152_019_456,
        12_884_901_888,
    )
    assert (flops["fp8"], flops["bf16"], flops["fp32"]) == (41_875_931_136, 16_036_921_344, 0)
    assert f"{100 * flops['fp8'] / flops['total']:.2f}" == "72.31"
    peaks = float8_8b["peaks"]
    assert (f"{peaks['effective']:.1f}", f"{peaks['arithmetic']:.1f}") == ("1549.5", "1704.9")
    figures = rounded(
        float8_8b["schedule"],
        "tflops",
        "mfu",
        "mfu_bf16_peak",
        "mfu_fp8_peak",
        "mfu_arithmetic_peak",
    )
    assert figures == ("450.16", "29.05", "45.52", "22.75", "26.40")
    assert (float8_8b["schedule"]["tps"], float8_8b["schedule"]["origin"]) == (7773, "given")


def test_reference_values_of_8b_in_bf16(bf16_8b):
    assert rounded(bf16_8b["schedule"], "tflops", "mfu", "mfu_bf16_peak") == (
        "364.68",
        "36.87",
        "36.87",
    )
    assert bf16_8b["flops_per_token"]["fp8"] == 0


def test_other_reference_values_of_8b():
    causal = plan("llama3_8b_float8", "--tps", "7773", "--metrics.flops_convention=causal")
    assert rounded(causal["schedule"], "mfu") == ("23.99",)
    assert f"{causal['flops_per_token']['total'] / 1e9:.3f}" == "51.470"
    full = plan("llama3_8b", "--activation_checkpoint.mode=full")
    assert f"{full['flops_per_token']['with_recompute'] / 1e9:.2f}" == "72.41"
    assert full["schedule"]["hfu"] > full["schedule"]["mfu"]
    gw_hp = plan(
        "llama3_8b_float8",
        "--float8.recipe_name=rowwise_with_gw_hp",
        "--float8.enable_fsdp_float8_all_gather=false",
        "--float8.precompute_float8_dynamic_scale_for_fsdp=false",
    )  # fmt: skip
    assert (
        f"{100 * gw_hp['flops_per_token']['fp8'] / gw_hp['flops_per_token']['total']:.2f}"
        == "48.21"
    )
    assert {row["kind"]: row["gemms"]["grad_weight"]["precision"] for row in gw_hp["linears"]}[
        "attention.wq"
    ] == "bf16"


def test_linears_have_the_shapes_of_a_rank():
    tp = plan(
        "llama3_8b_float8",
        "--parallelism.tensor_parallel_degree=2",
        "--training.local_batch_size=2",
    )
    rows = {row["kind"]: row for row in tp["linears"]}
    assert rows["attention.wk"]["gemms"]["output"] == {
        "m": 16384,
        "n": 512,
        "k": 4096,
        "precision": "fp8",
    }
    assert rows["feed_forward.w2"]["gemms"]["grad_weight"] == {
        "m": 4096,
        "n": 7168,
        "k": 16384,
        "precision": "fp8",
    }
    assert rows["output"]["kept_because"] and not rows["output"]["converted"]
    assert all(
        row["count"] == 32 and row["divisible_by_16"]
        for kind, row in rows.items()
        if kind != "output"
    )


def converted(found: dict[str, Any]) -> set[str]:
    return {row["kind"].partition(".")[2] for row in found["linears"] if row["converted"]}


ALL_SEVEN = {"wq", "wk", "wv", "wo", "w1", "w2", "w3"}


def test_auto_converts_nothing_of_the_debug_model_and_says_why():
    found = plan("debug_model", AUTO)
    assert converted(found) == set()
    assert found["flops_per_token"]["fp8"] == 0
    reasons = [row["kept_because"] for row in found["linears"] if row["kind"] != "output"]
    assert len(reasons) == 7 and all(
        re.match(r"auto: \d+\.\d\dx the time of bf16", reason) for reason in reasons
    )
    assert found["prediction"]["step_speedup"] == 1
    assert found["request"]["float8_recipe"] == "tensorwise"
    assert "; tensorwise float8 is on, but filter_fqns keeps every linear in bf16." in answer(found)
    assert "float8 off" not in format_plan(found) and "if on" not in format_plan(found)
    hurt = plan("debug_model")["prediction"]
    assert hurt["step_speedup"] < 1 and hurt["verdict"].startswith("tensorwise float8 hurts")


def test_auto_converts_all_seven_of_8b_on_fsdp():
    assert converted(plan("llama3_8b_float8", AUTO)) == ALL_SEVEN


@pytest.mark.parametrize(
    ("config", "device", "tp", "kept"),
    [
        ("llama3_1b", "B200", 1, ALL_SEVEN),  # the host is slower than the device
        ("llama3_8b", "H100 SXM", 8, set()),  # activations are gathered in float8
    ],
)
def test_auto_is_no_slower_than_all_or_none(config, device, tp, kept):
    on = [
        *(config, "--world-size=64", f"--parallelism.tensor_parallel_degree={tp}"),
        *(RESHARD_DEFAULT, "--float8.enable_float8_linear", "--float8.filter_fqns"),
    ]
    auto, every = plan(*on, "auto", device=device), plan(*on, "[]", device=device)
    fastest = min(every["prediction"][name]["step_s"] for name in ("bf16", "float8"))
    assert auto["prediction"]["float8"]["step_s"] == pytest.approx(fastest)
    assert converted(auto) == ALL_SEVEN - kept
    reasons = [row["kept_because"] for row in auto["linears"]]
    assert any(each.endswith("launches and reductions cost more") for each in reasons) == bool(kept)


ROWWISE = ["--float8.enable_float8_linear", "--float8.recipe_name=rowwise", AUTO]


def test_auto_keeps_attentions_linears_of_8b_on_tp8_rowwise():
    found = plan("llama3_8b", "--parallelism.tensor_parallel_degree=8", *ROWWISE)
    # All four are small there: [8192, 4096] to 512 or 128, and 512 to 4096.
    assert converted(found) <= {"w1", "w2", "w3"}
    (wq, *_) = found["linears"]
    assert wq["kept_because"] == f"auto: {wq['time_ratio']:.2f}x the time of bf16"


def test_auto_converts_nothing_where_casts_are_not_fused():
    found = plan("llama3_8b_float8", "--compile.enable=false", AUTO)
    assert converted(found) == set()
    assert found["linears"][0]["kept_because"].endswith(", as eager casts are not fused")


def test_a_kind_that_is_converted_in_some_layers_only():
    found = plan("llama3_8b_float8", '--float8.filter_fqns=["layers.0", "layers.1"]')
    rows = [
        (row["converted"], row["count"], row["kept_because"])
        for row in found["linears"]
        if "wq" in row["kind"]
    ]
    assert rows == [
        (False, 1, "filter_fqns 'layers.0'"), (False, 1, "filter_fqns 'layers.1'"), (True, 30, "")
    ]  # fmt: skip
    everywhere = plan("llama3_8b_float8")["prediction"]
    assert 1 < found["prediction"]["step_speedup"] < everywhere["step_speedup"]


def test_without_float8_the_gain_of_turning_it_on_is_told(bf16_8b):
    assert bf16_8b["prediction"]["step_speedup"] > 1.1
    assert len(bf16_8b["prediction"]["converted"]) == 7
    a100 = plan("llama3_8b", device="A100 SXM 80GB")
    assert (a100["prediction"]["step_speedup"], a100["peaks"]["fp8"]) == (None, None)
    assert a100["prediction"]["bf16"]["step_s"] == a100["schedule"]["step_s"]
    assert a100["schedule"]["mfu"] > 0 and a100["schedule"]["mfu_fp8_peak"] is None


def test_memory_is_weighed_against_the_device(float8_8b):
    memory = float8_8b["memory"]
    assert memory["peak"]["parameters"] == 8_030_261_248 * 4 // 8
    assert memory["peak"]["optimizer_states"] == 2 * memory["peak"]["parameters"]
    assert memory["peak"]["total"] == max(moment["total"] for moment in memory["moments"])
    assert memory["fits"] and memory["device_bytes"] == 80 * 2**30
    assert memory["reserved"] == round(1.26 * memory["peak"]["total"])
    alone = plan("llama3_8b", "--world-size", "1")["memory"]
    assert not alone["fits"] and alone["peak"]["optimizer_states"] == 8 * 8_030_261_248


def test_schedule_follows_from_the_rate(bf16_8b):
    schedule = bf16_8b["schedule"]
    assert schedule["tokens_per_step"] == 8 * 8192
    assert schedule["step_s"] == pytest.approx(8192 / 6297)
    assert schedule["tokens_per_day"] == pytest.approx(8 * 6297 * 86400)
    assert schedule["run_days"] == pytest.approx(1000 * 8192 / 6297 / 86400)
    assert schedule["checkpoint_bytes"] == 12 * 8_030_261_248
    assert schedule["checkpoint_s"] == pytest.approx(
        12.045, abs=0.001
    )  # each of 8 ranks writes 1 GB/s


def test_gpu_hours_are_beside_days(bf16_8b):
    schedule = bf16_8b["schedule"]
    assert schedule["run_gpu_hours"] == pytest.approx(8 * 24 * schedule["run_days"])
    days = schedule["days_per_trillion_tokens"]
    assert schedule["gpu_hours_per_trillion_tokens"] == pytest.approx(8 * 24 * days)


def answer(found: dict[str, Any]) -> str:
    """The first paragraph of the report, on one line."""
    return " ".join(format_plan(found).partition("\n\n")[0].split())


def section(found: dict[str, Any], title: str) -> list[str]:
    """The lines of a section of the report, without its title."""
    _, _, text = format_plan(found).partition(f"\n\n{title}\n{'-' * len(title)}\n")
    assert text, f"no section {title}"
    return text.partition("\n\n")[0].splitlines()


def numbers(line: str) -> list[float]:
    return [float(each.replace(",", "")) for each in re.findall(r"(?<![\w^])[\d,.]*\d(?!\w)", line)]


def test_the_report_begins_with_the_answer_that_the_json_gives():
    found = plan("llama3_8b_float8", "--training.steps=3000")
    prediction, schedule = found["prediction"], found["schedule"]
    low, high = prediction["speedup_band"]
    slow, fast = schedule["tps_band"]
    hours = 3000 * schedule["step_s"] / 3600
    assert hours < 2  # so the answer has minutes
    assert answer(found) == (
        f"8B on 8 x H100 SXM, predicted: fits ({found['memory']['reserved'] / 2**30:.1f} of 80 GiB)"
        f", {schedule['tps']:,.0f} tokens/s per device ({slow:,.0f} to {fast:,.0f}), "
        f"{schedule['step_s']:.3f} s a step, {60 * hours:.1f} minutes and {8 * hours:.2f} GPU-hours"
        f" for 3,000 steps (10^12 tokens: {schedule['days_per_trillion_tokens']:.0f} days and "
        f"{schedule['gpu_hours_per_trillion_tokens']:,.0f} GPU-hours); tensorwise float8 helps: a "
        f"step runs at {prediction['step_speedup']:.2f}x the speed of bf16 ({low:.2f} to "
        f"{high:.2f})."
    )
    short, long = (answer(plan("debug_model", f"--training.steps={n}")) for n in (1, 10**6))
    assert re.search(r" a step, 0\.0\d+ seconds and .* for 1 steps \(10\^12 tokens: ", short)
    assert "10^12" not in long  # it trains 1.6e10


def test_a_given_rate_is_never_called_predicted_and_the_other_way_round(float8_8b, bf16_8b):
    given = answer(float8_8b)
    gib = float8_8b["memory"]["reserved"] / 2**30
    assert given.startswith(
        f"8B on 8 x H100 SXM, predicted: fits ({gib:.1f} of 80 GiB); given: 7,773 tokens/s per "
        "device, 1.05 s a step, 17.6 minutes and 2.34 GPU-hours for 1,000 steps (10^12 "
        "tokens: 186 days and 35,736 GPU-hours); predicted: tensorwise float8 "
    )
    assert float8_8b["schedule"]["tps_band"] is float8_8b["schedule"]["step_s_band"] is None
    assert section(float8_8b, "Cost at the given rate")[0].split() == ["given"]
    assert section(plan("llama3_8b"), "Cost at the predicted rate")[0].split()[0] == "predicted"

    # What is off is not promised, and what a device cannot do neither.
    assert "; predicted: tensorwise float8 would help: a step would run at " in answer(bf16_8b)
    assert section(bf16_8b, "Time of a step, predicted")[0].endswith("bf16  tensorwise, if on")
    assert "; the A100 SXM 80GB has no float8" in answer(plan("llama3_8b", device="A100 SXM 80GB"))


def test_the_rate_of_what_does_not_fit_is_conditional():
    found = plan("llama3_8b", "--world-size", "1")
    assert re.search(r"does not fit \([\d.]+ of 80 GiB\); if it did, [\d,]+ tokens", answer(found))
    tight = plan("llama3_8b_float8", "--memory", "20")
    peak, reserved = (tight["memory"][key] for key in ("peak", "reserved"))
    assert f"tight ({peak['total'] / 2**30:.1f} to {reserved / 2**30:.1f} of 20 GiB)" in answer(
        tight
    )


LAYOUTS = {
    "one": ["llama3_8b_float8", "--world-size=1"],
    "eight": ["llama3_8b_float8"],
    "off": ["llama3_8b"],
    "replicas": [
        *("llama3_8b", "--world-size=64", "--parallelism.data_parallel_replicate_degree=4"),
        "--parallelism.tensor_parallel_degree=2",
    ],
    "async": [
        *("llama3_70b", "--world-size=64", "--parallelism.enable_async_tensor_parallel"),
        "--parallelism.tensor_parallel_degree=8",
        "--training.global_batch_size=64",
    ],
    "host": ["debug_model"],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_parts_of_a_step_add_up_and_bands_contain_their_value(layout):
    found = plan(*LAYOUTS[layout])
    prediction, schedule = found["prediction"], found["schedule"]
    for step in (prediction["bf16"], prediction["float8"]):
        parts = (step[f"{key}_s"] for key in ("device_parts", "exposed", "slowed"))
        device_s = sum(sum(each.values()) for each in parts)
        assert step["step_s"] == pytest.approx(max(device_s, step["host_s"]))
        assert (step["host_s"] > device_s) is (layout == "host")
    speedup = prediction["bf16"]["step_s"] / prediction["float8"]["step_s"]
    assert prediction["step_speedup"] == pytest.approx(speedup)

    for name in ("tps", "step_s"):
        low, high = schedule[f"{name}_band"]
        assert low <= schedule[name] <= high
        assert (low < schedule[name] < high) is bool(found["assumed"])
    slow_tps, fast_tps = schedule["tps_band"]
    fast_s, slow_s = schedule["step_s_band"]
    tokens = schedule["tps"] * schedule["step_s"]
    assert [slow_tps * slow_s, fast_tps * fast_s] == pytest.approx([tokens, tokens])
    low, high = prediction["speedup_band"]
    assert low <= prediction["step_speedup"] <= high

    # So do the rows of the report: those above the step are its parts, in both columns.
    _, *rows = section(found, "Time of a step, predicted")
    (index,) = (index for index, row in enumerate(rows) if row.startswith("step "))
    for column in (0, 1):
        parts = [numbers(row)[column] for row in rows[:index]]
        assert sum(parts) == pytest.approx(numbers(rows[index])[column], abs=0.05 * len(parts))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_collectives_are_those_of_the_step_as_configured(layout):
    found = plan(*LAYOUTS[layout])
    request, prediction = found["request"], found["prediction"]
    step = prediction["float8" if request["float8_recipe"] else "bf16"]
    collectives = {each["kind"]: each for each in found["communication"]["collectives"]}
    sizes = {"tensor parallelism": "tp", "sharding": "dp_shard", "replicas": "dp_replicate"}
    assert step["exposed_s"]["context parallelism"] == 0
    for kind, degree in sizes.items():
        if request[degree] == 1:
            assert kind not in collectives and step["exposed_s"][kind] == 0
            continue
        each = collectives[kind]
        assert each["ring_size"] == request[degree]
        assert each["exposed_s"] == step["exposed_s"][kind] > 0
        assert each["hidden_s"] == step["hidden_s"][kind] >= 0
    assert (step["slowed_s"]["beside communication"] > 0) is bool(sum(step["hidden_s"].values()))


def test_every_second_of_fsdps_collectives_is_exposed_or_hidden():
    found = plan("llama3_8b_float8", RESHARD_DEFAULT)
    (sharding,) = found["communication"]["collectives"]
    rates = rates_of(find_device("H100 SXM"))

    # Blocks are gathered in float8 with two norms in bf16, and again in the backward; the embedding
    # and the output once. All gradients are reduced in float32.
    output = 128256 * 4096
    block = 2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336
    gathered = 64 * (block + 2 * 2 * 4096) + 2 * output + 2 * (output + 4096)
    nbytes, count = gathered + 4 * 8_030_261_248, 64 + 2 + 34
    latency = rates.collective_seconds + 7 * rates.link_hop_seconds
    seconds = count * latency + nbytes * 7 / 8 / (450e9 * rates.link)
    assert sharding["exposed_s"] + sharding["hidden_s"] == pytest.approx(seconds)


def test_async_tensor_parallelism_hides_a_part_of_the_same_collectives():
    words = ["llama3_8b", "--parallelism.tensor_parallel_degree=4"]
    waited, hidden = (
        next(
            each
            for each in found["communication"]["collectives"]
            if each["kind"] == "tensor parallelism"
        )
        for found in (plan(*words), plan(*words, "--parallelism.enable_async_tensor_parallel"))
    )
    assert waited["hidden_s"] == 0 < hidden["hidden_s"]
    assert hidden["exposed_s"] + hidden["hidden_s"] == pytest.approx(waited["exposed_s"])


def test_replicas_have_what_they_add_to_sharding():
    alone, beside = (
        plan("llama3_8b", "--world-size", world_size, f"--parallelism.{key}={degree}")
        for world_size, key, degree in (
            ("8", "data_parallel_shard_degree", 8),
            ("16", "data_parallel_replicate_degree", 2),
        )
    )
    (sharding,), (same, replicas) = (
        each["communication"]["collectives"] for each in (alone, beside)
    )
    assert same == sharding and not sharding["crosses_nodes"]
    assert replicas["crosses_nodes"] and replicas["ring_size"] == 2
    shard_bytes = 4 * 8_030_261_248 / 8
    rates = rates_of(find_device("H100 SXM"))
    assert replicas["gb_s"] == pytest.approx(50 * rates.network)
    # An all-reduce sends each half twice.
    latency = 34 * 2 * (rates.collective_seconds + rates.network_hop_seconds)
    total = latency + shard_bytes / (1e9 * replicas["gb_s"])
    assert replicas["exposed_s"] + replicas["hidden_s"] == pytest.approx(total)


def test_links_and_the_attention_kernel_can_be_given():
    words = ["llama3_8b_float8", "--world-size", "16"]
    known = plan(*words)
    slower = plan(*words, "--link", "100", "--network", "10", "--node-devices", "4")
    assert slower["communication"].items() >= {
        "link_gb_s": 100, "network_gb_s": 10, "node_devices": 4
    }.items()  # fmt: skip
    (before,), (after,) = (each["communication"]["collectives"] for each in (known, slower))
    rates = rates_of(find_device("H100 SXM"))
    assert after["gb_s"] == pytest.approx(4 * 10 * rates.network) and after["crosses_nodes"]
    assert before["gb_s"] == pytest.approx(450 * rates.link)  # 8 adapters carry 400 GB/s
    assert after["exposed_s"] + after["hidden_s"] > before["exposed_s"] + before["hidden_s"]
    together = plan(*words, "--node-devices", "16")["communication"]["collectives"]
    assert [each["crosses_nodes"] for each in together] == [False]

    flash = plan(*words, "--attention", "flash")
    assert (known["request"]["attention_kernel"], flash["request"]["attention_kernel"]) == (
        "cudnn", "flash"
    )  # fmt: skip
    attention = [
        each["prediction"]["float8"]["device_parts_s"]["attention"] for each in (known, flash)
    ]
    assert attention[1] / attention[0] == pytest.approx(
        rates.attention_cudnn / rates.attention_flash
    )


def test_the_constants_that_move_the_step_are_listed_and_no_other():
    found = plan("llama3_8b_float8", device="H20")
    listed = {each["name"]: each for each in found["assumed"]}
    # A ring within a node uses no network, and sdpa no flex attention.
    assert listed.keys() >= {"bf16_matmul", "fp8_matmul"}
    assert not listed.keys() & {"network", "attention_flex", "async_tensor_parallel"}
    squares = [0.0, 0.0]
    for each in found["assumed"]:
        constant = constants_of(find_device("H20"))[each["name"]]
        assert (each["value"], tuple(each["between"])) == (constant.value, constant.between)
        slow, fast = each["step_ratio"]
        assert slow > 1 > fast
        squares = [squares[0] + math.log(fast) ** 2, squares[1] + math.log(slow) ** 2]
    # Together they are the band.
    step_s = found["schedule"]["step_s"]
    band = [step_s * math.exp(-(squares[0] ** 0.5)), step_s * math.exp(squares[1] ** 0.5)]
    assert found["schedule"]["step_s_band"] == pytest.approx(band)

    lines = section(found, "Assumed")
    for name, each in listed.items():
        (line,) = (line for line in lines if line.startswith(f"{name} "))
        percent = [f"{ratio - 1:+.1%}" for ratio in each["step_ratio"]]
        values = [f"{value:g}" for value in (each["value"], *each["between"])]
        basis = "guess" if each["guessed"] else "measured"
        assert line.split()[1:] == [*values, *percent, basis]
    across = plan("llama3_8b_float8", "--world-size", "64")["assumed"]
    assert "network" in {each["name"] for each in across}


def test_costs_at_both_ends_of_the_band():
    found = plan("llama3_8b_float8", "--world-size", "16")
    schedule = found["schedule"]
    head, *rows = section(found, "Cost at the predicted rate")
    assert head.split() == ["predicted", "slow", "fast"]
    table = {re.split("  +", row)[0]: numbers(row)[-3:] for row in rows}
    low, high = schedule["tps_band"]
    assert table["tokens/s per device"] == [round(each) for each in (schedule["tps"], low, high)]
    for name, at in (
        ("a step, seconds", lambda tps: 8192 / tps),
        ("10^12 tokens, GPU-hours", lambda tps: 1e12 / tps / 3600),
        ("10^12 tokens, days", lambda tps: 1e12 / tps / 16 / 86400),
        ("this run, GPU-hours", lambda tps: 1000 * 8192 * 16 / tps / 3600),
        ("this run, hours", lambda tps: 1000 * 8192 / tps / 3600),
    ):
        assert table[name] == pytest.approx(
            [at(each) for each in (schedule["tps"], low, high)], 5e-3
        )


SHIPPED = {
    "debug_model": (1, 8),
    "float8_parity": (1, 8),
    "llama3_150m": (1, 8),
    "llama3_350m": (1, 8),
    "llama3_1b": (1, 8),
    "llama3_8b": (8, 64, 128),
    "llama3_8b_float8": (8, 64),
    "llama3_8b_long": (8,),
    "llama3_70b": (32, 256),
    "llama3_405b": (256, 512),
}


def test_every_shipped_config_is_checked():
    assert SHIPPED.keys() == {path.stem for path in (ROOT / "train_configs").glob("*.toml")}


@pytest.mark.parametrize("config", SHIPPED)
@pytest.mark.parametrize("device", ["H100 SXM", "A100 SXM 80GB", "RTX 5090"])
def test_a_report_has_80_columns(config, device):
    words = ["--model.vocab_size=32000"] if config in ("llama3_150m", "llama3_350m") else []
    if device.startswith("A100"):
        words += [f"--float8.{key}=false" for key in FLOAT8_SWITCHES]
    for world_size in SHIPPED[config]:
        for more in (["--tps", "1234"], ["--activation_checkpoint.mode=none"]):
            found = plan(config, f"--world-size={world_size}", *words, *more, device=device)
            lines = format_plan(found).splitlines()
            assert [line for line in lines if len(line) > 80] == []
            assert lines[0].startswith(found["request"]["model"][:20])


FLOAT8_SWITCHES = (
    "enable_float8_linear",
    "enable_fsdp_float8_all_gather",
    "precompute_float8_dynamic_scale_for_fsdp",
)


def test_the_report_gives_the_reason_for_each_linear():
    found = plan("llama3_8b_float8", '--float8.filter_fqns=["layers.0", "wk", "wv"]')
    rows = section(found, "Linears")
    assert [row.split()[-1] for row in rows if row.startswith("wq ")] == ["bf16", "float8"]
    assert "wq, wk, wv, wo, w1, w2, w3 in bf16: filter_fqns 'layers.0'" in rows
    assert "wk in bf16: filter_fqns 'wk'" in rows
    assert "output in bf16: the projection to the vocabulary stays in high precision" in rows
    assert not [row for row in rows if "shared" in row]

    # A linear that is slower in float8 pays by the cast that it shares.
    found = plan("llama3_8b_float8")
    (wv,) = (row for row in found["linears"] if row["kind"] == "attention.wv")
    assert wv["shares_cast_with"] == ["attention.wq", "attention.wk"]
    wv["time_ratio"] = 1.03
    assert "wv: its input's cast is shared with wq, wk" in section(found, "Linears")
    found["prediction"]["better_kept"] = ["attention.wv", "attention.wo"]
    rows = section(found, "Linears")
    assert "wv: slower in float8, even with its input's cast shared with wq, wk" in rows
    assert "wo: slower in float8" in rows

    part = plan(
        "llama3_8b",
        "--float8.enable_float8_linear",
        "--float8.recipe_name=rowwise_with_gw_hp",
    )
    (row,) = (row for row in section(part, "Linears") if row.startswith("wq "))
    assert row.endswith("float8, grad_weight in bf16")
    assert section(plan("llama3_8b"), "Linears if tensorwise float8 were on")


def test_what_does_not_fit_is_planned_anyway_and_what_would_fit_is_named():
    base = ["llama3_8b", "--world-size"]
    found = plan(*base, "1", "--activation_checkpoint.mode=none")
    assert not found["memory"]["fits"] and found["schedule"]["run_days"] > 0
    layouts = would_fit(found)
    assert layouts == [(4, "none", 1), (2, "full", 1)]
    for world_size, mode, _ in layouts:
        mode_word = f"--activation_checkpoint.mode={mode}"
        assert plan(*base, str(world_size), mode_word)["memory"]["fits"]
        assert not plan(*base, str(world_size // 2), mode_word)["memory"]["fits"]
    *_, last, tried, _ = section(found, "Memory of a rank, predicted")
    assert re.search(r"reserved, at most +[\d.]+  does not fit \([\d.]+ of 80 GiB\)", last)
    assert tried.startswith(
        "would fit: 4 GPUs with tp 1 and activation checkpointing none, or 2 GPUs"
    )

    hopeless = plan(*base, "1", "--training.local_batch_size=4096")
    assert would_fit(hopeless) == []
    said = "would fit: no number of GPUs, with tp up to 8 either; lower"
    assert said in " ".join(format_plan(hopeless).split())
    assert would_fit(plan(*base, "8")) == []


def would_fit(found: dict[str, Any]) -> list[tuple[int, str, int]]:
    keys = ("world_size", "activation_checkpoint", "tensor_parallel_degree")
    return [tuple(layout[key] for key in keys) for layout in found["memory"]["would_fit"]]


def test_131072_tokens_of_8b_fit_8_gpus_with_tensor_parallelism():
    long = ["llama3_8b", "--training.seq_len=131072"]
    found = plan(*long)
    flops = found["flops_per_token"]
    # 6 for each weight of a linear; 12 * layers * dim * seq_len for attention.
    assert flops["block_linears"] == 6 * 32 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    assert flops["output"] == 6 * 128256 * 4096
    assert flops["attention"] == 12 * 32 * 4096 * 131072 == 206_158_430_208
    assert flops["total"] == 251_186_380_800

    # Kept for the backward: what each block, the last norm and the projection read, in bf16
    # [tokens, dim], and the gradients of the projection's input and weight. The logits come in 16
    # chunks, whose weight gradients are summed in float32.
    states = 12 * 8_030_261_248 // 8
    hidden, output, rotary = 2**30, 128256 * 4096, 2 * 4 * 131072 * 64
    kept, working = 34 * hidden + 2 * output, hidden + 2 * 2**30 + 4 * output
    gathered = 2 * 2 * (output + 4096)
    loss, *_ = plan(*long, "--activation_checkpoint.mode=full")["memory"]["moments"]
    assert loss == {"name": "loss", "total": states + kept + working + gathered + rotary}

    assert not found["memory"]["fits"] and would_fit(found) == [(128, "full", 1), (8, "full", 2)]
    for tp, fits in ((1, False), (2, True)):
        words = ("--activation_checkpoint.mode=full", f"--parallelism.tensor_parallel_degree={tp}")
        assert plan(*long, *words)["memory"]["fits"] is fits
    report = " ".join(format_plan(found).split())
    assert "8 GPUs with tp 2 and activation checkpointing full" in report


LLAMA_2 = {
    "7B": ((4096, 32, 32, 32, 11008, 32000), 6_738_415_616),
    "13B": ((5120, 40, 40, 40, 13824, 32000), 13_015_864_320),
    "34B": ((8192, 48, 64, 8, 22016, 32000), 33_743_970_304),
    "70B": ((8192, 80, 64, 8, 28672, 32000), 68_976_648_192),
    "InternLM 20B": ((5120, 60, 40, 40, 13824, 103168), 20_088_714_240),
}
SIZES = ("dim", "n_layers", "n_heads", "n_kv_heads", "ffn_dim", "vocab_size")


@pytest.mark.parametrize("name", LLAMA_2)
def test_a_model_without_a_flavor_is_planned_and_named_by_its_keys(name):
    values, parameters = LLAMA_2[name]
    sizes = dict(zip(SIZES, values, strict=True))
    keys = [f"--model.{key}={value}" for key, value in sizes.items()]
    found = plan("llama3_8b", "--model.flavor=", *keys, "--training.seq_len=4096")
    assert found["model"].items() >= sizes.items()
    assert (found["model"]["parameters"], found["request"]["flavor"]) == (parameters, "")
    title = ", ".join(f"{key} = {value}" for key, value in sizes.items())
    assert answer(found).startswith(f"{title} on 8 x H100 SXM, predicted: ")


def test_a_flavor_is_named_with_the_keys_that_override_it():
    found = plan("llama3_8b", "--model.n_layers=16", "--model.rope_theta=1e6")
    assert found["request"]["model"] == "8B, n_layers = 16, rope_theta = 1000000.0"
    assert (found["request"]["flavor"], found["model"]["n_layers"]) == ("8B", 16)


def test_tied_embeddings_are_counted_once():
    found = plan("llama3_8b", "--model.flavor=1B", "--world-size=1")
    model, flops = found["model"], found["flops_per_token"]
    assert model["parameters"] == model["parameters_without_embedding"] == 1_235_814_400
    assert model["tie_embeddings"] and flops["output"] == 6 * 128256 * 2048
    assert found["memory"]["peak"]["parameters"] == 4 * 1_235_814_400
    assert found["schedule"]["checkpoint_bytes"] == 12 * 1_235_814_400
    said = "1,235,814,400 parameters, and the input embedding is the projection to the vocabulary"
    assert said in " ".join(format_plan(found).split())


def test_a_gpu_without_a_data_sheet_is_planned_by_its_figures(float8_8b):
    peaks = ["--metrics.peak_tflops_bf16=989", "--metrics.peak_tflops_fp8=1979"]
    figures = [*peaks, "--bandwidth=3.35", "--memory=80"]
    found = plan("llama3_8b_float8", "--tps", "7773", *figures, device="Q100")
    for name in ("model", "flops_per_token", "memory"):
        assert found[name] == float8_8b[name]
    assert found["peaks"] == float8_8b["peaks"] | {"device": "Q100", "data_sheet": False}
    assert found["schedule"] == float8_8b["schedule"]
    said = "No data sheet of the Q100 is known"
    assert section(found, "Assumed")[0].startswith(said)
    assert said not in format_plan(float8_8b)

    # Links can be given too.
    links = ["--link=450", "--network=50", "--node-devices=8"]
    given = plan("llama3_8b_float8", *figures, *links, device="Q100")["communication"]
    assert given["link_gb_s"] == 450 != found["communication"]["link_gb_s"]
    larger = plan("llama3_8b_float8", "--memory=160", "--bandwidth=7")["peaks"]
    assert (larger["memory_gib"], larger["bandwidth_tb_s"]) == (160, 7)


def test_no_tokenizer_is_needed_where_the_flavor_has_a_vocabulary(bf16_8b):
    assert plan("llama3_8b", "--tps", "6297", "--model.tokenizer_path=/nowhere") == bf16_8b
    with pytest.raises(DataError, match="tokenizer_path = ./nowhere. cannot be read"):
        plan("debug_model", "--model.tokenizer_path=/nowhere")


def test_standard_output_has_the_json_alone_and_may_be_closed():
    words = [*CONFIG, "--device", "H100 SXM", "--json", "--activation_checkpoint.mode=auto"]
    result = run_plan(*words)
    assert json.loads(result.stdout)["request"]["activation_checkpoint"] == "none"
    assert '"auto" is activation_checkpoint "none", fsdp_reshard_' in result.stderr

    pipe = subprocess.PIPE
    command = [sys.executable, "-m", "torchtitan_lite", "plan", *words]
    with subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=pipe, text=True) as process:
        process.stdout.close()
        assert "Traceback" not in process.stderr.read()
    assert process.returncode == -signal.SIGPIPE


def test_405b_on_512_gpus():
    found = plan("llama3_405b", "--world-size", "512")
    assert found["request"]["dp_shard"] * found["request"]["tp"] == 512
    assert found["model"]["parameters"] == 405_853_388_800
    assert found["schedule"]["origin"] == "predicted"


TITLES = (
    "Run",
    "Time of a step, predicted",
    "Memory of a rank, predicted",
    "Cost at the given rate",
    "Linears",
    "Model",
    "MFU at the given rate",
    "Assumed",
)


def test_the_report_names_every_section_and_the_verdict():
    result = run_plan(
        "--job.config_file",
        "train_configs/llama3_8b_float8.toml",
        "--device",
        "NVIDIA H200",
        "--tps",
        "9000",
    )
    assert result.returncode == 0, result.stderr
    for text in (
        "8,030,261,248 parameters", "57,912,852,480", "float8 helps", "of 141 GiB); given: 9,000",
        "of 1549.5 TFLOPS, each matmul at its own peak",
        *(f"\n\n{title}\n---" for title in TITLES),
    ):  # fmt: skip
        assert text in result.stdout


RESHARD_DEFAULT = "--parallelism.fsdp_reshard_after_forward=default"
CONFIG = ["--job.config_file", "train_configs/llama3_8b_float8.toml"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*CONFIG], "--device is needed where there is no GPU; use one of A100 SXM 40GB"),
        (
            [*CONFIG, "--device", "H100"],
            '--device "H100" is not known; use one of H100 SXM, H100 500W, H100 PCIe, H100 NVL. '
            "Plan any other by --bandwidth, --memory and --metrics.peak_tflops_b",
        ),
        ([*CONFIG, "--device", "H100SXM"], '--device "H100SXM" is not known; use one of H100 SXM'),
        ([*CONFIG, "--device", "?"], '--device "?" is not known; use one of A100 SXM 40GB'),
        ([*CONFIG, "--device", "H200", "--memory", "0"], "--memory 0.0 must be a positive number"),
        ([*CONFIG, "--memory", "80GB"], "--memory: invalid float value: '80GB'; --help shows"),
        ([*CONFIG, "--world-size", "1,000"], "--world-size: invalid int value: '1,000'; --help"),
        ([*CONFIG, "--device"], "--device: expected one argument; --help shows each"),
        (
            [*CONFIG, "--device", "H200", "--bandwidth", "1e-320"],
            "--bandwidth 1e-320 must be a positive number, 1e-06 to 1e+09",
        ),
        (
            [*CONFIG, "--device", "H100 SXM", "--world-size", "0"],
            "--world-size 0 must be 1 to 1000000",
        ),
        (
            [*CONFIG, "--device", "H200", "--node-devices", "0"],
            "--node-devices 0 must be 1 to 1000000",
        ),
        ([*CONFIG, "--device", "H200", "--link", "0"], "--link 0.0 must be a positive number"),
        (
            [*CONFIG, "--device", "H200", "--network", "inf"],
            "--network inf must be a positive number, 1e-06 to 1e+09",
        ),
        (
            [*CONFIG, "--device", "H200", "--attention", "math"],
            "--attention math is not a kernel; use one of cudnn, flash, flex",
        ),
        (
            [*CONFIG, "--device", "L4", "--attention", "cudnn", "--training.document_mask"],
            "--attention cudnn has no document mask; plan [training] document_mask = true with "
            "flex",
        ),
        (
            [*CONFIG, "--device", "MI300X", "--attention", "cudnn"],
            "--attention cudnn does not run on MI300X; use flash or flex",
        ),
        ([*CONFIG, "--device", "H100 SXM", "--tps", "-3"], "--tps -3.0 must be a positive number"),
        ([*CONFIG, "--device", "A100 SXM 80GB"], "the A100 SXM 80GB has no float8 matrix units"),
        (
            [
                *(*CONFIG, "--device", "H100 SXM", "--float8.recipe_name=mxfp8"),
                *("--float8.enable_fsdp_float8_all_gather=false",),
                *("--float8.precompute_float8_dynamic_scale_for_fsdp=false",),
            ],
            "no kernels of it for the H100 SXM, only for B200, B300, GB200, GB300; plan another "
            "--device",
        ),
        (
            [
                *(*CONFIG, "--device", "B200", "--float8.recipe_name=rowwise"),
                *("--float8.enable_fsdp_float8_all_gather=false",),
                *("--float8.precompute_float8_dynamic_scale_for_fsdp=false",),
                "--float8.scale_gradients_in_matmul",
            ],
            "[float8] scale_gradients_in_matmul = true needs a GPU of compute capability 9.x, and "
            "B200 is none; plan another --device, or set it to false",
        ),
        (
            [
                *CONFIG,
                "--device",
                "L4",
                "--world-size",
                "6",
                "--parallelism.tensor_parallel_degree=4",
            ],
            "does not divide",
        ),
        ([*CONFIG, "--device", "L4", "--model.flavour=8B"], "unknown key"),
        (
            [*CONFIG, "--device", "L4", "--training.mixed_precision_param=float32"],
            '[training] mixed_precision_param = "float32" cannot be planned',
        ),
    ],
)
def test_refusals(arguments, message, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=re.escape(message)):
        MAIN(arguments)


def test_a_refusal_is_no_traceback():
    result = run_plan(*CONFIG, "--device", "H100")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith('--device "H100" is not known; use one of H100 SXM')


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_is_no_traceback(unbuffered):
    with Path("/dev/full").open("w") as full:
        result = subprocess.run(
            [sys.executable, "-m", "torchtitan_lite", "plan", "--help"],
            cwd=ROOT,
            env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=100,
            check=False,
        )
    assert result.returncode == 7
    assert result.stderr == (
        "a file or standard output cannot be written: [Errno 28] No space left on device; "
        "make room.\n"
    )


def test_the_gpu_at_hand_is_planned_for(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    assert find_device(None).name == "H200"
    assert find_device("l4").name == "L4"


def test_help():
    printed = build_parser("plan").format_help()
    options = re.findall(r"^  --[\w-]+.*?(?=^  \S|\Z)", printed, flags=re.MULTILINE | re.DOTALL)
    assert len(options) == 14
    assert [option for option in options if len(option.split()) < 4] == []


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_output_is_not_gathered_in_float8(tied: bool) -> None:
    model = ("--model.flavor=1B", f"--model.tie_embeddings={str(tied).lower()}")
    kept, converted = (
        plan("llama3_8b_float8", *model, f"--float8.convert_output={value}")
        for value in ("false", "true")
    )
    copies = [
        each["prediction"]["float8"]["device_parts_s"]["fsdp copies"] for each in (kept, converted)
    ]
    assert (copies[0] == copies[1]) is tied


def test_output_in_float8_is_planned_like_any_other_linear() -> None:
    kept, converted = (
        plan("llama3_8b_float8", f"--float8.convert_output={value}") for value in ("false", "true")
    )
    (row,) = (row for row in converted["linears"] if row["kind"] == "output")
    assert row["converted"] and row["gemms"]["output"]["precision"] == "fp8"
    tokens = 57_912_852_480
    assert kept["flops_per_token"]["total"] == converted["flops_per_token"]["total"] == tokens
    assert converted["flops_per_token"]["fp8"] - kept["flops_per_token"]["fp8"] == 3_152_019_456
    assert 1 < converted["prediction"]["step_speedup"] / kept["prediction"]["step_speedup"] < 1.05


def test_the_command_plans_by_measured_rates(tmp_path):
    rates = {"bf16_matmul": 0.5, "fp8_matmul": 0.7}
    sheet = {"bf16_tflops": 989, "fp8_tflops": 1979, "bandwidth_tb_s": 3.35, "multiprocessors": 132}
    file = tmp_path / "results.json"
    about = {"version": 1, "date": "2026-11-23", "device": "H100 SXM", "data_sheet": sheet}
    file.write_text(json.dumps(about | {"rates": rates}))
    words = ("llama3_8b_float8", "--measured", str(file))
    found = plan(*words)
    assert {each["name"]: each["value"] for each in found["measured"]} == rates
    assert found["prediction"]["step_speedup"] > plan(words[0])["prediction"]["step_speedup"]

    # Rates are relative to the data sheet's figures.
    for given in (["--bandwidth", "3"], ["--metrics.peak_tflops_bf16", "900"]):
        with pytest.raises(ConfigError, match=r"is relative to .*, and the plan to "):
            plan(*words, *given)
