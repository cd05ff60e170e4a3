"""What makes a run fast on a GPU: it computes what the plain way does, and it is what really
ran."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from launching import ENV, ROOT, finish, launcher, losses, train, train_arguments
from micro import measure_losses
from torch import nn

from torchtitan_lite.config import OptimizerConfig
from torchtitan_lite.training.optim import build_optimizer, step_unless

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


# ----- CrossEntropy -----
def test_the_loss_takes_at_most_a_quarter_of_the_memory_of_the_plain_path() -> None:
    plain, *ours = measure_losses(tokens=8192, vocab_size=128256, dim=1024)
    for cost in ours:
        assert cost.mib <= plain.mib / 4, cost
        assert cost.loss == pytest.approx(plain.loss, rel=1e-5)
        assert cost.grad_norms == pytest.approx(plain.grad_norms, rel=1e-2)


# ----- BFloat16AdamW, state_dtype -----


def updated(device: str) -> torch.Tensor:
    """What three steps add to a weight."""
    generator = torch.Generator().manual_seed(0)
    weight = nn.Parameter(torch.zeros(64, 256, device=device))
    optimizer = build_optimizer(
        [weight], OptimizerConfig(state_dtype="bfloat16", lr=1e-2, weight_decay=0.0)
    )
    for _ in range(3):
        weight.grad = torch.randn(64, 256, generator=generator).to(device)
        step_unless(optimizer, torch.zeros((), device=device))
    return weight.detach().cpu()


def test_moments_in_bfloat16_are_updated_as_on_a_cpu() -> None:
    expected = updated("cpu")
    found = updated("cuda")  # compiled
    assert (found - expected).norm() / expected.norm() < 1e-3


def test_moments_in_bfloat16_train_nearly_as_float32_does(tmp_path: Path) -> None:
    expected = losses(tmp_path / "float32", "--training.steps=10", processes=1)
    settings = ["--training.steps=10", "--optimizer.state_dtype=bfloat16"]
    found = losses(tmp_path / "low", *settings, processes=1)
    assert found == pytest.approx(expected, rel=5e-3) and found != expected


# ----- find_attention -----
def test_a_run_says_which_attention_it_took(tmp_path: Path) -> None:
    output = finish(*train_arguments(tmp_path, "--training.steps=2"), processes=1)
    (chosen,) = re.findall(r"attention by (\w+)", output)
    assert chosen in {"CUDNN_ATTENTION", "FLASH_ATTENTION"}


# ----- init_distributed -----
def test_memory_is_taken_in_segments_that_grow() -> None:
    code = (
        "import torch, torchtitan_lite.run.process_group as d; from torchtitan_lite.config "
        "import CommConfig; "
        "device = d.init_distributed(CommConfig()); kept = torch.empty(2**28, device=device); "
        "print([segment['is_expandable'] for segment in torch.cuda.memory_snapshot()], "
        "flush=True); d.end_process(0)"
    )
    env = {name: value for name, value in ENV.items() if not name.endswith("ALLOC_CONF")}
    command = [sys.executable, *launcher(1, "--no-python"), sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env)
    assert result.returncode == 0, result
    assert "True" in result.stdout and "False" not in result.stdout, result


# ----- memory_budget -----
def test_compiled_float8_takes_less_memory_by_a_budget(tmp_path: Path) -> None:
    sizes = ["--training.seq_len=2048", "--training.local_batch_size=8", "--training.steps=3"]
    compiled = [*sizes, "--compile.enable", "--float8.enable_float8_linear"]
    mode = "--activation_checkpoint.mode=memory_budget"
    budget = [mode, "--activation_checkpoint.memory_budget=0.3"]
    whole = train(tmp_path / "whole", *compiled, processes=1)[-1]
    part = train(tmp_path / "part", *compiled, *budget, processes=1)[-1]
    assert part["memory_gib"] < whole["memory_gib"]
    assert part["loss"] == pytest.approx(whole["loss"], rel=5e-3)


# ----- bench -----
def test_the_benchmark_compares_its_rows(tmp_path: Path) -> None:
    rows = ["bf16_compiled", "tensorwise_compiled", "bf16", "tensorwise"]
    command = [sys.executable, "scripts/benchmarks/bench.py", *rows, "--out", str(tmp_path)]
    result = subprocess.run(command, cwd=ROOT, env=ENV, capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, result.stdout + result.stderr
    assert all(f"| {row} " in result.stdout for row in rows) and "emulated" not in result.stdout
