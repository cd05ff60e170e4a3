from pathlib import Path

import pytest

from torchtitan_lite.benchmarks.processes import Watched
from torchtitan_lite.benchmarks.torchtitan import (
    PARAMETERS,
    Figures,
    Rival,
    Versus,
    check_comparable,
    figures,
    torchtitan_dimensions,
    torchtitan_options,
)
from torchtitan_lite.config import Config, load_config
from torchtitan_lite.errors import ConfigError, RunError

DEBUG_MODEL = Path(__file__).parents[2] / "train_configs/debug_model.toml"
OURS = "[rank0] 00:56:39 step {step:>2}/12  loss 7.3082  grad_norm 2.12  tps 1,238"
THEIRS = "[titan] 2026-11-22 00:56:00,470 - root - INFO - step: {step:>2}  loss:  6.31141  grad_norm:  1.5072"


def load(*words: str) -> Config:
    settings = ["--float8.enable_float8_linear=false", *words]
    return load_config(["--job.config_file", str(DEBUG_MODEL), *settings], world_size=2)


@pytest.mark.parametrize("line", [OURS, THEIRS])
def test_figures_are_counted_from_the_lines_of_either_log(line: str) -> None:
    # 3 s up to the first step, then 0.5 s each.
    lines = [(3 + 0.5 * (step - 1), line.format(step=step)) for step in range(1, 13)]
    watched = Watched(
        ((1.0, "step on it"), *lines, (20.0, "12 steps, 1,536 tokens")), peak_mib=512.0
    )
    assert figures(watched, tokens=100) == Figures(tps=200.0, first_step_s=3.0, peak_mib=512.0)


def test_the_first_rank_that_tells_of_a_step_counts() -> None:
    lines = [
        (step + late, THEIRS.format(step=step)) for step in range(1, 11) for late in (0.0, 0.4)
    ]
    assert figures(Watched(tuple(lines), peak_mib=1.0), tokens=100).tps == pytest.approx(100)


@pytest.mark.parametrize("steps", [range(1, 10), range(2, 13), [*range(1, 6), *range(7, 13)]])
def test_a_log_that_lacks_steps_is_refused(steps: range) -> None:
    with pytest.raises(RunError, match="the log tells of steps"):
        figures(
            Watched(tuple((float(step), OURS.format(step=step)) for step in steps), 1.0), tokens=1
        )


@pytest.mark.parametrize(
    "line",
    [
        "Llama 3 debugmodel: 5,876,992 parameters, vocabulary 2256; attention by FLASH_ATTENTION",
        "Model llama3 debugmodel size: 5,876,992 total parameters",
    ],
)
def test_either_log_tells_the_number_of_parameters(line: str) -> None:
    assert Watched(((0.0, line),), 1.0).find(PARAMETERS) == "5,876,992"


def test_torchtitan_is_asked_for_the_same_model() -> None:
    assert torchtitan_dimensions(load()) == {
        "dim": 256, "n_layers": 6, "n_heads": 16, "n_kv_heads": 8, "multiple_of": 768, "vocab_size": 2256,
        "norm_eps": 1e-5, "rope_theta": 500000.0,
    }  # fmt: skip


