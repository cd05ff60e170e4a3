"""Which rows the benchmark has, in what order, and how many layers of each fit."""

import dataclasses
from pathlib import Path

import pytest

from torchtitan_lite.benchmarks import rows as bench_plan
from torchtitan_lite.benchmarks.rows import (
    BF16,
    DEBUG,
    LLAMA_8B,
    RECIPES,
    Device,
    Row,
    fitting_layers,
    forecast,
    plan_rows,
    planned_device,
    profiled,
    profiled_rows,
)
from torchtitan_lite.config import check_config
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.metrics.devices import DEVICES, DeviceSpec, lookup_device
from torchtitan_lite.models.flavors import FLAVORS

CPU = Device("CPU", None, False, {"bf16": 0.4, "fp32": 0.1})


def device(name: str) -> Device:
    spec = lookup_device(name)
    assert isinstance(spec, DeviceSpec)
    return planned_device(spec)


@pytest.fixture(scope="module")
def h200() -> list[Row]:
    return plan_rows(device("H200"), quick=False)[0]


def test_a_gpu_has_the_whole_matrix_of_8b_and_two_small_shapes(h200: list[Row]) -> None:
    matrix = {
        (row.recipe, row.compiled, row.checkpoint, row.batch)
        for row in h200
        if row.shape is LLAMA_8B
    }
    assert len(matrix) == len(RECIPES) * 2 * 3 * 2
    small = [(row.shape.name, row.recipe) for row in h200 if row.shape is not LLAMA_8B]
    assert small == [
        ("1B", "bf16"),
        ("1B", "tensorwise"),
        ("debug", "bf16"),
        ("debug", "tensorwise"),
    ]
    assert len({row.name for row in h200}) == len(h200) == 52


def test_the_most_important_rows_come_first_and_bf16_before_what_is_held_against_it(
    h200: list[Row],
) -> None:
    assert [(row.shape.name, row.checkpoint, row.batch, row.compiled) for row in h200[:4]] == [
        ("8B", "op", 1, True)
    ] * 4
    assert [row.recipe for row in h200[:4]] == list(RECIPES)
    for number, row in enumerate(h200):
        assert dataclasses.replace(row, recipe=BF16) in h200[: number + 1]


def test_rows_that_are_compared_have_the_same_layers(h200: list[Row]) -> None:
    layers: dict[tuple[str, str, int], set[int]] = {}
    for row in h200:
        layers.setdefault((row.shape.name, row.checkpoint, row.batch), set()).add(row.layers)
    assert all(len(counts) == 1 for counts in layers.values())
    assert all(row.layers == row.shape.args.n_layers for row in h200 if row.shape is not LLAMA_8B)


@pytest.mark.parametrize("name", ["H200", "H100 SXM", "B200", "L4"])
def test_the_layers_are_the_most_that_fit(name: str) -> None:
    gpu = device(name)
    layers = fitting_layers(LLAMA_8B, "none", 2, {True, False}, gpu)
    assert gpu.memory_gib is not None
    for more, fits in ((0, True), (1, False)):
        if 0 < layers + more <= LLAMA_8B.args.n_layers:
            estimates = [
                forecast(
                    Row(LLAMA_8B, layers + more, "none", 2, compiled, BF16, 1, 1), gpu
                ).memory_gib
                for compiled in (True, False)
            ]
            assert (max(filter(None, estimates)) <= gpu.memory_gib) is fits


def test_what_cannot_run_is_told_with_its_reason() -> None:
    rows, skipped = plan_rows(device("A100 SXM 80GB"), quick=True)
    assert {row.recipe for row in rows} == {BF16}
    assert set(skipped.values()) == {"the A100 SXM 80GB has no float8 matrix units"}
    predicted = forecast(rows[0], device("A100 SXM 80GB")).tps
    assert predicted is not None and predicted < (forecast(rows[0], device("H100 SXM")).tps or 0.0)
    tiny = Device("tiny", 1.0, True)
    rows, skipped = plan_rows(tiny, quick=True)
    assert {row.shape.name for row in rows} == {"debug"}
    assert set(skipped.values()) == {"not one layer fits the 1 GiB of the tiny"}


def test_rows_are_chosen_by_the_words_of_their_names() -> None:
    rows, _ = plan_rows(CPU, quick=True, only="eager bf16")
    assert [row.name for row in rows] == ["debug 4L seq128 b1 none eager bf16"]
    with pytest.raises(
        ConfigError, match='--only "eager mxfp8" leaves no row: no name has all these words'
    ):
        plan_rows(CPU, quick=True, only="eager mxfp8")


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("gpu", [spec.name for spec in DEVICES[::5]] + [""])
def test_the_config_of_every_row_is_sound(
    gpu: str, quick: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, _ = plan_rows(device(gpu) if gpu else CPU, quick=quick)
    for row in rows:
        monkeypatch.setitem(FLAVORS, row.flavor, row.args)
        config = row.config("/tmp/run", peak_tflops_bf16=0.5)
        assert (
            check_config(profiled(config), world_size=1) == check_config(config, world_size=1) == []
        )
        assert (
            config.training.steps == row.steps and config.training.microbatch_tokens == row.tokens
        )
        assert config.float8.enable_float8_linear is (row.recipe != BF16)


def test_planning_leaves_the_flavors_as_they_are(h200: list[Row]) -> None:
    assert not [name for name in FLAVORS if name.startswith("bench")]
    assert h200[0].flavor not in FLAVORS


def test_a_forecast_knows_what_float8_gains_and_on_cpu_only_how_long_it_takes() -> None:
    bf16, float8 = (
        forecast(Row(LLAMA_8B, 4, "op", 1, True, recipe, 2, 8), device("H200"))
        for recipe in RECIPES[:2]
    )
    assert bf16.tps and float8.tps and float8.tps > bf16.tps
    assert bf16.flops_by_precision["fp8"] == 0 < float8.flops_by_precision["fp8"]
    assert bf16.step_s == pytest.approx(8192 / bf16.tps)
    on_cpu = forecast(Row(DEBUG, 6, "none", 2, True, "tensorwise", 2, 8), CPU)
    assert on_cpu.tps is on_cpu.memory_gib is None
    assert on_cpu.flops_by_precision["fp32"] > 0 == on_cpu.flops_by_precision["fp8"]
    assert on_cpu.overhead_s == bench_plan.CPU_TIMING.start_s + bench_plan.CPU_TIMING.compile_s


def test_the_page_says_what_runs_are_taken_to_need() -> None:
    timing = bench_plan.GPU_TIMING
    page = (Path(__file__).parents[2] / "docs/performance.md").read_text()
    assert (
        f"Compilation is taken to need {timing.compile_s:g} s a row and\na start {timing.start_s:g} s"
        in page
    )


def test_a_profile_is_of_the_first_float8_row_and_its_bf16_row(h200: list[Row]) -> None:
    assert profiled_rows(h200) == h200[:2]
    assert profiled_rows(h200[:1]) == h200[:1]
    assert profiled_rows(h200[2:4]) == h200[2:3]
