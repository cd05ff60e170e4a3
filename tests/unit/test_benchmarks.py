"""scripts/benchmarks: what they compute from measurements, and what they refuse to compare."""

import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import bare_loop
import common
import pytest
import torch
from bare_loop import BARE, check_comparable, plain_loss
from common import Figures, Ratios, Watched, check_values, measure_pairs, tokens_a_step, watch
from fake_gpu_probe import FIRST_STEADY, STEPS, Settings, fake_gpu, note_steps
from micro import measure_loss
from versus_on_fake_gpu import (
    FIGURES,
    Case,
    check_can_run,
    choose_cases,
    format_ratio,
    torchtitan_float8,
)
from versus_torchtitan import (
    ADAPTER,
    PARAMETERS,
    THEIRS,
    compare,
    torchtitan_dimensions,
    torchtitan_options,
)

from torchtitan_lite.config import Config, load_config
from torchtitan_lite.errors import ConfigError, RunError

DEBUG_MODEL = Path(__file__).parents[2] / "train_configs/debug_model.toml"
OURS = "[rank0] 00:56:39 step {step:>2}/12  loss 7.3082  grad_norm 2.12  tps 1,238"
THEIRS_LINE = "[titan] 2026-11-22 00:56:00,470 - INFO - step: {step:>2}  loss:  6.31141  grad_norm"


def load(*words: str) -> Config:
    settings = ["--float8.enable_float8_linear=false", *words]
    return load_config(["--job.config_file", str(DEBUG_MODEL), *settings], world_size=2)


def test_ratios_are_taken_pair_by_pair() -> None:
    ratios = Ratios.of([1.0, 4.0, 9.0], [2.0, 4.0, 6.0])
    assert ratios.values == (0.5, 1.0, 1.5)
    assert ratios.quartiles == [0.75, 1.0, 1.25]
    assert ratios.standard_error == pytest.approx(1.2533 * 0.5 / 1.349 / math.sqrt(3), rel=1e-4)
    assert str(ratios) == "1.000 +- 0.268 (quartiles 0.750, 1.250; 3 pairs)"
    with pytest.raises(ValueError, match="shorter"):
        Ratios.of([1.0, 2.0], [1.0])


def test_the_standard_error_is_that_of_a_median_and_ignores_outliers() -> None:
    values = tuple(statistics.NormalDist(1.0, 0.02).samples(4000, seed=0))
    expected = 1.2533 * 0.02 / math.sqrt(4000)
    assert Ratios(values).standard_error == pytest.approx(expected, rel=0.05)
    with_bursts = (*values[:3960], *[30.0] * 40)
    assert Ratios(with_bursts).standard_error == pytest.approx(expected, rel=0.05)


def test_a_drift_of_the_machine_is_in_no_ratio() -> None:
    drift = [1.0, 1.1, 1.3, 1.7, 2.5]
    assert Ratios.of([0.98 * each for each in drift], drift).values == pytest.approx([0.98] * 5)


def test_the_order_of_a_pair_alternates() -> None:
    turns = itertools.count()
    assert measure_pairs(lambda: ("a", next(turns)), lambda: ("b", next(turns)), pairs=3) == (
        [("a", 0), ("a", 3), ("a", 4)],
        [("b", 1), ("b", 2), ("b", 5)],
    )


def run(code: str, *, timeout_s: float = 30.0) -> Watched:
    return watch([sys.executable, "-c", code], env=os.environ, timeout_s=timeout_s)


def test_lines_have_the_time_of_their_arrival() -> None:
    watched = run("import time; print('a', flush=True); time.sleep(0.5); print('b')")
    (first, a), (second, b) = watched.lines
    assert (a, b) == ("a", "b") and first > 0 and second - first > 0.4


def test_the_peak_is_the_largest_processs() -> None:
    child = "taken = bytearray(900 * 2**20); del taken"
    command = (
        f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}], check=True)"
    )
    assert 900 < run(command).peak_mib < 1000


def test_a_command_that_fails_shows_the_end_of_its_output() -> None:
    with pytest.raises(RunError, match=r"ended with 3:\n") as caught:
        run("print(*range(1000), sep='\\n'); raise SystemExit(3)")
    shown = str(caught.value).splitlines()[1:]
    assert shown == [str(number) for number in range(1000 - common.TAIL_LINES, 1000)]


