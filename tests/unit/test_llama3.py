"""The model against transformers' Llama with the same weights, and RoPE against its definition."""

import math
from itertools import pairwise

import pytest
import torch
import transformers
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import flex_attention

from torchtitan_lite.errors import ConfigError
from torchtitan_lite.models import llama3
from torchtitan_lite.models.flavors import ModelArgs, RopeScaling
from torchtitan_lite.models.init import init_weights
from torchtitan_lite.models.llama3 import (
    Transformer,
    apply_rope,
    attention_backend,
    document_mask,
    document_starts,
    rope_frequencies,
    rope_table,
)

SCALING = RopeScaling(
    factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32
)


def small_args(**changes: object) -> ModelArgs:
    defaults = {
        "dim": 64, "n_layers": 2, "n_heads": 8, "n_kv_heads": 2, "ffn_dim": 96,
        "vocab_size": 50, "max_seq_len": 48,
    }  # fmt: skip
    return ModelArgs(**(defaults | changes))


def halves_from_pairs(weight: Tensor, heads: int) -> Tensor:
    """Meta's weight, whose rotated dimensions are neighbours, in transformers' order: all evens,
    then all odds."""
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
            "original_max_position_embeddings": args.rope_scaling.original_max_position_embeddings,
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
        "attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
        "attention.wq": "self_attn.q_proj", "attention.wk": "self_attn.k_proj",
        "attention.wv": "self_attn.v_proj", "attention.wo": "self_attn.o_proj",
        "feed_forward.w1": "mlp.gate_proj", "feed_forward.w2": "mlp.down_proj",
        "feed_forward.w3": "mlp.up_proj",
    }  # fmt: skip
    weights = {
        "model.embed_tokens.weight": model.tok_embeddings.weight,
        "model.norm.weight": model.norm.weight,
        "lm_head.weight": model.output.weight,
    }
    heads = {"attention.wq": args.n_heads, "attention.wk": args.n_kv_heads}
    for i, layer in enumerate(model.layers.values()):
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
def test_logits_and_gradients_equal_transformers_llama(
    n_kv_heads: int, scaling: RopeScaling | None
) -> None:
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
    assert (
        relative_error(halves_from_pairs(model.layers["0"].attention.wq.weight.grad, 8), wq) < 1e-5
    )
    for ours, theirs in (
        (model.tok_embeddings, llama.model.embed_tokens),
        (model.layers["0"].attention.wv, llama.model.layers[0].self_attn.v_proj),
        (model.layers["1"].feed_forward.w1, llama.model.layers[1].mlp.gate_proj),
        (model.layers["1"].ffn_norm, llama.model.layers[1].post_attention_layernorm),
        (model.output, llama.lm_head),
    ):
        assert relative_error(ours.weight.grad, theirs.weight.grad) < 1e-5


def test_a_tied_output_is_the_embedding_and_gets_both_gradients() -> None:
    with torch.device("meta"):
        tied, untied = (Transformer(small_args(tie_embeddings=tie)) for tie in (True, False))
    for model in (tied, untied):
        model.to_empty(device="cpu")
        init_weights(model, seed=1)
    assert tied.output.weight is tied.tok_embeddings.weight
    counts = [sum(p.numel() for p in model.parameters()) for model in (tied, untied)]
    assert counts[1] - counts[0] == 50 * 64

    # Two matrices with its values compute the same, and its gradient is the sum of theirs.
    untied.load_state_dict(tied.state_dict())
    tokens, weights = torch.randint(0, 50, (2, 20)), torch.randn(2, 20, 50)
    for model in (tied, untied):
        (model(tokens) * weights).sum().backward()
    assert torch.equal(tied(tokens), untied(tokens))
    embedding, output = untied.tok_embeddings.weight.grad, untied.output.weight.grad
    torch.testing.assert_close(tied.tok_embeddings.weight.grad, embedding + output)


