"""Write a figure of your own after each step: the norm of the model's weights, every 10 steps.

torchtitan-lite train --job.config_file debug_model --training.after_step weight_norms:log_norm
"""

import torch
from torch.distributed.tensor import DTensor

from torchtitan_lite import StepValues, Trainer


@torch.no_grad()
def log_norm(trainer: Trainer, values: StepValues) -> None:
    """Called on every rank after a step's update. Its time is the step's."""
    if values.step % 10:
        return
    norm = torch.nn.utils.get_total_norm(trainer.model.parameters())  # without a pipeline's ranks
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm  # collective, on every rank
    trainer.metrics.write_scalars(values.step, {"weight_norm": norm.item()})
