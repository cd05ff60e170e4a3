"""The recipes know the memory traffic of their casts: that of the kernels that Inductor generates
for a block, less what the kernels of a block in bf16 move."""

import json
from pathlib import Path
from typing import NamedTuple

import pytest
from running import run

from torchtitan_lite.planner.constants import COMPILED

pytestmark = [pytest.mark.deviceless, pytest.mark.timeout(600)]
KERNELS = Path(__file__).with_name("block_kernels.py")
KEPT_MIB = {"bf16": 1089, "rowwise_with_gw_hp": 1089}
KEPT_MIB |= dict.fromkeys(("tensorwise", "rowwise", "blockwise"), 737)
"""What a block keeps for backward beside its weights, with its output in place of its input."""

# A block of 8B and a sequence of 8192 tokens.
M, D, KV, F = 8192, 4096, 1024, 14336
INPUTS = M * (3 * D + F)  # of wq, wk and wv; of w1 and w3; of wo; of w2
WEIGHTS = D * (2 * D + 2 * KV + 3 * F)
GRAD_OUTPUTS = M * (3 * D + 2 * KV + 2 * F)


class Traffic(NamedTuple):
    """MiB that kernels move by how they access memory, and their number."""

    contiguous: float = 0.0
    transposing: float = 0.0
    strided: float = 0.0
    kernels: float = 0.0

    @property
    def equivalent(self) -> float:
        """MiB of kernels that read and write rows, which would take as long."""
        return self.contiguous + 1.5 * self.transposing + 3 * self.strided


class Pass(NamedTuple):
    """What the compiled forward or backward pass of a block does."""

    traffic: Traffic
    returned: float
    """MiB that it returns."""


def count(folder: Path, recipe: str, cp: int = 1) -> list[Pass]:
    """The forward and the backward pass of one of `cp` ranks that share a sequence."""
    out = folder / "kernels.json"
    run(folder, str(KERNELS), recipe, str(cp), str(out))
    return [Pass(Traffic(**counted), returned) for counted, returned in json.loads(out.read_text())]


@pytest.fixture(scope="module")
def bf16(tmp_path_factory: pytest.TempPathFactory) -> list[Pass]:
    return count(tmp_path_factory.mktemp("bf16"), "bf16")


# ----- TransformerBlock, context_parallel -----


def test_a_block_in_bf16_moves_what_its_norms_and_activations_need(bf16: list[Pass]) -> None:
    # Elements of 2 bytes per token; beside them are the rotary tables, of 8 MiB in each pass.
    forward = 9 * D + 2 * (D + KV) + 3 * F
    backward = 12 * D + 2 * (D + KV) + 5 * F
    mib = [2 * M * elements / 2**20 for elements in (forward, backward)]
    traffic = [each.traffic for each in bf16]
    assert [each.contiguous for each in traffic] == pytest.approx(mib, rel=0.01)
    assert [each.kernels for each in traffic] == [6, 7]
    assert all(each.transposing == each.strided == 0 for each in traffic)
    assert bf16[0].returned == pytest.approx(KEPT_MIB["bf16"], rel=0.01)


def test_ranks_that_share_a_sequence_copy_what_a_kernel_needs_in_one_piece(
    bf16: list[Pass], tmp_path: Path
) -> None:
    forward, backward = count(tmp_path, "bf16", cp=2)
    # Elements per token that are read and written: values, to stand beside keys; both of two ranks,
    # into the order of the sequence; outputs of two chunks.
    copied = 2 * M * (2 * KV + 2 * 2 * 2 * KV + 2 * D) / 2**20
    added = forward.traffic.contiguous - bf16[0].traffic.contiguous
    assert added == pytest.approx(copied, rel=0.01)
    assert forward.traffic.transposing == forward.traffic.strided == 0
    assert [forward.traffic.kernels, backward.traffic.kernels] == [6 + 2, 7 + 3]

    # Kept too: keys and values of the other rank, and outputs both of chunks and in one piece.
    kept = 2 * M * (2 * KV + D) / 2**20
    assert forward.returned - bf16[0].returned == pytest.approx(kept, rel=0.01)


# ----- COMPILED -----
@pytest.mark.parametrize("is_cast", [False, True], ids=["casts weights", "takes cast weights"])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise"])
def test_a_recipe_adds_the_traffic_of_its_casts(
    recipe: str, is_cast: bool, bf16: list[Pass], tmp_path: Path
) -> None:
    casts = COMPILED[recipe]
    counted = count(tmp_path, f"cast {recipe}" if is_cast else recipe)
    added = sum(each.traffic.equivalent for each in counted)
    added -= sum(each.traffic.equivalent for each in bf16)
    # Weights that are cast before the block are still read transposed, or scaled, in it.
    expected = sum(casts.input) * INPUTS + casts.grad_output * GRAD_OUTPUTS
    expected += 0 if is_cast else casts.weight * WEIGHTS
    slack = 100 + (3 * WEIGHTS / 2**20 if is_cast else 0)
    assert added == pytest.approx(expected / 2**20, rel=0.1, abs=slack)
    assert counted[0].returned == pytest.approx(KEPT_MIB[recipe], rel=0.01)
