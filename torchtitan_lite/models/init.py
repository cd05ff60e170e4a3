"""Initial weights that do not depend on how the model is sharded.

Each value is a pure function of the seed, the parameter's name and the element's global index. The
generator is counter-based: splitmix64's mixing function (Steele, Lea and Flood, OOPSLA 2014) of
key + index. Its top 53 bits are a uniform number, which the inverse distribution function maps to a
truncated normal.
"""

import hashlib
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from torchtitan_lite.catalog.flavors import ModelArgs

from .llama3 import Transformer, rope_table

CHUNK = 1 << 22  # elements generated at a time; bounds the memory of intermediate 64-bit values


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


_GAMMA, _MUL1, _MUL2 = map(_signed, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def _mix(z: Tensor) -> Tensor:
    """Apply splitmix64's finalizer to int64 `z` in place. The masks make the shifts logical."""
    z.bitwise_xor_((z >> 30) & (1 << 34) - 1).mul_(_MUL1)
    z.bitwise_xor_((z >> 27) & (1 << 37) - 1).mul_(_MUL2)
    return z.bitwise_xor_((z >> 31) & (1 << 33) - 1)


def truncated_normal(index: Tensor, *, key: int, std: float) -> Tensor:
    """Return a normal value for each int64 `index`, float32, truncated at 3 standard
    deviations. `std` is the standard deviation before the truncation."""
    bits = (_mix((index + key) * _GAMMA) >> 11) & (1 << 53) - 1
    uniform = bits.double().add_(0.5).mul_(2.0**-53)
    tail = math.erf(3 / math.sqrt(2))
    return torch.erfinv(uniform.mul_(2 * tail).sub_(tail)).mul_(std * math.sqrt(2)).float()


def local_part(tensor: Tensor) -> Any:
    """Return this rank's shard of a tensor, without autograd; all of a tensor without shards."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def find_shard(param: DTensor, coordinate: Sequence[int]) -> tuple[slice, ...]:
    """Return the global indices, per dimension, of the shard of `param` on a rank of its mesh.

    Tensor parallelism, the last mesh dimension, splits a weight before FSDP splits each part. The
    function of torch 2.13 differs from FSDP where parts are uneven."""
    offset, size = [0] * param.ndim, list(param.shape)
    for mesh_dim in reversed(range(param.device_mesh.ndim)):
        placement = param.placements[mesh_dim]
        if placement.is_replicate():
            continue
        dim = placement.dim  # type: ignore[attr-defined]  # Shard and _StridedShard both have it
        chunk = -(-size[dim] // param.device_mesh.size(mesh_dim))
        start = min(coordinate[mesh_dim] * chunk, size[dim])
        offset[dim] += start
        size[dim] = min(chunk, size[dim] - start)
    return tuple(slice(start, start + n) for start, n in zip(offset, size, strict=True))


def local_offset(param: Tensor) -> list[int]:
    """Return the global index, per dimension, at which this rank's shard of `param` starts."""
    if not isinstance(param, DTensor):
        return [0] * param.ndim
    coordinate = param.device_mesh.get_coordinate()
    assert coordinate is not None, "this rank holds no part of the parameter"
    shard = find_shard(param, coordinate)
    size, local_shape = [each.stop - each.start for each in shard], [*local_part(param).shape]
    assert size == local_shape, f"the shard has shape {local_shape}, not {size}"
    return [each.start for each in shard]


@torch.no_grad()
def _fill(param: Tensor, *, key: int, std: float) -> None:
    """Fill a matrix, or this rank's shard of it, in place."""
    local, (row0, col0) = local_part(param), local_offset(param)
    rows, cols = local.shape
    columns = torch.arange(col0, col0 + cols, device=local.device)
    step = max(1, CHUNK // max(1, cols))
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        row = torch.arange(row0 + start, row0 + stop, device=local.device)
        index = row[:, None] * param.shape[1] + columns  # global, [rows, cols]
        local[start:stop].copy_(truncated_normal(index, key=key, std=std))


def init_std(name: str, args: ModelArgs) -> float:
    """Return the standard deviation of the matrix `name`, as torchtitan initializes Llama 3.

    It is 1 for the embedding, 0.02 for linears that read the residual stream, smaller with depth
    for those that write to it, and 1/sqrt(D) for the output. A tied embedding has the output's, so
    that logits start near 1; the first RMSNorm rescales what the blocks read."""
    if name.startswith("output.") or (args.tie_embeddings and name.startswith("tok_embeddings.")):
        return args.dim**-0.5
    if name.startswith("tok_embeddings."):
        return 1.0
    layer = int(name.split(".")[1])
    reads = name.split(".")[-2] in ("wq", "wk", "wv", "w1")
    return 0.02 if reads else 0.02 / math.sqrt(2 * (layer + 1))


@torch.no_grad()
def init_weights(
    model: Transformer, *, seed: int, buffer_device: torch.device | None = None
) -> None:
    """Fill all parameters of `model`, sharded or not, and its rotary tables in place.

    The tables move to `buffer_device` if it is given."""
    for name, param in model.named_parameters():
        name = name.replace("_checkpoint_wrapped_module.", "")
        if param.ndim == 1:
            local_part(param).fill_(1.0)  # the weight of an RMSNorm
        else:
            digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
            key = _signed(int.from_bytes(digest[:8], "little"))
            _fill(param, key=key, std=init_std(name, model.args))

    device = buffer_device or model.rope_cos.device
    model.rope_cos, model.rope_sin = (table.to(device) for table in rope_table(model.args))


def all_finite(tensor: Tensor) -> bool:
    """Return whether this rank's part of a tensor has neither NaN nor infinity."""
    # Either makes the sum not finite. Unlike isfinite().all(), it allocates no boolean copy.
    return bool(local_part(tensor).sum(dtype=torch.float64).isfinite())
