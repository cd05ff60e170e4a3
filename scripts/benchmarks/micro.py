"""Measure one part of training: the loss, or logging.

python scripts/benchmarks/micro.py loss [--tokens 8192] [--vocab-size 128256] [--dim 256]
python scripts/benchmarks/micro.py logging --job.config_file X.toml [--processes 1] [--pairs 5] ...
"""

import argparse
import multiprocessing
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch
from bare_loop import plain_loss
from common import Ratios, describe_machine, measure_pairs, run_config
from torch import Tensor

from torchtitan_lite.base.terminal import run_script
from torchtitan_lite.config import load_config
from torchtitan_lite.metrics.hardware import peak_memory_gib
from torchtitan_lite.models.loss import CrossEntropy

LOSSES = ("plain", "ours, eager", "ours, compiled")
ONLY_TRAIN = ("--validation.enable=false", "--training.epochs=", "--metrics.log_freq=1")


@dataclass(frozen=True)
class LossCost:
    """Cost of one kind of loss and its backward pass."""

    kind: str
    mib: float
    """Peak memory above what the process held before: resident on a CPU, allocated on a GPU."""
    seconds: float
    """Forward and backward, the second time."""
    loss: float
    grad_norms: tuple[float, float]
    """Of the projection's input and weight."""

    def __str__(self) -> str:
        """The figures in a line."""
        norms = "{:.6g}, {:.6g}".format(*self.grad_norms)
        cost = f"{self.mib:,.0f} MiB, {self.seconds:.2f} s"
        return f"{self.kind}: {cost}, loss {self.loss:.6f}, gradient norms {norms}"


def measure_loss(kind: str, *, tokens: int, vocab_size: int, dim: int) -> LossCost:
    """Measure the loss of random tokens in bf16, on the GPU if there is one. The memory is the
    process's peak, so a process can measure once only."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    x = torch.randn(1, tokens, dim, device=device).bfloat16().requires_grad_()
    weight = (0.02 * torch.randn(vocab_size, dim, device=device)).bfloat16().requires_grad_()
    labels = torch.randint(vocab_size, (1, tokens), device=device)

    def plain(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        return plain_loss(x @ weight.t(), labels)

    ours = CrossEntropy(compiled=kind == "ours, compiled")
    loss = plain if kind == "plain" else partial(ours, scale=1 / tokens)

    def peak_gib() -> float:
        allocated = device.type == "cuda"
        return torch.cuda.max_memory_allocated() / 2**30 if allocated else peak_memory_gib(device)

    # The first time compiles and loads libraries.
    before = peak_gib()
    loss(x, weight, labels=labels).backward()
    x.grad = weight.grad = None
    torch.get_device_module(device).synchronize(device)
    began = time.perf_counter()
    total = loss(x, weight, labels=labels)
    total.backward()
    value = total.item()  # waits for the device
    seconds = time.perf_counter() - began

    assert x.grad is not None and weight.grad is not None, "both require gradients"
    norms = (x.grad.float().norm().item(), weight.grad.float().norm().item())
    return LossCost(kind, 1024 * (peak_gib() - before), seconds, value, norms)


def measure_losses(*, tokens: int, vocab_size: int, dim: int) -> list[LossCost]:
    """Measure each of LOSSES in a process of its own."""
    costs = []
    for kind in LOSSES:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            measure = partial(measure_loss, kind, tokens=tokens, vocab_size=vocab_size, dim=dim)
            costs.append(pool.submit(measure).result())
    return costs


def report_losses(options: argparse.Namespace, overrides: list[str]) -> None:
    """Print memory and time of our loss beside F.cross_entropy's."""
    plain, *ours = measure_losses(
        tokens=options.tokens, vocab_size=options.vocab_size, dim=options.dim
    )
    print(plain)
    for cost in ours:
        print(f"{cost}: {cost.mib / plain.mib:.2f} memory, {cost.seconds / plain.seconds:.2f} time")


def report_logging(options: argparse.Namespace, overrides: list[str]) -> None:
    """Print how much longer steps take that are all logged, by all of the config's writers."""

    def measure(log_freq: int) -> float:
        words = [*overrides, *ONLY_TRAIN, f"--metrics.log_freq={log_freq}"]
        config = load_config(words, world_size=options.processes)
        _, records = run_config(config, processes=options.processes)
        first, *rest = records  # a record's step time is the mean since the record before
        return statistics.fmean(record["step_time_s"] for record in rest)

    always, never = measure_pairs(lambda: measure(1), lambda: measure(10**6), pairs=options.pairs)
    print(f"seconds of a logged step over an unlogged one: {Ratios.of(always, never)}")


def positive(word: str) -> int:
    """Return the number in an option. Raises ValueError below 1."""
    if (value := int(word)) < 1:
        raise ValueError(word)
    return value


def main(argv: list[str]) -> None:
    """Measure the part that `argv` names. Raises RunError."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    reports = {
        "loss": report_losses,
        "logging": report_logging,
    }

    # Options of the parts; what is unknown here overrides the config.
    parser.add_argument("part", choices=reports)
    for name, default in {"tokens": 8192, "vocab-size": 128256, "dim": 256}.items():
        parser.add_argument(f"--{name}", type=positive, default=default)
    parser.add_argument("--processes", type=positive, default=1)
    parser.add_argument("--pairs", type=positive, default=5)
    options, overrides = parser.parse_known_args(argv)
    print(describe_machine())
    reports[options.part](options, overrides)


if __name__ == "__main__":
    run_script(main)
