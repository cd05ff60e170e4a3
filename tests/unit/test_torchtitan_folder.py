"""The weights of torchtitan's checkpoints: they arrive bit by bit, and nothing else is read."""

import os
import pickle
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torchtitan_layout import Layout, save_torchtitan

from torchtitan_lite.checkpoint.folders import find_kind
from torchtitan_lite.checkpoint.manifest import BrokenCheckpoint
from torchtitan_lite.checkpoint.state import model_state
from torchtitan_lite.checkpoint.torchtitan_folder import load_torchtitan, open_torchtitan
from torchtitan_lite.errors import CheckpointError
from torchtitan_lite.models.flavors import ModelArgs
from torchtitan_lite.models.llama3 import Transformer

ARGS = ModelArgs(dim=16, n_layers=2, n_heads=2, n_kv_heads=1, ffn_dim=32, vocab_size=24)
EMBEDDING, OUTPUT = "tok_embeddings.weight", "output.weight"


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def make_model(**changes: Any) -> Transformer:
    return Transformer(ModelArgs(**asdict(ARGS) | changes))


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
    tied = model.args.tie_embeddings
    load_torchtitan(folder, model_state(model), tied=tied, stages=None, group=None)
    return {name.removeprefix("model."): each for name, each in model_state(model).items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("layout", ["v0.1.0", "v0.2.2", "weights"])
def test_the_weights_of_each_layout_arrive_bit_by_bit(layout: Layout, tmp_path: Path) -> None:
    weights = make_weights()
    folder = save_torchtitan(tmp_path / "step-1000", weights, layout)
    assert find_kind(folder) == "torchtitan"
    assert same(load(folder, make_model()), weights)


def test_names_that_wrappers_have_changed(tmp_path: Path) -> None:
    weights = make_weights()
    wrapped = {
        name.replace("attention.", "_checkpoint_wrapped_module._orig_mod.attention."): each
        for name, each in weights.items()
    }
    folder = save_torchtitan(
        tmp_path, {f"_orig_mod.{name}": each for name, each in wrapped.items()}
    )
    assert same(load(folder, make_model()), weights)


def test_weights_in_bfloat16_are_converted(tmp_path: Path) -> None:
    weights = {name: each.bfloat16() for name, each in make_weights().items()}
    loaded = load(save_torchtitan(tmp_path, weights, "weights"), make_model())
    assert same(loaded, {name: each.float() for name, each in weights.items()})


def test_a_tied_model_takes_one_matrix_or_two_equal_ones(tmp_path: Path) -> None:
    weights = make_weights()
    output = weights.pop(OUTPUT)
    model = make_model(tie_embeddings=True)
    assert same(load(save_torchtitan(tmp_path / "one", weights), model), weights)
    twice = weights | {OUTPUT: weights[EMBEDDING].clone()}
    assert same(load(save_torchtitan(tmp_path / "two", twice), model), weights)
    other = save_torchtitan(tmp_path / "other", weights | {OUTPUT: output})
    with pytest.raises(CheckpointError, match=r"tie_embeddings = true, and .*other has an output"):
        load(other, model)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"n_layers": 1}, r"9 tensors differ.*: model\.layers\.1\.attention\S+ .* -> missing"),
        ({"n_layers": 3}, r"9 tensors differ.*: model\.layers\.2\.\S+ missing -> float32"),
        (
            {"ffn_dim": 48},
            r"6 tensors differ.*w1\.weight: float32 \[32, 16\] -> float32 \[48, 16\]",
        ),
    ],
)
def test_another_model_is_refused_by_name(
    changes: dict[str, int], reason: str, tmp_path: Path
) -> None:
    folder = save_torchtitan(tmp_path, make_weights())
    model = make_model(**changes)
    before = {name: each.clone() for name, each in model_state(model).items()}
    with pytest.raises(CheckpointError, match=reason):
        load(folder, model)
    assert same(before, model_state(model))


def edit_table(folder: Path, edit: Any) -> None:
    table = pickle.loads((folder / ".metadata").read_bytes())
    edit(table)
    (folder / ".metadata").write_bytes(pickle.dumps(table))


def point_elsewhere(table: Any) -> None:
    place = next(p for index, p in table.storage_data.items() if index.fqn == EMBEDDING)
    place.relative_path = "../secret"


def shrink_part(table: Any) -> None:
    table.state_dict_metadata[EMBEDDING].chunks[0].sizes = torch.Size((2, 16))


def grow_tensor(table: Any) -> None:
    huge = table.state_dict_metadata[EMBEDDING]
    huge.size = huge.chunks[0].sizes = torch.Size((2**40, 16))


def name_twice(table: Any) -> None:
    table.state_dict_metadata[f"model.{EMBEDDING}"] = table.state_dict_metadata[EMBEDDING]


def make_whole_numbers(table: Any) -> None:
    table.state_dict_metadata["norm.weight"].properties.dtype = torch.int32


def make_bytes(table: Any) -> None:
    table.state_dict_metadata[EMBEDDING] = table.state_dict_metadata["lr_scheduler.last_epoch"]


def make_pipe(folder: Path) -> None:
    (folder / "__0_0.distcp").unlink()
    os.mkfifo(folder / "__0_0.distcp")


