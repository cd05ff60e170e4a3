"""Llama 3 in the form of Hugging Face's transformers: its names, the order of its rows and its
config.json.

The two compute the same function. Here RoPE turns neighbouring dimensions of a head together, as in
Meta's checkpoints; there dimension j together with j + Q/2. So the rows of wq and wk, which make
those dimensions, stand in another order.

Shapes: H heads or key-value heads, Q head_dim, D dim.
"""

import json
import math
from typing import Any

import torch
from torch import Tensor

from .flavors import ModelArgs, RopeScaling

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
_FIXED = {
    "model_type": "llama",
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
}
"""What our model has no choice of."""


def hf_names(n_layers: int) -> dict[str, str]:
    """Hugging Face's name of each parameter of a model, by ours, in the order in which the model
    uses them."""
    blocks = {
        f"layers.{i}.{ours}": f"model.layers.{i}.{theirs}"
        for i in range(n_layers)
        for ours, theirs in _BLOCK_NAMES.items()
    }
    modules = {
        "tok_embeddings": "model.embed_tokens",
        **blocks,
        "norm": "model.norm",
        "output": "lm_head",
    }
    return {f"{ours}.weight": f"{theirs}.weight" for ours, theirs in modules.items()}


def to_hf(name: str, weight: Tensor, args: ModelArgs) -> Tensor:
    """`weight`, of our parameter `name`, in Hugging Face's order of rows: of each head all evens,
    then all odds. A copy for wq and wk, [H * Q, D]; any other is returned as it is."""
    if heads := _rotated_heads(name, args):
        return weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
    return weight


def from_hf(name: str, weight: Tensor, args: ModelArgs) -> Tensor:
    """What `to_hf` makes `weight` of: the inverse."""
    if heads := _rotated_heads(name, args):
        return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
    return weight


def _rotated_heads(name: str, args: ModelArgs) -> int | None:
    return {"wq": args.n_heads, "wk": args.n_kv_heads}.get(name.split(".")[-2])


def hf_config(
    args: ModelArgs, *, dtype: torch.dtype, bos_id: int | None, eos_id: int | None
) -> dict[str, Any]:
    """The config.json of `args`, in the form of transformers 4, which transformers 5 reads too.
    Where an id of BOS or EOS is None the model has none."""
    scaling = args.rope_scaling
    return _FIXED | {
        "architectures": ["LlamaForCausalLM"],
        **{theirs: getattr(args, ours) for ours, theirs in _SIZES.items()},
        "head_dim": args.head_dim,
        "rms_norm_eps": args.norm_eps,
        "rope_theta": args.rope_theta,
        "rope_scaling": scaling
        and {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_seq_len,
        },
        "bos_token_id": bos_id,
        "eos_token_id": eos_id,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


def model_args(config: dict[str, Any]) -> ModelArgs:
    """What a config.json of transformers 4 or 5 describes. Raises ValueError, which names the key,
    for what is not a model of this kind."""
    for key, fixed in _FIXED.items():
        # transformers leaves out what is as usual, but never the type.
        value = config.get(key, None if key == "model_type" else fixed)
        if value != fixed:
            raise ValueError(
                f"{key} = {json.dumps(value)}: this model has only {json.dumps(fixed)}"
            )
    config = {"num_key_value_heads": config.get("num_attention_heads")} | config
    sizes = {ours: _positive(config, theirs, whole=True) for ours, theirs in _SIZES.items()}
    dim, heads, kv_heads = sizes["dim"], sizes["n_heads"], sizes["n_kv_heads"]
    head_dim = config.get("head_dim") or dim // heads
    if head_dim * heads != dim:
        raise ValueError(
            f"head_dim = {head_dim}: this model has hidden_size / num_attention_heads = {dim} / {heads}"
        )
    if heads % kv_heads:
        raise ValueError(
            f"num_key_value_heads = {kv_heads} does not divide num_attention_heads = {heads}"
        )
    rope = {"rope_theta": config.get("rope_theta", 10000.0)}
    rope |= config.get("rope_parameters") or config.get("rope_scaling") or {}
    return ModelArgs(
        **sizes,
        rope_theta=_positive(rope, "rope_theta"),
        rope_scaling=_rope_scaling(rope),
        norm_eps=_positive(config, "rms_norm_eps"),
    )


def _rope_scaling(rope: dict[str, Any]) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise ValueError(
            f'rope_type = {json.dumps(kind)}: this model has only "default" and "llama3"'
        )
    return RopeScaling(
        factor=_positive(rope, "factor"),
        low_freq_factor=_positive(rope, "low_freq_factor"),
        high_freq_factor=_positive(rope, "high_freq_factor"),
        original_max_seq_len=_positive(rope, "original_max_position_embeddings", whole=True),
    )


def _positive(fields: dict[str, Any], key: str, *, whole: bool = False) -> Any:
    value = fields.get(key)
    allowed = int if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, allowed) or not 0 < value < math.inf:
        raise ValueError(f"{key} = {json.dumps(value)} must be a positive {'whole ' * whole}number")
    return value if whole else float(value)
