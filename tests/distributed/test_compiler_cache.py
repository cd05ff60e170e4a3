"""A file of the compiler's cache that was cut off, as a machine that goes down leaves it."""

import subprocess
import sys
from pathlib import Path

import pytest

COMPILES = """
import torch
from torchtitan_lite.run.outcome import explain_compiler
try:
    torch.compile(lambda x: x.sin() * 2)(torch.ones(64))
    print("compiled")
except Exception as error:
    print(explain_compiler(error))
"""


# ----- explain_compiler -----
@pytest.mark.timeout(300)  # the compiler reads all of torch's headers
def test_a_cut_off_file_of_the_cache_is_told_with_the_folder_to_remove(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS", "0")

    def outcome() -> str:
        command = [sys.executable, "-c", COMPILES]
        return subprocess.check_output(command, text=True, timeout=200)

    assert outcome() == "compiled\n"
    (library,) = tmp_path.glob("*/*.main.so")
    library.write_bytes(b"")
    assert f"remove the folder {tmp_path} and start again" in (told := outcome())
    assert told.endswith(f"It said: ImportError: {library}: file too short\n")
