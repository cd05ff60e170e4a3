"""The plan of a block follows what its linears are."""

import torch
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel
from torchao.float8.float8_tensor_parallel import (
    Float8ColwiseParallel,
    Float8RowwiseParallel,
    PrepareFloat8ModuleInput,
)

from torchtitan_lite.config import Float8Config
from torchtitan_lite.float8.convert import convert_linears
from torchtitan_lite.float8.selection import select_linears
from torchtitan_lite.models.flavors import ModelArgs
from torchtitan_lite.models.llama3 import Transformer
from torchtitan_lite.parallel.tensor_parallel import SHARDED_DIMS, _block_plan

ARGS = ModelArgs(dim=64, n_layers=1, n_heads=4, n_kv_heads=2, ffn_dim=96, vocab_size=50, max_seq_len=16)


def plan(float8: Float8Config | None) -> dict[str, type]:
    with torch.device("meta"):
        model = Transformer(ARGS)
    if float8 is not None:
        choices = select_linears(
            model, filter_fqns=float8.filter_fqns, sharded_dims=SHARDED_DIMS, tp_degree=2, tokens=64
        )
        convert_linears(model, choices, float8=float8, emulate=True)
    return {name: type(style) for name, style in _block_plan(model.layers[0]).items()}


def test_without_float8_and_under_rowwise_activations_are_gathered_in_high_precision() -> None:
    for float8 in (None, Float8Config(recipe_name="rowwise")):
        styles = plan(float8)
        assert styles["attention"] is styles["feed_forward"] is PrepareModuleInput
        assert styles["attention.wq"] is styles["feed_forward.w3"] is ColwiseParallel
        assert styles["attention.wo"] is styles["feed_forward.w2"] is RowwiseParallel


def test_under_tensorwise_all_are_the_float8_styles() -> None:
    styles = plan(Float8Config())
    assert styles["attention"] is styles["feed_forward"] is PrepareFloat8ModuleInput
    assert {styles[f"attention.{name}"] for name in ("wq", "wk", "wv")} == {Float8ColwiseParallel}
    assert styles["attention.wo"] is styles["feed_forward.w2"] is Float8RowwiseParallel


def test_an_input_that_a_kept_linear_reads_too_is_gathered_in_high_precision() -> None:
    styles = plan(Float8Config(filter_fqns=("wk", "w2")))
    assert styles["attention"] is PrepareModuleInput
    assert (styles["attention.wk"], styles["attention.wq"]) == (ColwiseParallel, Float8ColwiseParallel)
    assert styles["feed_forward"] is PrepareFloat8ModuleInput
    assert styles["feed_forward.w2"] is RowwiseParallel
