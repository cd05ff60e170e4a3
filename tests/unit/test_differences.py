"""Differences between configs and models, and what a damaged checkpoint is found by."""

from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_checkpoints import write_checkpoint

from torchtitan_lite.base.errors import CheckpointError
from torchtitan_lite.catalog.flavors import FLAVORS
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
