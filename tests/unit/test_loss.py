"""Cross-entropy against its definition."""

import torch

from torchtitan_lite.models.loss import cross_entropy_sum

IGNORED = -100


def test_the_loss_is_the_sum_of_minus_log_probabilities_of_the_labels_that_count() -> None:
    torch.manual_seed(0)
    logits, labels = torch.randn(2, 3, 7), torch.randint(0, 7, (2, 3))
    labels[1, 2] = IGNORED
    log_p = logits.double().log_softmax(-1)
    expected = -sum(log_p[b, s, labels[b, s]] for b in range(2) for s in range(3) if (b, s) != (1, 2))
    torch.testing.assert_close(cross_entropy_sum(logits, labels).double(), expected, rtol=1e-6, atol=0)


def test_low_precision_logits_are_summed_in_float32() -> None:
    logits, labels = torch.randn(4, 64, 100).bfloat16(), torch.randint(0, 100, (4, 64))
    loss = cross_entropy_sum(logits, labels)
    assert loss.dtype is torch.float32
    torch.testing.assert_close(loss, cross_entropy_sum(logits.float(), labels), rtol=0, atol=0)


def test_labels_that_are_all_ignored_cost_nothing_and_move_nothing() -> None:
    logits = torch.randn(1, 4, 7, requires_grad=True)
    loss = cross_entropy_sum(logits, torch.full((1, 4), IGNORED))
    loss.backward()
    assert loss.item() == 0.0
    assert logits.grad is not None and not logits.grad.any()
