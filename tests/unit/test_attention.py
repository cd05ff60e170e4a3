"""The name of what computes attention."""

import pytest
import torch

from torchtitan_lite.models.flavors import ModelArgs
from torchtitan_lite.models.llama3 import attention_backend


@pytest.mark.parametrize(
    ("bos_id", "device", "expected"),
    [
        (None, "cpu", "FLASH_ATTENTION"),
        (0, "cpu", "FLASH_ATTENTION"),
        (0, "cuda", "FLEX_ATTENTION"),
    ],
)
def test_the_attention_backend_is_named(bos_id: int | None, device: str, expected: str) -> None:
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
    found = attention_backend(args, tp_degree=2, dtype=torch.bfloat16, device=torch.device(device))
    assert found == expected


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
    assert attention_backend(args, tp_degree=2, **kind) == "CUDNN_ATTENTION"
    assert shapes == [(1, 4, 48, 8), (1, 1, 48, 8), (1, 1, 48, 8)]
