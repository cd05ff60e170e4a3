"""The planner through its command: METRICS' reference values, what auto keeps, memory, rates and
refusals."""

import contextlib
import io
import json
import os
import re
import runpy
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from torchtitan_lite.errors import ConfigError, DataError
from torchtitan_lite.planner.plan import find_device
from torchtitan_lite.planner.report import format_plan

ROOT = Path(__file__).parents[2]
MAIN = runpy.run_path(str(ROOT / "scripts/plan.py"))["main"]
AUTO = '--float8.filter_fqns=["auto"]'


def run_plan(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "scripts/plan.py", *arguments]
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


def test_a_document_mask_changes_no_figure_and_the_report_says_what_is_counted():
    masked, plain = (
        plan("debug_model", f"--training.document_mask={on}") for on in ("true", "false")
    )
    assert masked.pop("request") == plain.pop("request") | {"document_mask": True}
    assert masked == plain
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        config = str(ROOT / "train_configs/debug_model.toml")
        MAIN(["--job.config_file", config, "--device", "H100 SXM", "--training.document_mask"])
    assert "document mask (attention counts as if documents were one)" in printed.getvalue()


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
    hurt = plan("debug_model")["prediction"]
    assert hurt["step_speedup"] < 1 and hurt["verdict"].startswith("float8 hurts")


def test_auto_converts_all_seven_of_8b_on_fsdp():
    assert converted(plan("llama3_8b_float8", AUTO)) == ALL_SEVEN


ROWWISE = ["--float8.enable_float8_linear", "--float8.recipe_name=rowwise", AUTO]


def test_auto_keeps_wk_and_wv_of_8b_on_tp8_rowwise():
    found = plan("llama3_8b", "--parallelism.tensor_parallel_degree=8", *ROWWISE)
    # wq and wo are as small there: [8192, 4096] to 512, and 512 to 4096.
    assert converted(found) == {"w1", "w2", "w3"}


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


def test_predictions_for_several_devices_say_that_they_leave_out_communication(float8_8b):
    bound = "upper bound, without communication"
    predicted = plan("llama3_8b_float8")
    alone = plan("llama3_8b_float8", "--world-size", "1")
    bounds = [found["schedule"]["bound"] for found in (predicted, float8_8b, alone)]
    assert bounds == [bound, None, None]
    leave_out = [found["prediction"]["without_communication"] for found in (float8_8b, alone)]
    assert leave_out == [True, False]

    lines = format_plan(predicted).splitlines()
    assert (
        "What to expect without communication: rates are upper bounds, times are lower bounds"
        in lines
    )
    for start in ("float8 helps: a step runs at 1.29x", "tps 12,687 per device", "microbatch "):
        (line,) = (line for line in lines if line.startswith(start))
        assert "without communication" in line
    assert "without communication" not in format_plan(alone)


