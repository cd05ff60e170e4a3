"""What the loss and its backward take of memory and time, beside PyTorch's own: each in a process
of its own. A hub."""

import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from torchtitan_lite.metrics.hardware import peak_memory_gib, synchronize
from torchtitan_lite.models.loss import CrossEntropy

KINDS = ("plain", "ours, eager", "ours, compiled")
"""The first is what the others are held against."""


@dataclass(frozen=True)
class LossCost:
    """Of one kind of loss."""

    kind: str
    mib: float
    """Peak memory, above what the process held before; with the loss's gradients. Resident on a
    CPU, allocated on a GPU."""
    seconds: float
    """Of forward and backward, the second time."""
    loss: float
    grad_norms: tuple[float, float]
    """Of the projection's input and its weight."""


def plain_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy in nat of `labels` [B, S] under `logits` [B, S, V], as anyone would write
    it."""
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def _plain(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return plain_loss(x @ weight.t(), labels)


def measure_loss(kind: str, *, tokens: int, vocab_size: int, dim: int) -> LossCost:
    """The cost of the loss of `tokens` random tokens in bf16, on the GPU at hand or else the CPU.
    Memory is the most that this process has ever held, so that it measures once."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    x = torch.randn(1, tokens, dim, device=device).bfloat16().requires_grad_()
    weight = (0.02 * torch.randn(vocab_size, dim, device=device)).bfloat16().requires_grad_()
    labels = torch.randint(vocab_size, (1, tokens), device=device)
    ours = CrossEntropy(compiled=kind == "ours, compiled")
    loss = _plain if kind == "plain" else partial(ours.of_linear, scale=1 / tokens)
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device) if on_gpu else 2**30 * peak_memory_gib(device)
    loss(x, weight, labels=labels).backward()  # some compile, and a GPU's libraries start
    x.grad = weight.grad = None
    synchronize(device)
    began = time.perf_counter()
    total = loss(x, weight, labels=labels)
    total.backward()
    value = total.item()  # waits for the device
    seconds = time.perf_counter() - began
    assert x.grad is not None and weight.grad is not None, "both require gradients"
    norms = (x.grad.float().norm().item(), weight.grad.float().norm().item())
    peak = torch.cuda.max_memory_allocated(device) if on_gpu else 2**30 * peak_memory_gib(device)
    return LossCost(kind, (peak - before) / 2**20, seconds, value, norms)


def measure_losses(*, tokens: int, vocab_size: int, dim: int) -> list[LossCost]:
    """The cost of each of KINDS."""
    costs = []
    for kind in KINDS:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            measure = partial(measure_loss, kind, tokens=tokens, vocab_size=vocab_size, dim=dim)
            costs.append(pool.submit(measure).result())
    return costs


def format_costs(costs: list[LossCost]) -> str:
    """A table, with ratios to the first."""
    plain = costs[0]
    lines = [
        f"{'loss':<16}{'MiB':>10}{'ratio':>8}{'s':>9}{'ratio':>8}{'nat':>12}{'grad norms':>24}"
    ]
    for cost in costs:
        norms = "{:.6g}, {:.6g}".format(*cost.grad_norms)
        lines.append(
            f"{cost.kind:<16}{cost.mib:>10,.0f}{cost.mib / plain.mib:>8.3f}{cost.seconds:>9.2f}"
            f"{cost.seconds / plain.seconds:>8.3f}{cost.loss:>12.6f}{norms:>24}"
        )
    return "\n".join(lines)
