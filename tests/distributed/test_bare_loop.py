"""The bare loop trains what the trainer trains."""

import re
from pathlib import Path

import pytest
from launching import ROOT, TINY, finish


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("loss", "gap"), [("plain", 5e-4), ("ours", 1e-6)])
def test_the_bare_loop_has_the_losses_of_the_trainer(tmp_path: Path, loss: str, gap: float) -> None:
    words = [
        "--job.config_file",
        str(TINY),
        "--job.dump_folder",
        str(tmp_path),
        "--training.global_batch_size=-1",
    ]
    options = ["--pairs=2", "--block-steps=1", "--bare-loss", loss, "--float8.enable_float8_linear"]
    output = finish(str(ROOT / "scripts/bench_bare.py"), *words, *options, processes=2)
    (found,) = re.findall(r"losses of the two differ by (\S+) at most", output)
    assert float(found) <= gap
    assert "from 2 pairs" in output
