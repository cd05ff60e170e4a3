"""Whether torch.compile can work here and may trust its cache; asked before anything compiles, and
without importing torch."""

import os
import shutil
import tempfile
from collections.abc import MutableMapping
from pathlib import Path

from torchtitan_lite.base.errors import ConfigError

INDUCTOR_CACHE, TRITON_CACHE = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"
KERNELS_POINTER = "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"


def check_compiler(env: MutableMapping[str, str], *, compiles: bool, on_gpu: bool) -> None:
    """Raise ConfigError unless the compiler's caches are private and, if a run `compiles`, there is
    a compiler.

    Names caches in `env` if there are none: torch would take a folder in /tmp that anyone may have
    made before."""
    if not env.get(INDUCTOR_CACHE):
        env[INDUCTOR_CACHE] = f"{tempfile.gettempdir()}/torchtitan_lite_inductor_{os.geteuid()}"
    if not env.get(TRITON_CACHE):
        env[TRITON_CACHE] = f"{env[INDUCTOR_CACHE]}/triton"
    for name in (INDUCTOR_CACHE, TRITON_CACHE):
        if problem := find_problem(Path(env[name]).absolute()):
            raise ConfigError(f"{name}={env[name]}: {problem}; set it to another folder.")

    # torch sets it for each kernel that it loads. Adding it then could crash a thread of gloo that
    # reads the environment; changing it cannot.
    env.setdefault(KERNELS_POINTER, "0")
    if not compiles:
        return

    # Triton compiles its launchers in C, and Inductor its kernels for CPUs in C++.
    language, variable, names = "C++", "CXX", ["g++"]
    if on_gpu:
        language, variable, names = "C", "CC", ["gcc", "clang"]
    names = [env[variable]] if variable in env else names
    if not any(shutil.which(name, path=env.get("PATH")) for name in names):
        raise ConfigError(
            f"[compile] enable = true needs a {language} compiler, and there is no "
            f"{' or '.join(names)}; install one, name it in {variable}, or set [compile] enable = "
            "false."
        )


def find_problem(path: Path) -> str:
    """Make a cache folder if there is none, and return why the compiler must not use it, or "".
    Files in it run as code, so nobody else but root may write there."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path) as file:
            own = os.fstat(file.fileno()).st_uid  # not always the user: NFS has one for root
        folder, link = path.stat(), path.lstat()
    except OSError as error:
        return f"cannot be written: {error}"
    if others := {folder.st_uid, link.st_uid} - {0, own}:
        return f"it belongs to user {min(others)}, not to {own}, and its files run as code"
    if folder.st_mode & 0o022:
        mode = f"mode {folder.st_mode & 0o777:o}"
        return f"{mode} lets others write files in it, which run as code (chmod go-w, if none did)"
    return ""
