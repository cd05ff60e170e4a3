"""Differences between configs, dimensions, tensors and whole checkpoints."""

import math
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_checkpoints import CONFIG, small_tensors, write_checkpoint

from torchtitan_lite.checkpoint.compare import (
    CheckpointDifference,
    ValueDifference,
    changes,
    check_model,
    check_tensors,
    compare,
    config_changes,
)
from torchtitan_lite.checkpoint.manifest import (
    TensorEntry,
    TrainingProgress,
    read_manifest,
    write_manifest,
)
from torchtitan_lite.checkpoint.reading import verify_checkpoint
from torchtitan_lite.errors import CheckpointError
from torchtitan_lite.models.flavors import FLAVORS


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
    assert found == CheckpointDifference([], [], [], [], [], 4) and found.same
    assert str(found) == "4 tensors are equal in every bit"


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
        tmp_path,
        20,
        new,
        model={"dim": 8},
        config=CONFIG.replace("0.0008", "0.001"),
        progress=TrainingProgress(step=20, samples=160, tokens=10240, data={"seed": 1}),
    )
    found = compare(a, b)
    assert found == CheckpointDifference(
        progress=["seed: 0 -> 1", "step: 10 -> 20", "samples: 80 -> 160", "tokens: 5120 -> 10240"],
        config=["[optimizer] lr: 0.0008 -> 0.001"],
        model=["dim: 4 -> 8"],
        tensors=[
            "model.gone: float32 [1] -> missing",
            "model.shape: float32 [2, 3] -> float32 [3, 2]",
        ],
        values=[
            ValueDifference("model.values", 4, 2, 4.0),
            ValueDifference("model.zero", 2, 1, 0.0),
            ValueDifference("model.nan", 2, 1, None),
        ],
        equal_tensors=1,
    )
    assert not found.same
    assert str(found).splitlines()[-5:] == [
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


def test_configs():
    old = '[job]\ndescription = ""\n[training]\nsteps = 10\nlr = 1e-3\ndatasets = [{path = "x"}]\n'
    new = '[job]\ndescription = "x"\n[training]\nsteps = 20\nlr = 0.001\n[debug]\nseed = 1\n'
    assert config_changes(old, new) == [
        '[job] description: "" -> "x"',
        "[training] steps: 10 -> 20",
        '[training] datasets: [{"path": "x"}] -> unset',
        "[debug] seed: unset -> 1",
    ]
    assert config_changes(old, old) == []


def test_dimensions():
    old, new = (
        {"dim": 4, "scaling": {"factor": 8.0}, "mask": None},
        {"dim": 8, "scaling": None, "mask": None},
    )
    assert changes(old, new) == ["dim: 4 -> 8", "scaling: { factor = 8.0 } -> unset"]


def test_tensors():
    old = {
        "a": TensorEntry("float32", (2, 3)),
        "b": TensorEntry("float32", ()),
        "c": TensorEntry("float32", (1,)),
    }
    new = {
        "a": TensorEntry("float32", (3, 2)),
        "c": TensorEntry("bfloat16", (1,)),
        "d": TensorEntry("int64", (4,)),
    }
    assert changes(old, new, absent="missing", text=str) == [
        "a: float32 [2, 3] -> float32 [3, 2]",
        "b: float32 [] -> missing",
        "c: float32 [1] -> bfloat16 [1]",
        "d: missing -> int64 [4]",
    ]


def test_models_differ_by_what_decides_the_weights_and_rope():
    saved = asdict(FLAVORS["3-8B"])
    check_model(saved, saved | {"max_seq_len": 16, "document_bos_id": 1}, path=Path("x"))
    del saved["tie_embeddings"]  # as in manifests of version 0.2
    check_model(saved, asdict(FLAVORS["3-8B"]), path=Path("x"))
    with pytest.raises(
        CheckpointError,
        match=r"x is of another model: rope_scaling: unset -> \{ factor = 8\.0, .*rope_scaling = "
        r"\{ factor = 1\.0 \} is none; the flavors 3-8B and 3-70B have none",
    ):
        check_model(saved, asdict(FLAVORS["8B"]), path=Path("x"))
    with pytest.raises(
        CheckpointError, match="tie_embeddings: true -> false; n_kv_heads: 8 -> 16. Set [^(]*$"
    ):
        check_model({"n_kv_heads": 8, "tie_embeddings": True}, {"n_kv_heads": 16}, path=Path("x"))


def test_a_difference_is_listed():
    saved = {"model.a": TensorEntry("float32", (2, 3)), "model.b": TensorEntry("float32", (2,))}
    check_tensors(saved, saved, path=Path("step-00000010"))
    wanted = {"model.a": TensorEntry("bfloat16", (2, 3)), "model.c": TensorEntry("float32", (1,))}
    with pytest.raises(
        CheckpointError,
        match=r"step-00000010 is of another model: 3 tensors differ from this run's",
    ) as e:
        check_tensors(saved, wanted, path=Path("step-00000010"))
    for difference in (
        "model.a: float32 [2, 3] -> bfloat16 [2, 3]",
        "model.b: float32 [2] -> missing",
        "model.c: missing",
    ):
        assert difference in str(e.value)


def test_moments_of_another_type_are_refused_with_the_keys_that_decide_it():
    saved = {
        "model.a": TensorEntry("float32", (2, 3)),
        "optimizer.a.exp_avg": TensorEntry("bfloat16", (2, 3)),
    }
    wanted = saved | {"optimizer.a.exp_avg": TensorEntry("float32", (2, 3))}
    with pytest.raises(
        CheckpointError,
        match="is of another optimizer: 1 tensors differ.* state_dtype to the saved run's, or "
        r"\[checkpoint\] exclude_from_loading = \[.optimizer.\]",
    ):
        check_tensors(saved, wanted, path=Path("step-00000010"))


def test_weights_of_another_type_are_refused_with_the_key_that_decides_it():
    names = ("model.a", "optimizer.a.exp_avg")
    saved, wanted = ({name: TensorEntry(dtype, (2, 3)) for name in names} for dtype in TYPES)
    with pytest.raises(
        CheckpointError,
        match=r"is of another data type: 2 tensors .* Set \[training\] dtype to",
    ):
        check_tensors(saved, wanted, path=Path("step-00000010"))


TYPES = ("float32", "bfloat16")


def test_many_differences_are_counted():
    saved = {f"model.{number}": TensorEntry("float32", (2,)) for number in range(20)}
    with pytest.raises(CheckpointError, match=r"20 tensors differ.*model.7: .*; and 12 more"):
        check_tensors(saved, {}, path=Path("x"))
