"""The bare loop trains what the trainer trains."""

import re
from pathlib import Path

import pytest
from launching import ROOT, TINY, finish, losses

SCRIPT = str(ROOT / "scripts/benchmarks/bare_loop.py")
OVERRIDES = ["--training.global_batch_size=-1", "--training.steps=5"]
OVERRIDES += ["--float8.enable_float8_linear"]


# ----- bare_loop, Trainer -----
@pytest.mark.timeout(240)
def test_the_bare_loop_has_the_losses_of_the_trainer(tmp_path: Path) -> None:
    ours = losses(tmp_path, *OVERRIDES, processes=2)
    # torch's norm, by which the loop clips, is a little too small on CPU.
    for options, gap in (([], 5e-4), (["--our-loss"], 1e-4)):
        words = [SCRIPT, *options, "--job.config_file", str(TINY), *OVERRIDES]
        output = finish(*words, processes=2)
        bare = [float(loss) for loss in re.findall(r"^step \d+  loss (\S+)$", output, re.MULTILINE)]
        assert len(bare) == 5 and bare == pytest.approx(ours, rel=gap)
