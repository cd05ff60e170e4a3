"""Compiled float8 writes no cast twice, counted in what the compiler makes of a block; and computes
what it did."""

from dataclasses import replace

import torch
from torch._inductor import config

from torchtitan_lite.benchmarks.passes import ARGS, least_float8, measure_passes
from torchtitan_lite.float8.shared_casts import keep_shared_casts

SMALL = replace(ARGS, max_seq_len=64)


def test_each_input_is_cast_once() -> None:
    forward, backward = measure_passes("tensorwise", shared=True, args=SMALL)
    assert (forward.float8_elements, backward.float8_elements) == least_float8(SMALL)
    # Inductor by itself casts the input of wq, wk and wv three times, and that of w1 and w3 twice.
    plain, _ = measure_passes("tensorwise", shared=False, args=SMALL)
    assert plain.float8_elements == forward.float8_elements + 2 * SMALL.max_seq_len * SMALL.dim


def test_shared_casts_change_no_result() -> None:
    x = torch.randn(32, 64).bfloat16()
    one = torch.ones(())
    weights = [torch.randn(48, 64).to(torch.float8_e4m3fn).t() for _ in range(2)]

    def multiply(x: torch.Tensor) -> list[torch.Tensor]:
        cast = (x * 2).to(torch.float8_e4m3fn)
        return [
            torch._scaled_mm(cast, weight, one, one, out_dtype=torch.bfloat16) for weight in weights
        ]

    expected = multiply(x)
    torch._dynamo.reset()
    with config.patch(post_grad_custom_post_pass=None):  # as it is for other tests, afterwards
        keep_shared_casts()
        found = torch.compile(multiply, fullgraph=True)(x)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
