"""The planner through its command: METRICS' reference values, what auto keeps, memory, rates and
refusals."""

import contextlib
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

from torchtitan_lite.base.errors import ConfigError, DataError
from torchtitan_lite.cli import run_command
from torchtitan_lite.planner.constants import RATE_RANGE, SPLIT_RATE_RANGE
from torchtitan_lite.planner.plan import find_device
from torchtitan_lite.planner.report import format_plan

ROOT = Path(__file__).parents[2]
PLAN = [sys.executable, "-m", "torchtitan_lite", "plan"]
FLOAT8_8B = ("llama3_8b_float8", "--tps", "7773")
BF16_8B = ("llama3_8b", "--tps", "6297")
AUTO = '--float8.filter_fqns=["auto"]'
ON = "--float8.enable_float8_linear"
RESHARD_DEFAULT = "--parallelism.fsdp_reshard_after_forward=default"
NO_GATHER = (
    "--float8.enable_fsdp_float8_all_gather=false",
    "--float8.precompute_float8_dynamic_scale_for_fsdp=false",
)
FIGURES = ("--metrics.peak_tflops_bf16=989", "--bandwidth=3.35", "--memory=80")
ALL_SEVEN = {"wq", "wk", "wv", "wo", "w1", "w2", "w3"}
PARAMETERS = 8_030_261_248
"""Of 8B."""


def mode(name: str) -> str:
    return f"--activation_checkpoint.mode={name}"


def tp(degree: int) -> str:
    return f"--parallelism.tensor_parallel_degree={degree}"


def plan(config: str, *arguments: str, device: str = "H100 SXM") -> dict[str, Any]:
    """What the command prints, run in this process, as it imports much."""
    return json.loads(printed(config, arguments, device))


@cache
def printed(config: str, arguments: tuple[str, ...], device: str) -> str:
    file = str(ROOT / f"train_configs/{config}.toml")
    with contextlib.redirect_stdout(io.StringIO()) as output:
        words = ["--job.config_file", file, "--device", device, "--json", *arguments]
        run_command(["plan", *words])
    return output.getvalue()


def parts_of(found: dict[str, Any]) -> dict[str, float]:
    """The parts of the device's time in float8."""
    return found["prediction"]["float8"]["compute_s"]


def converted(found: dict[str, Any]) -> set[str]:
    return {row["kind"].partition(".")[2] for row in found["linears"] if not row["kept_because"]}


def text_of(found: dict[str, Any]) -> str:
    """The report on one line."""
    return " ".join(format_plan(found).split())


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


def assert_in_order(text: str, *parts: str) -> None:
    assert re.search(".*".join(map(re.escape, parts)), text), f"{parts} in {text}"


# ----- plan -----


def test_reference_values_of_8b_in_float8():
    found = plan(*FLOAT8_8B)
    model, flops, schedule = found["model"], found["flops_per_token"], found["schedule"]
    assert model["parameters"] == PARAMETERS
    assert flops["total"] == 57_912_852_480
    assert flops["fp8"] == 41_875_931_136
    assert (flops["output"], flops["attention"]) == (3_152_019_456, 12_884_901_888)
    assert (flops["bf16"], flops["fp32"]) == (16_036_921_344, 0)
    assert 100 * flops["fp8"] / flops["total"] == pytest.approx(72.31, abs=0.005)
    assert schedule["effective_peak"] == pytest.approx(1549.5, abs=0.05)
    assert schedule["arithmetic_peak"] == pytest.approx(1704.9, abs=0.05)
    expected = {
        "tflops": 450.16,
        "mfu": 29.05,
        "mfu_bf16_peak": 45.52,
        "mfu_fp8_peak": 22.75,
        "mfu_arithmetic_peak": 26.40,
    }
    assert {key: schedule[key] for key in expected} == pytest.approx(expected, abs=0.005)
    assert (schedule["tps"], schedule["origin"]) == (7773, "given")


