"""Data sheets of GPUs: dense peaks, memory, bandwidth and links."""

import re
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from typing import Literal

Precision = Literal["fp8", "bf16", "fp32"]
Architecture = Literal["Ampere", "Ada", "Hopper", "Blackwell", "CDNA3", "CDNA4", "unknown"]


@dataclass(frozen=True)
class DeviceSpec:
    """A row of a vendor's data sheet, and the machine that the device is usually sold in.

    Links carry `link_gb_s` GB/s (10^9 bytes per second) in each direction, by one device, within a
    node of `node_devices`: NVLink, Infinity Fabric, or PCIe without either. Between nodes each
    device has `network_gb_s` in each direction, which a buyer chooses.
    """

    name: str
    bf16_tflops: float  # dense, as fp8_tflops: a sparse peak is twice as high
    fp8_tflops: float | None  # None without float8 matrix units, or if not known
    memory_gib: float
    """GiB, which data sheets call GB. The driver keeps 1 to 2 %. ECC, on by default with GDDR6,
    takes a sixteenth: 48 and 24 GB are listed as 45 and 22.5."""
    bandwidth_tb_s: float  # of the memory, 10^12 bytes per second
    aliases: tuple[str, ...] = ()  # other names of the device, from torch or its vendor
    _: KW_ONLY
    architecture: Architecture = "unknown"
    link_gb_s: float = 32.0
    node_devices: int = 8
    network_gb_s: float = 25.0

    @property
    def capability_major(self) -> int | None:
        """Major compute capability, of architectures with kernels that no other has."""
        return {"Hopper": 9, "Blackwell": 10}.get(self.architecture)

    def with_peaks(self, tflops: Mapping[Precision, float]) -> "DeviceSpec":
        """Return the data sheet with these peaks instead of its own."""
        return replace(
            self,
            bf16_tflops=tflops.get("bf16", self.bf16_tflops),
            fp8_tflops=tflops.get("fp8", self.fp8_tflops),
        )


_AMPERE = partial(DeviceSpec, architecture="Ampere", link_gb_s=300)
_ADA = partial(DeviceSpec, architecture="Ada", network_gb_s=12.5)
_HOPPER = partial(DeviceSpec, architecture="Hopper", link_gb_s=450, network_gb_s=50)
_BLACKWELL = partial(DeviceSpec, architecture="Blackwell", link_gb_s=900, network_gb_s=50)
_GRACE = partial(_BLACKWELL, node_devices=72)
_CDNA3 = partial(DeviceSpec, architecture="CDNA3", link_gb_s=448, network_gb_s=50)
_CDNA4 = partial(DeviceSpec, architecture="CDNA4", link_gb_s=537.6, network_gb_s=50)

DEVICES = (
    _AMPERE("A100 SXM 40GB", 312, None, 40, 1.555, ("A100-SXM4-40GB",)),
    _AMPERE("A100 SXM 80GB", 312, None, 80, 2.039, ("A100-SXM4-80GB",)),
    _AMPERE("A100 PCIe 40GB", 312, None, 40, 1.555, ("A100-PCIE-40GB",), link_gb_s=32),
    _AMPERE("A100 PCIe 80GB", 312, None, 80, 1.935, ("A100 80GB PCIe",), link_gb_s=32),
    _HOPPER("H100 SXM", 989, 1979, 80, 3.35, ("H100 SXM5", "H100 80GB HBM3")),
    _HOPPER("H100 500W", 989, 1979, 95, 2.4),  # of Meta's Grand Teton, with HBM2e
    _HOPPER("H100 PCIe", 756, 1513, 80, 2.0, link_gb_s=64),
    _HOPPER("H100 NVL", 835, 1670, 94, 3.9, link_gb_s=64),
    _HOPPER("H200", 989, 1979, 141, 4.8, ("H200 SXM",)),
    _HOPPER("H20", 148, 296, 96, 4.0),
    _BLACKWELL("B200", 2250, 4500, 180, 8.0),
    _BLACKWELL("B300", 2250, 4500, 288, 8.0, ("B300 SXM6 AC",), network_gb_s=100),
    _GRACE("GB200", 2500, 5000, 186, 8.0),
    _GRACE("GB300", 2500, 5000, 288, 8.0, network_gb_s=100),
    _CDNA3("MI300X", 1307, 2615, 192, 5.3),
    _CDNA3("MI325X", 1307, 2615, 256, 6.0),
    _CDNA4("MI350X", 2300, 4600, 288, 8.0),
    _CDNA4("MI355X", 2500, 5000, 288, 8.0),
    _ADA("L40S", 362, 733, 45, 0.864, network_gb_s=25),
    _ADA("L40", 181, 362, 45, 0.864, network_gb_s=25),
    _ADA("L4", 121, 242, 22.5, 0.3),
    _ADA("RTX 4090", 165, 330, 24, 1.008),
    DeviceSpec("RTX 5090", 209.5, 419, 32, 1.792, link_gb_s=64, network_gb_s=12.5),
)


def lookup_device(name: str) -> DeviceSpec | None:
    """Return the data sheet of the device that torch or its vendor calls `name`, None if unknown.

    The whole name must match: a known name followed by "MIG", "Laptop GPU", "D" or an unlisted
    memory size is another device.
    """
    bare = re.sub(r"^(NVIDIA (GeForce )?|AMD Instinct )", "", name, flags=re.IGNORECASE).casefold()
    return next(
        (device for device in DEVICES if bare in map(str.casefold, (device.name, *device.aliases))),
        None,
    )
