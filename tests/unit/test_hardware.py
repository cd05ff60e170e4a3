from dataclasses import replace
from pathlib import Path

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

CPU = torch.device("cpu")


FILE = Path("peaks.json")


@pytest.fixture(autouse=True)
def measured_cpu(monkeypatch):
    def measure(precisions, *, file):
        assert file == FILE
        return {precision: {"bf16": 0.2, "fp32": 0.1}[precision] for precision in precisions}

    monkeypatch.setattr(hardware, "find_cpu_peaks", measure)


def resolve(device: torch.device, metrics: MetricsConfig, *precisions: str) -> Peaks:
    return find_peaks(device, metrics, precisions=precisions, file=FILE)


def test_cpu_peaks_of_the_precisions_in_use_are_measured_and_approximate():
    peaks = resolve(CPU, MetricsConfig(), "bf16", "fp32")
    assert peaks == Peaks("CPU", measured={"bf16": 0.2, "fp32": 0.1}, approximate=True)


def test_a_gpus_peak_is_the_median_of_ten_matmuls_at_a_time(monkeypatch):
    seconds = iter(
        [0.0, 0.1, 1.0, 1.4, 2.0, 2.2]
    )  # pairs: three times ten matmuls, of 0.1, 0.4 and 0.2 s
    monkeypatch.setattr(hardware.time, "perf_counter", lambda: next(seconds))
    monkeypatch.setattr(hardware, "_MEASURE_SECONDS", 0.6)
    monkeypatch.setattr(hardware, "_GPU_MATMULS", (64, 10))
    monkeypatch.setattr(hardware, "synchronize", lambda device: None)
    generator, randn = torch.Generator(), torch.randn
    monkeypatch.setattr(torch, "Generator", lambda device: generator)
    monkeypatch.setattr(torch, "randn", lambda *shape, generator, device: randn(*shape))
    assert measure_peak("fp32", torch.device("cuda")) == pytest.approx(10 * 2 * 64**3 / 0.2 / 1e12)


def gpu(monkeypatch, name: str) -> torch.device:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: {"cuda:1": name}[str(device)])
    monkeypatch.setattr(
        hardware,
        "measure_peak",
        lambda precision, device: {"bf16": 700.0, "fp8": 1300.0}[precision],
    )
    return torch.device("cuda", 1)


def test_a_gpu_is_looked_up_by_its_name(monkeypatch):
    device = gpu(monkeypatch, "NVIDIA L4")
    peaks = resolve(device, MetricsConfig(), "bf16", "fp8")
    assert peaks == Peaks("NVIDIA L4", published={"bf16": 121, "fp8": 242})
    assert peaks.tflops == {"bf16": 121, "fp8": 242}


def test_a_given_peak_goes_before_the_published_one_and_that_before_a_measured_one(monkeypatch):
    device = gpu(monkeypatch, "NVIDIA L4")
    metrics = MetricsConfig(peak_tflops_fp8=200.0, measure_peak=True)
    peaks = resolve(device, metrics, "bf16", "fp8")
    assert peaks.measured == {"bf16": 700.0, "fp8": 1300.0}
    assert peaks.tflops == {"bf16": 121, "fp8": 200.0}
    both = MetricsConfig(peak_tflops_bf16=100.0, peak_tflops_fp8=200.0)
    assert resolve(device, both).tflops == {"bf16": 100.0, "fp8": 200.0}


def test_an_unknown_gpu_has_the_peaks_that_were_measured_and_no_others(monkeypatch):
    device = gpu(monkeypatch, "Tesla T4")
    assert resolve(device, MetricsConfig(), "bf16").tflops == {}
    measured = resolve(device, MetricsConfig(measure_peak=True), "bf16")
    assert measured == Peaks("Tesla T4", measured={"bf16": 700.0})  # which is not approximate


def test_the_line_for_the_log_says_where_each_peak_comes_from():
    assert str(Peaks("Tesla T4")) == "Tesla T4: peaks unknown, so mfu is n/a"
    peaks = Peaks("CPU", measured={"bf16": 1.00132, "fp32": 0.147}, given={"bf16": 2.0})
    figures = "peaks in TFLOPS: bf16 1.001 (measured), fp32 0.147 (measured), bf16 2 (given)"
    assert str(peaks) == f"CPU: {figures}"
    assert str(replace(peaks, approximate=True)) == f"CPU: approximate {figures}"


def test_cpu_memory_is_the_peak_of_this_process():
    before = peak_memory_gib(torch.device("cpu"))
    block = torch.ones(
        int(before * 2**30), dtype=torch.uint8
    )  # on top of what is held, so more than ever before
    during = peak_memory_gib(torch.device("cpu"))
    del block
    assert before < during < 2 * before + 0.1
    assert peak_memory_gib(torch.device("cpu")) >= during
    assert total_memory_gib(torch.device("cpu")) is None


def test_gpu_memory_is_what_torch_reserved(monkeypatch):
    class Properties:
        total_memory = 80 * 2**30

    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 3 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    assert peak_memory_gib(torch.device("cuda")) == 3.0
    assert total_memory_gib(torch.device("cuda")) == 80.0


def test_on_cpu_a_given_peak_is_not_measured_unless_asked_for():
    given = MetricsConfig(peak_tflops_bf16=1.0)
    peaks = resolve(CPU, given, "bf16", "fp32")
    assert peaks == Peaks("CPU", measured={"fp32": 0.1}, given={"bf16": 1.0}, approximate=True)
    assert resolve(CPU, given, "bf16") == Peaks("CPU", given={"bf16": 1.0})
    both = MetricsConfig(peak_tflops_bf16=1.0, measure_peak=True)
    assert resolve(CPU, both, "bf16") == Peaks("CPU", measured={"bf16": 0.2}, given={"bf16": 1.0})