def test_a_model_that_was_untied_does_not_run() -> None:
    model = Transformer(small_args(tie_embeddings=True))
    model.output.weight = torch.nn.Parameter(model.output.weight.detach().clone())
    with pytest.raises(AssertionError, match="something has replaced parameters"):
        model(torch.zeros(1, 4, dtype=torch.long))
    model.tie_weights()
    assert model(torch.zeros(1, 4, dtype=torch.long)).shape == (1, 4, 50)


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
    plain, scaled = (
        rope_frequencies(small_args(dim=512, rope_scaling=scaling)) for scaling in (None, SCALING)
    )
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


def test_a_document_starts_at_its_bos_or_before_the_window() -> None:
    tokens = torch.tensor([[7, 8, 1, 5, 1, 1, 9], [1, 5, 6, 7, 8, 9, 1], [5, 5, 5, 5, 5, 5, 5]])
    expected = [[0, 0, 2, 2, 4, 5, 5], [0, 0, 0, 0, 0, 0, 6], [0] * 7]
    assert document_starts(tokens, bos_id=1).tolist() == expected


BOS = 0
STARTS = [[0, 13, 14, 30], [7, 40]]
"""Where the test's tokens have BOS ids: at the first place, in a document of BOS alone, at none of
the first places."""


def documents() -> Tensor:
    tokens = torch.randint(1, 50, (2, 48))
    for row, starts in zip(tokens, STARTS, strict=True):
        row[starts] = BOS
    return tokens


def run_each_alone(model: Transformer, tokens: Tensor, weights: Tensor) -> Tensor:
    """Logits of `tokens` if each document is a sequence of its own; gradients of their sum by
    `weights` are added."""
    rows = []
    for row, row_weights, starts in zip(tokens, weights, STARTS, strict=True):
        bounds = sorted({0, *starts, 48})
        parts = [model(row[None, start:end])[0] for start, end in pairwise(bounds)]
        rows.append(torch.cat(parts))
        (rows[-1] * row_weights).sum().backward()
    return torch.stack(rows)


def build_pair(**changes: object) -> tuple[Transformer, Transformer]:
    """The same model with and without the document mask."""
    masked, plain = (
        Transformer(small_args(document_bos_id=bos_id, **changes)) for bos_id in (BOS, None)
    )
    for model in (masked, plain):
        init_weights(model, seed=1)
    return masked, plain


def check_documents_are_alone(masked: Transformer, plain: Transformer) -> None:
    """Logits and gradients of `masked` are those of `plain` on each document alone."""
    torch.manual_seed(0)
    tokens, weights = documents(), torch.randn(2, 48, 50)
    logits = masked(tokens)
    (logits * weights).sum().backward()
    torch.testing.assert_close(logits, run_each_alone(plain, tokens, weights))
    for actual, expected in zip(masked.parameters(), plain.parameters(), strict=True):
        assert actual.grad is not None and expected.grad is not None
        assert relative_error(actual.grad, expected.grad) < 2e-6
    assert relative_error(plain(tokens), logits) > 1e-3


@pytest.mark.parametrize("scaling", [None, SCALING], ids=["plain", "llama3.1"])
@pytest.mark.parametrize("n_kv_heads", [8, 4, 2], ids=["gqa1", "gqa2", "gqa4"])
def test_masked_documents_are_as_if_each_were_alone(
    n_kv_heads: int, scaling: RopeScaling | None
) -> None:
    check_documents_are_alone(*build_pair(n_kv_heads=n_kv_heads, rope_scaling=scaling))


def test_the_mask_changes_nothing_in_a_window_of_one_document() -> None:
    masked, plain = build_pair()
    tokens = torch.randint(1, 50, (2, 48))
    torch.testing.assert_close(masked(tokens), plain(tokens))


