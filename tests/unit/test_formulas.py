"""Others' counts for Llama3-8B at 8192 tokens, against the figures they published."""

from torchtitan_lite.metrics.formulas import Dimensions, list_formulas

LLAMA3_8B = Dimensions(
    parameters=8_030_261_248,
    dim=4096,
    n_layers=32,
    n_heads=32,
    n_kv_heads=8,
    head_dim=128,
    ffn_dim=14336,
    vocab_size=128256,
    seq_len=8192,
)


def test_8b():
    counts = {formula.used_by: formula.flops_per_token for formula in list_formulas(LLAMA3_8B)}
    assert counts == {
        "PaLM (arXiv 2204.02311, appendix B), nanoGPT, fms-fsdp": 61_066_469_376,
        "torchtitan": 57_914_449_920,
        "Megatron-LM, the paper (SC21)": 71_871_496_192,
        "Megatron-LM, the code": 51_470_401_536,
        "XTuner ThroughputHook": 56_302_239_744,
        "XTuner ThroughputHook with activation checkpointing": 74_018_979_840,
    }


def test_every_formula_says_how_it_differs():
    assert all(formula.differs for formula in list_formulas(LLAMA3_8B))
