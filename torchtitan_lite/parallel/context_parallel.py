"""Context parallelism: the ranks of a group share each sequence, and gather its keys and values.

Of c ranks, rank r computes chunks r and 2c-1-r of the 2c equal chunks of a sequence, so that causal
attention is the same work for all, as in Llama 3 (arXiv 2407.21783, section 3.3.2).

Shapes: B batch, S seq_len of the whole sequence, s = S / c, H heads, K key-value heads, Q head_dim.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn.attention.flex_attention import BlockMask

from torchtitan_lite.models.llama3 import Attention, Transformer, attend


def apply_context_parallel(model: Transformer, mesh: DeviceMesh, *, flash: bool) -> None:
    """Split the sequences of `model`, in place, over the ranks of `mesh`. `flash`: causal attention
    runs in the GPU's FlashAttention."""
    context = ContextParallel(mesh, flash=flash)
    model.shard_sequence = context.shard_sequence
    for module in model.modules():
        if isinstance(module, Attention):
            module.attend = context.attend


@dataclass(frozen=True)
class ContextParallel:
    """A rank's place among the ranks that share each sequence."""

    mesh: DeviceMesh
    flash: bool

    def shard_sequence(self, x: Tensor, dim: int) -> Tensor:
        """Return this rank's two chunks of `x`, whose dimension `dim` is a whole sequence."""
        rank = self.mesh.get_local_rank()
        chunks = x.chunk(2 * self.mesh.size(), dim)
        return torch.cat((chunks[rank], chunks[-1 - rank]), dim)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | BlockMask | None) -> Tensor:
        """Return the attention [B, H, s, Q] of this rank's `q` to whole sequences, causal if
        `mask`, over [s, S], is None. `k` and `v` [B, K, s, Q] are gathered from all ranks."""
        # Not stacked: `cat` of more than four dimensions launches a kernel for each tensor.
        k, v = self._gather(torch.cat((k, v))).chunk(2)  # [B, K, S, Q] each
        if mask is not None:
            return attend(q, k, v, mask)

        # Each chunk attends to all keys up to its own end.
        early, late = q.chunk(2, dim=-2)
        rank, length = self.mesh.get_local_rank(), early.shape[-2]
        ends = (rank + 1) * length, (2 * self.mesh.size() - rank) * length
        chunks = [
            self._attend_from_end(chunk, k[..., :end, :], v[..., :end, :])
            for chunk, end in zip((early, late), ends, strict=True)
        ]
        return torch.cat(chunks, dim=-2)

    def _gather(self, kv: Tensor) -> Tensor:
        """Gather each rank's `kv` [2B, K, s, Q] in the order of the sequence, [2B, K, S, Q]."""
        shards = DTensor.from_local(kv, self.mesh, [Shard(0)], run_check=False)
        gathered = shards.redistribute(placements=[Replicate()])
        by_rank = gathered.to_local(grad_placements=[Partial()]).chunk(self.mesh.size())
        halves = [rank_kv.chunk(2, dim=-2) for rank_kv in by_rank]
        early, late = [half[0] for half in halves], [half[1] for half in halves]
        return torch.cat((*early, *reversed(late)), dim=-2)

    def _attend_from_end(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the causal attention of `q`, the queries of the last positions of `k` and `v`.

        SDPA aligns a causal mask with the first positions, and its `causal_lower_right` breaks
        compiled graphs and stores the mask on CPU."""
        if self.flash:
            flash = torch.ops.aten._scaled_dot_product_flash_attention
            return flash(q, k, v, is_causal=True)[0]  # aligned with the last positions

        # Zeros take the place of the queries of earlier positions, which costs time, not memory.
        length = q.shape[-2]
        padded = F.pad(q, (0, 0, k.shape[-2] - length, 0))
        return attend(padded, k, v, None)[..., -length:, :]
