"""Others' counts for Llama3-8B at 8192 tokens, against the figures they published."""

from torchtitan_lite.metrics.formulas import list_formulas
from torchtitan_lite.models.flavors import FLAVORS


def test_8b():
    counts = {
        formula.used_by: formula.flops_per_token
        for formula in list_formulas(FLAVORS["8B"], parameters=8_030_261_248, seq_len=8192)
    }
    assert counts == {
        "PaLM (arXiv 2204.02311, appendix B), nanoGPT, fms-fsdp": 61_066_469_376,
        "torchtitan": 57_914_449_920,
        "Megatron-LM, the paper (SC21)": 71_871_496_192,
        "Megatron-LM, the code": 51_470_401_536,
        "XTuner ThroughputHook": 56_302_239_744,
        "XTuner ThroughputHook with activation checkpointing": 74_018_979_840,
    }
