"""The benchmark of the loss, small: every kind computes the same."""

import pytest
import torch

from torchtitan_lite.benchmarks.loss import LossCost, format_costs, measure_loss, plain_loss


def test_the_plain_loss_is_the_mean_over_all_positions() -> None:
    logits, labels = (
        torch.zeros(2, 3, 5, dtype=torch.bfloat16),
        torch.zeros(2, 3, dtype=torch.int64),
    )
    logits[1, 2, 0] = 1.0
    uniform, other = torch.tensor(5.0).log(), (1 + 4 * torch.tensor(-1.0).exp()).log()
    assert plain_loss(logits, labels) == pytest.approx(((5 * uniform + other) / 6).item())


def test_all_kinds_compute_one_loss() -> None:
    plain, ours = (
        measure_loss(kind, tokens=64, vocab_size=500, dim=32) for kind in ("plain", "ours, eager")
    )
    assert ours.loss == pytest.approx(plain.loss, rel=1e-5)
    assert ours.grad_norms == pytest.approx(plain.grad_norms, rel=1e-2)


def test_the_table_has_ratios_to_the_first() -> None:
    table = format_costs(
        [
            LossCost("plain", 1000.0, 4.0, 9.0, (1.0, 2.0)),
            LossCost("ours", 250.0, 1.0, 9.0, (1.0, 2.0)),
        ]
    )
    assert table.splitlines()[2].split() == [
        "ours",
        "250",
        "0.250",
        "1.00",
        "0.250",
        "9.000000",
        "1,",
        "2",
    ]
