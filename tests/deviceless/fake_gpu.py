"""The fake GPU: its library, built for the installed torch, the environment of processes that run
on it, and what they called."""

import hashlib
import os
import re
import struct
import subprocess
import sysconfig
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

FOLDER = Path(__file__).parent
SOURCES = [FOLDER / "fake_gpu.c", FOLDER / "answers.c"]
SITE = Path(sysconfig.get_paths()["purelib"])
INCLUDES = [
    SITE / "nvidia/cu13/include",
    SITE / "nvidia/nccl/include",
    SITE / "triton/backends/nvidia/include",
]
FAKED = re.compile(r"(__cuda|cuda|cu[A-Z]|cublas|nccl|cudnn)\w+")
"""Functions of the libraries that are faked."""
REAL = re.compile(r"cuFile|cudnnGet")
"""Those among them that need no device."""
COUNTER = struct.Struct("Q248s")
"""What fake_gpu.c calls so."""
WAITS = ("wait for ", "copy from device to pageable")
"""How the names of calls begin in which the host waits for the device."""


def build() -> Path:
    """The folder of the library: in the user's cache, one for each torch and state of the
    sources."""
    sources = b"".join(path.read_bytes() for path in (*SOURCES, Path(__file__)))
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    of_torch = cache / "torchtitan_lite/fake_gpu" / f"torch-{version('torch')}"
    folder = of_torch / hashlib.sha256(sources).hexdigest()[:12]
    library = folder / "libfake_gpu.so"
    if library.exists():
        return folder

    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder) as temporary:
        build = Path(temporary)
        # Headers of CUDA include one that no wheel has, and that C has no use for.
        (build / "nv").mkdir()
        (build / "nv/target").touch()
        compiler = ["gcc", "-O1", "-fPIC", *(f"-I{include}" for include in (build, *INCLUDES))]
        for source in SOURCES:
            subprocess.run([*compiler, "-c", source, "-o", build / f"{source.stem}.o"], check=True)

        objects = list(build.glob("*.o"))
        defined = set().union(*(_symbols(each, "--defined-only") for each in objects))
        stubs = build / "stubs.c"
        stubs.write_text(
            "".join(f"int {name}(void) {{ return 0; }}\n" for name in sorted(_wanted() - defined))
        )
        subprocess.run(
            [*compiler, "-shared", *objects, stubs, "-o", build / library.name], check=True
        )

        for name in ("libcuda.so.1", "libcuda.so", "libnvidia-ml.so.1"):
            (build / name).symlink_to(library.name)
            (build / name).replace(folder / name)
        (build / library.name).replace(library)
    return folder


def _wanted() -> set[str]:
    """The functions to define: those that torch's libraries need, and all of the driver's."""
    needed = set().union(
        *(_symbols(each, "--undefined-only") for each in (SITE / "torch/lib").glob("*.so"))
    )
    header = (INCLUDES[0] / "cuda.h").read_text()
    driver = re.findall(r"CUDAAPI\s+(cu[A-Z]\w+)\s*\(", header)
    driver += re.findall(r"#define\s+cu\w+\s+(cu\w+_v\d+)\b", header)
    return {name for name in needed.union(driver) if FAKED.fullmatch(name) and not REAL.match(name)}


def _symbols(path: Path, which: str) -> set[str]:
    """Names of functions of an object, or of a library's dynamic ones."""
    kind = "--dynamic" if path.suffix == ".so" else "--extern-only"
    table = subprocess.run(
        ["nm", kind, which, path], capture_output=True, text=True, check=True
    ).stdout
    return {line.split()[-1].partition("@")[0] for line in table.splitlines()}


def environment(folder: Path) -> dict[str, str]:
    """What puts processes on the fake GPU. Compiled kernels are kept apart: what was autotuned by
    the times of a fake must not reach a real GPU."""
    return {
        "LD_PRELOAD": str(folder / "libfake_gpu.so"),
        "LD_LIBRARY_PATH": str(folder),
        "TRITON_LIBCUDA_PATH": str(folder),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(folder.parent / "inductor"),
        "TRITON_CACHE_DIR": str(folder.parent / "triton"),
    }


def read_counts(folder: Path, rank: int = 0) -> Counter[str]:
    """How often the processes of a rank called what is counted, by name; `folder` was
    FAKE_GPU_COUNTS."""
    files = folder.glob(f"rank{rank}-*")
    return sum((count_calls(path.read_bytes()) for path in files), Counter[str]())


def count_calls(counters: bytes) -> Counter[str]:
    """How often a process called what is counted, by name; `counters` is its file's content."""
    rows = COUNTER.iter_unpack(counters)
    return Counter({name.partition(b"\0")[0].decode(): n for n, name in rows if n})
