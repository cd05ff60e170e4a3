"""The data sheets: every row by the names that torch and the vendors use, and every name that is
another device."""

import pytest

from torchtitan_lite.config import MetricsConfig
from torchtitan_lite.metrics.devices import DEVICES, DeviceSpec, lookup_device
from torchtitan_lite.metrics.hardware import published_peaks

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
        ("H100 SXM", H100),  # as a user writes it
        ("rtx 4090", {"bf16": 165, "fp8": 330}),
    ],
)
def test_published_peaks(name, tflops):
    assert published_peaks(lookup_device(name)) == tflops


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
        "H100",
        "NVIDIA",
    ],
)
def test_no_device_gets_the_data_sheet_of_another(name):
    assert lookup_device(name) is None
    assert published_peaks(lookup_device(name)) == {}


@pytest.mark.parametrize(
    ("name", "memory_gib", "bandwidth_tb_s"),
    [
        ("NVIDIA A100-SXM4-40GB", 40, 1.555),
        ("NVIDIA A100-SXM4-80GB", 80, 2.039),
        ("NVIDIA A100-PCIE-40GB", 40, 1.555),
        ("NVIDIA A100 80GB PCIe", 80, 1.935),
        ("NVIDIA H100 80GB HBM3", 80, 3.35),
        ("NVIDIA H100 PCIe", 80, 2.0),
        ("NVIDIA H100 NVL", 94, 3.9),
        ("NVIDIA H200", 141, 4.8),
        ("NVIDIA H20", 96, 4.0),
        ("NVIDIA B200", 180, 8.0),
        ("NVIDIA B300 SXM6 AC", 288, 8.0),
        ("NVIDIA GB200", 186, 8.0),
        ("NVIDIA GB300", 288, 8.0),
        ("AMD Instinct MI300X", 192, 5.3),
        ("AMD Instinct MI325X", 256, 6.0),
        ("AMD Instinct MI350X", 288, 8.0),
        ("AMD Instinct MI355X", 288, 8.0),
        ("NVIDIA L40S", 45, 0.864),
        ("NVIDIA L40", 45, 0.864),
        ("NVIDIA L4", 22.5, 0.3),
        ("NVIDIA GeForce RTX 4090", 24, 1.008),
        ("NVIDIA GeForce RTX 5090", 32, 1.792),
    ],
)
def test_memory(name, memory_gib, bandwidth_tb_s):
    device = lookup_device(name)
    assert isinstance(device, DeviceSpec)
    assert (device.memory_gib, device.bandwidth_tb_s) == (memory_gib, bandwidth_tb_s)


@pytest.mark.parametrize(
    ("name", "architecture", "multiprocessors", "link_gb_s", "node_devices", "network_gb_s"),
    [
        ("A100 SXM 40GB", "Ampere", 108, 300, 8, 25),
        ("A100 SXM 80GB", "Ampere", 108, 300, 8, 25),
        ("A100 PCIe 40GB", "Ampere", 108, 32, 8, 25),
        ("A100 PCIe 80GB", "Ampere", 108, 32, 8, 25),
        ("H100 SXM", "Hopper", 132, 450, 8, 50),
        ("H100 500W", "Hopper", 132, 450, 8, 50),
        ("H100 PCIe", "Hopper", 114, 64, 8, 50),
        ("H100 NVL", "Hopper", 132, 64, 8, 50),
        ("H200", "Hopper", 132, 450, 8, 50),
        ("H20", "Hopper", 78, 450, 8, 50),
        ("B200", "Blackwell", 148, 900, 8, 50),
        ("B300", "Blackwell", 148, 900, 8, 100),
        ("GB200", "Blackwell", 152, 900, 72, 50),  # NVL72
        ("GB300", "Blackwell", 152, 900, 72, 100),
        ("MI300X", "CDNA3", 304, 448, 8, 50),  # 7 links of 64 GB/s
        ("MI325X", "CDNA3", 304, 448, 8, 50),
        ("MI350X", "CDNA4", 256, 537.6, 8, 50),  # 7 links of 76.8 GB/s
        ("MI355X", "CDNA4", 256, 537.6, 8, 50),
        ("L40S", "Ada", 142, 32, 8, 25),
        ("L40", "Ada", 142, 32, 8, 25),
        ("L4", "Ada", 58, 32, 8, 12.5),
        ("RTX 4090", "Ada", 128, 32, 8, 12.5),
        ("RTX 5090", "unknown", 170, 64, 8, 12.5),
    ],
)
def test_architecture_and_links(
    name, architecture, multiprocessors, link_gb_s, node_devices, network_gb_s
):
    device = lookup_device(name)
    assert (device.architecture, device.multiprocessors) == (architecture, multiprocessors)
    links = device.link_gb_s, device.node_devices, device.network_gb_s
    assert links == (link_gb_s, node_devices, network_gb_s)


def test_every_row_is_complete():
    # torchao has no MXFP8 for the RTX 5090, compute capability 12.0, so that it is no "Blackwell".
    assert [each.name for each in DEVICES if each.architecture == "unknown"] == ["RTX 5090"]
    assert {each.name for each in DEVICES if each.mxfp8} == {"B200", "B300", "GB200", "GB300"}
    for device in DEVICES:
        has_float8 = device.architecture != "Ampere"
        assert (device.fp8_tflops is not None) == has_float8
        if has_float8:  # twice as fast, but for rounding
            assert device.fp8_tflops == pytest.approx(2 * device.bf16_tflops, rel=0.02)


def test_given_peaks_come_before_the_data_sheets():
    h100 = lookup_device("H100 SXM")
    assert h100.with_given(MetricsConfig()) == h100
    given = h100.with_given(MetricsConfig(peak_tflops_bf16=800.0, peak_tflops_fp8=1500.0))
    assert published_peaks(given) == {"bf16": 800, "fp8": 1500}
    assert given.bandwidth_tb_s == h100.bandwidth_tb_s


def test_every_row_is_found_by_its_name_and_no_name_is_there_twice():
    assert [lookup_device(device.name) for device in DEVICES] == list(DEVICES)
    names = [name.casefold() for device in DEVICES for name in (device.name, *device.aliases)]
    assert len(names) == len(set(names))
