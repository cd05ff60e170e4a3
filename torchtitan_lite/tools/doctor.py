"""Check what this machine can do: each check runs the real thing and reports what it saw."""

import os
import platform
import resource
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module, metadata
from pathlib import Path

import torch
import torch.distributed as dist
from packaging.requirements import Requirement
from torch import nn
from torch.multiprocessing import ProcessRaisedException, start_processes

from torchtitan_lite.base.errors import RunError
from torchtitan_lite.base.files import usable_cores
from torchtitan_lite.catalog.devices import lookup_device
from torchtitan_lite.catalog.recipes import RECIPES
from torchtitan_lite.config import Float8Config
from torchtitan_lite.float8.convert import convert_linears, has_float8_units, must_emulate
from torchtitan_lite.float8.selection import LinearChoice
from torchtitan_lite.metrics.hardware import (
    device_name,
    host_memory_gib,
    measure_peak,
    total_memory_gib,
)
from torchtitan_lite.run import compiler_checks
from torchtitan_lite.run.process_group import stay_on_loopback
from torchtitan_lite.run.supervise import listen

GIB, WRITTEN = 2**30, 64 << 20
SIZE = 256
"""Of the linear that is multiplied."""
CLOCK_SECONDS = 5.0
"""A file system's clock that is off by more confuses tools that compare times of files."""
MEETING = timedelta(seconds=30)
"""For two ranks to meet."""
NEEDED = ("packages", "bf16", "ranks", "disk")
"""Checks without which no run trains."""
EXTRAS = {
    "tiktoken": "Llama's tokenizers ([llama])",
    "tokenizers": "tokenizer.json ([llama])",
    "pyarrow": "Parquet input ([parquet])",
    "datasets": "Hugging Face datasets ([hf])",
    "safetensors": "Hugging Face models ([hf])",
    "matplotlib": "plots ([plots])",
    "wandb": "Weights & Biases ([wandb])",
}


@dataclass(frozen=True)
class Finding:
    """What a check saw; if not `works`, why something does not work here."""

    check: str
    works: bool
    text: str


class Unfit(Exception):
    """Raised by a check that fails for a known reason."""


