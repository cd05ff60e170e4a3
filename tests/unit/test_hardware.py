import pytest
import torch

from torchtitan_lite.metrics import hardware
from torchtitan_lite.metrics.hardware import (
    Peaks,
    lookup_peaks,
    measure_cpu_peaks,
    peak_memory_gib,
    resolve_peaks,
    total_memory_gib,
)

H100 = {"bf16": 989, "fp8": 1979}


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA A100-SXM4-40GB", {"bf16": 312}),
        ("NVIDIA A100-SXM4-80GB", {"bf16": 312}),
        ("NVIDIA A100-PCIE-40GB", {"bf16": 312}),
        ("NVIDIA A100 80GB PCIe", {"bf16": 312}),
        ("NVIDIA H100 80GB HBM3", H100),
        ("NVIDIA H100 SXM", H100),
        ("NVIDIA H200", H100),
        ("NVIDIA H200 SXM", H100),
        ("NVIDIA H100 PCIe", {"bf16": 756, "fp8": 1513}),
        ("NVIDIA H100 NVL", {"bf16": 835, "fp8": 1670}),
        ("NVIDIA H20", {"bf16": 148, "fp8": 296}),
        ("NVIDIA B200", {"bf16": 2250, "fp8": 4500}),  # dense: the sparse figures are double
        ("NVIDIA B300 SXM6 AC", {"bf16": 2250, "fp8": 4500}),
        ("NVIDIA GB200", {"bf16": 2500, "fp8": 5000}),
        ("NVIDIA GB300", {"bf16": 2500, "fp8": 5000}),
        ("AMD Instinct MI300X", {"bf16": 1307, "fp8": 2615}),
        ("AMD Instinct MI325X", {"bf16": 1307, "fp8": 2615}),
        ("AMD Instinct MI350X", {"bf16": 2300, "fp8": 4600}),
        ("AMD Instinct MI355X", {"bf16": 2500, "fp8": 5000}),
        ("NVIDIA L40S", {"bf16": 362, "fp8": 733}),
        ("nvidia l40s", {"bf16": 362, "fp8": 733}),
        ("NVIDIA L40", {"bf16": 181, "fp8": 362}),
        ("NVIDIA L4", {"bf16": 121, "fp8": 242}),
        ("NVIDIA GeForce RTX 4090", {"bf16": 165, "fp8": 330}),
        ("NVIDIA GeForce RTX 5090", {"bf16": 209.5, "fp8": 419}),
    ],
)
def test_published_peaks(name, tflops):
    assert lookup_peaks(name) == Peaks(name, "published", tflops)


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA H100 80GB HBM2e",  # sold as PCIe and as SXM: the name does not tell which
        "NVIDIA H100 64GB HBM2e",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",  # a slice of the GPU
        "NVIDIA H100",
        "NVIDIA H200 NVL",
        "NVIDIA GH200 480GB",
        "NVIDIA H800",
        "NVIDIA A100X",
        "NVIDIA A10",
        "NVIDIA A100-SXM-64GB",  # has more cores than the 40 and 80 GB ones
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA RTX 4000 Ada Generation",
        "NVIDIA L400",
        "AMD Instinct MI300A",
        "Tesla T4",
        "",
    ],
)
def test_no_device_gets_the_peak_of_another(name):
    assert lookup_peaks(name) == Peaks(name, "unknown", {})


def test_cpu_peaks_are_measured(monkeypatch):
    monkeypatch.setattr(hardware, "_MEASURE_SECONDS", 0.0001)
    peaks = resolve_peaks(torch.device("cpu"))
    assert (peaks.device_name, peaks.origin) == ("CPU", "measured")
    assert peaks.tflops.keys() == {"bf16", "fp32"}
    assert all(tflops > 0 for tflops in peaks.tflops.values())


def test_a_measured_peak_is_the_median_matmul(monkeypatch):
    seconds = iter([0.0, 0.1, 1.0, 1.4, 2.0, 2.2])  # pairs: three matmuls of 0.1, 0.4 and 0.2 s
    monkeypatch.setattr(hardware.time, "perf_counter", lambda: next(seconds))
    monkeypatch.setattr(hardware, "_MEASURE_SECONDS", 0.6)
    assert hardware._matmul_tflops(torch.float32) == pytest.approx(2 * 1024**3 / 0.2 / 1e12)


def test_measuring_leaves_the_random_state_alone(monkeypatch):
    monkeypatch.setattr(hardware, "_MEASURE_SECONDS", 0.0001)
    before = torch.get_rng_state()
    measure_cpu_peaks()
    assert torch.equal(torch.get_rng_state(), before)


def test_a_gpu_is_looked_up_by_its_name(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: {"cuda:1": "NVIDIA L4"}[str(device)])
    assert resolve_peaks(torch.device("cuda", 1)) == lookup_peaks("NVIDIA L4")


def test_the_line_for_the_log():
    assert str(lookup_peaks("NVIDIA H200")) == "NVIDIA H200: published peaks bf16 989, fp8 1979 TFLOPS"
    assert str(lookup_peaks("Tesla T4")) == "Tesla T4: peaks unknown, so mfu is n/a"
    cpu = Peaks("CPU", "measured", {"bf16": 1.00132, "fp32": 0.147})
    assert str(cpu) == "CPU: measured peaks bf16 1.001, fp32 0.147 TFLOPS"


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
