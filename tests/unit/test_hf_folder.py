"""Weights read from a folder of Hugging Face into a model, by one process. tests/distributed reads
them into shards."""

import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import tomli
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_hostile import edits
from sample_llamas import ARGS, EACH_FAMILY, FAMILIES, build_hf, config_of, logit_difference
from torch import Tensor

from torchtitan_lite.base.errors import CheckpointError
from torchtitan_lite.catalog.flavors import FLAVORS, ModelArgs
from torchtitan_lite.checkpoint.folders import find_kind
from torchtitan_lite.checkpoint.hf_folder import INDEX, HfReader, load_hf, model_settings
from torchtitan_lite.checkpoint.state import model_state
from torchtitan_lite.config import ModelConfig, resolve_model
from torchtitan_lite.models.llama3 import Transformer

TIED = FAMILIES["Llama 3.2"]
DEBUG_ARGS = replace(FLAVORS["debugmodel_gqa"], vocab_size=300, max_seq_len=48)


@pytest.fixture(autouse=True)
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def loaded(folder: Path, args: ModelArgs) -> Transformer:
    model = Transformer(args)
    load_hf(folder, model_state(model), args, group=None)
    return model


# ----- load_hf -----


@EACH_FAMILY
def test_a_loaded_model_computes_transformers_logits(tmp_path, args, notices):
    llama = build_hf(args)
    llama.save_pretrained(tmp_path, max_shard_size="50KB")
    # The run's sequence length is none of a model's dimensions.
    model = loaded(tmp_path, replace(args, max_seq_len=64))
    assert logit_difference(model, llama) < 1e-5
    assert (model.output.weight is model.tok_embeddings.weight) is args.tie_embeddings
    assert f"{tmp_path} is a Hugging Face model, which has no hashes" in notices.text


def test_weights_are_converted_to_the_type_of_the_model(tmp_path):
    llama = build_hf(ARGS).bfloat16()
    llama.save_pretrained(tmp_path)
    model = loaded(tmp_path, ARGS)
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    assert model.norm.weight.equal(llama.model.norm.weight.float())


def test_rotary_frequencies_and_a_tied_output_may_be_saved_too(tmp_path):
    """As Llama 2's files have the former, and some tied models the latter."""
    llama = build_hf(TIED)
    llama.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    weights = safetensors.torch.load(path.read_bytes())
    weights["lm_head.weight"] = torch.ones(3)  # transformers ignores it too
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    safetensors.torch.save_file(weights, path, metadata={"format": "pt"})
    assert logit_difference(loaded(tmp_path, TIED), llama) < 1e-5


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"n_kv_heads": 4}, "n_kv_heads: 2 -> 4"),
        ({"tie_embeddings": False}, "tie_embeddings: true -> false"),
        ({"rope_scaling": None}, r"rope_scaling: .*32\.0, .* -> unset"),
    ],
)
def test_another_model_is_refused_with_the_keys_to_set(tmp_path, changes, difference):
    build_hf(TIED).save_pretrained(tmp_path)
    message = rf"another model: {difference}\. Set the keys of \[model] to those .*, or name"
    with pytest.raises(CheckpointError, match=message) as caught:
        loaded(tmp_path, replace(TIED, **changes))  # type: ignore[arg-type]
    pasted = resolve_model(ModelConfig(**tomli.loads(caught.value.paste)["model"]))
    assert replace(pasted, max_seq_len=TIED.max_seq_len) == TIED


def test_a_tensor_is_read_from_the_file_that_the_index_names(tmp_path):
    llama = build_hf(ARGS)
    llama.save_pretrained(tmp_path, max_shard_size="50KB")
    places = json.loads((tmp_path / INDEX).read_text())["weight_map"]
    last, name = tmp_path / max(places.values()), min(places, key=places.__getitem__)
    stale = safetensors.torch.load(last.read_bytes())
    stale[name] = torch.zeros_like(llama.state_dict()[name])
    safetensors.torch.save_file(stale, last, metadata={"format": "pt"})
    assert logit_difference(loaded(tmp_path, ARGS), llama) < 1e-5
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": places | {name: last.name}}))
    assert logit_difference(loaded(tmp_path, ARGS), llama) > 1e-5


@pytest.mark.parametrize("files", [("config.json", "pytorch_model.bin"), ("adapter.safetensors",)])
def test_weights_of_another_form_are_refused_with_the_fix(tmp_path, files):
    for name in files:
        (tmp_path / name).write_text(json.dumps(config_of(ARGS)))
    assert find_kind(tmp_path) == "Hugging Face"
    with pytest.raises(CheckpointError, match="No such file .* save_pretrained writes one"):
        loaded(tmp_path, ARGS)


@pytest.fixture
def hf_dir(tmp_path):
    """A model of transformers' own with the dimensions of debugmodel_gqa."""
    build_hf(DEBUG_ARGS).save_pretrained(tmp_path / "hf")
    return tmp_path / "hf"


# ----- HfReader: broken models -----


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_weights(folder: Path, **changes: Tensor | None) -> None:
    path = folder / "model.safetensors"
    weights: dict[str, Any] = safetensors.torch.load(path.read_bytes()) | changes
    kept = {name: weight for name, weight in weights.items() if weight is not None}
    safetensors.torch.save_file(kept, path, metadata={"format": "pt"})


def truncate(path: Path, to: int = -1) -> None:
    os.truncate(path, to % path.stat().st_size)


def split(folder: Path, file: str) -> None:
    """Rename the model's file, and write an index that names `file`."""
    (folder / "model.safetensors").rename(folder / "part.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": file}}))