def test_without_float8_and_with_recomputation():
    bf16, full = plan(*BF16_8B), plan("llama3_8b", mode("full"))
    expected = {"tflops": 364.68, "mfu": 36.87, "mfu_bf16_peak": 36.87}
    assert {key: bf16["schedule"][key] for key in expected} == pytest.approx(expected, abs=0.005)
    flops = full["flops_per_token"]
    assert (flops["total"] + flops["recompute"]) / 1e9 == pytest.approx(72.41, abs=0.005)
    assert full["schedule"]["hfu"] > full["schedule"]["mfu"]


def test_linears_have_the_shapes_of_a_rank():
    settings = ["--training.local_batch_size=2", "--float8.recipe_name=rowwise_with_gw_hp"]
    all_gather = ("enable_fsdp_float8_all_gather", "precompute_float8_dynamic_scale_for_fsdp")
    settings += [f"--float8.{key}=false" for key in all_gather]
    found = plan("llama3_8b_float8", tp(2), *settings)
    rows = {row["kind"]: row for row in found["linears"]}
    sizes = {kind: [row["tokens"], *row["local_shape"]] for kind, row in rows.items()}
    assert sizes["attention.wk"] == [16384, 512, 4096]
    assert sizes["feed_forward.w2"] == [16384, 4096, 7168]
    in_float8 = {"output": "fp8", "grad_input": "fp8", "grad_weight": "bf16"}
    assert rows["feed_forward.w2"]["precisions"] == in_float8
    output = rows.pop("output")
    assert output["kept_because"] and output["precisions"] == dict.fromkeys(in_float8, "bf16")
    assert all(len(row["names"]) == 32 for row in rows.values())


def test_output_in_float8_is_planned_like_any_other_linear() -> None:
    kept, found = (
        plan("llama3_8b_float8", f"--float8.convert_output={value}") for value in ("false", "true")
    )
    (row,) = (row for row in found["linears"] if row["kind"] == "output")
    assert not row["kept_because"] and row["precisions"]["output"] == "fp8"
    before, after = kept["flops_per_token"], found["flops_per_token"]
    assert before["total"] == after["total"] == 57_912_852_480
    assert after["fp8"] - before["fp8"] == 3_152_019_456
    speedups = [each["prediction"]["speedup"] for each in (kept, found)]
    assert 1 < speedups[1] / speedups[0] < 1.05


def test_tied_embeddings_are_counted_once():
    found = plan("llama3_8b", "--model.flavor=1B", "--world-size=1")
    model, flops = found["model"], found["flops_per_token"]
    assert model["parameters"] == 1_235_814_400
    assert model["tie_embeddings"] and flops["output"] == 6 * 128256 * 2048
    assert found["memory"]["peak"]["parameters"] == 4 * 1_235_814_400
    assert found["model"]["checkpoint_bytes"] == 12 * 1_235_814_400
    assert "1,235,814,400 parameters" in text_of(found)


def test_a_model_without_a_flavor_is_planned_and_named_by_its_keys():
    names = ("dim", "n_layers", "n_heads", "n_kv_heads", "ffn_dim", "vocab_size")
    llama_2 = dict(zip(names, (8192, 80, 64, 8, 28672, 32000), strict=True))  # 70B
    keys = [f"--model.{key}={value}" for key, value in llama_2.items()]
    found = plan("llama3_8b", "--model.flavor=", *keys, "--training.seq_len=4096")
    assert found["model"].items() >= llama_2.items()
    assert found["model"]["parameters"] == 68_976_648_192
    title = ", ".join(f"{key} = {value}" for key, value in llama_2.items())
    assert answer(found).startswith(f"{title} on 8 x H100 SXM, predicted: ")


def test_a_document_mask_changes_attention_alone():
    masked, plain = (
        plan("debug_model", f"--training.document_mask={on}") for on in ("true", "false")
    )
    assert masked["request"] == plain["request"] | {"attention_kernel": "flex"}
    for name in ("flops_per_token", "linears", "memory"):
        assert masked[name] == plain[name]
    assert parts_of(masked)["attention"] > parts_of(plain)["attention"]


