"""The fault of Inductor on GPUs that a patch works around, without the patch and with it."""

import json
from pathlib import Path

import pytest
from running import run

pytestmark = [pytest.mark.deviceless, pytest.mark.timeout(300)]
PROGRAM = Path(__file__).with_name("transposes.py")


# ----- store_transposes_in_tiles -----
def test_store_transposes_in_tiles_changes_what_a_reduction_stores(tmp_path: Path) -> None:
    out = tmp_path / "kinds.json"
    run(tmp_path, str(PROGRAM), str(out))
    assert json.loads(out.read_text()) == [["strided"], ["contiguous", "transposing"]]
