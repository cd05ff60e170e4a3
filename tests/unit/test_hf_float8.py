"""Exports in float8, with transformers and compressed-tensors as the judges of them."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from compressed_tensors.quantization import QuantizationConfig
from sample_checkpoints import differing
from sample_exports import load, read, read_json, save, state_of
from sample_llamas import ARGS, EACH_FAMILY, FAMILIES, TOKENS, build
from torch import Tensor

from torchtitan_lite.base.errors import CheckpointError, ConfigError
from torchtitan_lite.catalog.flavors import ModelArgs
from torchtitan_lite.checkpoint.hf_export import export_hf
from torchtitan_lite.checkpoint.hf_folder import HfReader
from torchtitan_lite.checkpoint.state import model_state
from torchtitan_lite.cli import run_command
from torchtitan_lite.config import Float8Config
from torchtitan_lite.float8.convert import convert_to_float8
from torchtitan_lite.models.hf_float8 import quantize
from torchtitan_lite.models.llama3 import Transformer

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

TIED = FAMILIES["Llama 3.2"]
LINEARS = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
LINEARS += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
BLOCKS = {f"model.layers.{i}.{name}" for i in range(ARGS.n_layers) for name in LINEARS}
# Sizes that every recipe takes.
WIDE = ModelArgs(
    dim=256, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=384, vocab_size=50, max_seq_len=48
)


def float8(**keys: Any) -> Float8Config:
    return Float8Config(enable_float8_linear=True, **keys)


def sqnr_db(signal: Tensor, other: Tensor) -> float:
    return 20 * math.log10((signal.norm() / (signal - other).norm()).item())


def export(
    folder: Path, args: ModelArgs, *, dtype: Any = "float8", **keys: Any
) -> tuple[Transformer, Path]:
    """A model, and its export as of a run with these keys of [float8]."""
    model = build(args).requires_grad_(False)
    table = {"enable_float8_linear": True, **keys}
    step_dir = save(folder / "step-00000100", state_of(model), args, float8=table)
    export_hf(step_dir, folder / dtype, dtype=dtype)
    return model, folder / dtype


def loaded(folder: Path, like: Transformer) -> dict[str, Tensor]:
    """The weights that a run starts from."""
    weights = {name: torch.empty_like(each) for name, each in model_state(like).items()}
    HfReader(folder).load(weights)
    return weights


# ----- trained_in_float8 -----


@pytest.mark.parametrize(
    ("args", "keys", "kept"),
    [
        (ARGS, {}, {"lm_head"}),
        (replace(ARGS, vocab_size=48), {"convert_output": True}, {"lm_head"}),
        (TIED, {"convert_output": True}, {"lm_head"}),
        (
            ARGS,
            {"filter_fqns": ("wk", "layers.0.feed_forward")},
            {f"model.layers.{i}.self_attn.k_proj" for i in range(2)}
            | {f"model.layers.0.{name}" for name in LINEARS if "mlp" in name}
            | {"lm_head"},
        ),
    ],
)
def test_the_linears_that_trained_in_float8_are_exported_in_it_and_no_other(
    args, keys, kept, tmp_path
):
    _, out = export(tmp_path, args, **keys)
    weights = read(out / "model.safetensors")
    found = {name for name, each in weights.items() if each.dtype == torch.float8_e4m3fn}
    assert found == {f"{name}.weight" for name in {*BLOCKS, "lm_head"} - kept}
    scales = {name for name, each in weights.items() if each.dtype == torch.float32}
    assert scales == {f"{name}_scale" for name in found}
    others = weights.keys() - found - scales
    assert {weights[name].dtype for name in others} == {torch.bfloat16}

    config = read_json(out / "config.json")
    assert config["torch_dtype"] == "bfloat16"
    assert set(config["quantization_config"]["ignore"]) == kept


def test_a_run_without_float8_is_refused(tmp_path):
    step_dir = save(tmp_path / "step-00000100", state_of(build(ARGS)))
    message = r"\[float8\] enable_float8_linear = false .*; use --dtype bfloat16"
    with pytest.raises(ConfigError, match=message):
        run_command(["convert", "export", str(step_dir), str(tmp_path / "o"), "--dtype=float8"])
    assert list(tmp_path.iterdir()) == [step_dir]
    filters = ["attention", "feed_forward"]
    with pytest.raises(ConfigError, match="filter_fqns = .* keeps all 15 linears"):
        export(tmp_path / "filtered", TIED, filter_fqns=filters, convert_output=True)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"recipe_name": "tensorwide"}, 'recipe_name = "tensorwide" .* did you mean "tensorwise"'),
        ({"filter_fqns": 3}, "filter_fqns = 3 .* must be"),
    ],
)
def test_a_table_of_no_config_is_refused_and_a_key_of_other_versions_is_not(
    keys, message, tmp_path
):
    with pytest.raises(ConfigError, match=rf"\[float8\] {message}"):
        export(tmp_path / "invalid", ARGS, **keys)
    export(tmp_path / "older", ARGS, scale_gradients_in_matmul=True)


# ----- quantize -----


@pytest.mark.parametrize(
    ("recipe", "shape"),
    [("tensorwise", (1,)), ("rowwise", (48, 1)), ("mxfp8", (48, 1)), ("blockwise", (48, 1))],
)
def test_quantize_gives_the_scales_of_the_recipe(recipe, shape):
    weight = torch.randn(48, 32) * torch.logspace(-3, 3, 48)[:, None]
    weight[7] = 0
    data, scales = quantize(weight, float8(recipe_name=recipe))
    assert (data.dtype, data.shape) == (torch.float8_e4m3fn, weight.shape)
    assert (scales.dtype, scales.shape) == (torch.float32, shape)
    largest = weight.abs().amax() if shape == (1,) else weight.abs().amax(1, keepdim=True)
    expected = (largest / 448).clamp(min=2.0**-100).reshape(shape)
    assert scales.equal(expected)
    assert sqnr_db(weight, data.float() * scales) > 30
    assert data[7].float().equal(torch.zeros(32))


def test_a_weight_that_is_not_finite_is_refused(tmp_path):
    for value in (math.nan, math.inf):
        state = state_of(build(ARGS))
        state["model.layers.1.attention.wv.weight"][3, 4] = value
        table = {"enable_float8_linear": True}
        folder = save(tmp_path / f"{value}" / "step-00000100", state, float8=table)
        with pytest.raises(CheckpointError, match="1.attention.wv.weight has values .* float8_e4"):
            export_hf(folder, tmp_path / "out", dtype="float8")


# ----- quantization_config -----


@pytest.mark.parametrize(("recipe", "strategy"), [("tensorwise", "tensor"), ("rowwise", "channel")])
def test_quantization_config_is_the_librarys(recipe, strategy, tmp_path):
    _, out = export(tmp_path, ARGS, recipe_name=recipe)
    fields = read_json(out / "config.json")["quantization_config"]
    config = QuantizationConfig.model_validate(fields)
    (group,) = config.config_groups.values()
    assert (config.format, config.quantization_status) == ("float-quantized", "compressed")
    assert (group.weights.strategy, group.weights.dynamic) == (strategy, False)
    assert group.weights.pytorch_dtype() == torch.float8_e4m3fn
    assert (group.input_activations.strategy, group.input_activations.dynamic) == ("token", True)


@EACH_FAMILY
def test_transformers_loads_an_export_of_each_family(args, tmp_path):
    """The rows of wq and wk, and the scales of these rows, are in the same order."""
    keys: dict[str, Any] = {"recipe_name": "rowwise"}
    if args.n_kv_heads == 1:
        keys["filter_fqns"] = ["wk", "wv"]  # their 8 rows are no multiple of 16
    model, out = export(tmp_path, args, **keys)
    _, whole = export(tmp_path / "whole", args, dtype="bfloat16", **keys)
    logits, expected = (load(each, dtype=torch.float32)(TOKENS).logits for each in (out, whole))
    assert sqnr_db(expected, logits) > 20
    assert load(out).lm_head.weight.dtype == torch.bfloat16
    assert sqnr_db(model(TOKENS), logits) > 20


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise", "mxfp8"])
def test_an_export_computes_what_the_model_computes_in_float8(recipe, tmp_path):
    model, out = export(tmp_path, WIDE, recipe_name=recipe)
    exact = model(TOKENS)
    exported = load(out, dtype=torch.float32)(TOKENS).logits
    convert_to_float8(model.bfloat16() if recipe == "mxfp8" else model, recipe, keep=("output",))
    own = model(TOKENS).float()
    # Their errors differ: a recipe's scales of inputs are not those of the library.
    assert min(sqnr_db(exact, exported), sqnr_db(exact, own), sqnr_db(own, exported)) > 20


# ----- HfReader -----


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("args", [ARGS, TIED], ids=["untied", "tied"])
def test_an_export_is_read_as_transformers_reads_it(args, recipe, tmp_path, notices):
    model, out = export(tmp_path, args, recipe_name=recipe)
    weights = loaded(out, model)
    assert "14 float8 weights are converted to torch.float32" in notices.text
    for name, weight in model_state(model).items():
        in_float8 = "attention.w" in name or "feed_forward" in name
        assert sqnr_db(weight, weights[name]) > (30 if in_float8 else 45), name

    # transformers computes with the same weights.
    decompressed = load(out, dtype=torch.float32)
    decompressed(TOKENS)
    decompressed.config.quantization_config = None
    theirs = {
        name: each for name, each in decompressed.state_dict().items() if "_scale" not in name
    }
    plain = transformers.LlamaForCausalLM(decompressed.config)
    plain.load_state_dict(theirs)
    plain.save_pretrained(tmp_path / "plain")
    assert differing(loaded(tmp_path / "plain", model), weights) == []


def test_scales_of_blocks_are_refused_and_weights_without_scales(tmp_path):
    model, out = export(tmp_path, ARGS, recipe_name="rowwise")
    path, name = out / "model.safetensors", "model.layers.1.mlp.up_proj.weight"
    weights = read(path)
    for scales in (torch.ones(2, 2), torch.ones(()), None, torch.ones(3, 1)):
        edited: dict[str, Any] = weights | {f"{name}_scale": scales}
        kept = {name: each for name, each in edited.items() if each is not None}
        safetensors.torch.save_file(kept, path)
        missing = "up_proj.weight: one of float32.* -> float8_e4m3fn"
        with pytest.raises(CheckpointError, match=missing if scales is None else str(path)):
            loaded(out, model)


def test_an_index_names_the_scales_too(tmp_path):
    model, out = export(tmp_path, ARGS, recipe_name="rowwise")
    expected = loaded(out, model)
    export_hf(tmp_path / "step-00000100", tmp_path / "many", dtype="float8", max_shard_bytes=9000)
    index = json.loads((tmp_path / "many/model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 3
    assert index["weight_map"].keys() == read(out / "model.safetensors").keys()
    assert differing(loaded(tmp_path / "many", model), expected) == []
    load(tmp_path / "many")
