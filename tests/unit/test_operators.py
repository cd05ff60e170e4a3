"""The ledger against PyTorch's own count of a forward pass, by kind of module and precision."""

import dataclasses
from collections import Counter
from typing import Any

import pytest
import torch
from sample_jobs import job_of
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.flop_counter import FlopCounterMode, bmm_flop, mm_flop

from torchtitan_lite.config import Config, Float8Config, ModelConfig, TrainingConfig
from torchtitan_lite.float8.recipes import RECIPES
from torchtitan_lite.models.flavors import FLAVORS, ModelArgs
from torchtitan_lite.planner.meta_model import MetaModel, build_meta_model

SMALL = ModelArgs(
    dim=64, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=96, vocab_size=80, max_seq_len=64
)


def build(recipe: str | None, args: ModelArgs = SMALL, **float8: Any) -> MetaModel:
    config = Config(
        model=ModelConfig(flavor="8B"),
        training=TrainingConfig(seq_len=args.max_seq_len, local_batch_size=1),
        float8=Float8Config(
            enable_float8_linear=recipe is not None, recipe_name=recipe or "tensorwise", **float8
        ),
    )
    return build_meta_model(job_of(config, args))


def count_operators(meta: MetaModel) -> Counter[tuple[str, str]]:
    """FLOPs per token of a forward pass by kind of module and precision. A matmul is in fp8 if its
    operands are wrapped: float8 numbers and their scales."""
    flops: Counter[tuple[str, str]] = Counter()

    def counting(count: Any) -> Any:
        def record(*args: Any, out_val: Any, **kwargs: Any) -> int:
            counted = count(*(arg.shape for arg in args if isinstance(arg, torch.Tensor)))
            innermost = max(counter.mod_tracker.parents, key=lambda name: name.count("."))
            parts = [part for part in innermost.split(".")[1:] if not part.isdigit()]
            precision = "fp8" if is_traceable_wrapper_subclass(args[0]) else "bf16"
            flops[".".join(parts).removeprefix("layers."), precision] += counted // seq_len
            return counted

        record._get_raw = True  # type: ignore[attr-defined]  # the operands, not only their shapes
        return record

    aten, seq_len = torch.ops.aten, meta.model.args.max_seq_len
    tokens = torch.zeros(1, seq_len, dtype=torch.long, device="meta")
    mapping = {aten.mm: counting(mm_flop), aten.bmm: counting(bmm_flop)}
    with torch.no_grad(), FlopCounterMode(display=False, custom_mapping=mapping) as counter:
        meta.model(tokens)
    assert sum(flops.values()) * seq_len == counter.get_total_flops(), "another operator has FLOPs"
    return flops


@pytest.mark.parametrize("recipe", [None, *RECIPES])
def test_forward_is_a_third_of_the_ledger_in_each_precision(recipe: str | None) -> None:
    meta = build(recipe)
    flops = count_operators(meta)
    assert 3 * sum(flops.values()) == meta.ledger.total
    fp8 = sum(count for (_, precision), count in flops.items() if precision == "fp8")
    matmuls = len(RECIPES[recipe].matmuls) if recipe else 0
    assert matmuls * fp8 == meta.ledger.by_precision["fp8"]


def test_the_forward_of_8b() -> None:
    meta = build("tensorwise", dataclasses.replace(FLAVORS["3-8B"], n_layers=32))
    flops = count_operators(meta)
    assert 3 * sum(flops.values()) == meta.ledger.total == 57_912_852_480
    fp8 = sum(count for (_, precision), count in flops.items() if precision == "fp8")
    assert f"{100 * fp8 / sum(flops.values()):.2f}" == "72.31"


def test_a_document_mask_changes_no_count() -> None:
    masked = build("tensorwise", dataclasses.replace(SMALL, document_bos_id=1))
    plain = build("tensorwise")
    assert masked.ledger == plain.ledger
    assert count_operators(masked) == count_operators(plain)


def test_each_linear_runs_in_the_precision_that_was_chosen() -> None:
    flops = count_operators(build("rowwise", filter_fqns=("wk", "layers.0")))
    assert flops["attention.wq", "fp8"] == 2 * 64 * 64  # layer 1
    assert flops["attention.wq", "bf16"] == 2 * 64 * 64  # layer 0
    assert flops["attention.wk", "bf16"] == 2 * 2 * 64 * 32  # both
    assert flops["output", "bf16"] == 2 * 64 * 80
