"""Llama as Hugging Face's transformers store it: parameter names, order of rows, config.json.

RoPE rotates pairs of dimensions of a head: neighbours here, as in Meta's checkpoints, and
dimensions j and j + Q/2 in transformers. So the rows of wq and wk have another order.

Shapes: H heads or key-value heads, Q head_dim, D dim.
"""

import json
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from torchtitan_lite.catalog.flavors import ModelArgs, RopeScaling

_BLOCK_NAMES = {
    "attention_norm": "input_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
}
_SIZES = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "ffn_dim": "intermediate_size",
    "vocab_size": "vocab_size",
    "max_seq_len": "max_position_embeddings",
}
_FIXED = {"model_type": "llama", "hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
"""Keys of config.json with only one supported value."""
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
"""Names of the embedding, and of the output, which a tied model does not save."""


def hf_names(args: ModelArgs, *, prefix: str = "") -> dict[str, str]:
    """Return Hugging Face's name of each parameter by `prefix` and ours, in the order of the
    forward pass. A tied output has no name."""
    names = {"tok_embeddings.weight": EMBEDDING}
    for i in range(args.n_layers):
        for ours, theirs in _BLOCK_NAMES.items():
            names[f"layers.{i}.{ours}.weight"] = f"model.layers.{i}.{theirs}.weight"
    names["norm.weight"] = "model.norm.weight"
    if not args.tie_embeddings:
        names["output.weight"] = HEAD
    return {f"{prefix}{ours}": theirs for ours, theirs in names.items()}


def to_hf(name: str, weight: Tensor, args: ModelArgs) -> Tensor:
    """Return the weight of our parameter `name` as Hugging Face has it: in wq and wk, [H * Q, D],
    each head has its even rows first."""
    if heads := _rotated_heads(name, args):
        return weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
    return weight


def from_hf(name: str, weight: Tensor, args: ModelArgs) -> Tensor:
    """Inverse of `to_hf`."""
    if heads := _rotated_heads(name, args):
        return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
    return weight


def _rotated_heads(name: str, args: ModelArgs) -> int | None:
    return {"wq": args.n_heads, "wk": args.n_kv_heads}.get(name.split(".")[-2])


def hf_config(
    args: ModelArgs, *, dtype: torch.dtype, bos_id: int | None, eos_id: int | None
) -> dict[str, Any]:
    """Return the config.json of a model, for transformers 4 and 5. An id of None: no such token."""
    scaling = args.rope_scaling and {"rope_type": "llama3", **asdict(args.rope_scaling)}
    return _FIXED | {
        "architectures": ["LlamaForCausalLM"],
        **{theirs: getattr(args, ours) for ours, theirs in _SIZES.items()},
        "head_dim": args.head_dim,
        "rms_norm_eps": args.norm_eps,
        "rope_theta": args.rope_theta,
        "rope_scaling": scaling,
        "rope_parameters": {"rope_theta": args.rope_theta, **(scaling or {"rope_type": "default"})},
        "tie_word_embeddings": args.tie_embeddings,
        "bos_token_id": bos_id,
        "eos_token_id": eos_id,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


def model_args(config: dict[str, Any]) -> ModelArgs:
    """Return the dimensions in a config.json. Raises ValueError for a key with another value."""
    for key, fixed in _FIXED.items():
        # transformers may leave out a key with its default value, but never the type.
        value = config.get(key, None if key == "model_type" else fixed)
        _require(value == fixed, key, value, f"this model has only {json.dumps(fixed)}")

    tied = config.get("tie_word_embeddings", False)
    _require(isinstance(tied, bool), "tie_word_embeddings", tied, "must be true or false")
    config = {"num_key_value_heads": config.get("num_attention_heads")} | config
    sizes = {ours: _positive(config, theirs, whole=True) for ours, theirs in _SIZES.items()}
    dim, heads, kv_heads = sizes["dim"], sizes["n_heads"], sizes["n_kv_heads"]
    head_dim = config.get("head_dim") or dim // heads
    rule = f"must be even, and hidden_size / num_attention_heads = {dim} / {heads}"
    _require(head_dim == dim / heads and head_dim % 2 == 0, "head_dim", head_dim, rule)
    rule = f"does not divide num_attention_heads = {heads}"
    _require(heads % kv_heads == 0, "num_key_value_heads", kv_heads, rule)

    # If both keys are set, transformers uses the older one, rope_scaling, too.
    rope = {"rope_theta": config.get("rope_theta", 10000.0)}
    rope |= config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    _require(kind in ("default", "llama3"), "rope_type", kind, 'must be "default" or "llama3"')
    scaling = None
    if kind == "llama3":
        fields = {
            key: _positive(rope, key, whole=isinstance(default, int))
            for key, default in asdict(RopeScaling()).items()
        }
        scaling = RopeScaling(**fields)
        high, rule = scaling.high_freq_factor, f"must be above {scaling.low_freq_factor}"
        _require(high > scaling.low_freq_factor, "high_freq_factor", high, rule)
    return ModelArgs(
        **sizes,
        rope_theta=_positive(rope, "rope_theta"),
        rope_scaling=scaling,
        norm_eps=_positive(config, "rms_norm_eps"),
        tie_embeddings=tied,
    )


def _positive(fields: dict[str, Any], key: str, *, whole: bool = False) -> Any:
    value: Any = fields.get(key)
    number = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    kind, limit = ("whole number below 2**31", 2**31) if whole else ("number", 2**1023)
    _require(number and 0 < value < limit, key, value, f"must be a positive {kind}")
    return value if whole else float(value)


def _require(holds: bool, key: str, value: Any, rule: str) -> None:
    if not holds:
        raise ValueError(f"{key} = {json.dumps(value)}: {rule}")
