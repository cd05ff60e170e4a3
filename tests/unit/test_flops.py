"""The FLOPs ledger against published counts, and against PyTorch's own counter by kind of module
and precision. B batch, S seq_len, V vocab_size."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from sample_jobs import job_of
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.flop_counter import FlopCounterMode, _scaled_mm_flop, bmm_flop, mm_flop

from torchtitan_lite.catalog.flavors import FLAVORS, ModelArgs
from torchtitan_lite.catalog.recipes import RECIPES
from torchtitan_lite.config import Config, Float8Config, MetricsConfig, TrainingConfig
from torchtitan_lite.metrics.flops import FlopsLedger, count_flops
from torchtitan_lite.training.model import MetaModel, build_meta_model, choose_linears

SMALL = ModelArgs(
    dim=64, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=96, vocab_size=80, max_seq_len=64
)
FITS_ALL = replace(SMALL, dim=128, n_heads=1, n_kv_heads=1, ffn_dim=256, max_seq_len=128)
"""Its sizes are multiples for all recipes."""
LLAMA_8B = FLAVORS["3-8B"]
TOTAL, OUTPUT, ATTENTION = 57_912_852_480, 3_152_019_456, 12_884_901_888


def build(
    recipe: str | None = None,
    args: ModelArgs = SMALL,
    *,
    emulate: bool = False,
    dtype: Any = "bfloat16",
    convention: Any = "palm",
    **float8: Any,
) -> MetaModel:
    """The model of a job with one sequence of max_seq_len tokens."""
    seq_len, name = args.max_seq_len, recipe or "tensorwise"
    config = Config(
        training=TrainingConfig(seq_len=seq_len, local_batch_size=1, mixed_precision_param=dtype),
        float8=Float8Config(enable_float8_linear=bool(recipe), recipe_name=name, **float8),
        metrics=MetricsConfig(flops_convention=convention),
    )
    job = job_of(config, args)
    return build_meta_model(job, choose_linears(job), emulate=emulate)


# ----- FlopsLedger, count_flops: published counts -----


def test_ledger_of_8b():
    ledger = build(args=LLAMA_8B).ledger
    assert (ledger.total, ledger.attention) == (TOTAL, ATTENTION)
    assert ledger.by_precision == {"fp8": 0, "bf16": TOTAL, "fp32": 0}


def test_ledger_of_8b_by_the_causal_convention_is_megatrons_count():
    ledger = build(args=LLAMA_8B, convention="causal").ledger
    assert (ledger.total, ledger.attention) == (51_470_401_536, ATTENTION // 2)


def test_ledger_of_8b_by_module():
    ledger = build("rowwise_with_gw_hp", LLAMA_8B).ledger
    linears = (TOTAL - OUTPUT - ATTENTION) // 32
    block = {"fp8": linears * 2 // 3, "bf16": linears // 3 + ATTENTION // 32, "fp32": 0}
    assert ledger.by_module == {f"layers.{i}": block for i in range(32)} | {
        "output": {"fp8": 0, "bf16": OUTPUT, "fp32": 0}
    }


@pytest.mark.parametrize(
    ("recipe", "share"),
    [("tensorwise", 72.31), ("rowwise", 72.31), ("rowwise_with_gw_hp", 48.21), ("mxfp8", 72.31)],
)
def test_ledger_of_8b_has_the_share_in_fp8(recipe, share):
    ledger = build(recipe, LLAMA_8B).ledger
    assert round(100 * ledger.by_precision["fp8"] / ledger.total, 2) == share
    assert sum(ledger.by_precision.values()) == ledger.total == TOTAL


# ----- FlopsLedger, count_flops: emulation and recomputation -----


@pytest.mark.parametrize(("recipe", "runs_in"), [("tensorwise", "fp32"), ("mxfp8", "bf16")])
def test_ledger_counts_emulated_fp8_as_what_it_runs_in(recipe, runs_in):
    real, emulated = (build(recipe, emulate=each).ledger for each in (False, True))
    assert (real.fp8_runs_in, emulated.fp8_runs_in) == ("fp8", runs_in)
    assert emulated.by_precision["fp8"] == 0 < real.by_precision["fp8"]
    assert emulated.by_precision[runs_in] == real.by_precision[runs_in] + real.by_precision["fp8"]
    assert sum(emulated.by_precision.values()) == real.total


def test_ledger_counts_high_precision_as_the_compute_type():
    ledger = build("rowwise_with_gw_hp", dtype="float32").ledger
    assert ledger.by_precision["bf16"] == 0
    assert ledger.by_precision["fp32"] == ledger.total - ledger.by_precision["fp8"]
    assert ledger.attention_runs_in == "fp32"


def test_ledger_counts_recomputed_modules_again_and_apart():
    meta, w3 = build("rowwise_with_gw_hp"), "layers.1.feed_forward.w3"

    def ledger(convention: Any = "palm", *recomputed: str) -> FlopsLedger:
        return count_flops(
            meta.model,
            n_layers=SMALL.n_layers,
            q_dim=SMALL.q_dim,
            seq_len=64,
            high_precision="bf16",
            float8_matmuls={w3: ("output", "grad_input")},
            convention=convention,
            recomputed=recomputed,
        )

    names = "layers.0.attention.wk", w3, "layers.1.attention"
    found = ledger("palm", *names)
    in_bf16 = 2 * 64 * 32 + 4 * 64 * 64
    assert found.recompute == {"fp8": 2 * 64 * 96, "bf16": in_bf16, "fp32": 0}
    assert found.total == ledger().total
    assert ledger("causal", *names).recompute["bf16"] == 2 * 64 * 32 + 2 * 64 * 64
    assert ledger().recompute == {"fp8": 0, "bf16": 0, "fp32": 0}


# ----- FlopsLedger, count_flops: PyTorch's counter -----


@pytest.mark.parametrize("recipe", [None, "tensorwise", "rowwise_with_gw_hp"])
def test_ledger_equals_the_flop_counter_of_both_passes(recipe):
    meta = build(recipe, emulate=True)
    tokens = torch.zeros(3, 64, dtype=torch.long, device="meta")
    with FlopCounterMode(display=False) as counter:
        meta.model(tokens).sum().backward()  # logits [B, S, V]
    assert meta.ledger.total * tokens.numel() == counter.get_total_flops()


def count_operators(meta: MetaModel) -> Counter[tuple[str, str]]:
    """FLOPs per token of a forward pass by kind of module and precision. A matmul is in fp8 if its
    operands are float8 numbers, alone or wrapped with their scales."""
    flops: Counter[tuple[str, str]] = Counter()

    def counting(count: Any) -> Any:
        def record(*args: Any, out_val: Any, **kwargs: Any) -> int:
            counted = count(*(arg.shape for arg in args if isinstance(arg, torch.Tensor)))
            innermost = max(counter.mod_tracker.parents, key=lambda name: name.count("."))
            parts = [part for part in innermost.split(".")[1:] if not part.isdigit()]
            wrapped = is_traceable_wrapper_subclass(args[0])
            precision = "fp8" if wrapped or args[0].dtype.itemsize == 1 else "bf16"
            flops[".".join(parts).removeprefix("layers."), precision] += counted // seq_len
            return counted

        record._get_raw = True  # type: ignore[attr-defined]  # the operands, not only their shapes
        return record

    aten, seq_len = torch.ops.aten, meta.model.args.max_seq_len
    tokens = torch.zeros(1, seq_len, dtype=torch.long, device="meta")
    mapping = {aten.mm: counting(mm_flop), aten.bmm: counting(bmm_flop)}
    mapping[aten._scaled_mm] = counting(_scaled_mm_flop)
    with torch.no_grad(), FlopCounterMode(display=False, custom_mapping=mapping) as counter:
        meta.model(tokens)
    assert sum(flops.values()) * seq_len == counter.get_total_flops(), "another operator has FLOPs"
    return flops


@pytest.mark.parametrize("document_bos_id", [None, 1])
@pytest.mark.parametrize("recipe", [None, *RECIPES])
def test_ledger_is_three_forwards_in_each_precision(recipe, document_bos_id):
    meta = build(recipe, replace(FITS_ALL, document_bos_id=document_bos_id))
    flops = count_operators(meta)
    assert 3 * sum(flops.values()) == meta.ledger.total
    fp8 = sum(count for (_, precision), count in flops.items() if precision == "fp8")
    matmuls = len(RECIPES[recipe].matmuls) if recipe else 0
    assert matmuls * fp8 == meta.ledger.by_precision["fp8"]


def test_linears_run_in_the_precision_that_filter_fqns_leaves():
    flops = count_operators(build("rowwise", filter_fqns=("wk", "layers.0")))
    assert flops["attention.wq", "fp8"] == 2 * 64 * 64  # layer 1
    assert flops["attention.wq", "bf16"] == 2 * 64 * 64  # layer 0
    assert flops["attention.wk", "bf16"] == 2 * 2 * 64 * 32  # both
    assert flops["output", "bf16"] == 2 * 64 * 80
