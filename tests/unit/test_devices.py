"""The data sheets of GPUs, and the names by which torch and the vendors call them."""

import pytest

from torchtitan_lite.catalog.devices import DEVICES, DeviceSpec, lookup_device
from torchtitan_lite.metrics.hardware import published_peaks

# fmt: off
SHEETS = {
    # dense bf16 and fp8 TFLOPS, GiB, TB/s, architecture, GB/s of a link, devices of a node,
    # GB/s between nodes
    "A100 SXM 40GB": (312, None, 40, 1.555, "Ampere", 300, 8, 25),
    "A100 SXM 80GB": (312, None, 80, 2.039, "Ampere", 300, 8, 25),
    "A100 PCIe 40GB": (312, None, 40, 1.555, "Ampere", 32, 8, 25),
    "A100 PCIe 80GB": (312, None, 80, 1.935, "Ampere", 32, 8, 25),
    "H100 SXM": (989, 1979, 80, 3.35, "Hopper", 450, 8, 50),
    "H100 500W": (989, 1979, 95, 2.4, "Hopper", 450, 8, 50),
    "H100 PCIe": (756, 1513, 80, 2.0, "Hopper", 64, 8, 50),
    "H100 NVL": (835, 1670, 94, 3.9, "Hopper", 64, 8, 50),
    "H200": (989, 1979, 141, 4.8, "Hopper", 450, 8, 50),
    "H20": (148, 296, 96, 4.0, "Hopper", 450, 8, 50),
    "B200": (2250, 4500, 180, 8.0, "Blackwell", 900, 8, 50),
    "B300": (2250, 4500, 288, 8.0, "Blackwell", 900, 8, 100),
    "GB200": (2500, 5000, 186, 8.0, "Blackwell", 900, 72, 50),  # NVL72
    "GB300": (2500, 5000, 288, 8.0, "Blackwell", 900, 72, 100),
    "MI300X": (1307, 2615, 192, 5.3, "CDNA3", 448, 8, 50),  # 7 links of 64 GB/s
    "MI325X": (1307, 2615, 256, 6.0, "CDNA3", 448, 8, 50),
    "MI350X": (2300, 4600, 288, 8.0, "CDNA4", 537.6, 8, 50),  # 7 links of 76.8 GB/s
    "MI355X": (2500, 5000, 288, 8.0, "CDNA4", 537.6, 8, 50),
    "L40S": (362, 733, 45, 0.864, "Ada", 32, 8, 25),
    "L40": (181, 362, 45, 0.864, "Ada", 32, 8, 25),
    "L4": (121, 242, 22.5, 0.3, "Ada", 32, 8, 12.5),
    "RTX 4090": (165, 330, 24, 1.008, "Ada", 32, 8, 12.5),
    # Compute capability 12.0, for which torchao has no MXFP8: not our "Blackwell".
    "RTX 5090": (209.5, 419, 32, 1.792, "unknown", 64, 8, 12.5),
}
NAMES = {
    "A100 SXM 40GB": ["NVIDIA A100-SXM4-40GB"],
    "A100 SXM 80GB": ["NVIDIA A100-SXM4-80GB"],
    "A100 PCIe 40GB": ["NVIDIA A100-PCIE-40GB"],
    "A100 PCIe 80GB": ["NVIDIA A100 80GB PCIe"],
    "H100 SXM": ["NVIDIA H100 80GB HBM3", "NVIDIA H100 SXM5"],
    "H200": ["NVIDIA H200 SXM"],
    "B300": ["NVIDIA B300 SXM6 AC"],
    "MI300X": ["AMD Instinct MI300X"],
    "L40S": ["nvidia l40s"],
    "RTX 4090": ["NVIDIA GeForce RTX 4090", "rtx 4090"],
}
UNKNOWN = [
    "NVIDIA H100 80GB HBM2e",  # sold as PCIe and as SXM
    "NVIDIA H100 80GB HBM3 MIG 1g.10gb",  # a slice of the GPU
    "NVIDIA H100", "H100", "NVIDIA H200 NVL", "NVIDIA GH200 480GB", "NVIDIA H800",
    "NVIDIA A100X", "NVIDIA A10", "NVIDIA A100-SXM-64GB",
    "NVIDIA GeForce RTX 4090 D", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA L400",
    "AMD Instinct MI300A", "Tesla T4", "NVIDIA", "",
]
# fmt: on

# ----- DEVICES, DeviceSpec -----


def test_devices_have_the_values_of_their_data_sheets():
    found = {
        each.name: (
            *(each.bf16_tflops, each.fp8_tflops, each.memory_gib, each.bandwidth_tb_s),
            *(each.architecture, each.link_gb_s, each.node_devices, each.network_gb_s),
        )
        for each in DEVICES
    }
    assert found == SHEETS
    blackwell = {each.name for each in DEVICES if each.capability_major == 10}
    assert blackwell == {"B200", "B300", "GB200", "GB300"}
    hopper = {each.name for each in DEVICES if each.capability_major == 9}
    assert hopper == {"H100 SXM", "H100 500W", "H100 PCIe", "H100 NVL", "H200", "H20"}


def test_an_unlisted_device_has_slow_links():
    device = DeviceSpec("unlisted", 1, None, 1, 1)
    assert (device.link_gb_s, device.node_devices, device.network_gb_s) == (32, 8, 25)


def test_names_of_devices_are_unique():
    names = [name.casefold() for device in DEVICES for name in (device.name, *device.aliases)]
    assert len(names) == len(set(names))


# ----- lookup_device -----


def test_lookup_device_takes_the_names_of_torch_and_of_vendors():
    found = [lookup_device(name) for names in NAMES.values() for name in names]
    assert [each and each.name for each in found] == [
        device for device, names in NAMES.items() for _ in names
    ]
    assert [lookup_device(device.name) for device in DEVICES] == list(DEVICES)


@pytest.mark.parametrize("name", UNKNOWN)
def test_lookup_device_takes_no_device_for_a_similar_one(name):
    assert lookup_device(name) is None


# ----- published_peaks, with_peaks -----


def test_published_peaks_leave_out_what_is_unknown():
    assert published_peaks(lookup_device("H100 SXM")) == {"bf16": 989, "fp8": 1979}
    assert published_peaks(lookup_device("A100 SXM 40GB")) == {"bf16": 312}
    assert published_peaks(None) == {}


def test_with_peaks_replaces_those_of_the_data_sheet():
    h100 = lookup_device("H100 SXM")
    assert h100 and h100.with_peaks({}) == h100
    given = h100.with_peaks({"bf16": 800, "fp8": 1500})
    assert published_peaks(given) == {"bf16": 800, "fp8": 1500}
    assert given.bandwidth_tb_s == h100.bandwidth_tb_s
