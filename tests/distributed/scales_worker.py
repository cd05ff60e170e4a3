"""What matrix_worker.py does, but that the loss of step 3 is NaN, so that it updates nothing; and
that each rank writes the scales of all casts to float8 in the first step, in order, into
scales-RANK.json of the run's folder, by role."""

import json
import math
from typing import Any

import matrix_worker
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchao.float8.float8_training_tensor import _ToFloat8ConstrFunc

from torchtitan_lite.metrics.processor import StepValues
from torchtitan_lite.parallel.microbatches import ModelLoss
from torchtitan_lite.run.process_group import read_rank
from torchtitan_lite.training import model as build_model
from torchtitan_lite.training.trainer import Trainer

BAD_STEP = 3
scales: dict[str, list[float]] = {}
cast = _ToFloat8ConstrFunc.forward


def noted_cast(ctx: Any, tensor: Tensor, scale: Tensor, *args: Any) -> Any:
    """The cast, once its scale is noted."""
    local = scale.to_local() if isinstance(scale, DTensor) else scale
    scales.setdefault(args[2].name, []).append(float(local))
    return cast(ctx, tensor, scale, *args)


class BadLoss(ModelLoss):
    """Fails in one step."""

    bad = False

    def __call__(self, *args: Any, scale: float, **kwargs: Any) -> Tensor:
        return super().__call__(*args, scale=math.nan if self.bad else scale, **kwargs)


class ScalesTrainer(Trainer):
    """Notes the scales of the first step, and fails in step 3."""

    def train_step(self, step: int) -> StepValues:
        scales.clear()
        BadLoss.bad = step == BAD_STEP
        values = super().train_step(step)
        if step == 1:
            (self.job.folder / f"scales-{read_rank()[0]}.json").write_text(json.dumps(scales))
        return values


if __name__ == "__main__":
    _ToFloat8ConstrFunc.forward = staticmethod(noted_cast)
    build_model.ModelLoss = BadLoss  # type: ignore[misc]
    matrix_worker.Trainer = ScalesTrainer  # type: ignore[misc]
    matrix_worker.main()
