"""Initial weights that do not depend on how the model is sharded: every value is a pure function of
the seed, the parameter's name and the element's global index, so 1 process, 512 and any layout
start from the same weights.

The generator is a counter: splitmix64's mixing function (Steele, Lea and Flood, OOPSLA 2014) of key
+ index, its top 53 bits taken as a uniform number, turned into a truncated normal by the inverse of
its distribution function.
"""

import hashlib
import math

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .llama3 import Transformer, rope_table

CUTOFF = 3.0
"""Truncation of the normal distribution, in standard deviations."""
CHUNK = 1 << 22
"""Elements made at a time, which bounds the memory of the intermediate 64-bit values."""
_PREFIXES = ("_checkpoint_wrapped_module.", "_orig_mod.")


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


_GAMMA, _MUL1, _MUL2 = map(_signed, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def _mix(z: Tensor) -> Tensor:
    """splitmix64's finaliser of int64 `z`, modified in place; the masks make the arithmetic shifts
    logical."""
    z.bitwise_xor_((z >> 30) & (1 << 34) - 1).mul_(_MUL1)
    z.bitwise_xor_((z >> 27) & (1 << 37) - 1).mul_(_MUL2)
    return z.bitwise_xor_((z >> 31) & (1 << 33) - 1)


def truncated_normal(index: Tensor, *, key: int, std: float) -> Tensor:
    """Normal values of standard deviation `std` before truncation at `CUTOFF`, float32, one for
    each int64 `index`."""
    uniform = (
        ((_mix((index + key) * _GAMMA) >> 11) & (1 << 53) - 1).double().add_(0.5).mul_(2.0**-53)
    )
    tail = math.erf(CUTOFF / math.sqrt(2))
    return torch.erfinv(uniform.mul_(2 * tail).sub_(tail)).mul_(std * math.sqrt(2)).float()


def local_window(param: Tensor) -> tuple[list[int], list[int]]:
    """Offset and size, per dimension, of this rank's part of `param` within the global tensor.

    Mesh dimensions are taken from the last to the first, because tensor parallelism splits a weight
    before FSDP splits what is left; each splits a dimension as torch.chunk does."""
    offset, size = [0] * param.ndim, list(param.shape)
    if isinstance(param, DTensor):
        mesh = param.device_mesh
        coordinate = mesh.get_coordinate()
        assert coordinate is not None, "this rank holds no part of the parameter"
        for mesh_dim in reversed(range(mesh.ndim)):
            placement = param.placements[mesh_dim]
            if placement.is_replicate():
                continue
            dim = placement.dim  # type: ignore[attr-defined]  # of Shard and its strided kind alike
            chunk = -(-size[dim] // mesh.size(mesh_dim))
            start = min(coordinate[mesh_dim] * chunk, size[dim])
            offset[dim] += start
            size[dim] = min(chunk, size[dim] - start)
        assert tuple(size) == tuple(param.to_local().shape), (
            f"{tuple(size)} is not this rank's part of the parameter"
        )
    return offset, size


@torch.no_grad()
def _fill(param: Tensor, *, key: int, std: float) -> None:
    """Fill a matrix, or this rank's part of it, in place."""
    (row0, col0), (rows, cols) = local_window(param)
    local = param.to_local() if isinstance(param, DTensor) else param
    columns = torch.arange(col0, col0 + cols, device=local.device)
    step = max(1, CHUNK // max(1, cols))
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        index = (
            torch.arange(row0 + start, row0 + stop, device=local.device)[:, None] * param.shape[1]
            + columns
        )
        local[start:stop].copy_(truncated_normal(index, key=key, std=std))


def init_std(name: str, *, dim: int) -> float:
    """Standard deviation of the matrix `name`, as torchtitan initialises Llama 3: 1 for the
    embedding, 0.02 for what reads the residual stream, less with depth for what writes to it,
    1/sqrt(D) for the output."""
    if name.startswith("tok_embeddings."):
        return 1.0
    if name.startswith("output."):
        return dim**-0.5
    layer = int(name.split(".")[1])
    reads = name.split(".")[-2] in ("wq", "wk", "wv", "w1")
    return 0.02 if reads else 0.02 / math.sqrt(2 * (layer + 1))


@torch.no_grad()
def init_weights(
    model: Transformer, *, seed: int, buffer_device: torch.device | None = None
) -> None:
    """Fill every parameter of `model` in place, sharded or not, put its rotary tables on
    `buffer_device` (by default where they are), and check that nothing was left out."""
    for param in model.parameters():
        param.fill_(math.nan)
    for name, param in model.named_parameters():
        for prefix in _PREFIXES:
            name = name.replace(prefix, "")
        if param.ndim == 1:
            param.fill_(1.0)  # the weights of RMSNorm
        else:
            key = _signed(
                int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "little")
            )
            _fill(param, key=key, std=init_std(name, dim=model.args.dim))
    device = buffer_device or model.rope_cos.device
    model.rope_cos, model.rope_sin = (table.to(device) for table in rope_table(model.args))
    tensors: dict[str, Tensor] = dict(model.named_parameters()) | dict(model.named_buffers())
    missed = [name for name, tensor in tensors.items() if not _all_finite(tensor)]
    assert not missed, f"not initialised, or not finite: {', '.join(missed)}"


def _all_finite(tensor: Tensor) -> bool:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    # One NaN or infinity makes the sum one, and finite weights cannot overflow it: no boolean copy
    # is needed.
    return bool(local.sum(dtype=torch.float64).isfinite())