def test_a_command_that_takes_too_long_is_ended() -> None:
    began = time.perf_counter()
    with pytest.raises(RunError, match="ended with -15"):
        run("import time; time.sleep(60)", timeout_s=0.5)
    assert time.perf_counter() - began < 20


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--help"], 0, "rest are torchtitan's own options"),
        ([], 2, "the following arguments are required: dimensions"),
        (["no JSON"], 2, "argument dimensions: invalid loads value: 'no JSON'"),
        (["{}"], 2, "this Python has no torchtitan"),
    ],
)
def test_the_adapter_explains_itself(words: list[str], code: int, said: str) -> None:
    command = [sys.executable, str(ADAPTER), *words]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == code and "Traceback" not in result.stderr
    assert said in result.stdout + result.stderr


@pytest.mark.parametrize("line", [OURS, THEIRS_LINE])
def test_figures_are_read_from_either_log(line: str) -> None:
    # 3 s until the first step, then 0.5 s each. torchtitan's other ranks log the same step later.
    lines = [
        (3 + 0.5 * (step - 1) + late, line.format(step=step))
        for step in range(1, 13)
        for late in (0.0, 0.1)
    ]
    watched = Watched(((1.0, "step on it"), *lines, (20.0, "12 steps, 1,536 tokens")), 512.0)
    assert Figures.of(watched, tokens=100) == Figures(200.0, first_step_s=3.0, peak_mib=512.0)


@pytest.mark.parametrize("steps", [range(1, 10), range(2, 13), [*range(1, 6), *range(7, 13)]])
def test_a_log_without_some_steps_is_refused(steps: range) -> None:
    lines = tuple((float(step), OURS.format(step=step)) for step in steps)
    with pytest.raises(RunError, match="the log has steps"):
        Figures.of(Watched(lines, 1.0), tokens=1)


def test_tokens_of_a_step_are_a_processs() -> None:
    assert tokens_a_step(load(), processes=2) == 8 * 256
    assert tokens_a_step(load("--training.global_batch_size=32"), processes=2) == 16 * 256


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("--training.steps=9", "steps = 9: the first 5 are not measured; train at least 10"),
        ("--parallelism.tensor_parallel_degree=2", "degree = 2 is not the same in other; set it"),
        ("--parallelism.data_parallel_replicate_degree=2", "replicate_degree = 2 is not the same"),
        ("--activation_checkpoint.mode=auto", '"auto" is not .* set it to "none" or "selective"'),
        ("--optimizer.state_dtype=bfloat16", 'state_dtype = "bfloat16" is not the same'),
        ("--training.enable_cpu_offload", "enable_cpu_offload = true is not the same"),
    ],
)
def test_what_others_do_not_implement_is_refused(word: str, message: str) -> None:
    check_values(load(), common.ALIKE, other="other")
    with pytest.raises(ConfigError, match=message):
        check_values(load(word), common.ALIKE, other="other")


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("--optimizer.implementation=foreach", 'implementation = "foreach" is not the same'),
        ("--parallelism.fsdp_reshard_after_forward=always", '"always" is not the same'),
        ("--training.global_batch_size=32", "global_batch_size = 32 needs gradient accumulation"),
    ],
)
def test_what_the_bare_loop_does_not_implement_is_refused(word: str, message: str) -> None:
    check_comparable(load(), processes=2)
    with pytest.raises(ConfigError, match=message):
        check_comparable(load(word), processes=2)


def test_float8_and_document_masks_are_not_compared_with_torchtitan_on_cpu() -> None:
    check_values(load(), THEIRS, other="torchtitan")
    for word in ("--float8.enable_float8_linear=true", "--training.document_mask"):
        with pytest.raises(ConfigError, match="true is not the same in torchtitan"):
            check_values(load(word), THEIRS, other="torchtitan")
    assert not BARE.keys() & {"float8.enable_float8_linear", "training.document_mask"}


