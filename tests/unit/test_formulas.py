"""Other projects' formulas for Llama 3 8B at 8192 tokens: the table in docs/plan.md holds what they
give, against the figures that they published."""

import re
from pathlib import Path

import pytest

from torchtitan_lite.models.flavors import FLAVORS

PLAN = (Path(__file__).parents[2] / "docs/plan.md").read_text()
ARGS, SEQ_LEN, PARAMETERS, TOTAL = FLAVORS["8B"], 8192, 8_030_261_248, 57_912_852_480
L, D, F, V = ARGS.n_layers, ARGS.dim, ARGS.ffn_dim, ARGS.vocab_size
ATTENTION = 12 * L * ARGS.q_dim * SEQ_LEN
BLOCK = 2 * D * (ARGS.q_dim + ARGS.kv_dim) + 3 * D * F
XTUNER_LAYER = 8 * D**2 + 2 * SEQ_LEN * D + 6 * F * D
FORMULAS = {
    # 6 N + 12 L H Q T, N with and without the input embedding
    "PaLM (arXiv 2204.02311, appendix B), nanoGPT, fms-fsdp": 6 * PARAMETERS + ATTENTION,
    "torchtitan": 6 * (PARAMETERS - V * D) + ATTENTION,
    # 96 B s l h^2 (1 + s / 6h + V / 16 l h) per batch: arXiv 2104.04473, equation 3
    "Megatron-LM, the paper (SC21)": 96 * L * D**2 + 16 * L * D * SEQ_LEN + 6 * D * V,
    "Megatron-LM, the code": 6 * (L * BLOCK + D * V) + ATTENTION // 2,
    # (3 + AC) L (8 B s h^2 + 2 B s^2 h + 6 B s h ffn) + 6 B s h V per batch
    "XTuner ThroughputHook": 3 * L * XTUNER_LAYER + 6 * D * V,
    "XTuner ThroughputHook with activation checkpointing": 4 * L * XTUNER_LAYER + 6 * D * V,
}


@pytest.mark.parametrize(
    ("used_by", "flops"),
    zip(
        FORMULAS,
        (
            *(61_066_469_376, 57_914_449_920, 71_871_496_192),
            *(51_470_401_536, 56_302_239_744, 74_018_979_840),
        ),
        strict=True,
    ),
)  # fmt: skip
def test_the_page_has_the_formula_of(used_by: str, flops: int) -> None:
    assert FORMULAS[used_by] == flops
    row = rf"^\| {re.escape(used_by)} \| {flops / 1e9:.3f} \| {flops / TOTAL:.3f} \| .+ \|$"
    assert re.search(row, PLAN, flags=re.MULTILINE)
