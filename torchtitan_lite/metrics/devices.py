"""Data sheets of GPUs: dense peaks, memory and bandwidth."""

import re
from dataclasses import dataclass, replace
from typing import Literal

from torchtitan_lite.config import MetricsConfig

Precision = Literal["fp8", "bf16", "fp32"]


@dataclass(frozen=True)
class DeviceSpec:
    """A row of a vendor's data sheet."""

    name: str
    bf16_tflops: float  # dense, as fp8_tflops: a sparse peak is twice as high
    fp8_tflops: float | None  # None without float8 matrix units, or if not known
    memory_gib: float
    """GiB, which data sheets call GB. The driver keeps 1 to 2 %. ECC, on by default with GDDR6,
    takes a sixteenth: 48 and 24 GB are listed as 45 and 22.5."""
    bandwidth_tb_s: float  # of the memory, 10^12 bytes per second
    aliases: tuple[str, ...] = ()  # other names of the device, from torch or its vendor
    mxfp8: bool = False  # whether torchao trains in MXFP8 on it: compute capability 10.x

    def with_given(self, metrics: MetricsConfig) -> "DeviceSpec":
        """Return the data sheet with the peaks that the config gives instead of its own."""
        bf16, fp8 = metrics.peak_tflops_bf16, metrics.peak_tflops_fp8
        return replace(
            self, bf16_tflops=bf16 or self.bf16_tflops, fp8_tflops=fp8 or self.fp8_tflops
        )


DEVICES = (
    DeviceSpec("A100 SXM 40GB", 312, None, 40, 1.555, ("A100-SXM4-40GB",)),
    DeviceSpec("A100 SXM 80GB", 312, None, 80, 2.039, ("A100-SXM4-80GB",)),
    DeviceSpec("A100 PCIe 40GB", 312, None, 40, 1.555, ("A100-PCIE-40GB",)),
    DeviceSpec("A100 PCIe 80GB", 312, None, 80, 1.935, ("A100 80GB PCIe",)),
    DeviceSpec("H100 SXM", 989, 1979, 80, 3.35, ("H100 SXM5", "H100 80GB HBM3")),
    DeviceSpec("H100 PCIe", 756, 1513, 80, 2.0),
    DeviceSpec("H100 NVL", 835, 1670, 94, 3.9),
    DeviceSpec("H200", 989, 1979, 141, 4.8, ("H200 SXM",)),
    DeviceSpec("H20", 148, 296, 96, 4.0),
    DeviceSpec("B200", 2250, 4500, 180, 8.0, mxfp8=True),
    DeviceSpec("B300", 2250, 4500, 288, 8.0, ("B300 SXM6 AC",), mxfp8=True),
    DeviceSpec("GB200", 2500, 5000, 186, 8.0, mxfp8=True),
    DeviceSpec("GB300", 2500, 5000, 288, 8.0, mxfp8=True),
    DeviceSpec("MI300X", 1307, 2615, 192, 5.3),
    DeviceSpec("MI325X", 1307, 2615, 256, 6.0),
    DeviceSpec("MI350X", 2300, 4600, 288, 8.0),
    DeviceSpec("MI355X", 2500, 5000, 288, 8.0),
    DeviceSpec("L40S", 362, 733, 45, 0.864),
    DeviceSpec("L40", 181, 362, 45, 0.864),
    DeviceSpec("L4", 121, 242, 22.5, 0.3),
    DeviceSpec("RTX 4090", 165, 330, 24, 1.008),
    DeviceSpec("RTX 5090", 209.5, 419, 32, 1.792),
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
