"""The ledger against published counts, and against PyTorch's own counter. B batch, S seq_len, V
vocab_size."""

import dataclasses

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

from torchtitan_lite.float8.convert import convert_to_mxfp8, is_float8
from torchtitan_lite.float8.recipes import RECIPES
from torchtitan_lite.metrics.flops import FlopsLedger, count_flops
from torchtitan_lite.models.flavors import FLAVORS, ModelArgs
from torchtitan_lite.models.llama3 import Transformer

SMALL = ModelArgs(
    dim=64, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=96, vocab_size=80, max_seq_len=64
)


def build_model(args: ModelArgs, recipe: str | None = None, *, emulate: bool = False) -> nn.Module:
    with torch.device("meta"):
        model = Transformer(args)
    if recipe == "mxfp8":
        linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
        convert_to_mxfp8(model, set(linears) - {"output"}, emulate=emulate)
    elif recipe is not None:
        config = dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), emulate=emulate)
        convert_to_float8_training(
            model, config=config, module_filter_fn=lambda module, name: name != "output"
        )
    return model


def ledger_of(
    args: ModelArgs,
    recipe: str | None = None,
    *,
    emulate: bool = False,
    seq_len: int = 64,
    dtype="bf16",
    convention="palm",
    recomputed=(),
) -> FlopsLedger:
    model = build_model(args, recipe, emulate=emulate)
    row = RECIPES[recipe] if recipe else None
    return count_flops(
        model,
        args,
        seq_len=seq_len,
        high_precision=dtype,
        float8_matmuls={
            name: row.matmuls for name, module in model.named_modules() if is_float8(module)
        },
        fp8_runs_in=(row.emulated_in or dtype) if row and emulate else "fp8",
        convention=convention,
        recomputed=recomputed,
    )


def test_8b_counts():
    ledger = ledger_of(FLAVORS["8B"], seq_len=8192)
    assert ledger.total == 57_912_852_480
    assert ledger.total - ledger.output - ledger.attention == 41_875_931_136
    assert ledger.output == 3_152_019_456
    assert ledger.attention == 12_884_901_888
    assert ledger.by_precision == {"fp8": 0, "bf16": 57_912_852_480, "fp32": 0}


def test_8b_by_the_causal_convention_is_megatrons_count():
    ledger = ledger_of(FLAVORS["8B"], seq_len=8192, convention="causal")
    assert ledger.total == 51_470_401_536
    assert ledger.attention == 12_884_901_888 // 2


def test_8b_counts_of_modules():
    ledger = ledger_of(FLAVORS["8B"], "rowwise_with_gw_hp", seq_len=8192)
    linears = 41_875_931_136 // 32
    block = {"fp8": linears * 2 // 3, "bf16": linears // 3 + 12_884_901_888 // 32, "fp32": 0}
    assert ledger.by_module == {f"layers.{i}": block for i in range(32)} | {
        "output": {"fp8": 0, "bf16": 3_152_019_456, "fp32": 0}
    }


@pytest.mark.parametrize(
    ("recipe", "share"),
    [("tensorwise", 72.31), ("rowwise", 72.31), ("rowwise_with_gw_hp", 48.21), ("mxfp8", 72.31)],
)
def test_8b_fp8_share(recipe, share):
    ledger = ledger_of(FLAVORS["8B"], recipe, seq_len=8192)
    assert round(100 * ledger.by_precision["fp8"] / ledger.total, 2) == share
    assert sum(ledger.by_precision.values()) == ledger.total == 57_912_852_480


@pytest.mark.parametrize("recipe", [None, "tensorwise", "rowwise_with_gw_hp"])
@pytest.mark.parametrize(("batch", "seq_len"), [(1, 64), (3, 17)])
def test_equals_flop_counter(recipe, batch, seq_len):
    model = build_model(SMALL, recipe, emulate=True)
    tokens = torch.zeros(batch, seq_len, dtype=torch.long, device="meta")
    with FlopCounterMode(display=False) as counter:
        model(tokens).sum().backward()  # logits [B, S, V]
    assert (
        ledger_of(SMALL, recipe, seq_len=seq_len).total * batch * seq_len
        == counter.get_total_flops()
    )


def test_each_matmul_of_a_linear_has_a_precision():
    precisions = ledger_of(SMALL, "rowwise_with_gw_hp").precisions
    assert len(precisions) == 7 * SMALL.n_layers + 1
    assert precisions["layers.1.feed_forward.w2"] == {
        "output": "fp8",
        "grad_input": "fp8",
        "grad_weight": "bf16",
    }
    assert set(precisions["output"].values()) == {"bf16"}


@pytest.mark.parametrize(("recipe", "runs_in"), [("tensorwise", "fp32"), ("mxfp8", "bf16")])
def test_emulated_fp8_counts_as_what_it_runs_in(recipe, runs_in):
    real, emulated = ledger_of(SMALL, recipe), ledger_of(SMALL, recipe, emulate=True)
    assert (real.emulated, emulated.emulated) == (False, True)
    assert emulated.by_precision["fp8"] == 0 < real.by_precision["fp8"]
    assert emulated.by_precision[runs_in] == real.by_precision[runs_in] + real.by_precision["fp8"]
    assert sum(emulated.by_precision.values()) == real.total


def test_high_precision_is_the_compute_dtype():
    ledger = ledger_of(SMALL, "rowwise_with_gw_hp", dtype="fp32")
    assert ledger.by_precision["bf16"] == 0
    assert ledger.by_precision["fp32"] == ledger.total - ledger.by_precision["fp8"]
    assert ledger.attention_runs_in == "fp32"


def test_recomputed_modules_count_again_once_and_apart():
    names = {"layers.0.attention.wk", "layers.1.feed_forward.w3", "layers.1.attention"}
    ledger = ledger_of(SMALL, "rowwise_with_gw_hp", recomputed=names)
    assert ledger.recompute == {"fp8": 2 * 64 * 32 + 2 * 64 * 96, "bf16": 4 * 64 * 64, "fp32": 0}
    assert ledger.total == ledger_of(SMALL, "rowwise_with_gw_hp").total
    causal = ledger_of(SMALL, recomputed=names, convention="causal")
    assert causal.recompute["bf16"] == 2 * 64 * 32 + 2 * 64 * 96 + 2 * 64 * 64
    assert ledger_of(SMALL).recompute == {"fp8": 0, "bf16": 0, "fp32": 0}
