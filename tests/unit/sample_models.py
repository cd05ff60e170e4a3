"""Small models with the linears of any recipe, on meta and on CPU."""

from typing import Any

import torch

from torchtitan_lite.catalog.flavors import ModelArgs
from torchtitan_lite.config import Float8Config
from torchtitan_lite.float8.convert import convert_linears
from torchtitan_lite.float8.selection import select_linears
from torchtitan_lite.models.init import init_weights
from torchtitan_lite.models.llama3 import Transformer

SMALL = ModelArgs(
    dim=64, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=96, vocab_size=64, max_seq_len=16
)


def on_meta(
    args: ModelArgs = SMALL,
    recipe_name: str | None = None,
    *,
    emulate: bool = True,
    dtype: torch.dtype = torch.float32,
    **float8: Any,
) -> Transformer:
    """A model on meta that trains in float8 if there is a recipe; `float8` are other keys of
    [float8]."""
    with torch.device("meta"):
        model = Transformer(args).to(dtype)
    if recipe_name is not None:
        config = Float8Config(enable_float8_linear=True, recipe_name=recipe_name, **float8)
        choices = select_linears(model, config, tp_degree=1, tokens=None)
        convert_linears(model, choices, float8=config, emulate=emulate)
    return model


def ready(model: Transformer) -> Transformer:
    """`model` on CPU, with its first weights."""
    model.to_empty(device="cpu")
    init_weights(model, seed=0)
    return model
