"""PyTorch's own count of a forward pass, by module, operator and precision, against the ledger."""

import dataclasses

import pytest
import torch

from torchtitan_lite.config import Config, Float8Config, ModelConfig, TrainingConfig
from torchtitan_lite.metrics.operators import OperatorFlops, count_operators
from torchtitan_lite.models.flavors import ModelArgs
from torchtitan_lite.planner.meta_model import MetaModel, build_meta_model

SMALL = ModelArgs(
    dim=64, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=96, vocab_size=80, max_seq_len=64
)


def build(recipe: str | None, args: ModelArgs = SMALL, **float8: object) -> MetaModel:
    config = Config(
        model=ModelConfig(flavor="8B"),
        training=TrainingConfig(seq_len=64, local_batch_size=1),
        float8=Float8Config(
            enable_float8_linear=recipe is not None, recipe_name=recipe or "tensorwise", **float8
        ),
    )
    return build_meta_model(
        config, args, tp_degree=1, emulate=False, fused_attention=True, rates=None
    )


@pytest.mark.parametrize("recipe", [None, "tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8"])
def test_forward_is_a_third_of_the_ledger_in_each_precision(recipe):
    meta = build(recipe)
    rows = count_operators(meta.model, seq_len=64, high_precision="bf16")
    assert 3 * sum(row.flops_per_token for row in rows) == meta.ledger.total
    fp8 = sum(row.flops_per_token for row in rows if row.precision == "fp8")
    per_matmul = 3 if recipe != "rowwise_with_gw_hp" else 2  # its weight gradient is in bf16
    assert per_matmul * fp8 == meta.ledger.by_precision["fp8"]


def test_a_document_mask_changes_no_count():
    masked = build("tensorwise", dataclasses.replace(SMALL, document_bos_id=1))
    plain = build("tensorwise")
    assert masked.ledger == plain.ledger
    rows, expected = (
        count_operators(meta.model, seq_len=64, high_precision="bf16") for meta in (masked, plain)
    )
    assert rows == expected


def test_rows_are_by_kind_of_module():
    rows = count_operators(
        build("rowwise", filter_fqns=("wk", "layers.0")).model, seq_len=64, high_precision="bf16"
    )
    assert OperatorFlops("attention.wq", "mm", "fp8", 2 * 64 * 64) in rows  # of layer 1
    assert OperatorFlops("attention.wq", "mm", "bf16", 2 * 64 * 64) in rows  # of layer 0
    assert OperatorFlops("attention.wk", "mm", "bf16", 2 * 2 * 64 * 32) in rows  # of both
    assert OperatorFlops("attention", "bmm", "bf16", 2 * 4 * 64 * 64) in rows
    assert rows[-1] == OperatorFlops("output", "mm", "bf16", 2 * 64 * 80)


def test_an_operator_that_is_not_known_here_is_not_passed_over():
    class Other(torch.nn.Module):
        def forward(self, tokens):
            return torch.nn.functional.conv1d(
                torch.zeros(1, 2, 8, device="meta"), torch.zeros(3, 2, 3, device="meta")
            )

    with pytest.raises(
        AssertionError, match="an operator with FLOPs is none of those counted here"
    ):
        count_operators(Other(), seq_len=4, high_precision="bf16")