def examine(*, folder: Path, quick: bool) -> list[Finding]:
    """Run all checks and return their findings. `quick` leaves out those that measure speed. No
    failure of a check is raised."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    checks: dict[str, Callable[[], str]] = {
        "python": platform.python_version,
        "packages": check_packages,
        "device": lambda: check_device(device),
        "host": check_host,
        "ranks": check_ranks,
        "bf16": lambda: check_bf16(device),
    }
    checks |= {f"float8 {name}": _recipe_check(name, device) for name in RECIPES}
    checks["compile"] = lambda: check_compiler(device)
    checks["disk"] = lambda: check_disk(folder, quick=quick)
    checks["clock"] = lambda: check_clock(folder)
    checks["open files"] = check_limits
    checks |= {name: _extra_check(name, use) for name, use in EXTRAS.items()}
    if not quick:
        checks["matmuls"] = lambda: check_peaks(device)
    return [_run(name, check) for name, check in checks.items()]


def _run(name: str, check: Callable[[], str]) -> Finding:
    try:
        return Finding(name, True, check())
    except (Unfit, RunError) as error:
        return Finding(name, False, str(error))
    except Exception as error:  # a broken driver or package can raise anything
        reason = " ".join(str(error).split())[:200]
        return Finding(name, False, f"{type(error).__name__}: {reason}")


def can_train(findings: list[Finding]) -> bool:
    """Return whether the machine trains in bf16 and the run folder can be written."""
    return all(each.works for each in findings if each.check in NEEDED)


def format_findings(findings: list[Finding]) -> str:
    """Return a line for each check that works, then those for what does not work and why."""
    width = max(len(each.check) for each in findings)

    def lines(works: bool) -> list[str]:
        chosen = (each for each in findings if each.works is works)
        return [f"  {each.check:<{width}}  {each.text}" for each in chosen]

    broken = lines(False) or ["  nothing"]
    verdict = "training works here" if can_train(findings) else "training does not work here"
    return "\n".join(["works", *lines(True), "", "does not work here", *broken, "", verdict])


# ----- Software and host -----


def check_packages() -> str:
    """Return the versions of torch and torchao. Raises Unfit if a required package is outside its
    supported range."""
    wanted = [Requirement(text) for text in metadata.requires("torchtitan-lite") or []]
    ranges = {each.name: each.specifier for each in wanted if not each.marker}
    found = {name: metadata.version(name) for name in ranges}
    for name, version in found.items():
        if not ranges[name].contains(version, prereleases=True):
            raise Unfit(f"{name} {version} is not in {ranges[name]}; install one that is")
    return f"torch {found['torch']}, torchao {found['torchao']}"


def check_device(device: torch.device) -> str:
    """Return the GPUs and their driver, or the CPU."""
    if device.type == "cpu":
        return f"{device_name()}, load {os.getloadavg()[0]:.1f}; float8 is emulated on a CPU"
    spec = lookup_device(device_name())
    major, minor = torch.cuda.get_device_capability(device)
    known = spec.name if spec else "no data sheet: give [metrics] peak_tflops_bf16 and _fp8"
    smi = ""
    if shutil.which("nvidia-smi"):
        query = "--query-gpu=driver_version,clocks.max.sm,power.limit"
        words = ["nvidia-smi", query, "--format=csv,noheader"]
        smi = subprocess.run(words, capture_output=True, text=True).stdout.partition("\n")[0]
    return (
        f"{torch.cuda.device_count()} x {device_name()} ({known}), compute capability "
        f"{major}.{minor}, {total_memory_gib(device):.1f} GiB, CUDA {torch.version.cuda}, "
        f"driver, clock and power limit: {smi or 'unknown'}"
    )


def check_host() -> str:
    """Return cores and memory of the host."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB
    shared = shutil.disk_usage("/dev/shm").free / GIB
    return (
        f"{len(usable_cores())} cores, {host_memory_gib():.1f} GiB of memory, {free:.1f} unused; "
        f"/dev/shm {shared:.1f} GiB free"
    )


def check_ranks() -> str:
    """Return how ranks can talk to each other, after two on this host did. Raises Unfit or what
    they raise if they cannot."""
    if not dist.is_available() or not dist.is_gloo_available():
        raise Unfit("this build of PyTorch has no gloo: ranks cannot meet; install another")
    nccl = ""
    if torch.cuda.is_available():
        if not dist.is_nccl_available():
            raise Unfit("this build of PyTorch has no NCCL; install one that has")
        nccl = f", NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"

    began = time.perf_counter()
    with listen("") as listener:
        port = listener.getsockname()[1]
        served = dist.TCPStore(
            "127.0.0.1",
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
    try:
        start_processes(_meet, (port,), nprocs=2)
    except ProcessRaisedException as error:  # its text is a traceback
        raise Unfit(str(error).strip().splitlines()[-1]) from error
    del served
    return f"two met by gloo in {time.perf_counter() - began:.1f} s{nccl}"


def _meet(rank: int, port: int) -> None:
    """Add up a tensor with the other of two ranks."""
    stay_on_loopback()
    store = dist.TCPStore("127.0.0.1", port, timeout=MEETING)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=MEETING)
    dist.all_reduce(torch.ones(()))
    dist.destroy_process_group()