class Payload:
    """Makes a folder when it is unpickled: the code of an attacker."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda d: edit_table(d, point_elsewhere), r"reads \.\./secret, which is not one of its"),
        (lambda d: edit_table(d, shrink_part), "it has 32 of the 384 elements of a tensor"),
        (lambda d: edit_table(d, grow_tensor), r"has tensors of 70368744\d+ bytes, and the files"),
        (lambda d: edit_table(d, name_twice), rf"has two tensors model\.{EMBEDDING}"),
        (lambda d: edit_table(d, make_bytes), "not a table of tensors: AttributeError: .*fields"),
        (make_pipe, r"reads __0_0\.distcp, which is not one of its files"),
        (lambda d: (d / "__0_0.distcp").unlink(), r"reads __0_0\.distcp, which is not one"),
        (lambda d: (d / "__0_0.distcp").write_bytes(b"x"), "beyond the end of __0_0.distcp"),
        (lambda d: (d / ".metadata").write_bytes(b"x"), r"\.metadata: not a table of tensors"),
        (lambda d: (d / ".metadata").write_bytes(b"Np9\n."), "holds the opcode PUT"),
    ],
)
def test_hostile_folders_are_refused(damage: Any, reason: str, tmp_path: Path) -> None:
    folder = save_torchtitan(tmp_path / "step-1000", make_weights())
    damage(folder)
    with pytest.raises(BrokenCheckpoint, match=rf"step-1000 is broken: .*{reason}"):
        load(folder, make_model())


def test_weights_that_are_not_floating_point_are_refused(tmp_path: Path) -> None:
    folder = save_torchtitan(tmp_path / "step-1000", make_weights())
    edit_table(folder, make_whole_numbers)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight: int32 \[16\] -> float32"):
        load(folder, make_model())


def test_a_gap_between_parts_that_overlap_is_not_finite(tmp_path: Path) -> None:
    folder = save_torchtitan(tmp_path, make_weights())

    def overlap(table: Any) -> None:
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


def test_no_code_of_the_folder_runs(tmp_path: Path) -> None:
    marker = tmp_path / "code was run"
    weights: dict[str, Any] = make_weights()
    # Values of other states stay pickled.
    folder = save_torchtitan(tmp_path / "a", weights | {"dataloader.x": Payload(marker)})
    assert same(load(folder, make_model()), make_weights())
    assert not marker.exists()

    # A weight that is no tensor, and code in the table, are refused.
    folder = save_torchtitan(tmp_path / "b", weights | {"norm.weight": Payload(marker)})
    with pytest.raises(BrokenCheckpoint, match="not a table of tensors: "):
        load(folder, make_model())
    edit_table(folder, lambda table: setattr(table, "planner_data", Payload(marker)))
    with pytest.raises(BrokenCheckpoint, match=r"names posix\.mkdir, which no table"):
        load(folder, make_model())
    assert not marker.exists()


def test_flipped_bits_in_the_table_end_in_a_message_or_in_the_same_tensors(tmp_path: Path) -> None:
    folder = save_torchtitan(tmp_path / "whole", make_weights())
    table, flips = (folder / ".metadata").read_bytes(), random.Random(0)
    read = 0
    for number in range(100):
        flipped = bytearray(table)
        flipped[flips.randrange(len(table))] ^= 1 << flips.randrange(8)
        copied = Path(shutil.copytree(folder, tmp_path / f"flip {number}"))
        (copied / ".metadata").write_bytes(bytes(flipped))
        try:
            load(copied, make_model())
            read += 1
        except CheckpointError as error:
            assert "\n" not in str(error)
    assert 0 < read < 100


def test_parts_of_a_weight_from_several_ranks_are_one_weight(tmp_path: Path) -> None:
    """A weight in two parts, as two ranks save it."""
    weights = make_weights()
    top, bottom = weights[EMBEDDING][:10], weights[EMBEDDING][10:]
    parts = {"top": top.clone(), "bottom": bottom.clone()}
    rest = {name: each for name, each in weights.items() if name != EMBEDDING}
    folder = save_torchtitan(tmp_path, rest | parts, "weights")

    def join(table: Any) -> None:
        first, second = (table.state_dict_metadata.pop(name) for name in parts)
        second.chunks[0].offsets = torch.Size((10, 0))
        first.chunks += second.chunks
        first.size = torch.Size((24, 16))
        table.state_dict_metadata[EMBEDDING] = first
        for name, start in (("top", 0), ("bottom", 10)):
            index = next(index for index in table.storage_data if index.fqn == name)
            place = table.storage_data.pop(index)
            table.storage_data[MetadataIndex(EMBEDDING, torch.Size((start, 0)))] = place

    edit_table(folder, join)
    assert same(load(folder, make_model()), weights)
    assert open_torchtitan(folder).tensors[f"model.{EMBEDDING}"].shape == (24, 16)


LOAD = """
import sys
from pathlib import Path
import torch.distributed as dist
from test_torchtitan_folder import load, make_model, make_weights, same

assert "torchao" not in sys.modules
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
assert same(load(Path(sys.argv[1]), make_model()), make_weights())
"""


def test_weights_that_torchtitan_gathers_in_float8_are_read_by_any_process(tmp_path: Path) -> None:
    """They are saved in a wrapper of torchao's, which the process need not have imported."""
    from torchao.float8.float8_training_tensor import LinearMMConfig
    from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor

    weights, name = make_weights(), "layers.0.attention.wq.weight"
    sharded = distribute_tensor(weights[name], init_device_mesh("cpu", (1,)), [Shard(0)])
    wrapper = WeightWithDynamicFloat8CastTensor(
        sharded.to_local(), LinearMMConfig(), torch.float8_e4m3fn
    )
    gathered = DTensor(wrapper, sharded._spec, requires_grad=False)
    folder = save_torchtitan(tmp_path, weights | {name: gathered})
    environment = os.environ | {"PYTHONPATH": ":".join(sys.path)}
    subprocess.run([sys.executable, "-c", LOAD, folder], env=environment, check=True)
