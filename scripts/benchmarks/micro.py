"""Measure one part of training: the loss, the data, checkpoints, or logging.

python scripts/benchmarks/micro.py loss [--tokens 8192] [--vocab-size 128256] [--dim 256]
python scripts/benchmarks/micro.py data [--source PATH] [--seq-len 8192]
python scripts/benchmarks/micro.py checkpoint --job.config_file X.toml [--processes 2] ...
python scripts/benchmarks/micro.py logging --job.config_file X.toml [--processes 1] [--pairs 5] ...
"""

import argparse
import multiprocessing
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from bare_loop import plain_loss
from common import Ratios, describe_machine, measure_pairs, run_config
from torch import Tensor

from torchtitan_lite.base.errors import run_script
from torchtitan_lite.config import load_config
from torchtitan_lite.data.sources import open_source
from torchtitan_lite.data.token_store import TokenStore
from torchtitan_lite.data.tokenizer import build_tokenizer
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


def seconds_of(action: Callable[[], object]) -> float:
    """Call `action` and return the seconds that it took."""
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def report_data(options: argparse.Namespace, overrides: list[str]) -> None:
    """Print how fast a token store is made beside the tokenizer alone, and how fast windows are
    read beside numpy slices."""
    cores = len(os.sched_getaffinity(0))
    tokenizer = build_tokenizer("")
    texts = [row.text for chunk in open_source(options.source).chunks() for row in chunk()]
    with tempfile.TemporaryDirectory() as name:
        stores = (Path(name) / str(number) for number in range(options.pairs))

        def make() -> None:
            words = ["data", "make", options.source, str(next(stores))]
            command = [sys.executable, "-m", "torchtitan_lite", *words]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)

        made, alone = measure_pairs(
            lambda: seconds_of(make),
            lambda: seconds_of(lambda: tokenizer.encode_documents(texts)) / cores,
            pairs=options.pairs,
        )
        print(
            f"rate of a store made by {cores} threads over {cores} x the tokenizer's: "
            f"{Ratios.of(alone, made)}"
        )

        # Both read pages that are in the page cache.
        store = TokenStore(Path(name) / "0")
        tokens = np.asarray(store.read(0, store.tokens))
        length = options.seq_len + 1
        starts = np.random.default_rng(0).integers(0, store.tokens - length, (256, 8))
        windows, slices = measure_pairs(
            lambda: seconds_of(lambda: [store.windows(some, length) for some in starts]),
            lambda: seconds_of(
                lambda: [np.stack([tokens[i : i + length] for i in some]) for some in starts]
            ),
            pairs=10,
        )
        rate = starts.size * options.seq_len / statistics.median(windows) / 1e6
        print(
            f"windows of {options.seq_len}: {rate:,.0f} million tokens/s; over numpy slices: "
            f"{Ratios.of(slices, windows)}"
        )


def report_checkpoints(options: argparse.Namespace, overrides: list[str]) -> None:
    """Print for how long synchronous and asynchronous saves stop training. A save that begins
    before the one before has ended waits for it: `--checkpoint.interval` must be long enough."""
    medians = []
    for mode in ("disabled", "async_with_pinned_mem"):
        saves = ("--checkpoint.enable", f"--checkpoint.async_mode={mode}")
        config = load_config([*overrides, *ONLY_TRAIN, *saves], world_size=options.processes)
        run, _ = run_config(config, processes=options.processes)
        text = "\n".join(line for _, line in run.lines)
        seconds = [float(each) for each in re.findall(r"checkpoint_s ([\d.]+)", text)]
        medians.append(statistics.median(seconds[1:]))  # the first copies into new memory
        print(f"async_mode {mode}: {medians[-1]:.3f} s, median of {len(seconds) - 1} saves")
    print(f"asynchronous over synchronous: {medians[1] / medians[0]:.3f}")


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
        "data": report_data,
        "checkpoint": report_checkpoints,
        "logging": report_logging,
    }

    # Options of the parts; what is unknown here overrides the config.
    parser.add_argument("part", choices=reports)
    for name, default in {
        "tokens": 8192,
        "vocab-size": 128256,
        "dim": 256,
        "seq-len": 8192,
    }.items():
        parser.add_argument(f"--{name}", type=positive, default=default)
    parser.add_argument("--processes", type=positive, default=1)
    parser.add_argument("--pairs", type=positive, default=5)
    parser.add_argument("--source", default="pystdlib", help="text (default: Python's library)")
    options, overrides = parser.parse_known_args(argv)
    print(describe_machine())
    reports[options.part](options, overrides)


if __name__ == "__main__":
    run_script(main)
