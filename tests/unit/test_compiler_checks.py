"""Whether the compiler can work, and whether its cache is private."""

import os
import tempfile
from pathlib import Path

import pytest

from torchtitan_lite.base.errors import ConfigError
from torchtitan_lite.run import compiler_checks
from torchtitan_lite.run.compiler_checks import INDUCTOR_CACHE, KERNELS_POINTER, TRITON_CACHE


def check_compiler(*, compiles: bool = False, on_gpu: bool = False, **env: object) -> str:
    """Check an environment with all compilers, and return the cache that it has then."""
    full = {"PATH": os.environ["PATH"]} | {name: str(value) for name, value in env.items()}
    compiler_checks.check_compiler(full, compiles=compiles, on_gpu=on_gpu)
    assert KERNELS_POINTER in full and full[TRITON_CACHE].startswith(f"{full[INDUCTOR_CACHE]}/")
    return full[INDUCTOR_CACHE]


# ----- check_compiler -----


def test_the_default_cache_is_private_and_others_are_not_touched(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    own = Path(check_compiler())
    assert check_compiler(TORCHINDUCTOR_CACHE_DIR="") == str(own)  # else the working directory
    assert own.parent == tmp_path and own.stat().st_mode & 0o777 == 0o700
    (tmp_path / "given").mkdir(mode=0o755)
    assert check_compiler(TORCHINDUCTOR_CACHE_DIR=tmp_path / "given") == str(tmp_path / "given")
    assert Path(check_compiler(TORCHINDUCTOR_CACHE_DIR=tmp_path / "new/cache")).is_dir()

    own.chmod(0o777)  # as anyone can make it before the first run
    with pytest.raises(ConfigError, match=f"{INDUCTOR_CACHE}={own}: mode 777 lets others write"):
        check_compiler()
    env = {INDUCTOR_CACHE: tmp_path / "given", TRITON_CACHE: own}
    with pytest.raises(ConfigError, match=f"{TRITON_CACHE}={own}: mode 777 lets others write"):
        check_compiler(**env)


SOMEBODY = "it belongs to user 12, not to [0-9]+, and its files run as code; set it to another"
OWN, ROOT, OTHER = os.geteuid(), 0, 12


@pytest.mark.parametrize(("mode", "owner", "link_owner", "problem"), [
    (0o755, OWN, None, None),
    (0o775, OWN, None, r"mode 775 lets others write .* code \(chmod go-w, if none did\); set"),
    (0o702, OWN, OWN, "mode 702 lets others"),
    (0o755, OTHER, None, SOMEBODY),
    (0o755, OTHER, OWN, SOMEBODY),
    (0o755, OWN, OWN, None),
    (0o755, OWN, ROOT, None),
    (0o755, OWN, OTHER, SOMEBODY),
])  # fmt: skip
def test_a_cache_in_which_others_can_write_is_refused(
    mode, owner, link_owner, problem, tmp_path, monkeypatch
):
    path = folder = tmp_path / "cache"
    if link_owner is not None:
        folder = tmp_path / "folder"
        path.symlink_to(folder)
    folder.mkdir()
    folder.chmod(mode)

    def owned_by(uid: int, found: os.stat_result) -> os.stat_result:
        return os.stat_result((*found[:4], uid, *found[5:]))

    follows = owned_by(owner, path.stat())
    itself = follows if link_owner is None else owned_by(link_owner, path.lstat())
    monkeypatch.setattr(Path, "lstat", lambda each: itself)
    monkeypatch.setattr(Path, "stat", lambda each, follow_symlinks=True: follows)
    if problem is None:
        check_compiler(TORCHINDUCTOR_CACHE_DIR=path)
        return
    with pytest.raises(ConfigError, match=f"{INDUCTOR_CACHE}={path}: {problem}"):
        check_compiler(TORCHINDUCTOR_CACHE_DIR=path)


@pytest.mark.parametrize("path", ["/dev/null/cache", "/proc/cache"])
def test_a_cache_that_is_unusable_is_refused(path):
    refused = rf"{INDUCTOR_CACHE}={path}: cannot be written: .*; set it"
    with pytest.raises(ConfigError, match=refused):
        check_compiler(TORCHINDUCTOR_CACHE_DIR=path)


@pytest.mark.parametrize(("on_gpu", "programs", "env", "refused"), [
    (False, ["g++"], {}, None),
    (False, ["gcc"], {}, r"a C\+\+ compiler, and there is no g\+\+; install .* CXX, or set \[comp"),
    (False, ["g++"], {"CXX": "clang++"}, r"no clang\+\+; install one"),
    (False, ["g++"], {"CC": "icc"}, None),
    (True, ["clang"], {"CXX": "icpc"}, None),
    (True, ["g++"], {}, "a C compiler, and there is no gcc or clang; .* CC, or set"),
    (True, ["gcc"], {"CC": "icc"}, "no icc; install one"),
])  # fmt: skip
def test_a_compiler_that_cannot_work_is_refused(on_gpu, programs, env, refused, tmp_path):
    for program in programs:
        (tmp_path / program).touch(mode=0o755)
    env |= {"PATH": tmp_path, INDUCTOR_CACHE: tmp_path / "cache"}
    check_compiler(compiles=False, on_gpu=on_gpu, **env)
    if refused is None:
        check_compiler(compiles=True, on_gpu=on_gpu, **env)
        return
    with pytest.raises(ConfigError, match=rf"\[compile\] enable = true needs {refused}|{refused}"):
        check_compiler(compiles=True, on_gpu=on_gpu, **env)
