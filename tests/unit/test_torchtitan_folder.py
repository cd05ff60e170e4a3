"""The weights of torchtitan's checkpoints: they arrive bit by bit, and nothing else is read."""

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sample_checkpoints import Payload, differing, edit_table
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torchao.float8 import fsdp_utils
from torchao.float8.float8_training_tensor import LinearMMConfig
from torchtitan_layout import save_torchtitan

from torchtitan_lite.base.errors import CheckpointError
from torchtitan_lite.catalog.flavors import ModelArgs
from torchtitan_lite.checkpoint.folders import find_kind
from torchtitan_lite.checkpoint.manifest import BrokenCheckpoint
from torchtitan_lite.checkpoint.state import model_state
from torchtitan_lite.checkpoint.torchtitan_folder import load_torchtitan
from torchtitan_lite.models.llama3 import Transformer

ARGS = ModelArgs(dim=16, n_layers=2, n_heads=2, n_kv_heads=1, ffn_dim=32, vocab_size=24)
EMBEDDING, OUTPUT = "tok_embeddings.weight", "output.weight"
WQ = "layers.0.attention.wq.weight"


@pytest.fixture(autouse=True)
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def make_model(**changes: Any) -> Transformer:
    return Transformer(replace(ARGS, **changes))


def make_weights() -> dict[str, Tensor]:
    """Weights by torchtitan's names, written out: the names are not taken from our model."""
    torch.manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (24, 16), "norm.weight": (16,)}
    for layer in ("layers.0", "layers.1"):
        shapes |= {
            f"{layer}.attention.wq.weight": (16, 16), f"{layer}.attention.wk.weight": (8, 16),
            f"{layer}.attention.wv.weight": (8, 16), f"{layer}.attention.wo.weight": (16, 16),
            f"{layer}.feed_forward.w1.weight": (32, 16),
            f"{layer}.feed_forward.w2.weight": (16, 32),
            f"{layer}.feed_forward.w3.weight": (32, 16),
            f"{layer}.attention_norm.weight": (16,), f"{layer}.ffn_norm.weight": (16,),
        }  # fmt: skip
    return {name: torch.randn(shape) for name, shape in (shapes | {OUTPUT: (24, 16)}).items()}


def load(folder: Path, model: Transformer) -> dict[str, Tensor]:
    """Load into `model`, and return its weights by torchtitan's names."""
    load_torchtitan(folder, model_state(model), stages=None, group=None)
    return {name.removeprefix("model."): each for name, each in model_state(model).items()}


# ----- load_torchtitan, weight_name -----


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [("v0.1.0", torch.float32), ("v0.2.2", torch.float32), ("weights", torch.bfloat16)],
)
def test_the_weights_of_each_layout_arrive_bit_by_bit(layout, dtype, tmp_path):
    weights = {name: each.to(dtype) for name, each in make_weights().items()}
    folder = save_torchtitan(tmp_path / "step-1000", weights, layout)
    assert find_kind(folder) == "torchtitan"
    expected = {name: each.float() for name, each in weights.items()}
    assert differing(load(folder, make_model()), expected) == []


def test_names_that_wrappers_have_changed(tmp_path):
    weights, wrapper = make_weights(), "_checkpoint_wrapped_module._orig_mod."
    wrapped = {
        "_orig_mod." + name.replace("attention.", f"{wrapper}attention."): each
        for name, each in weights.items()
    }
    assert differing(load(save_torchtitan(tmp_path, wrapped), make_model()), weights) == []


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"n_layers": 1}, r"9 tensors differ.*: model\.layers\.1\.attention\S+ .* -> missing"),
        ({"n_layers": 3}, r"9 tensors differ.*: model\.layers\.2\.\S+ missing -> float32"),
        ({"tie_embeddings": True}, r"1 tensors differ: model\.output\.weight: .* -> missing\. Set"),
        ({"ffn_dim": 48}, r"6 tensors differ.*w1\.weight: float32 \[32, 16\] -> float32 \[48, "),
    ],
)
def test_another_model_is_refused_by_name(changes, reason, tmp_path):
    folder, model = save_torchtitan(tmp_path, make_weights()), make_model(**changes)
    before = {name: each.clone() for name, each in model_state(model).items()}
    with pytest.raises(CheckpointError, match=reason):
        load(folder, model)
    assert differing(before, model_state(model)) == []