def test_compiled_blocks_take_any_mask_without_another_compilation() -> None:
    masked, plain = build_pair()
    torch._dynamo.reset()
    for layer in masked.layers.values():
        layer.compile(fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        check_documents_are_alone(masked, plain)
        masked(torch.randint(0, 50, (2, 48)))


@pytest.fixture
def flex_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlexAttention as CUDA runs it, but uncompiled, and with the backward pass that it refuses on
    CPU."""
    monkeypatch.setattr(llama3, "create_mask", flex_attention.create_block_mask)
    monkeypatch.setattr(llama3, "_compiled_flex_attention", lambda: flex_attention.flex_attention)
    monkeypatch.setattr(flex_attention, "_validate_device", lambda query, key, value: None)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("n_kv_heads", [8, 2], ids=["gqa1", "gqa4"])
def test_flex_attention_masks_documents_too(n_kv_heads: int, flex_on_cpu: None) -> None:
    check_documents_are_alone(*build_pair(n_kv_heads=n_kv_heads))


@pytest.mark.usefixtures("flex_on_cpu")
def test_flex_attention_leaves_out_blocks_between_documents() -> None:
    tokens = torch.ones(1, 512, dtype=torch.long)  # four blocks of 128 queries
    tokens[0, 300] = BOS
    mask = document_mask(document_starts(tokens, bos_id=BOS), torch.arange(tokens.shape[1]))
    assert isinstance(mask, flex_attention.BlockMask) and mask.full_kv_num_blocks is not None
    # Queries 256 to 299 see keys from 0 on, those from 384 on none before 300.
    assert (mask.kv_num_blocks + mask.full_kv_num_blocks).tolist() == [[[1, 2, 3, 2]]]


@pytest.mark.parametrize(
    ("bos_id", "device", "expected"),
    [
        (None, "cpu", "FLASH_ATTENTION"),
        (0, "cpu", "FLASH_ATTENTION"),
        (0, "cuda", "FLEX_ATTENTION"),
    ],
)
def test_the_attention_backend_is_named(
    bos_id: int | None, device: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    args = ModelArgs(
        dim=64,
        n_layers=1,
        n_heads=8,
        n_kv_heads=2,
        ffn_dim=96,
        vocab_size=50,
        max_seq_len=48,
        document_bos_id=bos_id,
    )
    found = attention_backend(
        args, cp_degree=1, tp_degree=2, dtype=torch.bfloat16, device=torch.device(device)
    )
    assert found == expected


def test_a_gpu_without_flex_attention_takes_no_document_mask(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    args = ModelArgs(
        dim=64, n_layers=1, n_heads=8, n_kv_heads=2, ffn_dim=96, vocab_size=50, document_bos_id=1
    )
    refused = "document_mask = true runs in .* 8.0 or newer, and Tesla T4 has 7.5; set it to false"
    with pytest.raises(ConfigError, match=refused):
        attention_backend(
            args, cp_degree=2, tp_degree=1, dtype=torch.bfloat16, device=torch.device("cuda")
        )


def test_this_ranks_share_of_the_heads_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = []

    def choose(*tensors: torch.Tensor, **options: object) -> int:
        shapes.extend(tuple(tensor.shape) for tensor in tensors)
        assert all(tensor.requires_grad for tensor in tensors)
        assert options == {"attn_mask": None, "is_causal": True, "enable_gqa": True}
        return int(torch.nn.attention.SDPBackend.CUDNN_ATTENTION.value)

    monkeypatch.setattr(torch, "_fused_sdp_choice", choose)
    args = ModelArgs(
        dim=64, n_layers=1, n_heads=8, n_kv_heads=2, ffn_dim=96, vocab_size=50, max_seq_len=48
    )
    kind = {"dtype": torch.bfloat16, "device": torch.device("cpu")}
    assert attention_backend(args, cp_degree=1, tp_degree=2, **kind) == "CUDNN_ATTENTION"
    assert shapes == [(1, 4, 48, 8), (1, 1, 48, 8), (1, 1, 48, 8)]
