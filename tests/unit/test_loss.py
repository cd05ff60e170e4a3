"""Cross-entropy against its definition, in one piece and in several."""

from collections.abc import Callable
from itertools import accumulate

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import grad
from torch.profiler import ProfilerActivity, profile

from torchtitan_lite.models import loss
from torchtitan_lite.models.loss import IGNORED, CrossEntropy

# ----- CrossEntropy -----

EAGER = CrossEntropy(compiled=False)


def plain_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """As PyTorch has it, of all tokens at once."""
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum")


def sample(dtype: torch.dtype, *, vocab_size: int = 103) -> tuple[Tensor, Tensor, Tensor]:
    """The input [B, S, D] of a linear, its weight [V, D], and labels, two of which do not count."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 24, 16, generator=generator).to(dtype)
    weight = torch.randn(vocab_size, 16, generator=generator).to(dtype)
    labels = torch.randint(vocab_size, (2, 24), generator=generator)
    labels[0, 3] = labels[1, 23] = IGNORED
    return x.requires_grad_(), weight.requires_grad_(), labels


def test_the_loss_is_the_sum_of_minus_log_probabilities_of_the_labels_that_count() -> None:
    torch.manual_seed(0)
    logits, labels = torch.randn(2, 3, 7), torch.randint(0, 7, (2, 3))
    labels[1, 2] = IGNORED
    log_p = logits.double().log_softmax(-1)
    counted = [(b, s) for b in range(2) for s in range(3) if (b, s) != (1, 2)]
    expected = -sum(log_p[b, s, labels[b, s]] for b, s in counted)
    for scale in (1.0, 0.5):
        total = EAGER(logits, None, labels, scale=scale).double()
        torch.testing.assert_close(total, scale * expected, rtol=1e-6, atol=0)


def test_low_precision_logits_are_summed_in_float32() -> None:
    logits, labels = torch.randn(4, 64, 100).bfloat16(), torch.randint(0, 100, (4, 64))
    total = EAGER(logits, None, labels)
    assert total.dtype is torch.float32
    assert torch.equal(total, EAGER(logits.float(), None, labels))


def test_kernels_are_compiled_by_the_backend(monkeypatch):
    backends = []
    monkeypatch.setattr(torch, "compile", lambda kernel, backend: backends.append(backend))
    CrossEntropy(compiled=True, backend="eager")
    assert backends == ["eager"] * 3


def test_ignored_labels_move_nothing_and_the_given_logits_stay_as_they_are() -> None:
    logits = torch.randn(1, 4, 7, requires_grad=True)
    before = logits.detach().clone()
    total = EAGER(logits, None, torch.full((1, 4), IGNORED))
    (gradient,) = grad(total, logits)
    assert total.item() == 0.0 and not gradient.any()
    EAGER(logits, None, torch.ones(1, 4, dtype=torch.long)).backward()
    assert torch.equal(logits, before)


@pytest.mark.parametrize(
    ("chunk_tokens", "piece_tokens", "compiled"),
    [(48, 48, False), (20, 7, False), (1, 1, False), (20, 7, True)],
)
def test_fused_with_the_linear_it_is_equal(chunk_tokens, piece_tokens, compiled, monkeypatch):
    x, weight, labels = sample(torch.float32)
    monkeypatch.setattr(loss, "CHUNK_LOGITS", chunk_tokens * len(weight))
    monkeypatch.setattr(loss, "PIECE_LOGITS", piece_tokens * len(weight))
    expected = plain_loss(x @ weight.t(), labels) / 48
    total = CrossEntropy(compiled=compiled)(x, weight, labels, scale=1 / 48)
    torch.testing.assert_close(total, expected, rtol=1e-6, atol=0)
    # Of a loss that is scaled once more, as by anything that follows it.
    found, right = grad(3 * total, (x, weight)), grad(3 * expected, (x, weight))
    torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-6)


def test_pieces_of_a_large_linear_take_the_memory_of_its_gradient(monkeypatch):
    monkeypatch.setattr(loss, "PIECE_LOGITS", 1)
    x, weight, labels = sample(torch.float32)  # dim 16: two copies of 8 tokens' logits
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        EAGER(x, weight, labels)
    assert sum(event.name == "aten::amax" for event in profiler.events()) == 48 / 8


def test_in_bfloat16_one_chunk_computes_what_the_plain_path_does() -> None:
    x, weight, labels = sample(torch.bfloat16)
    expected = plain_loss(x @ weight.t(), labels) / 48
    total = EAGER(x, weight, labels, scale=1 / 48)
    torch.testing.assert_close(total, expected, rtol=1e-6, atol=0)
    found_grads, expected_grads = grad(total, (x, weight)), grad(expected, (x, weight))
    for found, right in zip(found_grads, expected_grads, strict=True):
        assert found.dtype is torch.bfloat16
        error = (found.float() - right.float()).norm() / right.float().norm()
        assert error < 2e-3  # a rounding to bfloat16 is 2^-9


def test_without_gradients_none_are_made() -> None:
    x, weight, labels = sample(torch.float32)
    with torch.no_grad():
        total = EAGER(x, weight, labels)
        expected = plain_loss(x @ weight.t(), labels)
    assert not total.requires_grad
    torch.testing.assert_close(total, expected, rtol=1e-6, atol=0)


def test_its_backward_cannot_run_twice() -> None:
    x, weight, labels = sample(torch.float32)
    total = EAGER(x, weight, labels)
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()


def peak_bytes(loss: Callable[..., Tensor], *operands: Tensor) -> int:
    """Allocated at once by a loss of `operands` and its backward."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        loss(*operands).backward()
    events = profiler.profiler.kineto_results.events()
    events = sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns())
    return max(accumulate(event.nbytes() for event in events))


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_it_takes_at_most_a_quarter_of_the_memory_of_the_plain_path(compiled, monkeypatch):
    tokens, vocab_size, dim = 512, 16032, 16
    monkeypatch.setattr(loss, "PIECE_LOGITS", tokens * vocab_size // 32)
    x = torch.randn(1, tokens, dim).bfloat16().requires_grad_()
    weight = torch.randn(vocab_size, dim).bfloat16().requires_grad_()
    labels = torch.randint(vocab_size, (1, tokens))
    plain = peak_bytes(lambda x, weight: plain_loss(x @ weight.t(), labels), x, weight)
    ours = CrossEntropy(compiled=compiled)
    ours(x, weight, labels).backward()  # compiles
    x.grad = weight.grad = None
    assert peak_bytes(ours, x, weight, labels) <= plain / 4