def test_weights_that_are_not_floating_point_are_refused(tmp_path):
    weights = make_weights() | {"norm.weight": torch.ones(16, dtype=torch.int32)}
    folder = save_torchtitan(tmp_path, weights)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight: int32 \[16\] -> float32"):
        load(folder, make_model())


# ----- load_torchtitan: damage -----


def name_twice(table: Any) -> None:
    tensors = table.state_dict_metadata
    tensors[f"model.{EMBEDDING}"] = tensors[EMBEDDING]


def make_bytes(table: Any) -> None:
    tensors = table.state_dict_metadata
    tensors[EMBEDDING] = tensors["lr_scheduler.last_epoch"]


def make_pipe(folder: Path) -> None:
    (folder / "__0_0.distcp").unlink()
    os.mkfifo(folder / "__0_0.distcp")


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda d: edit_table(d, name_twice), rf"has two tensors model\.{EMBEDDING}"),
        (lambda d: edit_table(d, make_bytes), r"has model\.\S+, which is not a tensor"),
        (make_pipe, r"reads __0_0\.distcp, which is not one of its files"),
        (lambda d: (d / "__0_0.distcp").unlink(), r"reads __0_0\.distcp, which is not one"),
        (lambda d: (d / "__0_0.distcp").write_bytes(b"x"), "beyond the end of __0_0.distcp"),
        (lambda d: (d / ".metadata").write_bytes(b"x"), r"\.metadata: not a table of tensors"),
    ],
)
def test_hostile_folders_are_refused(damage, reason, tmp_path):
    folder = save_torchtitan(tmp_path / "step-1000", make_weights())
    damage(folder)
    with pytest.raises(BrokenCheckpoint, match=rf"step-1000 is broken: .*{reason}"):
        load(folder, make_model())


def test_a_gap_between_parts_that_overlap_is_not_finite(tmp_path):
    folder = save_torchtitan(tmp_path, make_weights())

    def overlap(table):
        index = next(index for index in table.storage_data if index.fqn == EMBEDDING)
        place, tensor = table.storage_data.pop(index), table.state_dict_metadata[EMBEDDING]
        tensor.chunks = [
            ChunkStorageMetadata(torch.Size((start, 0)), torch.Size((12, 16))) for start in (0, 6)
        ]
        for part in tensor.chunks:
            table.storage_data[MetadataIndex(EMBEDDING, part.offsets)] = place

    edit_table(folder, overlap)
    embedding = load(folder, make_model())[EMBEDDING]
    assert embedding[:18].isfinite().all()
    assert embedding[18:].isnan().all()


def test_no_code_of_the_folder_runs(tmp_path):
    marker = tmp_path / "code was run"
    weights = make_weights()
    # Values of other states stay pickled.
    folder = save_torchtitan(tmp_path / "a", weights | {"dataloader.x": Payload(marker)})
    assert differing(load(folder, make_model()), weights) == []

    # A weight that is no tensor, and code in the table, are refused.
    folder = save_torchtitan(tmp_path / "b", weights | {"norm.weight": Payload(marker)})
    with pytest.raises(BrokenCheckpoint, match=r"has a part of norm\.weight without an offset"):
        load(folder, make_model())
    edit_table(folder, lambda table: setattr(table, "planner_data", Payload(marker)))
    with pytest.raises(BrokenCheckpoint, match=r"names posix\.mkdir, which no table"):
        load(folder, make_model())
    assert not marker.exists()


# ----- load_torchtitan: weights gathered in float8 -----


@pytest.fixture
def gathered(tmp_path):
    """A folder with a weight in the wrapper of torchao's that gathers it in float8."""
    sharded = distribute_tensor(make_weights()[WQ], init_device_mesh("cpu", (1,)), [Shard(0)])
    wrapper = fsdp_utils.WeightWithDynamicFloat8CastTensor(
        sharded.to_local(), LinearMMConfig(), torch.float8_e4m3fn
    )
    weight = DTensor(wrapper, sharded._spec, requires_grad=False)
    return save_torchtitan(tmp_path, make_weights() | {WQ: weight})


def test_weights_gathered_in_float8(gathered, monkeypatch):
    assert differing(load(gathered, make_model()), make_weights()) == []
    monkeypatch.setitem(sys.modules, "torchao.float8.fsdp_utils", None)
    with pytest.raises(ImportError):  # so it is imported in processes that have not done so
        load(gathered, make_model())
