"""What makes a run fast on a GPU: it computes what the plain way does, and it is what really
ran."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from launching import ENV, ROOT, finish, losses, train, train_arguments
from micro import measure_losses
from torch import nn
from torch.nn.attention import SDPBackend

from torchtitan_lite.config import OptimizerConfig
from torchtitan_lite.models.attention import (
    attention_backend,
    attention_inputs,
    prefer_backend,
    time_backends,
)
from torchtitan_lite.models.flavors import FLAVORS, ModelArgs
from torchtitan_lite.optim import build_optimizer, step_unless

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
LOW_BIT = ("bfloat16", "int8", "float8")


def test_the_loss_takes_at_most_a_quarter_of_the_memory_of_the_plain_path() -> None:
    plain, *ours = measure_losses(tokens=8192, vocab_size=128256, dim=1024)
    for cost in ours:
        assert cost.mib <= plain.mib / 4, cost
        assert cost.loss == pytest.approx(plain.loss, rel=1e-5)
        assert cost.grad_norms == pytest.approx(plain.grad_norms, rel=1e-2)


def updated(state_dtype: str, device: str) -> torch.Tensor:
    """What three steps add to a weight."""
    generator = torch.Generator().manual_seed(0)
    weight = nn.Parameter(torch.zeros(64, 256, device=device))
    optimizer = build_optimizer(
        [weight], OptimizerConfig(state_dtype=state_dtype, lr=1e-2, weight_decay=0.0)
    )
    for _ in range(3):
        weight.grad = torch.randn(64, 256, generator=generator).to(device)
        step_unless(optimizer, torch.zeros((), device=device))
    return weight.detach().cpu()


@pytest.mark.parametrize("state_dtype", LOW_BIT)
def test_moments_in_fewer_bits_are_updated_as_on_a_cpu(state_dtype: str) -> None:
    expected = updated(state_dtype, "cpu")
    found = updated(state_dtype, "cuda")  # compiled
    assert (found - expected).norm() / expected.norm() < 1e-3


@pytest.mark.parametrize("state_dtype", LOW_BIT)
def test_moments_in_fewer_bits_train_nearly_as_float32_does(
    state_dtype: str, tmp_path: Path
) -> None:
    expected = losses(tmp_path / "float32", "--training.steps=10", processes=1)
    found = losses(
        tmp_path / "low",
        "--training.steps=10",
        f"--optimizer.state_dtype={state_dtype}",
        processes=1,
    )
    assert found == pytest.approx(expected, rel=5e-3) and found != expected


def test_the_fastest_attention_that_shares_heads_is_taken() -> None:
    args, device = FLAVORS["8B"], torch.device("cuda")
    kind = {"tp_degree": 1, "dtype": torch.bfloat16, "device": device}
    before = torch._C._get_sdp_priority_order()
    seconds = time_backends(*attention_inputs(args, batch_size=1, **kind))
    assert len(seconds) >= 2, seconds
    try:
        with torch.compiler.config.patch(cache_key_tag=""):
            for name in seconds:
                prefer_backend(name)
                assert attention_backend(args, **kind) == name
    finally:
        torch._C._set_sdp_priority_order(before)


def test_a_backend_that_cannot_compute_attention_is_left_out_in_silence(
    recwarn: pytest.WarningsRecorder,
) -> None:
    kind = {
        "tp_degree": 1,
        "dtype": torch.float32,
        "device": torch.device("cuda"),
    }  # no kernel of flash attention
    args = ModelArgs(
        dim=256, n_layers=1, n_heads=4, n_kv_heads=2, ffn_dim=256, vocab_size=16, max_seq_len=128
    )
    assert "FLASH_ATTENTION" not in time_backends(*attention_inputs(args, batch_size=1, **kind))
    assert [str(warning.message) for warning in recwarn] == []


def test_a_preferred_backend_is_taken_at_the_first_choice_of_a_process() -> None:
    program = """
import torch
from torchtitan_lite.models.attention import attention_backend, prefer_backend
from torchtitan_lite.models.flavors import FLAVORS, ModelArgs

prefer_backend("FLASH_ATTENTION")
print(attention_backend(FLAVORS["8B"], tp_degree=1, dtype=torch.bfloat16, device=torch.device("cuda")))
"""
    output = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout
    assert output == "FLASH_ATTENTION\n"


def test_a_run_says_which_attention_it_took(tmp_path: Path) -> None:
    output = finish(*train_arguments(tmp_path, "--training.steps=2"), processes=1)
    (chosen,) = re.findall(r"attention by (\w+)", output)
    (timed,) = re.findall(r"attention, forward and backward: (.*)", output)
    milliseconds = {name: float(value) for name, value in re.findall(r"(\w+) ([\d.]+) ms", timed)}
    assert chosen in SDPBackend.__members__ and milliseconds[chosen] == min(milliseconds.values())


def test_memory_is_taken_in_segments_that_grow() -> None:
    code = (
        "import torch, torchtitan_lite.parallel.distributed as d; from torchtitan_lite.config import CommConfig; "
        "device = d.init_distributed(CommConfig()); kept = torch.empty(2**28, device=device); "
        "print([segment['is_expandable'] for segment in torch.cuda.memory_snapshot()], flush=True); d.end_process(0)"
    )
    env = {name: value for name, value in ENV.items() if not name.endswith("ALLOC_CONF")}
    command = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "1",
        "--no-python",
        sys.executable,
    ]
    result = subprocess.run(
        [sys.executable, *command, "-c", code], capture_output=True, text=True, cwd=ROOT, env=env
    )
    assert result.returncode == 0 and "True" in result.stdout and "False" not in result.stdout, (
        result
    )


def test_compiled_float8_takes_less_memory_by_a_budget(tmp_path: Path) -> None:
    sizes = [
        "--training.seq_len=2048",
        "--training.local_batch_size=8",
        "--training.steps=3",
        "--compile.enable",
    ]
    budget = [
        "--activation_checkpoint.mode=memory_budget",
        "--activation_checkpoint.memory_budget=0.3",
    ]
    whole = train(tmp_path / "whole", *sizes, "--float8.enable_float8_linear", processes=1)[-1]
    part = train(tmp_path / "part", *sizes, "--float8.enable_float8_linear", *budget, processes=1)[
        -1
    ]
    assert part["memory_gib"] < whole["memory_gib"] and part["loss"] == pytest.approx(
        whole["loss"], rel=5e-3
    )


def test_the_quick_benchmark_measures_all_of_its_rows(tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    command = [sys.executable, "scripts/bench.py", "--quick", "--out", str(out)]
    result = subprocess.run(command, cwd=ROOT, env=ENV, capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, result.stdout + result.stderr
    report = json.loads(out.read_text())
    assert [row["status"] for row in report["rows"]] == ["done"] * 4 and not report["emulated"]
    assert all(row["mfu_achievable"] > 0 for row in report["rows"])
    assert report["skipped"] == []
