"""The bare loop trains what the trainer trains."""

import re

import pytest
import warm
from launching import ENV, ROOT, TINY

WORDS = ["--processes=2", "--pairs=2", "--training.global_batch_size=-1", "--training.steps=10"]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("loss", "gap"), [([], 5e-4), (["--our-loss"], 1e-6)])
def test_the_bare_loop_has_the_losses_of_the_trainer(loss: list[str], gap: float) -> None:
    script = str(ROOT / "scripts/benchmarks/bare_loop.py")
    words = [script, "--job.config_file", str(TINY), "--float8.enable_float8_linear", *WORDS]
    result = warm.python([*words, *loss], cwd=ROOT, env=ENV, timeout=280)
    assert result.returncode == 0, result.stdout + result.stderr
    (found,) = re.findall(r"losses differ by (\S+) at most", result.stdout)
    assert float(found) <= gap and "2 pairs" in result.stdout
