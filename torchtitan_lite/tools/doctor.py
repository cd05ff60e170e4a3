"""Check what this machine can do: each check runs the real thing and reports what it saw."""

import os
import platform
import shutil
import tempfile
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing import spawn

from torchtitan_lite.base.errors import RunError
from torchtitan_lite.catalog.recipes import RECIPES
from torchtitan_lite.checkpoint.manifest import installed_versions
from torchtitan_lite.config import Float8Config
from torchtitan_lite.float8.convert import convert_linears, must_emulate
from torchtitan_lite.float8.selection import LinearChoice
from torchtitan_lite.metrics.hardware import total_memory_gib
from torchtitan_lite.run import compiler_checks
from torchtitan_lite.run.process_group import has_gpus, stay_on_loopback

SIZE, LOWEST_SQNR_DB = 256, 15
NEEDED = ("device", "disk", "ranks", "bf16")
"""Checks without which no run trains."""


def build_checks(folder: Path) -> dict[str, Callable[[], str]]:
    """Return all checks by name, for runs that write into `folder`. Each returns what it saw."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return {
        "versions": lambda: ", ".join(map(" ".join, installed_versions().items())),
        "device": lambda: f"{torch.cuda.device_count() if has_gpus() else 1} x {device_name()}",
        "memory": lambda: f"{total_memory_gib(device):.1f} GiB",
        "disk": lambda: check_disk(folder),
        "ranks": check_ranks,
        "compile": lambda: check_compiler(device),
        "bf16": lambda: check_matmuls(None, device),
        **{f"float8 {name}": partial(check_matmuls, name, device) for name in RECIPES},
    }


def device_name() -> str:
    """Return the name of the GPU at hand, or of the CPU with its number of cores."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return f"CPU: {next(models, platform.machine())}, {len(os.sched_getaffinity(0))} cores"


def run_check(check: Callable[[], str]) -> tuple[bool, str]:
    """Return whether something works, and what the check saw or raised."""
    try:
        return True, check()
    except Exception as error:  # a broken driver or package can raise anything
        reason = f"{type(error).__name__}: {error}"
        return False, " ".join(reason.split())[-300:]  # the traceback of a rank ends with its error


def check_disk(folder: Path) -> str:
    """Write a file into a folder, and return the free space of its disk."""
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(4096))
        file.flush()
        os.fsync(file.fileno())
    return f"{shutil.disk_usage(folder).free / 2**30:.1f} GiB free in {folder}"


def check_ranks() -> str:
    """Let two ranks on this host add up a tensor."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(_meet, (f"file://{folder}/store",), nprocs=2)
    return "two met by gloo"


def _meet(rank: int, place: str) -> None:
    stay_on_loopback()
    timeout = timedelta(seconds=30)
    dist.init_process_group("gloo", place, rank=rank, world_size=2, timeout=timeout)
    dist.all_reduce(torch.ones(()))
    dist.destroy_process_group()


def check_compiler(device: torch.device) -> str:
    """Compile a function and compare its result."""
    compiler_checks.check_compiler(os.environ, compiles=True, on_gpu=device.type == "cuda")
    x = torch.arange(64.0, device=device)
    if not torch.equal(torch.compile(lambda y: (y * 2 + 1).relu())(x), x * 2 + 1):
        raise RunError("torch.compile gives a wrong result; set [compile] enable = false")
    return "a compiled function is right"


def check_matmuls(recipe: str | None, device: torch.device) -> str:
    """Compare a linear in a float8 recipe, or in bf16, with float32. Raises RunError if its output
    or a gradient is not what a matmul gives."""
    torch.manual_seed(0)
    x = torch.randn(SIZE, SIZE, device=device)
    model = nn.Sequential(nn.Linear(SIZE, SIZE, bias=False, device=device))
    expected, emulate = _multiply(model, x), False
    model.to(torch.bfloat16)
    if recipe is not None:
        float8 = Float8Config(enable_float8_linear=True, recipe_name=recipe)
        emulate = must_emulate(float8, device=device)
        choice = LinearChoice("0", ("0",), (SIZE, SIZE), (SIZE, SIZE))
        convert_linears(model, [choice], float8=float8, emulate=emulate)
    found = _multiply(model, x.to(torch.bfloat16))

    ratios = [a.norm() / (a - b).norm() for a, b in zip(expected, found, strict=True)]
    sqnr_db = 20 * torch.stack(ratios).min().log10().item()
    if not sqnr_db > LOWEST_SQNR_DB:
        raise RunError(f"a matmul is wrong: SQNR {sqnr_db:.1f} dB against float32")
    return f"{'emulated' if emulate else 'multiplied'}: SQNR {sqnr_db:.1f} dB against float32"


def _multiply(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Return the output of a linear and its gradients, of the input and of the weight."""
    inputs = x.clone().requires_grad_()
    output: Tensor = model(inputs)
    return [output, *torch.autograd.grad(output, [inputs, *model.parameters()], x)]
