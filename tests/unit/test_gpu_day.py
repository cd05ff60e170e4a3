"""A GPU day: constants from times, what is kept of its parts, and its tables."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import gpu_day
import pytest
from gpu_day import OUT_OF_TIME, PARTS, Part, run_day
from gpu_day_tables import format_results
from kernel_rates import PREDICTED, build_reference, derive_rates
from kernel_times import FLAVOR, TOKENS, prepare
from sample_plans import H100

from torchtitan_lite.catalog.flavors import FLAVORS

pytestmark = pytest.mark.slow

TRUE = {"bf16_matmul": 0.71, "fp8_matmul": 0.62, "slow_accumulation": 1.3, "row_scales": 1.06}
TRUE |= {"attention_cudnn": 0.55, "attention_flash": 0.3, "attention_flex": 0.25}
TRUE |= {"contiguous": 0.91, "kernel_seconds": 6e-6}


@pytest.fixture(scope="module")
def times() -> list[dict[str, Any]]:
    """What would be measured on a GPU with the rates TRUE."""
    roofline = build_reference(H100)
    at = replace(roofline, rates=replace(roofline.rates, **TRUE))
    return [
        each | {"seconds": PREDICTED[each["kind"]](at, each["sizes"])}
        for each, _ in prepare(FLAVORS[FLAVOR], TOKENS)
        if each["kind"] in PREDICTED
    ]


# ----- derive_rates -----
def test_rates_are_recovered_from_the_times_that_the_planner_predicts_with_them(times) -> None:
    found, implausible = derive_rates(times, H100)
    assert found == pytest.approx(TRUE, rel=1e-6) and implausible == {}
    fast = [each | {"seconds": each["seconds"] / 2} for each in times]
    found, implausible = derive_rates(fast, H100)
    assert "fp8_matmul" in implausible and "fp8_matmul" not in found


# ----- run_day, format_results -----
def test_a_day_keeps_what_its_parts_measured(monkeypatch, tmp_path: Path, times) -> None:
    monkeypatch.setattr(gpu_day.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu_day.torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(gpu_day.signal, "signal", lambda *_: None)
    monkeypatch.setattr(gpu_day, "device_name", lambda: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(gpu_day, "END_S", 1.0)

    def fake_part(share: float, code: str) -> Part:
        command = [sys.executable, "-c", f"import time; {code}"]
        return Part(share, lambda folder, seconds: command, PARTS["kernels"].read)

    parts = {"kernels": fake_part(0.1, "time.sleep(100)"), "failing": fake_part(0.9, "1 / 0")}
    monkeypatch.setattr(gpu_day, "PARTS", parts)
    contiguous = next(json.dumps(each) for each in times if each["kind"] == "contiguous")
    (tmp_path / "kernels.jsonl").write_text(contiguous)
    results = run_day(tmp_path, budget_s=20, only=[])
    assert json.loads((tmp_path / "results.json").read_text()) == results
    kernels, failing = results["parts"].values()
    assert kernels["status"] == OUT_OF_TIME
    assert failing["status"] == "failed with exit code 1"
    assert results["rates"] == pytest.approx({"contiguous": 0.91}, rel=2e-2)

    # 4.096 GFLOP in 2 ms, and the rate beside the published one.
    gradient = {"what": "w2: grad_input", "count": 2}
    gradient["sizes"] = {"rows": 4096, "columns": 1000, "inner": 500}
    kernels["measurements"].append({"kind": "row_scales", "seconds": 0.002, **gradient})
    shown = {"parts": {"kernels": kernels}, "rates": {"contiguous": 0.44}}
    text = format_results(results | shown)
    lines = [[cell.strip() for cell in line.split("|")] for line in text.splitlines()]
    assert ["", "w2: grad_input", "4096 x 1000 x 500", "2", ""] in lines
    assert ["contiguous", "0.44", "0.88", "0.500"] in [line[1:5] for line in lines]