@pytest.mark.skipif(version("torch") < "2.13", reason="refused with GQA on torch 2.11")
def test_what_a_memory_budget_recomputes_is_not_counted():
    words = ("llama3_8b", "--activation_checkpoint.memory_budget=0.0", RESHARD_DEFAULT)
    none, budget = (plan(*words, mode(name)) for name in ("none", "memory_budget"))
    assert budget["schedule"]["tps"] == none["schedule"]["tps"]


def test_no_tokenizer_is_needed_where_the_flavor_has_a_vocabulary():
    assert plan(*BF16_8B, "--model.tokenizer_path=/nowhere") == plan(*BF16_8B)
    with pytest.raises(DataError, match=r"tokenizer_path = ./nowhere. cannot be read"):
        plan("debug_model", "--model.tokenizer_path=/nowhere")


# ----- auto, filter_fqns -----


def test_auto_converts_nothing_of_the_debug_model_and_says_why():
    found = plan("debug_model", AUTO)
    assert (converted(found), found["flops_per_token"]["fp8"]) == (set(), 0)
    assert [row["time_ratio"] > 1 for row in found["linears"]] == 8 * [True]
    assert found["prediction"]["speedup"] == 1
    assert "; no linear is in float8: " in answer(found)


def test_auto_is_no_slower_than_all_or_none():
    words = ("--world-size=64", tp(8), RESHARD_DEFAULT, ON, "--float8.filter_fqns")
    auto, every = (plan("llama3_8b", *words, filters) for filters in ("auto", "[]"))
    fastest = min(every["prediction"][name]["step_s"] for name in ("bf16", "float8"))
    assert auto["prediction"]["float8"]["step_s"] <= fastest * (1 + 1e-9)


def test_auto_converts_all_seven_of_8b_and_nothing_where_casts_are_not_fused():
    assert converted(plan("llama3_8b_float8", AUTO)) == ALL_SEVEN
    assert converted(plan("llama3_8b_float8", "--compile.enable=false", AUTO)) == set()


def test_a_kind_that_is_converted_in_some_layers_only():
    found = plan("llama3_8b_float8", '--float8.filter_fqns=["layers.0", "layers.1"]')
    rows = {row["kept_because"]: row["names"] for row in found["linears"] if "wq" in row["kind"]}
    counts = {reason: len(names) for reason, names in rows.items()}
    assert counts == {"filter_fqns 'layers.0'": 1, "filter_fqns 'layers.1'": 1, "": 30}
    everywhere = plan("llama3_8b_float8")["prediction"]
    assert 1 < found["prediction"]["speedup"] < everywhere["speedup"]


# ----- Gain, StepTime -----


def test_without_float8_a_step_is_the_same_in_both():
    for found in (plan("llama3_8b"), plan("llama3_8b", device="A100 SXM 80GB")):
        prediction, schedule = found["prediction"], found["schedule"]
        assert prediction["float8"] == prediction["bf16"]
        assert (prediction["speedup"], prediction["bf16"]["step_s"]) == (1, schedule["step_s"])
        assert schedule["mfu"] > 0
    assert schedule["mfu_fp8_peak"] is None


