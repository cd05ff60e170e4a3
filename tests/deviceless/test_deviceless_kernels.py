"""The recipes know the memory traffic of their casts: that of the kernels that Inductor generates
for a block, less what the kernels of a block in bf16 move."""

import json
from pathlib import Path

import pytest
from running import run

from torchtitan_lite.float8.recipes import RECIPES, Traffic
from torchtitan_lite.planner.roofline import GATHERED_WEIGHT

pytestmark = [pytest.mark.deviceless, pytest.mark.timeout(600)]
KERNELS = Path(__file__).with_name("kernels.py")
KINDS = ("contiguous", "transposing", "strided", "kernels")

# A block of 8B and a sequence of 8192 tokens.
M, D, KV, F = 8192, 4096, 1024, 14336
INPUTS = M * (3 * D + F)  # of wq, wk and wv; of w1 and w3; of wo; of w2
WEIGHTS = D * (2 * D + 2 * KV + 3 * F)
GRAD_OUTPUTS = M * (3 * D + 2 * KV + 2 * F)


def count(folder: Path, recipe: str) -> list[Traffic]:
    """What the forward and the backward pass move, in MiB, and their kernels."""
    out = folder / "kernels.json"
    run(folder, str(KERNELS), recipe, str(out))
    return [Traffic(**counted) for counted in json.loads(out.read_text())]


@pytest.fixture(scope="module")
def bf16(tmp_path_factory: pytest.TempPathFactory) -> list[Traffic]:
    return count(tmp_path_factory.mktemp("bf16"), "bf16")


def test_a_block_in_bf16_moves_what_its_norms_and_activations_need(bf16: list[Traffic]) -> None:
    # Elements of 2 bytes per token; beside them are the rotary tables, of 8 MiB in each pass.
    forward = 9 * D + 2 * (D + KV) + 3 * F
    backward = 19 * D + 2 * (D + KV) + 5 * F
    mib = [2 * M * elements / 2**20 for elements in (forward, backward)]
    assert [each.contiguous for each in bf16] == pytest.approx(mib, rel=0.01)
    assert [each.kernels for each in bf16] == [6, 8]
    assert all(each.transposing == each.strided == 0 for each in bf16)


@pytest.mark.parametrize("name", ["tensorwise", "gathered", "rowwise", "rowwise_with_gw_hp"])
def test_a_recipe_adds_the_traffic_of_its_casts(
    name: str, bf16: list[Traffic], tmp_path: Path
) -> None:
    casts = RECIPES["tensorwise" if name == "gathered" else name].compiled_casts
    weight = GATHERED_WEIGHT if name == "gathered" else casts.weight
    # Each pass, with the elements and the number of its tensors. The compiler can transpose a
    # gathered weight in either.
    forward = [(casts.input[0], INPUTS, 4), (weight[0], WEIGHTS, 7)]
    backward = [
        (casts.input[1], INPUTS, 4),
        (weight[1], WEIGHTS, 7),
        (casts.grad_output, GRAD_OUTPUTS, 7),
    ]
    passes = [forward, backward] if name != "gathered" else [forward + backward]
    counted, plain = count(tmp_path, name), bf16
    if name == "gathered":
        counted, plain = ([Traffic(*map(sum, zip(*both, strict=True)))] for both in (counted, bf16))

    for found, without, tensors in zip(counted, plain, passes, strict=True):
        for kind in KINDS[:3]:
            added = sum(getattr(cast, kind) * elements for cast, elements, _ in tensors) / 2**20
            expected = getattr(without, kind) + added
            assert getattr(found, kind) == pytest.approx(expected, rel=0.05, abs=30), kind
        launched = without.kernels + sum(cast.kernels * count for cast, _, count in tensors)
        assert found.kernels == pytest.approx(launched, rel=0.05, abs=1)
