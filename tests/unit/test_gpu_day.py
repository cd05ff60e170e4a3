"""A GPU day: constants from times, and what is kept of parts that end in any way."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gpu_day
import pytest
from gpu_day import OUT_OF_TIME, PARTS, Part, run_day
from gpu_day_tables import format_results
from kernel_rates import PREDICTED, build_reference, derive_rates
from kernel_times import FLAVOR, MATMULS, TOKENS, prepare
from sample_plans import H100

from torchtitan_lite.errors import ConfigError
from torchtitan_lite.models.flavors import FLAVORS

TRUE = {
    "bf16_matmul": 0.71,
    "fp8_matmul": 0.62,
    "slow_accumulation": 1.3,
    "row_scales": 1.06,
    "matmul_seconds": 6e-6,
    "attention_cudnn": 0.55,
    "attention_flash": 0.3,
    "attention_flex": 0.25,
    "contiguous": 0.91,
    "transposing": 0.71,
    "strided": 0.22,
    "kernel_seconds": 1.5e-6,
    "host_seconds_per_kernel": 5e-6,
}
NAME = "NVIDIA H100 80GB HBM3"


def timed(**rates: float) -> list[dict[str, Any]]:
    """What would be measured on a GPU with these rates."""
    roofline = build_reference(H100)
    at = replace(roofline, rates=replace(roofline.rates, **rates))
    described = [each for each, _ in prepare(FLAVORS[FLAVOR], TOKENS)]
    described += [{"kind": "host_seconds_per_kernel", "what": "launch", "count": 1, "sizes": {}}]
    return [
        each | {"seconds": PREDICTED[each["kind"]](at, each["sizes"])}
        for each in described
        if each["kind"] in PREDICTED
    ]


def test_rates_are_recovered_from_the_times_that_the_planner_predicts_with_them() -> None:
    found, implausible = derive_rates(timed(**TRUE), H100)
    assert found == pytest.approx(TRUE, rel=1e-6)
    assert implausible == {}


def test_a_fraction_is_without_the_loss_of_the_last_wave_of_tiles() -> None:
    # 19 x 7 tiles on 132 multiprocessors take 2 waves, of which the second has one tile.
    sizes = {"rows": 19 * 128, "columns": 7 * 128, "inner": 256}
    wave_s = 2 * 128**2 * 256 / (989e12 * 0.5 / 132)
    matmul_seconds = 4e-6  # as published
    found, _ = derive_rates(
        [
            {
                "kind": "bf16_matmul",
                "what": "19 x 7 tiles",
                "count": 1,
                "sizes": sizes,
                "seconds": 2 * wave_s + matmul_seconds,
            }
        ],
        H100,
    )
    assert found == pytest.approx({"bf16_matmul": 0.5})


def test_large_matmuls_count_as_often_as_a_step_has_them() -> None:
    # Half of the speed in the seven linears of 32 blocks hardly counts beside one projection's.
    times = [each for each in timed(**TRUE) if each["kind"] == "bf16_matmul"]
    slow = [
        each | {"seconds": 2 * each["seconds"]} if each["what"].startswith("w") else each
        for each in times
    ]
    once = [each | {"count": 1} for each in slow]
    fractions = [derive_rates(each, H100)[0]["bf16_matmul"] for each in (slow, once)]
    assert 0.34 < fractions[0] < 0.4 < 0.5 < fractions[1]


@pytest.mark.parametrize(
    ("name", "factor", "figure"),
    [
        ("bf16_matmul", 0.5, "1.4"),
        ("contiguous", 0.1, ""),
        ("attention_flash", 1e-9, "no value"),
        ("host_seconds_per_kernel", 0.0, "no value"),
        ("kernel_seconds", 1e4, "0.015"),
    ],
)
def test_what_no_device_can_reach_is_left_out_with_the_figure(
    name: str, factor: float, figure: str
) -> None:
    times = timed(**TRUE)
    wrong = [
        each | {"seconds": factor * each["seconds"]} if each["kind"] == name else each
        for each in times
    ]
    found, implausible = derive_rates(wrong, H100)
    assert name not in found
    assert implausible[name].startswith(figure)


def test_slowdowns_of_float8_are_left_out_where_its_rate_is_implausible() -> None:
    times = [
        each | {"seconds": each["seconds"] / 2} if each["kind"] == "fp8_matmul" else each
        for each in timed(**TRUE)
    ]
    found, implausible = derive_rates(times, H100)
    assert not {"fp8_matmul", "slow_accumulation", "row_scales"} & found.keys()
    assert list(implausible) == ["fp8_matmul"]


def test_kinds_that_were_not_measured_are_left_out() -> None:
    some = [each for each in timed(**TRUE) if each["kind"] in ("contiguous", "fp8_matmul")]
    failed = {"kind": "strided", "what": "x", "count": 1, "sizes": {}, "error": "no compiler"}
    found, implausible = derive_rates([*some, failed], H100)
    assert found.keys() == {"contiguous", "fp8_matmul"} and implausible == {}


def test_every_linear_of_a_block_has_its_three_matmuls_in_every_kind() -> None:
    described = [each for each, _ in prepare(FLAVORS[FLAVOR], TOKENS)]
    flops: dict[str, int] = dict.fromkeys(MATMULS, 0)
    for each in described:
        if each["kind"] in MATMULS:
            rows, columns, inner = each["sizes"].values()
            flops[each["kind"]] += 2 * each["count"] * rows * columns * inner
    # 8B: 6 FLOPs a token for each weight of its linears, of which the projection is kept in bf16.
    projection, weights = 4096 * 128256, 32 * 218_103_808
    assert flops.pop("bf16_matmul") == 6 * 8192 * (weights + projection)
    assert set(flops.values()) == {6 * 8192 * weights}


# The day itself, with programs in place of its parts.


CONTIGUOUS = next(json.dumps(each) for each in timed(**TRUE) if each["kind"] == "contiguous")
WRITE = f"stream = open('kernels.jsonl', 'w'); stream.write({CONTIGUOUS!r}); stream.flush()\n"
SLEEP = "import time; time.sleep(100)"


def fake_part(share: float, code: str, *, before: str = "") -> Part:
    """A part whose process runs `code` in the folder; `before` is in its file already."""

    def command(folder: Path, seconds: float) -> list[str]:
        (folder / "kernels.jsonl").write_text(before)
        return [sys.executable, "-c", f"import os; os.chdir({str(folder)!r})\n{code}"]

    return Part(share, command, PARTS["kernels"].read)


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(gpu_day.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu_day.torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(gpu_day, "device_name", lambda: NAME)
    monkeypatch.setattr(gpu_day, "END_S", 1.0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,4")
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def parts_of(monkeypatch: pytest.MonkeyPatch, **parts: Part) -> None:
    monkeypatch.setattr(gpu_day, "PARTS", parts)


def test_each_part_is_written_at_once_and_rates_are_for_the_planner(
    on_a_gpu: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    look = "import shutil; shutil.copy('results.json', 'seen.json'); 1 / 0"
    parts_of(monkeypatch, kernels=fake_part(0.5, WRITE), second=fake_part(0.5, look))
    results = run_day(tmp_path / "day", budget_s=60, only=[])
    seen = json.loads((tmp_path / "day/seen.json").read_text())
    assert seen["ended_by"] == "running" and list(seen["parts"]) == ["kernels"]
    assert seen["rates"] == pytest.approx({"contiguous": 0.91}, rel=1e-2)
    assert results["ended_by"] == "done"
    assert results["parts"]["second"]["status"] == "failed with exit code 1"
    assert json.loads((tmp_path / "day/results.json").read_text()) == results
    assert (results["gpus"], os.environ["CUDA_VISIBLE_DEVICES"]) == (8, "3")
    with pytest.raises(ConfigError, match="has results already; name another folder"):
        run_day(tmp_path / "day", budget_s=60, only=[])


def test_a_part_that_is_out_of_time_keeps_what_it_has_and_the_next_one_runs(
    on_a_gpu: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    late = fake_part(0.1, SLEEP, before=CONTIGUOUS)
    parts_of(monkeypatch, kernels=late, second=fake_part(0.9, "pass"))
    results = run_day(tmp_path, budget_s=20, only=[])
    kernels, second = results["parts"].values()
    assert kernels["status"] == OUT_OF_TIME and len(kernels["measurements"]) == 1
    assert second["status"] == "done"


def test_an_interrupted_day_keeps_what_it_has(
    on_a_gpu: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    parts_of(monkeypatch, kernels=fake_part(0.5, WRITE + SLEEP), second=fake_part(0.5, "pass"))

    def interrupt() -> None:
        while not (file := tmp_path / "kernels.jsonl").exists() or not file.read_text():
            threading.Event().wait(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    results = run_day(tmp_path, budget_s=100, only=[])
    assert results["ended_by"] == "stopped by a signal" and list(results["parts"]) == ["kernels"]
    assert len(results["parts"]["kernels"]["measurements"]) == 1
    assert json.loads((tmp_path / "results.json").read_text()) == results


def test_a_day_needs_a_known_gpu(
    on_a_gpu: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(gpu_day, "device_name", lambda: "NVIDIA T4")
    with pytest.raises(ConfigError, match="NVIDIA T4: no data sheet with a float8 peak is known"):
        run_day(tmp_path, budget_s=1, only=[])
    monkeypatch.setattr(gpu_day.torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="a GPU is measured, and there is none here"):
        run_day(tmp_path, budget_s=1, only=[])


def test_what_the_parts_wrote_is_read(tmp_path: Path) -> None:
    (tmp_path / "tests.log").write_text(
        "tests/gpu/test_a.py::test_x[a b] PASSED [ 10%]\n"
        "tests/gpu/test_a.py::test_y FAILED [ 20%]\n"
        "tests/gpu/test_a.py::test_z SKIPPED (no) [ 30%]\n"
        "FAILED tests/gpu/test_a.py::test_y - assert 0\n"
    )
    assert PARTS["tests"].read(tmp_path) == {
        "outcomes": {"passed": 1, "failed": 1, "skipped": 1},
        "failed": ["tests/gpu/test_a.py::test_y"],
    }

    steps = range(1, 13)  # the first two are not counted
    times = [{"step": n, "step_time_s": 9.0 if n < 3 else n / 10, "tps": n} for n in steps]
    others = dict.fromkeys(("tflops", "mfu", "mfu_achievable", "memory_gib", "loss"), 1.0)
    (tmp_path / "scaled").mkdir()
    (tmp_path / "scaled/metrics.jsonl").write_text(
        "\n".join(json.dumps(each | others) for each in times)
    )
    figures = gpu_day.read_scaled(tmp_path)
    assert (figures["tps"], figures["step_time_s"]) == (7.5, pytest.approx(0.75))

    trace = tmp_path / "profile/profile_traces/step-00000010/rank0_trace.json"
    trace.parent.mkdir(parents=True)
    events = [("kernel", "gemm", 2000), ("kernel", "norm", 500), ("kernel", "gemm", 1000)]
    events += [("cpu_op", "aten::mm", 9000)]
    trace.write_text(
        json.dumps({"traceEvents": [{"cat": c, "name": n, "dur": d} for c, n, d in events]})
    )
    assert PARTS["profile"].read(tmp_path) == {
        "trace": "profile/profile_traces/step-00000010/rank0_trace.json",
        "kernels": 3,
        "ms": 3.5,
        "top": [{"name": "gemm", "calls": 2, "ms": 3.0}, {"name": "norm", "calls": 1, "ms": 0.5}],
    }


def test_the_tables_show_what_was_measured(tmp_path: Path) -> None:
    sizes = {"rows": 4096, "columns": 1000, "inner": 500}
    gradient = {"what": "w2: grad_input", "count": 2, "sizes": sizes}
    measurements = [
        {"kind": "outer_vector", "seconds": 0.002, **gradient},
        {"kind": "rescaled", "seconds": 0.004, **gradient},
        {"kind": "contiguous", "what": "copy", "count": 1, "sizes": {}, "seconds": 1.5e-4},
        {"kind": "attention_cudnn", "what": "a", "count": 1, "sizes": {}, "error": "no cuDNN"},
    ]
    part = {"status": "done", "seconds": 3.0}
    row = {"name": "8B row", "status": "done", "tps": 12345.0, "mfu": 40.25}
    results = {
        "device": NAME,
        "gpus": 8,
        "date": "2026-11-23",
        "commit": "abc",
        "versions": {},
        "ended_by": "done",
        "seconds": 9.0,
        "rates": {"contiguous": 0.44},
        "implausible": {"strided": "7 explains the times"},
        "parts": {
            "kernels": part | {"measurements": measurements},
            "tests": part | {"outcomes": {"passed": 3}, "failed": []},
            "rows": part | {"rows": [row], "skipped": [{"name": "other", "reason": "no time"}]},
            "scaled": part | {"tps": 23456.0},
            "profile": part | {"unread": "nothing was measured"},
        },
    }
    file = tmp_path / "results.json"
    file.write_text(json.dumps(results))
    command = [sys.executable, gpu_day.__file__, "table", str(file)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    assert result.stdout.rstrip("\n") == format_results(results)
    lines = [[cell.strip() for cell in line.split("|")] for line in result.stdout.splitlines()]
    cells = [cell for line in lines for cell in line]
    # 4.096 GFLOP in 2 and 4 ms.
    assert ["", "w2: grad_input", "4096 x 1000 x 500", "2", "1", ""] in lines
    assert any("outer_vector 4.0 ms, rescaled 8.0 ms, ratio 0.500" in cell for cell in cells)
    assert ["", "copy", "contiguous", "150.0", ""] in lines
    assert "attention_cudnn, a: no cuDNN" in cells
    assert ["", "contiguous", "0.44", "0.88", "0.500"] in [line[:5] for line in lines]
    assert "strided: left out: 7 explains the times" in cells
    assert any("scaled in their matmuls: tps 23,456, bf16_ratio -" in cell for cell in cells)
    assert "3 passed" in cells and "other: no time" in cells
    assert ["", "8B row", "12,345", "-", "-", "40.2", "-", "-", "-", ""] in lines

    file.write_text("{}")
    failed = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert failed.returncode == 2 and "name a results.json of run" in failed.stderr