LAYOUTS = {
    "eight": ("llama3_8b_float8",),
    "off": ("llama3_8b",),
    "replicas": (
        *("llama3_8b", "--world-size=64", tp(2)),
        "--parallelism.data_parallel_replicate_degree=4",
    ),
    "async": (
        *("llama3_70b", "--world-size=64", tp(8), "--training.global_batch_size=64"),
        "--parallelism.enable_async_tensor_parallel",
    ),
    "host": ("debug_model",),
    "amd": ("llama3_8b", "--device=MI300X"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_parts_of_a_step_add_up_and_ranges_contain_their_value(layout):
    found = plan(*LAYOUTS[layout])
    prediction, schedule = found["prediction"], found["schedule"]
    for step in (prediction["bf16"], prediction["float8"]):
        parts = [*step["compute_s"].values(), *step["waits_s"].values()]
        assert step["step_s"] == pytest.approx(sum(parts))
        assert (step["waits_s"]["host"] > 0) is (layout == "host")
    speedup = prediction["bf16"]["step_s"] / prediction["float8"]["step_s"]
    assert prediction["speedup"] == pytest.approx(speedup)
    assert schedule["tps_range"] == [schedule["tps"] * each for each in RATE_RANGE]
    low, high = prediction["speedup_range"]
    assert low <= prediction["speedup"] <= high

    # So do the rows of the report: those above the step are its parts, in both columns.
    _, *rows = section(found, "Time of a step, predicted")
    (index,) = (index for index, row in enumerate(rows) if row.startswith("step "))
    for column in range(1 + bool(found["request"]["float8_recipe"])):
        parts = [numbers(row)[column] for row in rows[:index]]
        assert sum(parts) == pytest.approx(numbers(rows[index])[column], abs=0.05 * len(parts))


def test_a_layout_of_stages_has_the_range_of_published_ones():
    words = ("--training.global_batch_size=64", "--parallelism.pipeline_parallel_degree=2")
    found = plan("llama3_8b", *words, "--training.local_batch_size=8", "--world-size=8")
    schedule = found["schedule"]
    assert schedule["tps_range"] == [schedule["tps"] * each for each in SPLIT_RATE_RANGE]
    assert found["prediction"]["bf16"]["waits_s"]["pipeline"] > 0
    assert "pp 2 (2 stages, 1F1B) x dp_replicate 1 x dp_shard 4" in text_of(found)


def test_links_can_be_given():
    words = ("llama3_8b_float8", "--world-size", "16")
    known = plan(*words)
    slower = plan(*words, "--link", "100", "--network", "10", "--node-devices", "4")
    waits = [each["prediction"]["float8"]["waits_s"]["FSDP"] for each in (known, slower)]
    assert waits[1] > waits[0] > 0
    assert "can send 100 GB/s within a node of 4, and 10 to other nodes" in text_of(slower)


# ----- plan_schedule -----


def test_schedule_follows_from_the_rate():
    schedule = plan(*BF16_8B)["schedule"]
    expected = {
        "step_s": 8192 / 6297,
        "run_hours": 1000 * 8192 / 6297 / 3600,
        "run_gpu_hours": 8 * 1000 * 8192 / 6297 / 3600,
        "gpu_hours_per_trillion_tokens": 1e12 / 6297 / 3600,
    }
    assert {key: schedule[key] for key in expected} == pytest.approx(expected)


# ----- memory -----


def test_memory_is_weighed_against_the_device():
    memory = plan(*FLOAT8_8B)["memory"]
    assert memory["peak"]["parameters"] == PARAMETERS * 4 // 8
    assert memory["peak"]["optimizer_states"] == 2 * memory["peak"]["parameters"]
    assert memory["fits"]
    assert memory["reserved"] == round(1.26 * memory["peak"]["total"])
    alone = plan("llama3_8b", "--world-size", "1")["memory"]
    assert not alone["fits"] and alone["peak"]["optimizer_states"] == 8 * PARAMETERS


def test_what_does_not_fit_is_planned_anyway_and_fixes_are_named():
    found = plan("llama3_8b", "--world-size", "1", mode("none"))
    assert not found["memory"]["fits"] and found["schedule"]["run_hours"] > 0
    assert "; use more GPUs, activation checkpointing, or a lower [training] loc" in text_of(found)
    assert "use more GPUs" not in text_of(plan("llama3_8b"))


# ----- format_plan -----


def test_the_report_begins_with_the_answer_that_the_json_gives():
    found = plan("llama3_8b_float8", "--training.steps=3000")
    prediction, schedule = found["prediction"], found["schedule"]
    hours = 3000 * schedule["step_s"] / 3600
    assert_in_order(
        answer(found),
        f"8B on 8 x H100 SXM, predicted: fits ({found['memory']['reserved'] / 2**30:.1f} of 78 G",
        f"{schedule['tps']:,.0f} tokens/s per device ",
        "({:,.0f} to {:,.0f})".format(*schedule["tps_range"]),
        f"{schedule['step_s']:.3f} s a step, ",
        f"{hours:.3f} hours and {8 * hours:.2f} GPU-hours for 3,000 steps",
        f"(10^12 tokens: {schedule['gpu_hours_per_trillion_tokens']:,.0f} GPU-hours); tensorwise ",
        f" {prediction['speedup']:.2f}x the speed of bf16 ",
        "({:.2f} to {:.2f}).".format(*prediction["speedup_range"]),
    )


def test_a_given_rate_is_never_called_predicted_and_the_other_way_round():
    given, off = plan(*FLOAT8_8B), plan(*BF16_8B)
    assert_in_order(
        answer(given),
        f"predicted: fits ({given['memory']['reserved'] / 2**30:.1f} of 78 GiB)",
        "; given: 7,773 tokens/s per device, 1.05 s a step, 0.293 hours and 2.34 GPU-hours",
        "1,000 steps (10^12 tokens: 35,736 GPU-hours); predicted: tensorwise float8 ",
    )
    assert given["schedule"]["tps_range"] is None
    assert section(given, "Cost at the given rate")[0].split() == ["given"]
    assert section(plan("llama3_8b"), "Cost at the predicted rate")[0].split()[0] == "predicted"

    # What is off is not promised.
    assert "; predicted: no linear is in float8: " in answer(off)
    assert section(off, "Time of a step, predicted")[0].split() == ["milliseconds", "bf16"]


def test_the_rate_of_what_does_not_fit_is_conditional():
    found = plan("llama3_8b", "--world-size", "1")
    reserved = found["memory"]["reserved"] / 2**30
    assert f"does not fit ({reserved:.0f} of 78 GiB); if it did, " in answer(found)


def test_the_report_names_every_section_and_the_verdict(capsys):
    words = ["--job.config_file", str(ROOT / "train_configs/llama3_8b_float8.toml")]
    run_command(["plan", *words, "--device", "NVIDIA H200", "--tps", "9000"])
    text = capsys.readouterr().out
    assert " | ".join(re.findall(r"\n\n(.+)\n---+\n", text)) == (
        "Time of a step, predicted | Memory of a rank, predicted | Cost at the given rate | "
        "Linears | Assumed"
    )
    figures = ("of 137.5 GiB); given: 9,000", "float8 helps", "of 1,549 TFLOPS, each")
    assert_in_order(text.replace("\n", " "), *figures, "8,030,261,248 parameters", "57,912,852,480")


def test_the_report_gives_the_reason_for_each_linear():
    found = plan("llama3_8b_float8", '--float8.filter_fqns=["layers.0", "wk", "wv"]')
    rows = section(found, "Linears")
    assert [row.split()[-1] for row in rows if row.startswith("wq ")] == ["bf16", "float8"]
    assert "wq, wk, wv, wo, w1, w2, w3 in bf16: filter_fqns 'layers.0'" in rows
    assert "wk in bf16: filter_fqns 'wk'" in rows
    assert "output in bf16: the projection to the vocabulary stays in high precision" in rows

    part = plan("llama3_8b", ON, "--float8.recipe_name=rowwise_with_gw_hp")
    (row,) = (row for row in section(part, "Linears") if row.startswith("wq "))
    assert row.endswith("float8, grad_weight in bf16")


@pytest.mark.parametrize(
    ("config", "device", "words"),
    [
        ("debug_model", "H100 SXM", (mode("none"),)),
        ("float8_parity", "A100 SXM 80GB", ("--tps=1234", f"{ON}=false")),
        ("llama3_8b_float8", "RTX 5090", ("--world-size=128",)),
        ("llama3_405b", "H100 SXM", ("--world-size=512", mode("none"))),
    ],
)
def test_a_report_has_80_columns(config, device, words):
    lines = format_plan(plan(config, *words, device=device)).splitlines()
    assert [line for line in lines if len(line) > 80] == []


# ----- find_device -----


def test_the_gpu_at_hand_is_planned_for(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2**30, 139.81 * 2**30))
    found = find_device(None)
    assert (found.name, found.memory_gib) == ("H200", 138.8)
    assert (find_device("l4").name, find_device("l4").memory_gib) == ("L4", 21.9)
    assert find_device(None, memory_gib=100).memory_gib == 97.5


def test_a_gpu_without_a_data_sheet_is_planned_by_its_figures():
    peak = "--metrics.peak_tflops_fp8=1979"
    known, found = plan(*FLOAT8_8B), plan(*FLOAT8_8B, *FIGURES, peak, device="Q100")
    for name in ("model", "flops_per_token", "memory", "schedule"):
        assert found[name] == known[name]
    said = "No data sheet of the Q100 is known"
    assert said in text_of(found) and said not in text_of(known)
    larger = plan("llama3_8b_float8", "--memory=160", "--bandwidth=7")["device"]
    assert (larger["memory_gib"], larger["bandwidth_tb_s"]) == (156, 7)


# ----- check_planned -----

CONFIG = ("--job.config_file", str(ROOT / "train_configs/llama3_8b_float8.toml"))
MXFP8 = shlex.join(["--float8.recipe_name=mxfp8", *NO_GATHER])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "--device is needed where there is no GPU; use one of A100 SXM 40GB"),
        (" ".join(FIGURES), "--device is needed .*; plan any other by --device and any name"),
        ("--device Q7", '"Q7" is not known; use .* H100 SXM, .*; plan .* --bandwidth \\(TB/s'),
        ("--device H200 --memory 0", "--memory: 0 must be a number from 1e-06"),
        ("--memory 80GB", "--memory: 80GB must be a number from .*; --help shows"),
        ("--world-size 1,000", "--world-size: 1,000 must be a whole number"),
        ("--device", "--device: expected one argument; --help shows each"),
        ("--device H200 --node-devices 0", "--node-devices: 0 must be a whole number from 1 to"),
        ("--device H200 --network inf", "--network: inf must be a number"),
        ("--device H200 --tps -3", "--tps: -3 must be a number"),
        (
            "--device H200 --tps 30000",
            "--tps 30000 is an MFU of 112 %; .* at most 26,755 with",
        ),
        ("--device H200 --tps 5 --search", "--search: not allowed with argument --tps"),
        ("--device 'A100 SXM 80GB'", "tensorwise.*, but the A100 SXM 80GB has no float8 kernels"),
        (f"--device 'H100 SXM' {MXFP8}", "mxfp8.*, but the H100 SXM has no float8 kernels of it"),
        (f"--device L4 --world-size 6 {tp(4)}", "does not divide"),
        ("--device L4 --model.flavour=8B", "unknown key"),
        (
            "--device L4 --training.mixed_precision_param=float32",
            r'\[training\] mixed_precision_param = "float32" cannot be planned',
        ),
    ],
)
def test_refusals(words, message, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=message):
        run_command(["plan", *CONFIG, *shlex.split(words)])


# ----- cli, plan -----


@pytest.mark.slow
def test_standard_output_has_the_json_alone():
    words = [*PLAN, *CONFIG, "--device", "H100 SXM", "--json", mode("auto")]
    result = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert json.loads(result.stdout)["request"]["activation_checkpoint"] == "none"
    assert '[activation_checkpoint] mode: "auto" -> "none"' in result.stderr


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_or_a_closed_pipe_is_no_traceback(unbuffered):
    env = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    streams = {"stderr": subprocess.PIPE, "text": True, "env": env, "cwd": ROOT}
    with Path("/dev/full").open("w") as full:
        result = subprocess.run([*PLAN[:3], "schema"], stdout=full, timeout=100, **streams)
    assert (result.returncode, result.stderr.count("\n")) == (7, 1)
    assert re.search(r"No space left on device; make room", result.stderr)

    with subprocess.Popen([*PLAN[:3], "schema"], stdout=subprocess.PIPE, **streams) as process:
        process.stdout.close()
        assert "Traceback" not in process.stderr.read()
    assert process.returncode == -signal.SIGPIPE
