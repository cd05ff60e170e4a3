"""Muon (Jordan et al. 2024; arXiv 2502.16982): the momentum of each matrix, orthogonalized.

The matrices are those of the blocks' linears, [M, N]; AdamW updates the embedding, the norms and
the projection to the vocabulary. An update U V^T, where U S V^T is the momentum, is scaled by
0.2 sqrt(max(M, N)), the root mean square of AdamW's updates, so that both have one lr and decay.

Newton-Schulz iterations need whole matrices. Each rank of a group that shards them gathers one
matrix, iterates, and scatters the result: the ranks share the work, and at most one whole matrix is
on each at a time. Replicas repeat the work of each other.
"""

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from torch.optim import _muon

from torchtitan_lite.models.init import find_shard

from .bfloat16_adamw import own_part


class Muon(torch.optim.AdamW):
    """Muon for the matrices of blocks, AdamW for the other parameters. Its moments of a matrix are
    one, `momentum_buffer`. A step sets the gradients of matrices to None."""

    def __init__(
        self, groups: Any, *, mesh: DeviceMesh | None, momentum: float, **settings: Any
    ) -> None:
        """`groups` have param_names. `mesh`: that of all ranks; None: matrices are whole. A
        collective call."""
        super().__init__(groups, **settings)
        self._momentum, self._ranks = momentum, None
        self._device = self.param_groups[0]["params"][0].device
        if mesh is not None:
            shards = mesh["dp_shard", "cp", "tp"]._flatten("dp_shard_cp_tp")
            self._ranks, self._device = shards.get_group(), torch.device(mesh.device_type)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update each parameter that has a gradient."""
        assert closure is None, "the loss is computed once a step"
        skip = getattr(self, "found_inf", None)  # None: whoever calls has read it
        for group in self.param_groups:
            lr, kept = group["lr"], 1 - group["lr"] * group["weight_decay"]
            for matrices in self._rounds(group):
                updates = [self._update_momentum(matrix, skip) for matrix in matrices]
                updates = orthogonalize(matrices, updates, self._ranks)
                for matrix, update in zip(matrices, updates, strict=True):
                    weight, update = own_part(matrix.detach()), update.to(matrix.device)
                    rate = _muon._adjust_lr(lr, "match_rms_adamw", matrix.shape)
                    _store(weight, torch.add(weight.float() * kept, update, alpha=-rate), skip)
                    matrix.grad = None  # AdamW leaves it
        super().step()

    def _rounds(self, group: dict[str, Any]) -> Iterator[list[Parameter]]:
        """Yield the matrices of a group, as many at a time as there are ranks, similar in size."""
        matrices = [
            parameter
            for name, parameter in zip(group["param_names"], group["params"], strict=True)
            if name.startswith("layers.") and parameter.ndim == 2 and parameter.grad is not None
        ]
        matrices.sort(key=Tensor.numel)
        ranks = 1 if self._ranks is None else self._ranks.size()
        for start in range(0, len(matrices), ranks):
            yield matrices[start : start + ranks]

    def _update_momentum(self, matrix: Parameter, skip: Tensor | None) -> Tensor:
        """Return this rank's shard of Nesterov's momentum, bfloat16, on the computing device."""
        state = self.state[matrix]
        assert matrix.grad is not None, "those without a gradient are left out"
        if not state:
            state["momentum_buffer"] = torch.zeros_like(matrix)
        momentum, gradient = own_part(state["momentum_buffer"]), own_part(matrix.grad).float()
        new = torch.lerp(momentum.float(), gradient, 1 - self._momentum)
        _store(momentum, new, skip)
        return torch.lerp(gradient, new, self._momentum).to(self._device, torch.bfloat16)


def _store(old: Tensor, new: Tensor, skip: Tensor | None) -> None:
    old.copy_(new if skip is None else torch.where(skip == 0, new, old))


def orthogonalize(
    matrices: Sequence[Tensor], shards: Sequence[Tensor], ranks: dist.ProcessGroup | None
) -> list[Tensor]:
    """Orthogonalize matrices, of which this rank has `shards`, bfloat16, laid out over `ranks` as
    the parameters `matrices`: at most as many as ranks. Return its shards. Collective."""
    if ranks is None or ranks.size() == 1:
        return [_newton_schulz(shard) for shard in shards]

    # Rank i takes matrix i: its shard on each rank.
    parts: list[tuple[slice, ...]] = []
    if ranks.rank() < len(matrices):
        matrix = matrices[ranks.rank()]
        assert isinstance(matrix, DTensor) and matrix.ndim == 2
        sizes = [
            1 if placement.is_replicate() else size
            for placement, size in zip(matrix.placements, matrix.device_mesh.shape, strict=True)
        ]
        parts = [find_shard(matrix, place) for place in product(*map(range, sizes))]
        whole = shards[0].new_empty(matrix.shape)
        assert len(parts) == ranks.size()
    idle = [0] * (ranks.size() - len(shards))
    sent = [shard.numel() for shard in shards] + idle
    received = [whole[part].numel() for part in parts] or [0] * ranks.size()

    # Gather, iterate, scatter.
    ours = torch.cat([shard.flatten() for shard in shards])
    theirs = ours.new_empty(sum(received))
    dist.all_to_all_single(theirs, ours, received, sent, group=ranks)
    if parts:
        for part, values in zip(parts, theirs.split(received), strict=True):
            whole[part] = values.view_as(whole[part])
        whole = _newton_schulz(whole)
        theirs = torch.cat([whole[part].flatten() for part in parts])
    dist.all_to_all_single(ours, theirs, sent, received, group=ranks)
    return [
        values.view_as(shard)
        for shard, values in zip(shards, ours.split(sent), strict=False)  # idle ranks' are empty
    ]


def _newton_schulz(update: Tensor) -> Tensor:
    """Return about U V^T of `update`, U S V^T, [M, N] in bfloat16; overwrites `update`."""
    coefficients = _muon.DEFAULT_A, _muon.DEFAULT_B, _muon.DEFAULT_C
    return _muon._zeropower_via_newtonschulz(
        update, coefficients, _muon.DEFAULT_NS_STEPS, _muon.EPS
    )
