"""Compares, on every process, the loss and its gradients over a vocabulary split among the
processes with those over the whole one, for each size of vocabulary named. Ends well if they are
equal within float32 rounding."""

import sys
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from torchtitan_lite.config import CommConfig
from torchtitan_lite.models.loss import IGNORED, CrossEntropy
from torchtitan_lite.run.process_group import end_process, init_distributed

LOSS = CrossEntropy(compiled=False)


def compare(vocab_size: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 24, 16, requires_grad=True)
    weight = torch.randn(vocab_size, 16, requires_grad=True)
    labels = torch.randint(vocab_size, (2, 24))
    labels[0, 3] = labels[1, 23] = IGNORED
    logits = (x @ weight.t()).detach().requires_grad_()

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def over(tensor: Tensor, placement: Replicate | Shard) -> Tensor:
        return distribute_tensor(tensor.detach(), mesh, [placement]).requires_grad_()

    whole, rows, shares = over(x, Replicate()), over(weight, Shard(0)), over(logits, Shard(2))
    for loss, of, over_all in (
        (partial(LOSS.of_linear, labels=labels), (whole, rows), (x, weight)),
        (partial(LOSS.of_logits, labels=labels), (shares,), (logits,)),
    ):
        total, expected = loss(*of), loss(*over_all)
        torch.testing.assert_close(total, expected, rtol=1e-6, atol=0)
        grads = torch.autograd.grad(total, of), torch.autograd.grad(expected, over_all)
        for grad, right in zip(*grads, strict=True):
            torch.testing.assert_close(grad.full_tensor(), right, rtol=1e-5, atol=1e-5)


def main() -> None:
    init_distributed(CommConfig())
    for vocab_size in map(int, sys.argv[1:]):
        compare(vocab_size)
    end_process(0)


if __name__ == "__main__":
    main()
