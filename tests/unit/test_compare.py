"""Checkpoints read through: verified, and compared with each other."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_checkpoints import CONFIG, small_tensors, write_checkpoint

from torchtitan_lite.checkpoint.compare import (
    Comparison,
    ValueChange,
    compare,
    format_comparison,
    verify_checkpoint,
)
from torchtitan_lite.checkpoint.manifest import read_manifest, write_manifest
from torchtitan_lite.errors import CheckpointError


def test_a_checkpoint_that_is_as_written(tmp_path):
    assert verify_checkpoint(write_checkpoint(tmp_path, 10), hashes=True) == []


@given(
    at=st.integers(0, 20_000),
    bit=st.integers(0, 7),
    name=st.sampled_from(["__0_0.distcp", ".metadata"]),
)
@settings(max_examples=30)
def test_any_flipped_bit_is_found(tmp_path_factory, at, bit, name):
    path = write_checkpoint(tmp_path_factory.mktemp("flip"), 10)
    content = bytearray((path / name).read_bytes())
    content[at % len(content)] ^= 1 << bit
    (path / name).write_bytes(content)
    assert verify_checkpoint(path, hashes=True) == [f"{name}: its contents have changed"]


def test_a_table_that_disagrees_with_the_manifest_is_found(tmp_path):
    path = write_checkpoint(tmp_path, 10)
    manifest = read_manifest(path)
    write_manifest(path, replace(manifest, tensors={"model.w": manifest.tensors["model.w"]}))
    assert verify_checkpoint(path, hashes=False) == [".metadata: model.b is not as in the manifest"]


def test_equal_checkpoints(tmp_path):
    tensors = {**small_tensors(10), "model.n": torch.tensor([math.nan, 0.0])}
    a, b = (
        write_checkpoint(tmp_path / name, 10, tensors, save_id=name * 32) for name in ("a", "b")
    )
    found = compare(a, b)
    assert found == Comparison([], [], [], [], [], 4) and found.same
    assert format_comparison(found) == "4 tensors are equal in every bit"


def test_every_kind_of_difference(tmp_path):
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
    }
    del new["model.gone"]
    a = write_checkpoint(tmp_path, 10, old)
    b = write_checkpoint(
        tmp_path, 20, new, model={"dim": 8}, config=CONFIG.replace("0.0008", "0.001")
    )
    found = compare(a, b)
    assert found == Comparison(
        progress=["step: 10 -> 20", "samples: 80 -> 160", "tokens: 5120 -> 10240"],
        config=["[optimizer] lr: 0.0008 -> 0.001"],
        model=["dim: 4 -> 8"],
        tensors=[
            "model.gone: float32 [1] -> missing",
            "model.shape: float32 [2, 3] -> float32 [3, 2]",
        ],
        values=[
            ValueChange("model.values", 4, 2, 4.0),
            ValueChange("model.zero", 2, 1, 0.0),
            ValueChange("model.nan", 2, 1, None),
        ],
        equal_tensors=1,
    )
    assert not found.same
    assert format_comparison(found).splitlines()[-5:] == [
        "values:",
        "  model.values: 2 of 4 elements differ, by 4 at most",
        "  model.zero: 1 of 2 elements differ, by 0 at most",
        "  model.nan: 1 of 2 elements differ, by not a number at most",
        "1 tensors are equal in every bit",
    ]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("manifest.json", "manifest.json: No such file"),
        ("__0_0.distcp", "__0_0.distcp: No such file"),
    ],
)
@pytest.mark.parametrize("which", [10, 20])
def test_the_broken_one_is_named(tmp_path, name, reason, which):
    paths = {step: write_checkpoint(tmp_path, step) for step in (10, 20)}
    (paths[which] / name).unlink()
    with pytest.raises(CheckpointError, match=f"step-000000{which} is broken: {reason}"):
        compare(paths[10], paths[20])
