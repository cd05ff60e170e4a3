"""The fault of Inductor on GPUs that a patch works around, without the patch and with it."""

import json
from pathlib import Path

import pytest
from running import run

pytestmark = [pytest.mark.deviceless, pytest.mark.timeout(300)]
PROGRAM = Path(__file__).with_name("transposes.py")


def test_a_reduction_stores_a_transposed_cast_unless_patched(tmp_path: Path) -> None:
    out = tmp_path / "kinds.json"
    run(tmp_path, str(PROGRAM), str(out))
    assert json.loads(out.read_text()) == [["strided"], ["contiguous", "transposing"]]
