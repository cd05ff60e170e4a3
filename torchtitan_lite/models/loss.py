"""Cross-entropy of next-token prediction. Shapes: B batch, S seq_len, V vocab_size."""

import torch.nn.functional as F
from torch import Tensor


def cross_entropy_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum over all positions of the cross-entropy in nat of `labels` [B, S] under `logits` [B, S, V], in float32.
    A label of -100 does not count. The logits may be a DTensor split over the vocabulary, within `loss_parallel`."""
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(0, 1), reduction="sum")
