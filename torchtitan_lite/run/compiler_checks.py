"""Whether torch.compile can work here and may trust its cache; asked before anything compiles, and
without importing torch."""

import os
import re
import shutil
import tempfile
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from torchtitan_lite.base.errors import ConfigError

INDUCTOR_CACHE, TRITON_CACHE = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"
SWITCHES = ("TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE")
"""Variables that turn the compiler off where they are 1."""
OTHERS_MAY_WRITE = 0o022


def check_compiler(env: MutableMapping[str, str], *, compiles: bool, on_gpu: bool) -> None:
    """Raise ConfigError unless the compiler's caches are private and, if a run `compiles`, it can.

    Names a cache in `env` if there is none: torch would take a folder in /tmp that anyone may have
    made before."""
    if not env.get(INDUCTOR_CACHE):
        try:
            parent = tempfile.gettempdir()
        except OSError as error:
            raise ConfigError(f"{INDUCTOR_CACHE} is not set: {error}; name a folder.") from error
        env[INDUCTOR_CACHE] = f"{parent}/torchtitan_lite_inductor_{os.geteuid()}"
    for name in (INDUCTOR_CACHE, TRITON_CACHE):
        cache = env.get(name)
        if cache and (problem := find_problem(Path(cache).absolute(), compiles=compiles)):
            raise ConfigError(f"{name}={cache}: {problem}; set it to another folder.")
    if compiles:
        check_tools(env, on_gpu=on_gpu)


def find_problem(path: Path, *, compiles: bool) -> str:
    """Make a cache folder if there is none, and return why the compiler must not use it, or "".
    Files in it run as code, so nobody else may write there."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path) as file:
            own = os.fstat(file.fileno()).st_uid  # not always the user: NFS has one for root
        folder, link = path.stat(), path.lstat()
    except OSError as error:
        return f"cannot be written: {error}"
    if folder.st_uid != own or link.st_uid not in (0, own):
        other = link.st_uid if folder.st_uid == own else folder.st_uid
        return f"it belongs to user {other}, not to {own}, and its files run as code"
    if folder.st_mode & OTHERS_MAY_WRITE:
        mode = f"mode {folder.st_mode & 0o777:o}"
        return f"{mode} lets others write files in it, which run as code (chmod go-w, if none did)"
    if compiles and re.search(r"[\s'\"]", str(path)):
        return f"{path} has a space or a quote, with which [compile] fails"
    return ""


def check_tools(env: Mapping[str, str], *, on_gpu: bool) -> None:
    """Raise ConfigError if a variable turns the compiler off, or if it has no C or C++ compiler."""
    unless = "or set [compile] enable = false"
    for name in SWITCHES:
        if env.get(name) == "1":
            raise ConfigError(
                f"[compile] enable = true, and {name}=1 turns the compiler off; unset it, {unless}."
            )

    # Triton compiles its launchers in C, and Inductor its kernels for CPUs in C++.
    language, variable, names = "C++", "CXX", ["g++"]
    if on_gpu:
        language, variable, names = "C", "CC", ["gcc", "clang"]
    names = [env[variable]] if variable in env else names
    if not any(shutil.which(name, path=env.get("PATH")) for name in names):
        raise ConfigError(
            f"[compile] enable = true needs a {language} compiler, and there is no "
            f"{' or '.join(names)}; install one, name it in {variable}, {unless}."
        )
