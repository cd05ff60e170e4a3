"""The choice of attention's kernel: named, timed, preferred."""

import pytest
import torch
from torch.nn.attention import SDPBackend

from torchtitan_lite.models.attention import (
    attention_backend,
    attention_inputs,
    prefer_backend,
    time_backends,
)
from torchtitan_lite.models.flavors import ModelArgs

CPU = torch.device("cpu")


def args(**changes: object) -> ModelArgs:
    return ModelArgs(
        dim=64,
        n_layers=1,
        n_heads=8,
        n_kv_heads=2,
        ffn_dim=96,
        vocab_size=50,
        max_seq_len=48,
        **changes,
    )


@pytest.mark.parametrize(
    ("bos_id", "device", "expected"),
    [
        (None, "cpu", "FLASH_ATTENTION"),
        (0, "cpu", "FLASH_ATTENTION"),
        (0, "cuda", "FLEX_ATTENTION"),
    ],
)
def test_the_attention_backend_is_named(bos_id: int | None, device: str, expected: str) -> None:
    found = attention_backend(
        args(document_bos_id=bos_id), tp_degree=2, dtype=torch.bfloat16, device=torch.device(device)
    )
    assert found == expected


def test_a_rank_has_its_share_of_the_heads() -> None:
    q, k, v = attention_inputs(args(), batch_size=3, tp_degree=2, dtype=torch.bfloat16, device=CPU)
    assert q.shape == (3, 4, 48, 8) and k.shape == v.shape == (3, 1, 48, 8)
    assert all(tensor.requires_grad and tensor.dtype is torch.bfloat16 for tensor in (q, k, v))


def test_backends_that_the_device_lacks_are_not_timed() -> None:
    inputs = attention_inputs(args(), batch_size=1, tp_degree=1, dtype=torch.bfloat16, device=CPU)
    seconds = time_backends(*inputs)
    assert list(seconds) == ["FLASH_ATTENTION"] and seconds["FLASH_ATTENTION"] > 0


def test_a_preferred_backend_is_asked_first_and_none_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = torch._C._get_sdp_priority_order()
    # What PyTorch does on Hopper at a process's first choice of a backend.
    own_orders = iter(
        [[int(backend.value) for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH)]]
    )

    def choose(*tensors: torch.Tensor, **options: object) -> int:
        for order in own_orders:
            torch._C._set_sdp_priority_order(order)
        return int(SDPBackend.MATH.value)

    monkeypatch.setattr(torch, "_fused_sdp_choice", choose)
    with torch.compiler.config.patch(cache_key_tag="tp"):
        try:
            prefer_backend("CUDNN_ATTENTION")
            attention_backend(args(), tp_degree=1, dtype=torch.bfloat16, device=CPU)
            order, tag = torch._C._get_sdp_priority_order(), torch.compiler.config.cache_key_tag
        finally:
            torch._C._set_sdp_priority_order(before)
    assert order[0] == int(SDPBackend.CUDNN_ATTENTION.value)
    assert tag == "tp CUDNN_ATTENTION"
    assert {SDPBackend(number).name for number in order} >= {
        "CUDNN_ATTENTION",
        "FLASH_ATTENTION",
        "MATH",
    }