def test_a_linear_that_pays_by_the_cast_it_shares_says_so():
    found = plan("llama3_8b", "--parallelism.tensor_parallel_degree=2", *ROWWISE[:2])
    (wv,) = (row for row in found["linears"] if row["kind"] == "attention.wv")
    assert wv["time_ratio"] > 1 and found["prediction"]["better_kept"] == []
    assert wv["shares_cast_with"] == ["attention.wq", "attention.wk"]
    said = "1.03  float8: its input's cast is shared with attention.wq, attention.wk"
    assert said in format_plan(found)

    slower = format_plan(plan("llama3_8b", "--parallelism.tensor_parallel_degree=8", *ROWWISE[:2]))
    said = "1.30  float8, better kept in bf16: its input's cast is shared with attention.wq"
    assert said in slower and "1.31  float8, better kept in bf16\n" in slower


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
    report = format_plan(found)
    assert "does not fit: the device has 80.00\nwould fit: 4 GPUs with tp 1 and" in report
    assert "1,204.7 days" in report

    hopeless = plan(*base, "1", "--training.local_batch_size=4096")
    assert would_fit(hopeless) == []
    assert "would fit: no number of GPUs, with tp up to 8 either; lower" in format_plan(hopeless)
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
    hidden, output, block, rotary = 2**30, 128256 * 4096, 218_112_000, 2 * 4 * 131072 * 64
    kept, working = 34 * hidden + 2 * output, hidden + 2 * 2**30 + 4 * output
    gathered = 2 * block + 2 * 2 * (output + 4096)
    loss, *_ = plan(*long, "--activation_checkpoint.mode=full")["memory"]["moments"]
    assert loss == {"name": "loss", "total": states + kept + working + gathered + rotary}

    assert not found["memory"]["fits"] and would_fit(found) == [(128, "full", 1), (8, "full", 2)]
    for tp, fits in ((1, False), (2, True)):
        words = ("--activation_checkpoint.mode=full", f"--parallelism.tensor_parallel_degree={tp}")
        assert plan(*long, *words)["memory"]["fits"] is fits
    report = format_plan(found)
    assert "8 GPUs with tp 2 and activation checkpointing full" in report
    assert max(map(len, report.splitlines())) < 200


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
    assert format_plan(found).splitlines()[2].startswith(f"{title} on 8 x H100 SXM: ")


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
    assert "and the input embedding is the projection to the vocabulary" in format_plan(found)


def test_a_gpu_without_a_data_sheet_is_planned_by_its_figures(float8_8b):
    peaks = ["--metrics.peak_tflops_bf16=989", "--metrics.peak_tflops_fp8=1979"]
    figures = [*peaks, "--bandwidth=3.35", "--memory=80"]
    found = plan("llama3_8b_float8", "--tps", "7773", *figures, device="Q100")
    known = json.loads(json.dumps(float8_8b).replace('"H100 SXM"', '"Q100"'))
    assert found == known
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
    assert '[activation_checkpoint] mode = "auto" is "none" here' in result.stderr

    pipe = subprocess.PIPE
    command = [sys.executable, "scripts/plan.py", *words]
    with subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=pipe, text=True) as process:
        process.stdout.close()
        assert "Traceback" not in process.stderr.read()
    assert process.returncode == -signal.SIGPIPE


def test_405b_on_512_gpus():
    found = plan("llama3_405b", "--world-size", "512")
    assert found["request"]["dp_shard"] * found["request"]["tp"] == 512
    assert found["model"]["parameters"] == 405_853_388_800
    assert found["schedule"]["origin"] == "predicted"


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
        "8,030,261,248 parameters", "57,912,852,480", "attention.wk", "float8 helps",
        "fits: the device has 141.00", "tps 9,000 per device (given)", "of 1549.5 TFLOPS, each "
                                                                       "matmul at its own peak",
    ):  # fmt: skip
        assert text in result.stdout


CONFIG = ["--job.config_file", "train_configs/llama3_8b_float8.toml"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*CONFIG], "--device is needed where there is no GPU; use one of A100 SXM 40GB"),
        (
            [*CONFIG, "--device", "H100"],
            '--device "H100" is not known; use one of H100 SXM, H100 PCIe, H100 NVL. '
            "scripts/plan.py plans any other by --bandwidth, --memory and --metrics.peak_tflops_b",
        ),
        ([*CONFIG, "--device", "H100SXM"], '--device "H100SXM" is not known; use one of H100 SXM'),
        ([*CONFIG, "--device", "?"], '--device "?" is not known; use one of A100 SXM 40GB'),
        ([*CONFIG, "--device", "H200", "--memory", "0"], "--memory 0.0 must be a positive number"),
        (
            [*CONFIG, "--device", "H200", "--bandwidth", "1e-320"],
            "--bandwidth 1e-320 must be a positive number, 1e-06 to 1e+09",
        ),
        (
            [*CONFIG, "--device", "H100 SXM", "--world-size", "0"],
            "--world-size 0 must be 1 to 1000000",
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
            [sys.executable, "scripts/plan.py", "--help"],
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


def test_help(capsys):
    MAIN(["--help"])
    assert "--world-size N" in capsys.readouterr().out


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