def check_limits() -> str:
    """Return the limit of open files. Raises Unfit if it is too low for many shards."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit < 1024:
        raise Unfit(f"at most {limit} at once, and a run may need 1,024: ulimit -n 4096")
    return f"{limit:,} at once"


def check_disk(folder: Path, *, quick: bool) -> str:
    """Return the free space of the file system of a folder, and how fast it writes."""
    free = shutil.disk_usage(folder).free / GIB
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        began = time.perf_counter()
        file.write(b"\0" * (4096 if quick else WRITTEN))
        file.flush()
        os.fsync(file.fileno())
        seconds = time.perf_counter() - began
    speed = "" if quick else f", {WRITTEN / seconds / 1e6:,.0f} MB/s with fsync"
    return f"{free:.1f} GiB free in {folder}{speed}"


def check_clock(folder: Path) -> str:
    """Return how far the clock of a folder's file system is off this host's. Raises Unfit if it is
    too far."""
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        off = Path(file.name).stat().st_mtime - time.time()
    if abs(off) > CLOCK_SECONDS:
        raise Unfit(f"the clock of {folder} is {off:+.0f} s off this host's: synchronize them")
    return f"that of {folder} is {off:+.1f} s off this host's"


def _extra_check(name: str, use: str) -> Callable[[], str]:
    def check() -> str:
        try:
            import_module(name)
        except ModuleNotFoundError as error:
            raise Unfit(f"not installed; it is for {use}") from error
        return f"{metadata.version(name)}, for {use}"

    return check


# ----- Computation -----


def check_bf16(device: torch.device) -> str:
    """Return how close a linear in bf16 is to float32, forward and backward."""
    return _compare(lambda model: None, device)


def _recipe_check(name: str, device: torch.device) -> Callable[[], str]:
    def check() -> str:
        float8 = Float8Config(enable_float8_linear=True, recipe_name=name)
        emulate = must_emulate(float8, device=device)
        choice = LinearChoice("0", ("0",), (SIZE, SIZE), (SIZE, SIZE))

        def convert(model: nn.Module) -> None:
            convert_linears(model, [choice], float8=float8, emulate=emulate)

        return _compare(convert, device) + (", emulated" if emulate else "")

    return check


def _compare(convert: Callable[[nn.Module], object], device: torch.device) -> str:
    """Return the SQNR of a converted linear's output and gradients against float32. Raises Unfit
    if they are not what a matmul gives."""
    from torchao.float8.float8_utils import compute_error  # slow to import

    torch.manual_seed(0)
    x = torch.randn(SIZE, SIZE, device=device)
    plain = nn.Sequential(nn.Linear(SIZE, SIZE, bias=False)).to(device)
    model = nn.Sequential(nn.Linear(SIZE, SIZE, bias=False)).to(device)
    model.load_state_dict(plain.state_dict())
    model.to(torch.bfloat16)
    convert(model)

    results = []
    for each, dtype in ((plain, torch.float32), (model, torch.bfloat16)):
        input = x.detach().clone().to(dtype).requires_grad_()
        output = each(input)
        output.backward(x.to(dtype))
        results.append((output, input.grad, next(each.parameters()).grad))
    expected, found = results
    errors = [
        compute_error(a.detach().float(), b.detach().float()).item()
        for a, b in zip(expected, found, strict=True)
        if a is not None and b is not None
    ]
    if len(errors) < 3 or not min(errors) > 15:
        raise Unfit(f"a matmul is wrong: SQNR {min(errors, default=0.0):.1f} dB against float32")
    return f"multiplied: SQNR {min(errors):.1f} dB against float32, forward and backward"


def check_compiler(device: torch.device) -> str:
    """Compile a function and compare its result."""
    compiler_checks.check_compiler(os.environ, compiles=True, on_gpu=device.type == "cuda")
    x = torch.arange(64.0, device=device)
    began = time.perf_counter()
    compiled = torch.compile(lambda y: (y * 2 + 1).relu())
    if not torch.equal(compiled(x), x * 2 + 1):
        raise Unfit("torch.compile gives a wrong result; set [compile] enable = false")
    return f"torch.compile works; a function took {time.perf_counter() - began:.1f} s"


def check_peaks(device: torch.device) -> str:
    """Return the rates of large matmuls."""
    names = ("bf16", "fp8") if has_float8_units(device) else ("bf16",)
    rates = (f"{measure_peak(name, device):,.2f} TFLOPS in {name}" for name in names)  # type: ignore[arg-type]
    return ", ".join(rates)
