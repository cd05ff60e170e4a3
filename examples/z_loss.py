"""Train with a loss of your own: cross-entropy with the z-loss of PaLM (arXiv 2204.02311, 5.1),
which keeps the logits small.

torchtitan-lite train --job.config_file debug_model --training.loss z_loss:z_loss
"""

import torch.nn.functional as F
from torch import Tensor

WEIGHT = 1e-4


def z_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the sum of the loss over tokens, for logits [B, S, V] and labels [B, S]."""
    logits = logits.flatten(0, 1).float()  # [N, V]
    cross_entropy = F.cross_entropy(logits, labels.flatten(), reduction="sum")
    counted = (labels.flatten() != -100).float()  # -100: a label that does not count
    return cross_entropy + WEIGHT * (logits.logsumexp(-1).square() * counted).sum()
