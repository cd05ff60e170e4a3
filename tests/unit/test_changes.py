"""What differs between two manifests, in words."""

from dataclasses import replace

from torchtitan_lite.checkpoint.changes import (
    config_changes,
    progress_changes,
    tensor_changes,
    value_changes,
)
from torchtitan_lite.checkpoint.manifest import Progress, TensorEntry


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
    assert value_changes(old, new) == ["dim: 4 -> 8", 'scaling: {"factor": 8.0} -> unset']


def test_progress():
    old = Progress(step=10, samples=80, tokens=640, data={"seed": 0, "store 1": "a"})
    assert progress_changes(old, replace(old, step=20, data={"seed": 1, "store 1": "a"})) == [
        "seed: 0 -> 1",
        "step: 10 -> 20",
    ]
    assert progress_changes(old, old) == []


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
    assert tensor_changes(old, new) == [
        "a: float32 [2, 3] -> float32 [3, 2]",
        "b: float32 [] -> missing",
        "c: float32 [1] -> bfloat16 [1]",
        "d: missing -> int64 [4]",
    ]
