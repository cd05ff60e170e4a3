"""Saves checkpoints as torchtitan lays them out, sharded over all processes, and reads them and one
of a single process: `torchtitan_worker.py FOLDER`, which has that one as `alone`. Ends well if
every weight arrives bit by bit."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torchtitan_layout import Layout, torchtitan_state

from torchtitan_lite.checkpoint.torchtitan_folder import load_torchtitan
from torchtitan_lite.config import CommConfig
from torchtitan_lite.run.process_group import end_process, init_distributed

LAYOUTS: tuple[Layout, ...] = ("v0.1.0", "v0.2.2", "weights")


def make_weights() -> dict[str, Tensor]:
    """The same weights in each process; not all of them divide evenly."""
    torch.manual_seed(0)
    shapes = {"tok_embeddings.weight": (7, 4), "layers.0.attention.wq.weight": (4, 4)}
    return {name: torch.randn(shape) for name, shape in (shapes | {"norm.weight": (3,)}).items()}


def main() -> None:
    init_distributed(CommConfig())
    folder, weights = Path(sys.argv[1]), make_weights()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    sharded = {name: distribute_tensor(each, mesh, [Shard(0)]) for name, each in weights.items()}
    for layout in LAYOUTS:
        dcp.save(torchtitan_state(sharded, layout), checkpoint_id=folder / layout)

    for name in (*LAYOUTS, "alone"):
        # Sharded in another dimension than saved.
        state: dict[str, Tensor] = {
            f"model.{fqn}": distribute_tensor(torch.zeros_like(each), mesh, [Shard(each.ndim - 1)])
            for fqn, each in weights.items()
        }
        load_torchtitan(folder / name, state, stages=None, group=dist.group.WORLD)
        for fqn, each in weights.items():
            loaded = state[f"model.{fqn}"]
            assert isinstance(loaded, DTensor) and torch.equal(loaded.full_tensor(), each), fqn
    end_process(0)


if __name__ == "__main__":
    main()
