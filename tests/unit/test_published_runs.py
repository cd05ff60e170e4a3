"""The published throughputs agree with themselves: layouts, step times and FLOP/s."""

from dataclasses import asdict

import pytest
from published_runs import MODELS, PUBLISHED_RUNS, RATIOS, PublishedRun

from torchtitan_lite.metrics.devices import lookup_device

RUNS = {run.name: run for run in PUBLISHED_RUNS}
DRIFT = 0.008
"""Published TFLOP/s and tokens/s are rounded and averaged apart, and vocabularies are padded."""


def test_names_are_unique() -> None:
    assert len(RUNS) == len(PUBLISHED_RUNS)
    assert len({ratio.name for ratio in RATIOS}) == len(RATIOS)


@pytest.mark.parametrize("run", RUNS.values(), ids=list(RUNS))
def test_layout_fills_the_gpus_of_a_known_device(run: PublishedRun) -> None:
    assert run.dp * run.tp * run.cp * run.pp == run.gpus
    device = lookup_device(run.device)
    assert device is not None
    assert device.name == run.device
    assert run.model in MODELS
    assert run.vp == 1 or run.pp > 1


@pytest.mark.parametrize(
    "run", [run for run in RUNS.values() if run.baseline], ids=lambda r: r.name
)
def test_baseline_is_the_bf16_run_of_the_same_layout(run: PublishedRun) -> None:
    baseline = RUNS[run.baseline or ""]
    assert baseline.recipe == "bf16"
    own = {"name", "source", "tps", "tflops", "step_s", "baseline", "doubt"}
    own |= {"recipe", "published_recipe", "float8_gather", "precomputed_scales"}
    changed = {name for name, value in asdict(run).items() if getattr(baseline, name) != value}
    assert changed <= own


@pytest.mark.parametrize(
    ("name", "sequences"),
    [
        ("T2024 8B 8 bf16", 16),
        ("T2024 8B 128 bf16", 256),
        ("T2024 70B 256 TP 8 float8", 512),
        ("T2024 405B 512 TP 8 PP 8 1F1B", 256),
        ("TP2025 8B bf16", 96),
        ("NeMo 24.03 H100 2-7B 1024K", 4),
    ],
)
def test_global_batch_is_the_published_one(name: str, sequences: int) -> None:
    assert RUNS[name].global_batch_size == sequences


@pytest.mark.parametrize(
    ("name", "microbatches"),
    [
        ("Bridge 25.11 H100 8B CS", 16),
        ("Bridge 25.11 H100 70B CS", 64),
        ("Bridge 25.11 H100 405B CS", 64),
        ("Bridge 25.11 B200 405B MX", 32),
        ("Bridge 25.11 GB200 405B CS", 384),
        ("Bridge 25.11 GB300 405B CS", 192),
        ("Bridge 25.09 GB200 70B MX", 16),
        ("Bridge 25.09 GB200 405B MX", 32),
        ("dgxc 24.09 H100 8B 8 FP8", 32),
        ("dgxc 24.09 H100 405B 576 FP8", 63),
    ],
)
def test_accumulation_is_the_published_one(name: str, microbatches: int) -> None:
    """The rows name the sequences per step; their sources name the microbatches as well."""
    assert RUNS[name].accumulation == microbatches


@pytest.mark.parametrize("run", [run for run in RUNS.values() if run.tflops], ids=lambda r: r.name)
def test_flops_per_second_are_those_of_the_tokens(run: PublishedRun) -> None:
    model = MODELS[run.model]
    head = model.dim // model.n_heads
    attention = 2 * model.dim * head * (model.n_heads + model.n_kv_heads)
    weights = model.n_layers * (attention + 3 * model.dim * model.ffn_dim)
    weights += model.dim * model.vocab_size
    scores = 12 * model.n_layers * (run.seq_len or 0) * model.dim
    flops = 6 * weights + scores / (2 if run.flops == "causal" else 1)
    assert run.tps * flops / 1e12 == pytest.approx(run.tflops, rel=DRIFT)


@pytest.mark.parametrize("run", [run for run in RUNS.values() if run.step_s], ids=lambda r: r.name)
def test_tokens_per_second_are_those_of_the_step(run: PublishedRun) -> None:
    tokens = (run.global_batch_size or 0) * (run.seq_len or 0)
    assert tokens / (run.step_s or 0) / run.gpus == pytest.approx(run.tps, rel=0.003)
