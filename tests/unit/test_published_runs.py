"""The published throughputs agree with themselves: layouts, step times and FLOP/s."""

from dataclasses import asdict

import pytest
from published_runs import MODELS, PUBLISHED_RUNS

from torchtitan_lite.catalog.devices import lookup_device

RUNS = {run.name: run for run in PUBLISHED_RUNS}

# ----- published_runs -----


def test_names_are_unique_and_known() -> None:
    assert len(RUNS) == len(PUBLISHED_RUNS)
    devices = {name: lookup_device(name) for name in {run.device for run in PUBLISHED_RUNS}}
    assert [name for name, device in devices.items() if not device or device.name != name] == []
    assert {run.model for run in PUBLISHED_RUNS} <= MODELS.keys()


def test_layouts_fill_the_gpus() -> None:
    wrong = [
        run.name
        for run in PUBLISHED_RUNS
        if run.dp * run.tp * run.cp * run.pp != run.gpus or (run.vp != 1 and run.pp == 1)
    ]
    assert wrong == []


def test_baselines_are_bf16_runs_of_the_same_layout() -> None:
    own = {"name", "source", "tps", "tflops", "step_s", "baseline", "doubt"}
    own |= {"recipe", "published_recipe", "float8_gather", "precomputed_scales"}
    for run in PUBLISHED_RUNS:
        if run.baseline:
            baseline = asdict(RUNS[run.baseline])
            changed = {name for name, value in asdict(run).items() if baseline[name] != value}
            assert (run.name, baseline["recipe"], changed - own) == (run.name, "bf16", set())


def test_batches_are_the_published_ones() -> None:
    """Sequences of a step, and microbatches: some sources name them beside the layout."""
    sequences = {
        "T2024 8B 8 bf16": 16,
        "T2024 8B 128 bf16": 256,
        "T2024 70B 256 TP 8 float8": 512,
        "T2024 405B 512 TP 8 PP 8 1F1B": 256,
        "TP2025 8B bf16": 96,
        "NeMo 24.03 H100 2-7B 1024K": 4,
    }
    assert {name: RUNS[name].global_batch_size for name in sequences} == sequences
    microbatches = {
        "Bridge 25.11 H100 8B CS": 16,
        "Bridge 25.11 H100 70B CS": 64,
        "Bridge 25.11 H100 405B CS": 64,
        "Bridge 25.11 B200 405B MX": 32,
        "Bridge 25.11 GB200 405B CS": 384,
        "Bridge 25.11 GB300 405B CS": 192,
        "Bridge 25.09 GB200 70B MX": 16,
        "Bridge 25.09 GB200 405B MX": 32,
        "dgxc 24.09 H100 8B 8 FP8": 32,
        "dgxc 24.09 H100 405B 576 FP8": 63,
    }
    assert {name: RUNS[name].accumulation for name in microbatches} == microbatches


def test_flops_per_second_are_those_of_the_tokens() -> None:
    found, published = {}, {}
    for run in PUBLISHED_RUNS:
        if run.tflops:
            model = MODELS[run.model]
            heads = model.n_heads + model.n_kv_heads
            block = 2 * model.dim * heads * model.dim // model.n_heads
            block += 3 * model.dim * model.ffn_dim
            scores = 12 * model.n_layers * run.seq_len * model.dim
            flops = 6 * (model.n_layers * block + model.dim * model.vocab_size)
            flops += scores / (2 if run.flops == "causal" else 1)
            found[run.name], published[run.name] = run.tps * flops / 1e12, run.tflops
    # They are rounded and averaged apart, and vocabularies are padded.
    assert found == pytest.approx(published, rel=0.008)


def test_tokens_per_second_are_those_of_the_step() -> None:
    timed = [run for run in PUBLISHED_RUNS if run.step_s]
    tps = [run.global_batch_size * run.seq_len / run.step_s / run.gpus for run in timed]
    assert tps == pytest.approx([run.tps for run in timed], rel=0.003)
