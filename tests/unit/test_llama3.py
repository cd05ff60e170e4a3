"""RoPE against its definition, tied weights, documents and the choice of attention. The model
against transformers' is in test_hf_llama.py."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from sample_jobs import job_of
from sample_llamas import ARGS, SCALING, config_of
from torch import Tensor
from torch.nn.attention import flex_attention
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from torchtitan_lite.catalog.flavors import ModelArgs
from torchtitan_lite.config import Config
from torchtitan_lite.models import llama3
from torchtitan_lite.models.init import init_weights
from torchtitan_lite.models.llama3 import (
    Transformer,
    apply_rope,
    document_mask,
    document_starts,
    rope_frequencies,
    rope_table,
)
from torchtitan_lite.training.model import find_attention

# ----- Transformer, apply_rope, document_starts, document_mask -----


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return ((actual - expected).norm() / expected.norm()).item()


def test_a_tied_model_stays_tied_or_does_not_run() -> None:
    with torch.device("meta"):
        model = Transformer(replace(ARGS, tie_embeddings=True))
    model.to_empty(device="cpu")
    assert model.output.weight is model.tok_embeddings.weight
    model.output.weight = torch.nn.Parameter(model.output.weight.detach().clone())
    with pytest.raises(AssertionError, match="something has replaced parameters"):
        model(torch.zeros(1, 4, dtype=torch.long))
    model.tie_weights()
    assert model(torch.zeros(1, 4, dtype=torch.long)).shape == (1, 4, 50)


def test_rope_turns_pair_j_at_position_p_by_p_over_theta_to_the_2j_over_q() -> None:
    args = replace(ARGS, dim=8, n_heads=1, n_kv_heads=1, max_seq_len=4)
    cos, sin = rope_table(args)
    x = torch.zeros(1, 4, 1, 8)
    x[..., 2] = 1.0  # the first of pair j = 1, of Q = 8
    angle = 3 * 500000.0 ** (-2 / 8)
    expected = torch.zeros(8)
    expected[2:4] = torch.tensor([math.cos(angle), math.sin(angle)])
    torch.testing.assert_close(apply_rope(x, cos, sin)[0, 3, 0], expected)


def test_rope_scaling_stretches_long_wavelengths_as_transformers_does() -> None:
    args = replace(ARGS, dim=512, rope_scaling=SCALING)
    scaled = rope_frequencies(args)
    transformers = LlamaRotaryEmbedding(LlamaConfig(**config_of(args)))
    torch.testing.assert_close(scaled, transformers.inv_freq)
    stretched = rope_frequencies(replace(ARGS, dim=512)) / scaled
    assert stretched[0] == 1 and stretched[-1] == 8
    assert ((stretched > 1.5) & (stretched < 7.5)).any()


def test_rope_is_computed_in_float32_and_returned_in_the_inputs_type() -> None:
    cos, sin = rope_table(ARGS)
    x = torch.randn(1, 48, 8, 8, dtype=torch.bfloat16)
    assert torch.equal(apply_rope(x, cos, sin), apply_rope(x.float(), cos, sin).bfloat16())


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
    args = replace(ARGS, **changes)
    masked, plain = Transformer(replace(args, document_bos_id=BOS)), Transformer(args)
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


@pytest.mark.parametrize(("n_kv_heads", "scaling"), [(8, None), (2, SCALING)])
def test_masked_documents_are_as_if_each_were_alone(n_kv_heads, scaling):
    check_documents_are_alone(*build_pair(n_kv_heads=n_kv_heads, rope_scaling=scaling))


def test_compiled_blocks_take_any_mask_without_another_compilation() -> None:
    masked, plain = build_pair()
    for layer in masked.layers.values():
        layer.compile(fullgraph=True, backend="aot_eager")
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
@pytest.mark.usefixtures("flex_on_cpu")
def test_flex_attention_masks_documents_too() -> None:
    check_documents_are_alone(*build_pair(n_kv_heads=2))


@pytest.mark.usefixtures("flex_on_cpu")
def test_flex_attention_leaves_out_blocks_between_documents() -> None:
    tokens = torch.ones(1, 512, dtype=torch.long)  # four blocks of 128 queries
    tokens[0, 300] = BOS
    mask = document_mask(document_starts(tokens, bos_id=BOS), torch.arange(tokens.shape[1]))
    assert isinstance(mask, flex_attention.BlockMask) and mask.full_kv_num_blocks is not None
    # Queries 256 to 299 see keys from 0 on, those from 384 on none before 300.
    assert (mask.kv_num_blocks + mask.full_kv_num_blocks).tolist() == [[[1, 2, 3, 2]]]


# ----- find_attention -----


def backend(args: ModelArgs, device: str, *, tp_degree: int) -> str:
    job = job_of(Config(), args, degrees=(1, 1, tp_degree))
    return find_attention(job, device=torch.device(device))


@pytest.mark.parametrize(
    ("bos_id", "device", "expected"),
    [(None, "cpu", "FLASH"), (0, "cpu", "FLASH"), (0, "cuda", "FLEX")],
)
def test_the_attention_backend_is_named(bos_id, device, expected):
    found = backend(replace(ARGS, document_bos_id=bos_id), device, tp_degree=2)
    assert found == f"{expected}_ATTENTION"


def test_this_ranks_share_of_the_heads_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = []

    def choose(*tensors: Tensor, **options: object) -> int:
        shapes.extend(tuple(tensor.shape) for tensor in tensors)
        assert all(tensor.requires_grad for tensor in tensors)
        assert options == {"attn_mask": None, "is_causal": True, "enable_gqa": True}
        return int(torch.nn.attention.SDPBackend.CUDNN_ATTENTION.value)

    monkeypatch.setattr(torch, "_fused_sdp_choice", choose)
    assert backend(ARGS, "cpu", tp_degree=2) == "CUDNN_ATTENTION"
    assert shapes == [(1, 4, 48, 8), (1, 1, 48, 8), (1, 1, 48, 8)]
