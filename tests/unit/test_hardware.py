"""Peaks of a device, given, published or measured, and memory."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from torchtitan_lite.config import MetricsConfig
from torchtitan_lite.metrics import hardware
from torchtitan_lite.metrics.hardware import (
    Peaks,
    find_peaks,
    measure_peak,
    peak_memory_gib,
    total_memory_gib,
)

CPU, GPU = torch.device("cpu"), torch.device("cuda", 1)
FILE = Path("peaks.json")
ON_CPU, ON_GPU = {"bf16": 0.2, "fp32": 0.1}, {"bf16": 700.0, "fp8": 1300.0}


@pytest.fixture(autouse=True)
def measured(monkeypatch):
    def measure(precisions, *, file):
        assert file == FILE
        return {precision: ON_CPU[precision] for precision in precisions}

    monkeypatch.setattr(hardware, "find_cpu_peaks", measure)
    monkeypatch.setattr(hardware, "measure_peak", lambda precision, device: ON_GPU[precision])


def find(device: torch.device, *precisions: str, **metrics) -> Peaks:
    return find_peaks(device, MetricsConfig(**metrics), precisions=precisions, file=FILE)


# ----- find_peaks -----


def test_find_peaks_measures_on_cpu_what_is_not_given_or_all_if_asked_to():
    assert find(CPU, "bf16", "fp32") == Peaks("CPU", measured=ON_CPU, approximate=True)
    given, bf16 = {"peak_tflops_bf16": 1.0}, {"bf16": 1.0}
    peaks = find(CPU, "bf16", "fp32", **given)
    assert peaks == Peaks("CPU", measured={"fp32": 0.1}, given=bf16, approximate=True)
    assert find(CPU, "bf16", **given) == Peaks("CPU", given=bf16)
    both = find(CPU, "bf16", **given, measure_peak=True)
    assert both == Peaks("CPU", measured={"bf16": 0.2}, given=bf16)


@pytest.mark.parametrize(
    ("name", "metrics", "origins", "tflops"),
    [
        ("NVIDIA L4", {}, {}, {"bf16": 121, "fp8": 242}),
        ("NVIDIA L4", {"measure_peak": True}, {"measured": ON_GPU}, {"bf16": 121, "fp8": 242}),
        (
            "NVIDIA L4",
            {"peak_tflops_fp8": 200.0, "measure_peak": True},
            {"measured": ON_GPU, "given": {"fp8": 200.0}},
            {"bf16": 121, "fp8": 200.0},
        ),
        ("Tesla T4", {}, {}, {}),
        ("Tesla T4", {"measure_peak": True}, {"measured": ON_GPU}, ON_GPU),
    ],
)
def test_find_peaks_of_a_gpu_are_given_else_published_else_measured(
    monkeypatch, name, metrics, origins, tflops
):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: {GPU: name}[device])
    peaks = find(GPU, "bf16", "fp8", **metrics)
    published = {"bf16": 121, "fp8": 242} if name == "NVIDIA L4" else {}
    assert peaks == Peaks(name, published=published, **origins)
    assert peaks.tflops == tflops


def test_peaks_are_described_with_their_origins():
    assert "unknown" in str(Peaks("Tesla T4"))
    peaks = Peaks("CPU", measured={"bf16": 1.00132, "fp32": 0.147}, given={"bf16": 2.0})
    figures = "bf16 1.001 (measured), fp32 0.147 (measured), bf16 2 (given)"
    assert figures in str(peaks) and "approximate" not in str(peaks)
    assert "approximate" in str(replace(peaks, approximate=True))


# ----- measure_peak -----
def test_measure_peak_of_a_gpu_is_the_median_of_ten_matmuls_at_a_time(monkeypatch):
    # Three times ten matmuls, of 0.1, 0.4 and 0.2 s.
    seconds = iter([0.0, 0.1, 1.0, 1.4, 2.0, 2.2])
    monkeypatch.setattr(hardware.time, "perf_counter", lambda: next(seconds))
    monkeypatch.setattr(hardware, "_MEASURE_SECONDS", 0.6)
    monkeypatch.setattr(hardware, "_GPU_MATMULS", (64, 10))
    monkeypatch.setattr(hardware, "synchronize", lambda device: None)
    generator, randn = torch.Generator(), torch.randn
    monkeypatch.setattr(torch, "Generator", lambda device: generator)
    monkeypatch.setattr(torch, "randn", lambda *shape, generator, device: randn(*shape))
    assert measure_peak("fp32", GPU) == pytest.approx(10 * 2 * 64**3 / 0.2 / 1e12)


# ----- peak_memory_gib, total_memory_gib -----


def test_peak_memory_gib_on_cpu_is_this_processs_count_in_kib(monkeypatch):
    own = {hardware.resource.RUSAGE_SELF: SimpleNamespace(ru_maxrss=3 * 2**20)}
    monkeypatch.setattr(hardware.resource, "getrusage", own.__getitem__)
    assert peak_memory_gib(CPU) == 3.0
    assert total_memory_gib(CPU) is None


def test_peak_memory_gib_of_a_gpu_is_what_torch_reserved(monkeypatch):
    properties = SimpleNamespace(total_memory=80 * 2**30)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", {GPU: 3 * 2**30}.__getitem__)
    monkeypatch.setattr(torch.cuda, "get_device_properties", {GPU: properties}.__getitem__)
    assert peak_memory_gib(GPU) == 3.0
    assert total_memory_gib(GPU) == 80.0
