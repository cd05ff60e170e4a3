import pytest
import torch

from torchtitan_lite.config import MetricsConfig
from torchtitan_lite.metrics import hardware
from torchtitan_lite.metrics.hardware import (
    Peaks,
    measure_peak,
    peak_memory_gib,
    resolve_peaks,
    total_memory_gib,
)

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def short_measurements(monkeypatch):
    monkeypatch.setattr(hardware, "_MEASURE_SECONDS", 0.0001)


def test_cpu_peaks_of_the_precisions_in_use_are_measured():
    peaks = resolve_peaks(CPU, MetricsConfig(), precisions=["bf16", "fp32"])
    assert (peaks.device_name, peaks.published, peaks.given) == ("CPU", {}, {})
    assert peaks.measured.keys() == {"bf16", "fp32"}
    assert all(tflops > 0 for tflops in peaks.measured.values())


def test_a_measured_peak_is_the_median_matmul(monkeypatch):
    seconds = iter([0.0, 0.1, 1.0, 1.4, 2.0, 2.2])  # pairs: three matmuls of 0.1, 0.4 and 0.2 s
    monkeypatch.setattr(hardware.time, "perf_counter", lambda: next(seconds))
    monkeypatch.setattr(hardware, "_MEASURE_SECONDS", 0.6)
    assert measure_peak("fp32", CPU) == pytest.approx(2 * 1024**3 / 0.2 / 1e12)


def test_measuring_leaves_the_random_state_alone():
    before = torch.get_rng_state()
    measure_peak("bf16", CPU)
    assert torch.equal(torch.get_rng_state(), before)


def gpu(monkeypatch, name: str) -> torch.device:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: {"cuda:1": name}[str(device)])
    monkeypatch.setattr(hardware, "measure_peak", lambda precision, device: {"bf16": 700.0, "fp8": 1300.0}[precision])
    return torch.device("cuda", 1)


def test_a_gpu_is_looked_up_by_its_name(monkeypatch):
    device = gpu(monkeypatch, "NVIDIA L4")
    peaks = resolve_peaks(device, MetricsConfig(), precisions=["bf16", "fp8"])
    assert peaks == Peaks("NVIDIA L4", published={"bf16": 121, "fp8": 242})
    assert peaks.tflops == {"bf16": 121, "fp8": 242}


def test_a_given_peak_goes_before_the_published_one_and_that_before_a_measured_one(monkeypatch):
    device = gpu(monkeypatch, "NVIDIA L4")
    metrics = MetricsConfig(peak_tflops_fp8=200.0, measure_peak=True)
    peaks = resolve_peaks(device, metrics, precisions=["bf16", "fp8"])
    assert peaks.measured == {"bf16": 700.0, "fp8": 1300.0}
    assert peaks.tflops == {"bf16": 121, "fp8": 200.0}
    both = MetricsConfig(peak_tflops_bf16=100.0, peak_tflops_fp8=200.0)
    assert resolve_peaks(device, both, precisions=[]).tflops == {"bf16": 100.0, "fp8": 200.0}


def test_an_unknown_gpu_has_the_peaks_that_were_measured_and_no_others(monkeypatch):
    device = gpu(monkeypatch, "Tesla T4")
    assert resolve_peaks(device, MetricsConfig(), precisions=["bf16"]).tflops == {}
    assert resolve_peaks(device, MetricsConfig(measure_peak=True), precisions=["bf16"]).tflops == {"bf16": 700.0}


def test_the_line_for_the_log_says_where_each_peak_comes_from():
    assert str(Peaks("Tesla T4")) == "Tesla T4: peaks unknown, so mfu is n/a"
    peaks = Peaks("CPU", measured={"bf16": 1.00132, "fp32": 0.147}, given={"bf16": 2.0})
    assert str(peaks) == "CPU: peaks in TFLOPS: bf16 1.001 (measured), fp32 0.147 (measured), bf16 2 (given)"


def test_cpu_memory_is_the_peak_of_this_process():
    before = peak_memory_gib(torch.device("cpu"))
    block = torch.ones(int(before * 2**30), dtype=torch.uint8)  # on top of what is held, so more than ever before
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
    assert resolve_peaks(CPU, given, precisions=["bf16", "fp32"]).measured.keys() == {"fp32"}
    both = MetricsConfig(peak_tflops_bf16=1.0, measure_peak=True)
    assert resolve_peaks(CPU, both, precisions=["bf16"]).measured.keys() == {"bf16"}