@pytest.mark.parametrize("flavor", ["debugmodel_gqa", "8B", "70B", "405B"])
def test_torchtitan_gets_the_same_model(flavor: str) -> None:
    dimensions = torchtitan_dimensions(load(f"--model.flavor={flavor}"))
    scaling = dimensions["rope_scaling_args"]
    assert scaling.pop("scaling_factor") == (1.0 if flavor == "debugmodel_gqa" else 8.0)
    assert scaling == {
        "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192
    }  # fmt: skip
    # Two thirds of 4 * dim, rounded up to a multiple of this, is the feed-forward's width.
    multiple = int(dimensions["multiple_of"])
    assert multiple * -(-int(8 * dimensions["dim"] / 3) // multiple) == multiple
    if flavor == "debugmodel_gqa":
        assert dimensions == {
            "dim": 256, "n_layers": 6, "n_heads": 16, "n_kv_heads": 8, "multiple_of": 768,
            "vocab_size": 2256, "norm_eps": 1e-5, "rope_theta": 500000.0,
            "rope_scaling_args": scaling,
        }  # fmt: skip


def test_tied_embeddings_are_not_compared_with_torchtitan() -> None:
    with pytest.raises(ConfigError, match="tie_embeddings = true is not implemented in torchtitan"):
        torchtitan_dimensions(load("--model.flavor=1B"))
    dimensions = torchtitan_dimensions(load("--model.flavor=1B", "--model.tie_embeddings=false"))
    assert (dimensions["multiple_of"], dimensions["rope_scaling_args"]["scaling_factor"]) == (
        8192,
        32.0,
    )


def test_torchtitan_gets_the_same_options() -> None:
    schedule = ["--lr_scheduler.decay_ratio=0.2", "--lr_scheduler.decay_type=cosine"]
    options = torchtitan_options(load("--training.seq_len=128", "--compile.enable", *schedule))
    assert {
        "--training.seq_len=128", "--training.local_batch_size=8", "--training.steps=30",
        "--optimizer.lr=0.003", "--lr_scheduler.warmup_steps=3", "--metrics.log_freq=1",
        "--activation_checkpoint.mode=none", "--training.mixed_precision_param=bfloat16",
        "--optimizer.implementation=fused", "--compile.enable", "--compile.components=model,loss",
        "--lr_scheduler.min_lr_factor=0.0", *schedule,
    } <= set(options)  # fmt: skip
    usual = torchtitan_options(load())
    assert "--compile.enable" not in usual
    assert not any("total_steps" in option for option in usual)  # unset there too


def test_models_of_different_size_are_refused() -> None:
    ours = Watched(((0.0, "Llama 3: 6 parameters, vocabulary 2"),), 1.0)
    theirs = Watched(((0.0, "size: 1,006 total parameters"),), 1.0)
    assert (ours.find(PARAMETERS), theirs.find(PARAMETERS)) == ("6", "1,006")
    with pytest.raises(RunError, match="6 parameters here, but 1,006 in torchtitan"):
        compare(lambda: ours, lambda: theirs, tokens=1, pairs=2)
    with pytest.raises(RunError, match=r"no line matches 'x':\nLlama"):
        ours.find("x")


def test_runs_take_turns_after_one_that_is_not_counted() -> None:
    asked: list[str] = []

    def watched(name: str, line: str, seconds: float) -> Watched:
        asked.append(name)
        lines = [(4 + seconds * step, line.format(step=step)) for step in range(1, 13)]
        return Watched(((0.0, "6 parameters"), *lines), 256.0)

    table = compare(
        lambda: watched("ours", OURS, 0.5),
        lambda: watched("theirs", THEIRS_LINE, 1.0),
        tokens=100,
        pairs=2,
    )
    assert asked == ["ours", "theirs", "ours", "theirs", "theirs", "ours"]
    assert "200.0         100.0   2.000 +- 0.000" in table


def test_the_plain_loss_is_the_mean_over_all_positions() -> None:
    logits, labels = torch.zeros(2, 3, 5).bfloat16(), torch.zeros(2, 3, dtype=torch.int64)
    logits[1, 2, 0] = 1.0
    uniform, other = torch.tensor(5.0).log(), (1 + 4 * torch.tensor(-1.0).exp()).log()
    assert plain_loss(logits, labels) == pytest.approx(((5 * uniform + other) / 6).item())


def test_both_losses_are_the_same() -> None:
    plain, ours = (
        measure_loss(kind, tokens=64, vocab_size=500, dim=32) for kind in ("plain", "ours, eager")
    )
    assert ours.loss == pytest.approx(plain.loss, rel=1e-5)
    assert ours.grad_norms == pytest.approx(plain.grad_norms, rel=1e-2)


def test_the_bare_loop_is_compared_by_its_losses_too(monkeypatch: pytest.MonkeyPatch) -> None:
    programs: list[tuple[str, ...]] = []

    def run(config: Config, *, processes: int, program: tuple[str, ...] = ()) -> object:
        programs.append(program)
        seconds, loss = (0.5, 2.002) if program else (1.0, 2.0)
        lines = [(4 + seconds * step, f"step {step}  loss {loss}") for step in range(1, 13)]
        return Watched(tuple(lines), 256.0), [{"loss": 2.0}] * 12

    monkeypatch.setattr(bare_loop, "run_config", run)
    table = bare_loop.compare(load(), processes=2, pairs=2, our_loss=True)
    assert "0.500 +- 0.000" in table and "losses differ by 1.0e-03 at most" in table
    assert [bool(program) for program in programs] == [False, False, True, True, False]
    assert programs[2][1:] == ["--our-loss"]


def test_words_choose_cases_on_the_fake_gpu() -> None:
    def names(*words: str) -> list[str]:
        return [" ".join(asdict(case).values()) for case in choose_cases(words)]

    assert names("fsdp1", "compiled", "op") == [
        "fsdp1 compiled op bf16",
        "fsdp1 compiled op tensorwise",
    ]
    assert names("gathered", "eager", "full") == ["fsdp2 eager full gathered"]
    assert len(names()) == (2 + 2 + 3) * 2 * 3
    with pytest.raises(ConfigError, match="^rowwise: no such word; choose from one fsdp1"):
        names("one", "rowwise")
    with pytest.raises(ConfigError, match="add the word fsdp2"):
        names("one", "gathered")


def test_the_fake_gpu_needs_torchtitan_and_the_cuda_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(ConfigError, match="needs torchtitan 0.2.2 and PyTorch's CUDA build"):
        check_can_run()


def test_a_case_on_the_fake_gpu_is_the_same_for_both() -> None:
    config = Case("fsdp2", "compiled", "op", "gathered").config(layers=3)
    assert {
        "--training.seq_len=8192", "--training.local_batch_size=1", "--training.steps=8",
        "--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=op",
        "--compile.enable", "--optimizer.implementation=fused", "--training.max_norm=1.0",
        "--parallelism.fsdp_reshard_after_forward=default",
        "--training.mixed_precision_param=bfloat16", "--training.mixed_precision_reduce=float32",
    } <= set(torchtitan_options(config))  # fmt: skip
    table = "--quantize.linear.float8."
    assert torchtitan_float8(config) == [
        "--model.converters=quantize.linear.float8",
        f"{table}filter_fqns=output",
        f"{table}enable_fsdp_float8_all_gather",
        f"{table}precompute_float8_dynamic_scale_for_fsdp",
    ]
    assert torchtitan_float8(Case("one", "eager", "none", "bf16").config(layers=3)) == []
    dimensions = torchtitan_dimensions(config)
    assert (dimensions["n_layers"], dimensions["vocab_size"]) == (3, 128256)


class CountingTrainer:
    """A trainer whose step launches a kernel and, in the first one, compiles."""

    def __init__(self, counters: Path) -> None:
        self.counters = counters
        self.launched = {"kernel a": 5, "wait for a stream": 1}
        self.train_step(9)

    def train_step(self, kernels: int) -> None:
        self.launched["kernel a"] += kernels
        rows = [fake_gpu.COUNTER.pack(n, name.encode()) for name, n in self.launched.items()]
        self.counters.write_bytes(b"".join(rows))


def test_a_probe_counts_the_calls_of_steady_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("FAKE_GPU_COUNTS", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", None)  # restored after the test
    trainer = CountingTrainer(tmp_path / f"rank0-{os.getpid()}")
    monkeypatch.setattr(CountingTrainer, "train_step", CountingTrainer.train_step)
    out = tmp_path / "figures.json"
    settings = Settings(out=str(out), began=time.time() - 100, compiled=True)
    note_steps(CountingTrainer, settings, [3 * 2**20, 2**20])

    for step in range(1, STEPS + 1):
        assert not out.exists()
        trainer.train_step(1000 if step < FIRST_STEADY else step)
    figures = json.loads(out.read_text())
    assert figures["calls"] == [{"kernel a": step} for step in range(FIRST_STEADY, STEPS)]
    assert len(figures["host_s"]) == len(figures["host_cpu_s"]) == STEPS - FIRST_STEADY
    assert 100 < figures["first_step_s"] < 110

    assert FIGURES["launches"]([figures]) == statistics.mean(range(FIRST_STEADY, STEPS))
    assert FIGURES["waits"]([figures]) == 0
    assert FIGURES["block MiB"]([figures]) == 4


def test_figures_of_calls_on_the_fake_gpu() -> None:
    calls = {
        "kernel a": 4, "matmul e4m3 x e5m2, scales: tensor, tensor": 3, "set memory": 1,
        "nccl all-gather of 1048576 bytes": 2, "nccl all-reduce of 524288 bytes": 1,
        "copy from pageable to device": 1, "copy from device to pageable": 1,
        "wait for cudaFree": 1,
    }  # fmt: skip
    runs = [{"calls": [{}]}, {"calls": [calls, calls]}]
    values = {name: FIGURES[name](runs) for name in ("launches", "matmuls", "copies", "waits")}
    assert values == {"launches": 10, "matmuls": 3, "copies": 3, "waits": 2}
    assert (FIGURES["collectives"](runs), FIGURES["sent MiB"](runs)) == (3, 2.5)
    assert [format_ratio(*both) for both in ((1.0, 2.0), (3.0, 0.0))] == ["0.50", "3 : 0"]