@pytest.mark.parametrize("flavor", ["debugmodel", "8B", "70B", "405B"])
def test_the_feed_forward_is_as_wide(flavor: str) -> None:
    dimensions = torchtitan_dimensions(load(f"--model.flavor={flavor}"))
    multiple = int(dimensions["multiple_of"])  # two thirds of 4 * dim, rounded up to a multiple
    assert multiple * -(-int(8 * dimensions["dim"] / 3) // multiple) == multiple


def test_torchtitan_is_asked_for_the_same_run() -> None:
    schedule = ["--lr_scheduler.decay_ratio=0.2", "--lr_scheduler.decay_type=cosine"]
    options = torchtitan_options(load("--training.seq_len=128", "--compile.enable", *schedule))
    assert {
        "--training.seq_len=128", "--training.local_batch_size=8", "--training.steps=30", "--optimizer.lr=0.003",
        "--lr_scheduler.warmup_steps=3", "--activation_checkpoint.mode=none", "--metrics.log_freq=1",
        "--training.mixed_precision_param=bfloat16", "--optimizer.implementation=fused",
    } <= set(options)  # fmt: skip
    assert {"--compile.enable", "--compile.components=model,loss"} <= set(options)
    assert {*schedule, "--lr_scheduler.min_lr_factor=0.0"} <= set(options)
    usual = torchtitan_options(load())
    assert "--compile.enable" not in usual and not any(
        "total_steps" in option for option in usual
    )  # unset there too


@pytest.mark.parametrize(
    ("word", "message"),
    [
        (
            "--training.steps=9",
            "steps = 9: a rate is of the steps after the first 5; train 10 at least",
        ),
        (
            "--float8.enable_float8_linear=true",
            "enable_float8_linear = true is not the same in torchtitan on CPU; set it to false",
        ),
        (
            "--parallelism.tensor_parallel_degree=2",
            "tensor_parallel_degree = 2 is not the same in torchtitan on CPU; set it to 1",
        ),
        (
            "--training.document_mask",
            "document_mask = true is not the same in torchtitan on CPU; set it to false",
        ),
        (
            "--optimizer.state_dtype=int8",
            'state_dtype = "int8" is not the same in torchtitan on CPU; set it to "float32"',
        ),
    ],
)
def test_what_would_not_be_the_same_is_refused(word: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_comparable(load(word))


def test_models_of_different_size_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    rival = Rival(load(), python="python", adapter=Path("adapter.py"), processes=2, shard_one=False)
    monkeypatch.setattr(rival, "run_ours", lambda: Watched(((0.0, "6 parameters"),), 1.0))
    monkeypatch.setattr(
        rival, "run_theirs", lambda: Watched(((0.0, "1,006 total parameters"),), 1.0)
    )
    with pytest.raises(RunError, match="6 parameters here, 1,006 in torchtitan"):
        rival.compare(pairs=2, tell=print)


def test_runs_take_turns_and_each_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    rival = Rival(load(), python="python", adapter=Path("adapter.py"), processes=2, shard_one=False)
    asked: list[str] = []
    told: list[str] = []

    def watched(name: str, line: str, seconds: float) -> Watched:
        asked.append(name)
        lines = [(4 + seconds * step, line.format(step=step)) for step in range(1, 13)]
        return Watched(((0.0, "6 parameters"), *lines), 256.0)

    monkeypatch.setattr(rival, "run_ours", lambda: watched("ours", OURS, 0.5))
    monkeypatch.setattr(rival, "run_theirs", lambda: watched("theirs", THEIRS, 1.0))
    versus = rival.compare(pairs=2, tell=told.append)
    assert asked == ["ours", "theirs"] + ["ours", "theirs"] + ["theirs", "ours"]
    assert versus.ratios("tps").values == pytest.approx((2.0, 2.0))
    assert told[0] == "torchtitan_lite: 4,096 tokens/s a process, step 1 after 4.5 s, 256 MiB"
    assert len(told) == 4


def test_tokens_are_those_of_a_process() -> None:
    def tokens(*words: str) -> int:
        return Rival(load(*words), python="", adapter=Path(), processes=2, shard_one=False).tokens

    assert tokens() == 8 * 256
    assert tokens("--training.global_batch_size=32") == 16 * 256


def test_ratios_are_of_the_medians_and_pair_by_pair() -> None:
    ours = tuple(Figures(tps, 4.0, 90.0) for tps in (110.0, 220.0, 55.0))
    theirs = tuple(Figures(tps, 8.0, 100.0) for tps in (100.0, 200.0, 50.0))
    versus = Versus(ours, theirs, parameters=6)
    told = versus.as_json()
    assert told["ratio_of_medians"] == pytest.approx(
        {"tps": 1.1, "first_step_s": 0.5, "peak_mib": 0.9}
    )
    assert told["median_of_ratios"] == pytest.approx(
        {"tps": 1.1, "first_step_s": 0.5, "peak_mib": 0.9}
    )
    assert (
        "launch to end of step 1, s                4.0         8.0    0.50   0.500, standard error 0.000, q"
        in str(versus)
    )
