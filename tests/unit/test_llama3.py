"""The model against transformers' Llama with the same weights, and RoPE against its definition."""

import math

import pytest
import torch
import transformers
from torch import Tensor
from torch.nn import functional as F

from torchtitan_lite.models.flavors import ModelArgs, RopeScaling
from torchtitan_lite.models.init import init_weights
from torchtitan_lite.models.llama3 import Transformer, apply_rope, attention_backend, rope_frequencies, rope_table

SCALING = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq_len=32)


def small_args(**changes: object) -> ModelArgs:
    defaults = {
        "dim": 64, "n_layers": 2, "n_heads": 8, "n_kv_heads": 2, "ffn_dim": 96, "vocab_size": 50, "max_seq_len": 48
    }  # fmt: skip
    return ModelArgs(**(defaults | changes))


def halves_from_pairs(weight: Tensor, heads: int) -> Tensor:
    """Meta's weight, whose rotated dimensions are neighbours, in transformers' order: all evens, then all odds."""
    return weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def reference(model: Transformer) -> transformers.LlamaForCausalLM:
    """transformers' Llama with the weights of `model`."""
    args = model.args
    rope: dict[str, object] = {"rope_type": "default", "rope_theta": args.rope_theta}
    if args.rope_scaling:
        rope |= {
            "rope_type": "llama3",
            "factor": args.rope_scaling.factor,
            "low_freq_factor": args.rope_scaling.low_freq_factor,
            "high_freq_factor": args.rope_scaling.high_freq_factor,
            "original_max_position_embeddings": args.rope_scaling.original_max_seq_len,
        }
    llama = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=args.dim,
            num_hidden_layers=args.n_layers,
            num_attention_heads=args.n_heads,
            num_key_value_heads=args.n_kv_heads,
            intermediate_size=args.ffn_dim,
            vocab_size=args.vocab_size,
            max_position_embeddings=args.max_seq_len,
            rms_norm_eps=args.norm_eps,
            rope_parameters=rope,
            tie_word_embeddings=False,
        )
    )
    names = {
        "attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attention.wq": "self_attn.q_proj",
        "attention.wk": "self_attn.k_proj", "attention.wv": "self_attn.v_proj", "attention.wo": "self_attn.o_proj",
        "feed_forward.w1": "mlp.gate_proj", "feed_forward.w2": "mlp.down_proj", "feed_forward.w3": "mlp.up_proj",
    }  # fmt: skip
    weights = {
        "model.embed_tokens.weight": model.tok_embeddings.weight,
        "model.norm.weight": model.norm.weight,
        "lm_head.weight": model.output.weight,
    }
    heads = {"attention.wq": args.n_heads, "attention.wk": args.n_kv_heads}
    for i, layer in enumerate(model.layers):
        for ours, theirs in names.items():
            weight = layer.get_parameter(f"{ours}.weight")
            weights[f"model.layers.{i}.{theirs}.weight"] = (
                halves_from_pairs(weight, heads[ours]) if ours in heads else weight
            )
    llama.load_state_dict({name: weight.detach().clone() for name, weight in weights.items()})
    return llama


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return ((actual - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("scaling", [None, SCALING], ids=["plain", "llama3.1"])
@pytest.mark.parametrize("n_kv_heads", [8, 2, 1], ids=["gqa1", "gqa4", "gqa8"])
def test_logits_and_gradients_equal_transformers_llama(n_kv_heads: int, scaling: RopeScaling | None) -> None:
    torch.manual_seed(0)
    model = Transformer(small_args(n_kv_heads=n_kv_heads, rope_scaling=scaling))
    init_weights(model, seed=1)
    llama = reference(model)
    tokens, labels = torch.randint(0, 50, (2, 2, 48))
    logits, expected = model(tokens), llama(tokens).logits
    assert relative_error(logits, expected) < 1e-5
    F.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
    F.cross_entropy(expected.flatten(0, 1), labels.flatten()).backward()
    wq = llama.model.layers[0].self_attn.q_proj.weight.grad
    assert relative_error(halves_from_pairs(model.layers[0].attention.wq.weight.grad, 8), wq) < 1e-5
    for ours, theirs in (
        (model.tok_embeddings, llama.model.embed_tokens),
        (model.layers[0].attention.wv, llama.model.layers[0].self_attn.v_proj),
        (model.layers[1].feed_forward.w1, llama.model.layers[1].mlp.gate_proj),
        (model.layers[1].ffn_norm, llama.model.layers[1].post_attention_layernorm),
        (model.output, llama.lm_head),
    ):
        assert relative_error(ours.weight.grad, theirs.weight.grad) < 1e-5


def test_rope_turns_pair_j_at_position_p_by_p_over_theta_to_the_2j_over_q() -> None:
    args = small_args(dim=8, n_heads=1, n_kv_heads=1, max_seq_len=4)
    cos, sin = rope_table(args)
    x = torch.zeros(1, 4, 1, 8)
    x[..., 2] = 1.0  # the first of pair j = 1, of Q = 8
    angle = 3 * 500000.0 ** (-2 / 8)
    expected = torch.zeros(8)
    expected[2:4] = torch.tensor([math.cos(angle), math.sin(angle)])
    torch.testing.assert_close(apply_rope(x, cos, sin)[0, 3, 0], expected)


def test_rope_scaling_keeps_short_wavelengths_and_stretches_long_ones() -> None:
    plain, scaled = (rope_frequencies(small_args(dim=512, rope_scaling=scaling)) for scaling in (None, SCALING))
    wavelength = 2 * math.pi / plain
    short, long = wavelength < 32 / 4, wavelength > 32 / 1
    assert short.any() and long.any() and (~short & ~long).any()
    torch.testing.assert_close(scaled[short], plain[short])
    torch.testing.assert_close(scaled[long], plain[long] / 8)
    between = ~short & ~long
    assert (scaled[between] < plain[between]).all() and (scaled[between] > plain[between] / 8).all()


def test_rope_is_computed_in_float32_and_returned_in_the_inputs_type() -> None:
    cos, sin = rope_table(small_args())
    x = torch.randn(1, 48, 8, 8, dtype=torch.bfloat16)
    assert torch.equal(apply_rope(x, cos, sin), apply_rope(x.float(), cos, sin).bfloat16())


def test_a_token_sees_none_after_it() -> None:
    model = Transformer(small_args())
    init_weights(model, seed=0)
    tokens = torch.randint(0, 50, (1, 20))
    changed = tokens.clone()
    changed[0, 12] = (changed[0, 12] + 1) % 50
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[0, :12], after[0, :12], rtol=0, atol=0)
    assert not torch.equal(before[0, 12], after[0, 12])


def test_the_attention_backend_is_named() -> None:
    name = attention_backend(small_args(), tp_degree=2, dtype=torch.bfloat16, device=torch.device("cpu"))
    assert name == "FLASH_ATTENTION"
