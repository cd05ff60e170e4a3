"""Differences between checkpoints, and what a damaged one is found by."""

import math
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_checkpoints import small_tensors, write_checkpoint

from torchtitan_lite.base.errors import CheckpointError
from torchtitan_lite.catalog.flavors import FLAVORS
from torchtitan_lite.checkpoint.compare import compare
from torchtitan_lite.checkpoint.manifest import (
    BrokenCheckpoint,
    TensorEntry,
    check_model,
    check_tensors,
    write_manifest,
)
from torchtitan_lite.checkpoint.reading import open_checkpoint
from torchtitan_lite.config.keys import config_changes

PATH = Path("step-00000010")
FLOAT, BFLOAT = TensorEntry("float32", (2, 3)), TensorEntry("bfloat16", (2, 3))

# ----- open_checkpoint -----


@given(
    at=st.integers(0, 20_000),
    bit=st.integers(0, 7),
    name=st.sampled_from(["__0_0.distcp", ".metadata"]),
)
@settings(max_examples=20)
def test_verify_finds_any_flipped_bit(tmp_path_factory, at, bit, name):
    path = write_checkpoint(tmp_path_factory.mktemp("flip"), 10)
    content = bytearray((path / name).read_bytes())
    content[at % len(content)] ^= 1 << bit
    (path / name).write_bytes(content)
    with pytest.raises(BrokenCheckpoint, match=rf"^{name}: its contents have changed$"):
        open_checkpoint(path, hashes=True)


def test_verify_finds_a_table_that_disagrees_with_the_manifest(tmp_path):
    path = write_checkpoint(tmp_path, 10)
    manifest = open_checkpoint(path, hashes=True).manifest
    write_manifest(path, replace(manifest, tensors={"model.w": manifest.tensors["model.w"]}))
    with pytest.raises(BrokenCheckpoint, match=r"^\.metadata: model\.b is not as in the manifest"):
        open_checkpoint(path, hashes=False)


# ----- compare -----


def test_compare_equal_checkpoints(tmp_path):
    tensors = {**small_tensors(10), "model.n": torch.tensor([math.nan, 0.0])}
    assert compare(*(write_checkpoint(tmp_path / id, 10, tensors) for id in ("a", "b"))) == {}


def test_compare_finds_every_kind_of_difference(tmp_path):
    old = {
        "model.equal": torch.ones(3),
        "model.gone": torch.ones(1),
        "model.shape": torch.ones(2, 3),
        "model.values": torch.tensor([[1.0, 2.0], [3.0, 4.0]]),
        "model.zero": torch.tensor([0.0, 1.0]),
        "model.nan": torch.tensor([1.0, math.nan], dtype=torch.bfloat16),
    }
    new = {
        **old,
        "model.shape": torch.ones(3, 2),
        "model.values": torch.tensor([[1.0, 2.5], [3.0, 0.0]]),
        "model.zero": torch.tensor([-0.0, 1.0]),
        "model.nan": torch.tensor([math.nan, math.nan], dtype=torch.bfloat16),
        "model.new": torch.tensor(1),
    }
    del new["model.gone"]
    found = compare(write_checkpoint(tmp_path, 10, old), write_checkpoint(tmp_path, 20, new))
    assert found == {
        "model.gone": "float32 [1] -> missing",
        "model.shape": "float32 [2, 3] -> float32 [3, 2]",
        "model.values": "2 of 4 elements differ, by 4 at most",
        "model.zero": "1 of 2 elements differ, by 0 at most",
        "model.nan": "1 of 2 elements differ, by nan at most",
        "model.new": "missing -> int64 []",
    }


@pytest.mark.parametrize("name", ["manifest.json", "__0_0.distcp"])
@pytest.mark.parametrize("which", [10, 20])
def test_compare_names_the_broken_one(tmp_path, name, which):
    paths = {step: write_checkpoint(tmp_path, step) for step in (10, 20)}
    (paths[which] / name).unlink()
    reason = f"step-000000{which} is broken: {name}: No such file"
    with pytest.raises(CheckpointError, match=reason):
        compare(paths[10], paths[20])


# ----- config_changes -----
def test_config_changes():
    old = '[job]\ndescription = ""\n[training]\nsteps = 10\nlr = 1e-3\ndatasets = [{path = "x"}]\n'
    new = '[job]\ndescription = "x"\n[training]\nsteps = 20\nlr = 0.001\n[debug]\nseed = 1\n'
    assert config_changes(old, new) == [
        '[job] description: "" -> "x"',
        "[training] steps: 10 -> 20",
        '[training] datasets: [{"path": "x"}] -> unset',
        "[debug] seed: unset -> 1",
    ]
    assert config_changes(old, old) == []


# ----- check_model, check_tensors -----


def test_check_model_compares_the_keys_that_determine_weights_and_rope():
    saved = asdict(FLAVORS["3-8B"])
    check_model(saved, saved | {"max_seq_len": 16, "document_bos_id": 1}, path=PATH)
    scaled = {"n_kv_heads": 8, "rope_scaling": {"factor": 8.0}}
    with pytest.raises(CheckpointError, match="n_kv_heads: 8 -> 16. Set "):
        check_model(scaled, scaled | {"n_kv_heads": 16}, path=PATH)
    with pytest.raises(CheckpointError, match="dim: 4 -> 8. Convert it, or"):
        check_model({"dim": 4}, {"dim": 8}, path=PATH, fix="Convert it")


def test_check_tensors_names_what_differs():
    saved = {"model.a": FLOAT, "model.b": FLOAT}
    check_tensors(saved, saved, path=PATH)
    message = (
        r"step-00000010 .* 3 tensors differ: model\.a: float32 \[2, 3\] -> bfloat16 \[2, 3\]; "
        r"model\.b: float32 \[2, 3\] -> missing; model\.c: missing -> .* \[training\] dtype"
    )
    with pytest.raises(CheckpointError, match=message):
        check_tensors(saved, {"model.a": BFLOAT, "model.c": FLOAT}, path=PATH)
    many = {f"model.{number}": FLOAT for number in range(20)}
    with pytest.raises(CheckpointError, match=r"20 tensors differ.*model\.7: .*; and 12 more"):
        check_tensors(many, {}, path=PATH)
