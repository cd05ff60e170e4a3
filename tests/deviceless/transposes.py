"""How Inductor's kernels store a transposed cast beside a reduction over rows: `transposes.py FILE`
on the fake GPU. FILE gets the kinds of access of the kernels, without the patch and with it.
"""

import json
import sys
from pathlib import Path

import torch
from block_kernels import KERNEL, kind_of_access
from torch import Tensor
from torch._inductor import config
from torch._inductor.graph import GraphLowering

from torchtitan_lite.patches import store_transposes_in_tiles


def cast(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest magnitude of each row of `x`, and `x` transposed in float8."""
    return x.abs().amax(1), x.to(torch.float8_e4m3fn).t().contiguous()


def kinds() -> list[str]:
    codes: list[str] = []
    GraphLowering.save_output_code = staticmethod(codes.append)
    torch._dynamo.reset()
    with config.patch(force_disable_caches=True):
        torch.compile(cast)(torch.zeros(8192, 4096, dtype=torch.bfloat16, device="cuda"))
    return [kind_of_access(source) for code in codes for _, source in KERNEL.findall(code)]


if __name__ == "__main__":
    plain = kinds()
    store_transposes_in_tiles()
    Path(sys.argv[1]).write_text(json.dumps([plain, kinds()]))
