"""Time the kernels of a training step one by one: Llama 3 8B, one sequence of 8,192 tokens.

python scripts/benchmarks/kernel_times.py FILE [--settle SECONDS]

Each line of FILE is a JSON object: `kind` and `what` was timed, its `sizes`, how often a step has
it (`count`), and `seconds`, the median of several timings, or the `error`. Data is random, and the
GPU as warm as in training. A kind is a constant of the planner, which kernel_rates.py computes from
the file.
"""

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from torchtitan_lite.base.errors import ConfigError
from torchtitan_lite.base.terminal import run_script
from torchtitan_lite.catalog.flavors import FLAVORS, ModelArgs
from torchtitan_lite.models.llama3 import attend, document_mask

FLAVOR, TOKENS = "3-8B", 8192
FLOAT8_MAX = torch.finfo(torch.float8_e4m3fn).max
TIMINGS, TIMING_S, MOST_CALLS = 7, 0.05, 100
"""Timings of each kernel, and seconds and calls in each."""
SLEEP_CYCLES = 2_000_000
"""About a millisecond, in which the host launches ahead of the device."""
Call = Callable[[], object]


@dataclass(frozen=True)
class Matmul:
    """A matmul [rows, inner] @ [inner, columns] of a linear, `count` times in a step."""

    what: str
    rows: int
    columns: int
    inner: int
    count: int
    column_major: tuple[bool, bool]  # the operands, in bf16

    @property
    def sizes(self) -> dict[str, int]:
        """M, N and K."""
        return {"rows": self.rows, "columns": self.columns, "inner": self.inner}


def matmuls(args: ModelArgs, tokens: int) -> list[Matmul]:
    """The three matmuls of each linear; catalog/recipes.py explains them."""
    layers = args.n_layers
    linears = {
        "wq, wo": (args.q_dim, args.dim, 2 * layers),
        "wk, wv": (args.kv_dim, args.dim, 2 * layers),
        "w1, w3": (args.ffn_dim, args.dim, 2 * layers),
        "w2": (args.dim, args.ffn_dim, layers),
        "output": (args.vocab_size, args.dim, 1),
    }
    return [
        matmul
        for name, (n, k, count) in linears.items()
        for matmul in (
            Matmul(f"{name}: output", tokens, n, k, count, (False, True)),
            Matmul(f"{name}: grad_input", tokens, k, n, count, (False, False)),
            Matmul(f"{name}: grad_weight", n, k, tokens, count, (True, False)),
        )
    ]


def random(rows: int, columns: int, *, column_major: bool = False) -> Tensor:
    """Normal values [rows, columns] in bf16."""
    shape = (columns, rows) if column_major else (rows, columns)
    values = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    return values.t() if column_major else values


def to_float8(x: Tensor) -> Tensor:
    """Cast with one scale."""
    return (x * (FLOAT8_MAX / x.abs().amax())).to(torch.float8_e4m3fn)


def bf16_matmul(matmul: Matmul) -> Call:
    """Prepare a matmul in bf16, in the memory layout that training has."""
    a = random(matmul.rows, matmul.inner, column_major=matmul.column_major[0])
    b = random(matmul.inner, matmul.columns, column_major=matmul.column_major[1])
    return partial(torch.mm, a, b)


def float8_matmul(matmul: Matmul, *, fast: bool, by_rows: bool) -> Call:
    """Prepare a matmul in float8, with a scale for each row and column if `by_rows`."""
    a = to_float8(random(matmul.rows, matmul.inner))
    b = to_float8(random(matmul.inner, matmul.columns, column_major=True))
    shapes = ((matmul.rows, 1), (1, matmul.columns)) if by_rows else ((), ())
    scale_a, scale_b = (torch.full(shape, 2.0**-9, device="cuda") for shape in shapes)
    return partial(
        torch._scaled_mm,
        *(a, b),
        scale_a=scale_a,
        scale_b=scale_b,
        out_dtype=torch.bfloat16,
        use_fast_accum=fast,
    )


MATMULS: dict[str, Callable[[Matmul], Call]] = {
    "bf16_matmul": bf16_matmul,
    "fp8_matmul": partial(float8_matmul, fast=True, by_rows=False),
    "slow_accumulation": partial(float8_matmul, fast=False, by_rows=False),
    "row_scales": partial(float8_matmul, fast=True, by_rows=True),
}


def copy(x: Tensor) -> Tensor:
    """Read and write rows: 4 bytes of each element."""
    return x + 1


ATTENTION = {
    "attention_cudnn": SDPBackend.CUDNN_ATTENTION,
    "attention_flash": SDPBackend.FLASH_ATTENTION,
    "attention_flex": None,
}


