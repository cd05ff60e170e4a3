"""Small models of each family of Llama, here and in transformers."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers

from torchtitan_lite.catalog.flavors import ModelArgs, RopeScaling
from torchtitan_lite.models.hf_llama import hf_config
from torchtitan_lite.models.llama3 import Transformer

ARGS = ModelArgs(
    dim=64, n_layers=2, n_heads=8, n_kv_heads=2, ffn_dim=96, vocab_size=50, max_seq_len=48
)
SCALING = RopeScaling(
    factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32
)
FAMILIES = {
    "Llama 3": ARGS,
    "Llama 3.1": replace(ARGS, rope_scaling=SCALING),
    "Llama 3.2": replace(ARGS, rope_scaling=replace(SCALING, factor=32.0), tie_embeddings=True),
    # No grouped queries; a head of 6 dimensions is 3 pairs.
    "Llama 2": replace(ARGS, dim=48, n_kv_heads=8, rope_theta=10000.0, norm_eps=1e-6),
    "one key-value head": replace(ARGS, n_kv_heads=1, rope_scaling=SCALING),
}
EACH_FAMILY = pytest.mark.parametrize("args", FAMILIES.values(), ids=FAMILIES)
TOKENS = torch.arange(96).reshape(2, 48) % 50


def config_of(args: ModelArgs) -> dict[str, Any]:
    """The config.json of a model in float32."""
    return hf_config(args, dtype=torch.float32, bos_id=1, eos_id=2)


def build(args: ModelArgs) -> Transformer:
    """A model in which each weight matters: new ones have norms alike and next to no attention."""
    model = Transformer(args)
    randomize(model)
    return model


def build_hf(args: ModelArgs) -> transformers.LlamaForCausalLM:
    """The same of transformers."""
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config_of(args)))
    randomize(model)
    return model


def randomize(model: torch.nn.Module) -> None:
    generator = torch.Generator().manual_seed(3)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=weight.shape[-1] ** -0.5 * 2, generator=generator)


@torch.no_grad()
def logit_difference(model: Transformer, llama: transformers.LlamaForCausalLM) -> float:
    """The largest, as a share of the largest logit."""
    logits, expected = model(TOKENS), llama(TOKENS).logits
    return ((logits - expected).abs().max() / expected.abs().max()).item()