CONFIG, ONE = "config.json", "model.safetensors"
HEAD, NORM = "lm_head.weight", "model.norm.weight"
STRANGERS = {f"extra{i:02d}": torch.zeros(1) for i in range(23)}


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda d: (d / CONFIG).unlink(),
            "config.json cannot be loaded: No such file .*; name",
        ),
        (lambda d: (d / CONFIG).write_text("{"), "config.json cannot be loaded: not JSON: "),
        (lambda d: (d / CONFIG).write_text("[]"), "config.json cannot .*: not a JSON object"),
        (lambda d: edit_config(d, mlp_bias=True), "config.json cannot be loaded: mlp_bias = "),
        (lambda d: edit_config(d, num_hidden_layers=5), r"s.5.input\S+ missing -> \[256\]; "),
        (lambda d: edit_config(d, num_hidden_layers=10**9), "n_layers is 10{9}, .* 57 weights"),
        (lambda d: edit_config(d, vocab_size=301), rf"{HEAD}: \[301, 256\] -> \[300, 256\]"),
        (lambda d: edit_weights(d, **{HEAD: None}), rf"{CONFIG} .*: {HEAD}: .* -> missing"),
        (lambda d: edit_weights(d, **{NORM: torch.zeros(256).double()}), r"float16 -> float64"),
        (lambda d: edit_weights(d, **STRANGERS), r"extra07: missing -> \[1\]; and 15 more"),
        (lambda d: (d / ONE).unlink(), f"{INDEX} cannot be loaded: No such file"),
        (lambda d: truncate(d / ONE), f"{ONE} cannot be loaded: "),
        (lambda d: truncate(d / ONE, to=0), f"{ONE} cannot be loaded: "),
        (lambda d: split(d, "b.safetensors"), "b.safetensors cannot be loaded"),
        (lambda d: split(d, "../hf/part.safetensors"), "../hf/part.safetensors is not a file's"),
        (lambda d: (d / ONE).rename(d / INDEX), f"{INDEX} cannot be loaded: "),
    ],
)
def test_broken_models_are_refused(hf_dir, damage, message):
    damage(hf_dir)
    with pytest.raises(CheckpointError, match=message):
        HfReader(hf_dir)


def refusal(folder: Path) -> str:
    """Why the model in `folder` is not read."""
    with pytest.raises(CheckpointError) as caught:
        HfReader(folder)
    return str(caught.value)


SOUND = config_of(DEBUG_ARGS)
PARTS = {"metadata": {"total_size": 8}, "weight_map": {"a": "a.safetensors", "b": "b"}}


@given(st.tuples(edits(SOUND), st.just(PARTS)) | st.tuples(st.just(SOUND), edits(PARTS)))
@settings(max_examples=150)
def test_any_value_in_a_config_or_an_index_is_read_or_refused(tmp_path_factory, files):
    folder = tmp_path_factory.mktemp("hostile")
    for name, fields in zip((CONFIG, INDEX), files, strict=True):
        (folder / name).write_text(json.dumps(fields))
    assert len(refusal(folder)) < 2000  # the weights are missing


@pytest.mark.parametrize("kind", [os.mkfifo, os.mkdir], ids=["pipe", "folder"])
@pytest.mark.parametrize("name", [CONFIG, ONE, INDEX])
def test_only_regular_files_are_read(hf_dir, name, kind):
    (hf_dir / (CONFIG if name == CONFIG else ONE)).unlink()
    kind(hf_dir / name)
    assert f"{name} cannot be loaded: is not a regular file; " in refusal(hf_dir)


# ----- model_settings -----

KNOWN = {name: replace(args, vocab_size=args.vocab_size or 777) for name, args in FLAVORS.items()}


@pytest.mark.parametrize("args", [*FAMILIES.values(), *KNOWN.values()], ids=[*FAMILIES, *KNOWN])
def test_the_keys_of_a_model_give_it_its_dimensions(args):
    settings = model_settings(replace(args, max_seq_len=7))
    assert replace(resolve_model(ModelConfig(**settings)), max_seq_len=args.max_seq_len) == args


# dim, n_layers, n_heads, n_kv_heads, ffn_dim, vocab_size, rope_theta of published models.
PUBLISHED = {
    "Llama 3.1 405B": (16384, 126, 128, 8, 53248, 128256, 5e5),
    "Llama 3 8B 4194k of Gradient": (4096, 32, 32, 8, 14336, 128256, 4.52e10),
    "SmolLM 135M": (576, 30, 9, 3, 1536, 49152, 1e4),
    "DeepSeek 67B": (8192, 95, 64, 8, 22016, 102400, 1e4),
}


def test_a_config_takes_the_dimensions_of_published_models():
    keys = ("dim", "n_layers", "n_heads", "n_kv_heads", "ffn_dim", "vocab_size", "rope_theta")
    for name, values in PUBLISHED.items():
        for eps in (1e-5, 1e-6):
            args = ModelArgs(**dict(zip(keys, values, strict=True)), norm_eps=eps)
            settings = ModelConfig(**model_settings(args))
            assert replace(resolve_model(settings), max_seq_len=args.max_seq_len) == args, name


def test_a_flavor_is_enough_for_its_dimensions():
    assert model_settings(FLAVORS["8B"]) == {"flavor": "8B"}
    assert model_settings(KNOWN["150M"]) == {"flavor": "150M", "vocab_size": 777}
    others = asdict(ARGS)
    del others["max_seq_len"], others["document_bos_id"], others["rope_scaling"]
    assert model_settings(ARGS) == {"flavor": "", **others}