def memory_kernel(function: Callable[[Tensor], object], rows: int, columns: int) -> Call:
    """Prepare a compiled function of random values [rows, columns]."""
    return partial(torch.compile(function), random(rows, columns))


def attention(backend: SDPBackend | None, args: ModelArgs, tokens: int) -> Call:
    """Prepare causal attention, forward and backward, in a backend of SDPA or by FlexAttention."""
    q, k, v = (
        torch.randn(1, tokens, heads, args.head_dim, device="cuda", dtype=torch.bfloat16)
        .transpose(1, 2)  # [1, heads, tokens, head_dim]
        .requires_grad_()
        for heads in (args.n_heads, args.n_kv_heads, args.n_kv_heads)
    )
    gradient = torch.randn_like(q)
    starts = torch.zeros(1, tokens, dtype=torch.int64, device="cuda")
    mask = document_mask(starts, torch.arange(tokens, device="cuda")) if backend is None else None

    def both() -> None:
        if backend is None:
            out = attend(q, k, v, mask)
        else:
            with sdpa_kernel(backend):
                out = attend(q, k, v, None)
        torch.autograd.grad(out, (q, k, v), gradient)

    return both


def prepare(args: ModelArgs, tokens: int) -> Iterator[tuple[dict[str, Any], Callable[[], Call]]]:
    """Yield what to time on the device, the most important first, and what prepares its call."""

    def describe(kind: str, what: str, count: int = 1, **sizes: int) -> dict[str, Any]:
        return {"kind": kind, "what": what, "count": count, "sizes": sizes}

    for kind, multiply in MATMULS.items():
        for matmul in matmuls(args, tokens):
            if matmul.what.startswith("output") and kind != "bf16_matmul":
                continue  # the projection is kept in bf16
            described = describe(kind, matmul.what, matmul.count, **matmul.sizes)
            yield described, partial(multiply, matmul)

    described = describe("contiguous", "copy of rows", bytes=4 * tokens * args.ffn_dim)
    yield described, partial(memory_kernel, copy, tokens, args.ffn_dim)
    for kind, backend in ATTENTION.items():
        described = describe(kind, f"{kind}, a layer", args.n_layers)
        yield described, partial(attention, backend, args, tokens)

    small = Matmul("small matmul", 128, 128, 128, 1, (False, False))
    yield describe("kernel_seconds", small.what, **small.sizes), partial(bf16_matmul, small)


def elapsed(call: Call, calls: int) -> float:
    """Return device seconds of a call. The device sleeps first, so that it never waits for the
    host."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(SLEEP_CYCLES)
    start.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / calls


def time_on_device(call: Call) -> list[float]:
    """Return device seconds of `call`, several times."""
    for _ in range(3):  # compile, load libraries, reserve memory
        call()
    calls = math.ceil(TIMING_S / max(elapsed(call, 3), 1e-9))
    return [elapsed(call, min(calls, MOST_CALLS)) for _ in range(TIMINGS)]


def time_prepared(ready: Callable[[], Call]) -> list[float]:
    """Time what `ready` prepares; its tensors are freed afterwards."""
    return time_on_device(ready())


def write(stream: TextIO, described: dict[str, Any], measure: Callable[[], list[float]]) -> None:
    """Write a measurement as a line at once, or why there is none."""
    try:
        seconds = measure()
        low, middle, high = statistics.quantiles(seconds, n=4, method="inclusive")
        described |= {"seconds": middle, "spread_pct": 100 * (high - low) / middle}
    except RuntimeError as error:  # also a compiler's, and no memory
        described |= {"error": str(error).strip().partition("\n")[0] or repr(error)}
    stream.write(json.dumps(described) + "\n")
    stream.flush()


def settle(seconds: float) -> None:
    """Multiply for that long: a GPU that has just started is cooler and faster than in training."""
    a, b = random(TOKENS, TOKENS), random(TOKENS, TOKENS)
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        for _ in range(10):
            torch.mm(a, b)
        torch.cuda.synchronize()


def main(argv: list[str]) -> None:
    """Measure into the file that `argv` names. Raises ConfigError without a GPU."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--settle", type=float, default=20.0, metavar="SECONDS")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        raise ConfigError("kernels are timed on a GPU, and there is none here.")

    torch.manual_seed(0)
    settle(options.settle)
    with options.file.open("w") as stream:
        for described, ready in prepare(FLAVORS[FLAVOR], TOKENS):
            write(stream, described, partial(time_prepared, ready))


if __name__ == "__main__":
    run_script(main)
