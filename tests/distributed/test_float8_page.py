"""Every command of docs/float8.md does what the page says, in the order of the page."""

import json
import re
import shlex
from pathlib import Path

import pytest
import warm
from launching import ENV, ROOT

PAGE = (ROOT / "docs" / "float8.md").read_text()
SHORT = (
    "--training.steps=3 --training.seq_len=32 --training.local_batch_size=2 "
    "--metrics.peak_tflops_bf16=1.0"
)


def commands(folder: Path) -> list[list[str]]:
    """Those of the page, with `folder` for outputs, and with their runs made short."""
    blocks = re.findall(r"^```bash\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)
    found = []
    for line in "".join(blocks).splitlines():
        words = shlex.split(line.replace("outputs/", f"{folder}/"))
        launcher = {"python": [], "torchrun": ["-m", "torch.distributed.run"]}[words[0]]
        short = shlex.split(SHORT) if "torchtitan_lite.train" in words else []
        short += ["--float8.log_numerics_freq=2"] if "--float8.log_numerics_freq" in words else []
        short += ["--collect-only"] if "pytest" in words else []
        found.append([*launcher, *words[1:], *short])
    return found


@pytest.mark.timeout(600)
def test_the_pages_commands(tmp_path: Path) -> None:
    said = {}
    for command in commands(tmp_path):
        done = warm.python(command, cwd=ROOT, env=ENV, timeout=200)
        assert done.returncode == 0, f"{command}: {done.stdout[-3000:]} {done.stderr[-3000:]}"
        said[" ".join(command)] = done.stdout
    assert len(said) == 6
    bf16, float8, compared, planned, watched, gpu = said.values()
    assert "0 of 43 linears are of float8" in bf16 and "42 of 43 linears are of float8" in float8
    assert "tps" in compared
    assert "float8 helps" in planned
    assert "float8 casts: least SQNR" in watched and "test_gpu" in gpu
    (measured,) = (tmp_path / "watched" / "numerics.jsonl").read_text().splitlines()
    assert json.loads(measured)["kinds"]["attention.wq"]["weight"]["sqnr_db"] == pytest.approx(
        31.5, abs=1
    )
