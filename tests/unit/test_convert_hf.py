"""Checkpoints as Hugging Face models and back, with transformers as the judge of what is
written."""

import base64
import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import tokenizers
import tomli_w
import torch
import torch.distributed.checkpoint as dcp
import transformers
from hypothesis import given, settings
from sample_hostile import edits
from sample_llamas import ARGS, FAMILIES, build, build_hf, logit_difference
from torch import Tensor

from torchtitan_lite import convert_hf
from torchtitan_lite.checkpoint.hf_folder import INDEX
from torchtitan_lite.checkpoint.manifest import (
    NEW_RUN,
    CheckpointManifest,
    hash_file,
    read_manifest,
    write_manifest,
)
from torchtitan_lite.checkpoint.reading import SafeReader
from torchtitan_lite.checkpoint.state import entries
from torchtitan_lite.convert_hf import export_hf, import_hf, plan_shards
from torchtitan_lite.data.tokenizer import SHIPPED_MODEL, build_tokenizer
from torchtitan_lite.errors import CheckpointError, ConfigError, StorageError
from torchtitan_lite.models.flavors import FLAVORS, ModelArgs
from torchtitan_lite.models.hf_llama import hf_config
from torchtitan_lite.models.llama3 import Transformer

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled"
)  # as the checkpoints are saved here

ROOT = Path(__file__).parents[2]
DEBUG_ARGS = replace(FLAVORS["debugmodel_gqa"], vocab_size=300, max_seq_len=48)


def save(folder: Path, state: dict[str, Tensor], args: ModelArgs, **settings: str) -> Path:
    """A checkpoint of `state` in `folder`, of a run whose [model] table had `settings`."""
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    manifest = CheckpointManifest(
        save_id="a",
        progress=replace(NEW_RUN, step=100),
        world_size=1,
        mesh={},
        versions={},
        model=asdict(args),
        config=tomli_w.dumps({"model": settings}),
        files={path.name: hash_file(path) for path in folder.iterdir()},
        tensors=entries(state),
    )
    write_manifest(folder, manifest)
    return folder


def state_of(model: Transformer) -> dict[str, Tensor]:
    state = {f"model.{name}": weight.detach() for name, weight in model.named_parameters()}
    return state | {"optimizer.norm.weight.step": torch.tensor(100.0)}


def load(folder: Path, **options: Any) -> transformers.LlamaForCausalLM:
    """The model that transformers reads, with no weight left out or made up."""
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, **options
    )
    assert not any(info.values()), info
    return model


def assert_same_tensors(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [
        name
        for name in one
        if one[name].dtype != other[name].dtype or not one[name].equal(other[name])
    ] == []


@pytest.fixture(scope="module")
def step_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(
        tmp_path_factory.mktemp("run") / "step-00000100",
        state_of(build(ARGS)),
        ARGS,
        tokenizer_path="",
    )


@pytest.fixture(scope="module")
def llama() -> transformers.LlamaForCausalLM:
    """A model of transformers' own with the dimensions of debugmodel_gqa."""
    return build_hf(DEBUG_ARGS)


@pytest.fixture
def hf_dir(tmp_path: Path, llama: transformers.LlamaForCausalLM) -> Path:
    llama.save_pretrained(tmp_path / "hf")
    return tmp_path / "hf"


@pytest.mark.parametrize("args", FAMILIES.values(), ids=FAMILIES)
def test_transformers_loads_an_export_and_gives_our_logits(tmp_path: Path, args: ModelArgs) -> None:
    model = build(args)
    folder = save(tmp_path / "step-00000100", state_of(model), args, tokenizer_path="")
    for max_shard_bytes, single in ((5_000_000_000, True), (50_000, False)):
        out = tmp_path / f"out-{single}"
        export_hf(folder, out, max_shard_bytes=max_shard_bytes)
        exported = load(out)
        assert logit_difference(model, exported) < 1e-5
        tied = exported.lm_head.weight is exported.model.embed_tokens.weight
        assert tied is args.tie_embeddings
        assert (out / "model.safetensors").exists() is single
        assert (out / "model.safetensors.index.json").exists() is not single
    assert list(tmp_path.glob(".tmp-*")) == []


@pytest.mark.parametrize("args", FAMILIES.values(), ids=FAMILIES)
def test_an_import_computes_transformers_logits_and_is_exported_bit_by_bit(
    tmp_path: Path, args: ModelArgs
) -> None:
    llama = build_hf(args)
    llama.save_pretrained(tmp_path / "hf", max_shard_size="50KB")
    import_hf(tmp_path / "hf", tmp_path / "step")
    assert read_manifest(tmp_path / "step").model == asdict(args)
    model = Transformer(args)
    state = SafeReader(tmp_path / "step").read_whole()
    model.load_state_dict(
        {name.removeprefix("model."): tensor for name, tensor in state.items()},
        strict=not args.tie_embeddings,
    )
    assert logit_difference(model, llama) < 1e-5

    export_hf(tmp_path / "step", tmp_path / "out")
    assert_same_tensors(
        dict(load(tmp_path / "out").named_parameters()), dict(llama.named_parameters())
    )


def test_shards_and_their_index(tmp_path: Path, step_dir: Path) -> None:
    export_hf(step_dir, tmp_path / "out", max_shard_bytes=50_000)
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert len(files) > 2
    found = {file: safetensors.torch.load_file(tmp_path / "out" / file) for file in files}
    assert index["weight_map"] == {
        name: file for file, weights in found.items() for name in weights
    }
    sizes = {
        file: sum(weight.nbytes for weight in weights.values()) for file, weights in found.items()
    }
    assert max(sizes.values()) <= 50_000
    assert (
        index["metadata"]["total_size"]
        == sum(sizes.values())
        == 4 * sum(map(torch.numel, build(ARGS).parameters()))
    )


@pytest.mark.parametrize(
    ("sizes", "shards"),
    [
        ([5, 5], [[0, 1]]),
        ([5, 6], [[0], [1]]),
        ([11, 1, 9], [[0], [1, 2]]),
        ([1, 11, 11, 1], [[0], [1], [2], [3]]),
    ],
)
def test_plan_of_shards(sizes: list[int], shards: list[list[int]]) -> None:
    named = {str(i): size for i, size in enumerate(sizes)}
    assert plan_shards(named, max_bytes=10) == [[str(i) for i in shard] for shard in shards]


def test_export_as_bfloat16(tmp_path: Path, step_dir: Path) -> None:
    export_hf(step_dir, tmp_path / "out", dtype="bfloat16")
    exported = load(tmp_path / "out")  # in the type that config.json names
    assert {weight.dtype for weight in exported.parameters()} == {torch.bfloat16}
    rounded = build(ARGS)
    for weight in rounded.parameters():
        weight.data = weight.data.bfloat16().float()
    assert logit_difference(rounded, load(tmp_path / "out", dtype=torch.float32)) < 1e-5


def test_an_export_in_a_type_that_cannot_hold_the_weights(tmp_path: Path) -> None:
    state = state_of(build(ARGS))
    state["model.norm.weight"][3] = 70000.0
    folder = save(tmp_path / "step", state, ARGS)
    with pytest.raises(
        CheckpointError,
        match=r"model\.norm\.weight has values that float16 cannot hold; use float32",
    ):
        export_hf(folder, tmp_path / "out", dtype="float16")
    assert list(tmp_path.iterdir()) == [folder]


def test_export_of_mixed_types_keeps_each_and_names_the_wider(tmp_path: Path) -> None:
    model = build(ARGS)
    state = {name: t if "norm" in name else t.bfloat16() for name, t in state_of(model).items()}
    export_hf(save(tmp_path / "step", state, ARGS), tmp_path / "out")
    weights = safetensors.torch.load_file(tmp_path / "out/model.safetensors")
    assert weights["model.norm.weight"].dtype == torch.float32
    assert weights["lm_head.weight"].dtype == torch.bfloat16
    assert json.loads((tmp_path / "out/config.json").read_text())["torch_dtype"] == "float32"
    export_hf(tmp_path / "step", tmp_path / "wide", dtype="float32")
    assert {
        w.dtype for w in safetensors.torch.load_file(tmp_path / "wide/model.safetensors").values()
    } == {torch.float32}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_export_then_import_is_bit_exact(tmp_path: Path, dtype: torch.dtype) -> None:
    state = {name: tensor.to(dtype) for name, tensor in state_of(build(DEBUG_ARGS)).items()}
    folder = save(tmp_path / "step", state, DEBUG_ARGS, tokenizer_path="")
    export_hf(folder, tmp_path / "hf", max_shard_bytes=4_000_000)
    import_hf(tmp_path / "hf", tmp_path / "back")
    del state["optimizer.norm.weight.step"]
    assert_same_tensors(SafeReader(tmp_path / "back").read_whole(), state)
    assert read_manifest(tmp_path / "back").model == read_manifest(folder).model


@pytest.mark.parametrize("shard_size", ["50GB", "4MB"], ids=["one file", "sharded"])
def test_import_then_export_is_bit_exact(
    tmp_path: Path, llama: transformers.LlamaForCausalLM, shard_size: str
) -> None:
    llama.save_pretrained(tmp_path / "hf", max_shard_size=shard_size)
    assert (tmp_path / "hf/model.safetensors").exists() is (shard_size == "50GB")
    import_hf(tmp_path / "hf", tmp_path / "step")
    export_hf(tmp_path / "step", tmp_path / "out")
    assert_same_tensors(
        safetensors.torch.load_file(tmp_path / "out/model.safetensors"), llama.state_dict()
    )


MEMORY = """
import re, sys
from pathlib import Path
from torchtitan_lite.convert_hf import export_hf, import_hf

def peak(convert, source, target, **options):
    convert(source, target, **options)  # ru_maxrss would be that of the parent process, if larger
    return 1024 * int(re.search(r"VmHWM:\\s*(\\d+) kB", Path("/proc/self/status").read_text())[1])

small, large = map(Path, sys.argv[1:])
export_hf(small / "step", small / "hf")
before = peak(import_hf, small / "hf", small / "back")  # with all libraries loaded
exported = peak(export_hf, large / "step", large / "hf", max_shard_bytes=48_000_000)
print(exported - before, peak(import_hf, large / "hf", large / "back") - before)
"""


def test_one_tensor_is_in_memory_at_a_time(tmp_path: Path) -> None:
    large = replace(ARGS, dim=512, n_layers=10, ffn_dim=1024)
    for name, args in (("small", ARGS), ("large", large)):
        state = {key: tensor for key, tensor in state_of(build(args)).items() if "model" in key}
        save(tmp_path / name / "step", state, args)
    paths = [str(tmp_path / name) for name in ("small", "large")]
    result = subprocess.run(
        [sys.executable, "-c", MEMORY, *paths],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    shards = [path.stat().st_size for path in (tmp_path / "large/hf").glob("*.safetensors")]
    assert len(shards) == 2 and min(shards) > 40_000_000
    growths = [int(word) for word in result.stdout.splitlines()[-1].split()]
    assert max(growths) < 0.8 * min(shards)  # the largest tensor has 2 MB


def test_an_import_is_a_checkpoint_of_weights_alone(
    tmp_path: Path, hf_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        import_hf(hf_dir, tmp_path / "step")
    manifest = read_manifest(tmp_path / "step")
    assert manifest.progress == NEW_RUN
    assert (manifest.world_size, manifest.model) == (1, asdict(DEBUG_ARGS))
    assert manifest.config == '[model]\nflavor = "debugmodel_gqa"\nvocab_size = 300\n'
    files = {f"__0_{number}.distcp" for number in range(6 * 9 + 3)}
    assert manifest.files.keys() == files | {".metadata"}
    assert manifest.tensors.keys() == {
        f"model.{name}" for name in Transformer(DEBUG_ARGS).state_dict()
    }
    assert manifest.versions.keys() == {"torchtitan_lite", "torch", "torchao", "python"}
    assert (
        'set [model] flavor = "debugmodel_gqa", vocab_size = 300 and [checkpoint] '
        f'initial_load_path = "{tmp_path / "step"}"'
    ) in caplog.text


def test_an_empty_folder_may_be_written_to(tmp_path: Path, step_dir: Path) -> None:
    (tmp_path / "out").mkdir()
    export_hf(step_dir, tmp_path / "out")
    assert (tmp_path / "out/config.json").exists()


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


def split(folder: Path, *files: str) -> None:
    """The model in a part, and an index that names `files`."""
    (folder / "model.safetensors").rename(folder / "part.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": dict(enumerate(files))}))


DOUBLE_NORM = {"model.norm.weight": torch.zeros(256, dtype=torch.float64)}
STRANGERS = {f"extra{i:02d}": torch.zeros(1) for i in range(23)}


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda d: (d / "config.json").unlink(),
            "config.json cannot be read: No such file or directory; name the",
        ),
        (
            lambda d: (d / "config.json").write_text("{"),
            "config.json cannot be imported: not JSON: Expect",
        ),
        (
            lambda d: (d / "config.json").write_text("[]"),
            "config.json cannot be imported: not a JSON object",
        ),
        (
            lambda d: edit_config(d, mlp_bias=True),
            "config.json cannot be imported: mlp_bias = true: this model has only false",
        ),
        (
            lambda d: edit_config(d, num_hidden_layers=5),
            r"config.json .*: model.layers.5.input_layernorm.weight: missing -> \[256\]; ",
        ),
        (
            lambda d: edit_config(d, num_hidden_layers=2**31 - 1),
            "config.json cannot be .*: n_layers is 2147483647, and there are 57 weights; use a L",
        ),
        (
            lambda d: edit_config(d, tie_word_embeddings=True),
            "config.json .*: lm_head.weight: tied to model.embed_tokens.weight -> another",
        ),
        (
            lambda d: edit_config(d, vocab_size=301),
            r"config.json .*lm_head.weight: \[301, 256\] -> \[300, 256\]",
        ),
        (
            lambda d: edit_weights(d, **{"lm_head.weight": None}),
            r"config.json .*: lm_head.weight: \[300, 256\] -> missing",
        ),
        (
            lambda d: edit_weights(d, extra=torch.zeros(1)),
            r"config.json .*: extra: missing -> \[1\]",
        ),
        (
            lambda d: edit_weights(d, **DOUBLE_NORM),
            "config.json .*: model.norm.weight: one of float32, bfloat16, float16 -> float64",
        ),
        (lambda d: edit_weights(d, **STRANGERS), r"extra07: missing -> \[1\]; and 15 more"),
        (
            lambda d: (d / "model.safetensors").unlink(),
            "model.safetensors.index.json cannot be read: No such file",
        ),
        (lambda d: truncate(d / "model.safetensors"), "model.safetensors cannot be imported: "),
        (
            lambda d: split(d, "part.safetensors", "b.safetensors"),
            "b.safetensors cannot be read: No such file",
        ),
        (
            lambda d: split(d, "../hf/part.safetensors"),
            "cannot be imported: ../hf/part.safetensors is not a file's name",
        ),
        (lambda d: (d / "model.safetensors").rename(d / INDEX), "index.json cannot be imported: "),
        (
            lambda d: truncate(d / "model.safetensors", to=0),
            "model.safetensors cannot be imported: ",
        ),
    ],
)
def test_what_cannot_be_imported(tmp_path: Path, hf_dir: Path, damage: Any, message: str) -> None:
    damage(hf_dir)
    with pytest.raises(CheckpointError, match=message):
        import_hf(hf_dir, tmp_path / "out")
    assert list(tmp_path.iterdir()) == [hf_dir]


def refusal(folder: Path) -> str:
    """Why the model in `folder` is not imported."""
    with pytest.raises(CheckpointError) as caught:
        import_hf(folder, folder.parent / "out")
    return str(caught.value)


@given(config=edits(hf_config(DEBUG_ARGS, dtype=torch.float32, bos_id=1, eos_id=2)))
@settings(max_examples=150, deadline=None)
def test_any_value_in_a_config_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, config: dict[str, Any]
) -> None:
    folder = tmp_path_factory.mktemp("hostile")
    (folder / "config.json").write_text(json.dumps(config))
    assert len(refusal(folder)) < 2000  # the weights are missing


INDEX_FILE = {"metadata": {"total_size": 8}, "weight_map": {"a": "a.safetensors", "b": "b"}}


@given(index=edits(INDEX_FILE))
@settings(max_examples=80, deadline=None)
def test_any_value_in_an_index_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, index: dict[str, Any]
) -> None:
    folder = tmp_path_factory.mktemp("hostile")
    config = hf_config(DEBUG_ARGS, dtype=torch.float32, bos_id=1, eos_id=2)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / INDEX).write_text(json.dumps(index))
    assert len(refusal(folder)) < 2000


@pytest.mark.parametrize("kind", [os.mkfifo, os.mkdir], ids=["pipe", "folder"])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors", INDEX])
def test_only_regular_files_are_imported(hf_dir: Path, name: str, kind: Any) -> None:
    if name == INDEX:
        (hf_dir / "model.safetensors").unlink()
    (hf_dir / name).unlink(missing_ok=True)
    kind(hf_dir / name)
    assert f"{name} cannot be imported: is not a regular file; " in refusal(hf_dir)


@pytest.mark.parametrize("number", ["9" * 5000, "9" * 400, "[" * 900 + "]" * 900, "1e999"])
@pytest.mark.parametrize("key", ["rms_norm_eps", "vocab_size", "hidden_act"])
def test_absurd_numbers_are_refused(hf_dir: Path, key: str, number: str) -> None:
    config = json.loads((hf_dir / "config.json").read_text()) | {key: "HERE"}
    (hf_dir / "config.json").write_text(json.dumps(config).replace('"HERE"', number))
    assert len(refusal(hf_dir)) < 2000


def flip_last_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def set_model(folder: Path, **dimensions: Any) -> None:
    """Have the manifest tell of another model, as one who can write into the folder could."""
    manifest = read_manifest(folder)
    write_manifest(folder, replace(manifest, model=manifest.model | dimensions))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda d: (d / "manifest.json").unlink(),
            "step is broken: manifest.json: No such file or directory; export",
        ),
        (
            lambda d: flip_last_byte(d / "__0_0.distcp"),
            "step is broken: __0_0.distcp: its contents have changed;",
        ),
        (
            lambda d: flip_last_byte(d / ".metadata"),
            "step is broken: .metadata: its contents have changed;",
        ),
        (
            lambda d: set_model(d, n_layers=10**9),
            "json: model: ValueError: n_layers is 10{9}, and there are 21 weights",
        ),
        (
            lambda d: set_model(d, n_heads=0),
            "step is broken: manifest.json: model: ZeroDivisionError",
        ),
        (lambda d: set_model(d, n_heads="8"), "step is broken: manifest.json: model: TypeError"),
        (lambda d: set_model(d, norm_eps=None), "rms_norm_eps = null: must be a positive number"),
        (
            lambda d: set_model(d, max_seq_len=-1),
            "max_position_embeddings = -1: must be a",
        ),
    ],
)
def test_a_broken_checkpoint_is_not_exported(tmp_path: Path, damage: Any, message: str) -> None:
    folder = save(tmp_path / "step", state_of(build(ARGS)), ARGS)
    damage(folder)
    with pytest.raises(CheckpointError, match=message):
        export_hf(folder, tmp_path / "out")
    assert list(tmp_path.iterdir()) == [folder]


def test_a_checkpoint_without_some_weights_is_not_exported(tmp_path: Path) -> None:
    state = state_of(build(ARGS))
    del state["model.norm.weight"]
    folder = save(tmp_path / "step", state | {"model.other": torch.zeros(1)}, ARGS)
    with pytest.raises(
        CheckpointError,
        match=r"broken: .*: model.norm.weight: .* -> missing; model.other: missing -> .*; export",
    ):
        export_hf(folder, tmp_path / "out")


@pytest.mark.parametrize("name", ["out", ".tmp-out"])
def test_what_is_there_is_not_overwritten(
    tmp_path: Path, step_dir: Path, hf_dir: Path, name: str
) -> None:
    kept = tmp_path / name / "kept"
    kept.parent.mkdir()
    kept.write_text("kept")
    for convert, source in ((export_hf, step_dir), (import_hf, hf_dir)):
        with pytest.raises(
            ConfigError, match=f"/{name} exists; remove it, or write to another folder"
        ):
            convert(source, tmp_path / "out")
        assert kept.read_text() == "kept"


def test_a_file_is_not_overwritten(tmp_path: Path, step_dir: Path) -> None:
    (tmp_path / "out").write_text("kept")
    with pytest.raises(ConfigError, match="out exists; remove it"):
        export_hf(step_dir, tmp_path / "out")


@contextmanager
def full_disk() -> Iterator[None]:
    """No file may grow past 40 kB, which a writer cannot tell from a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk(tmp_path: Path, step_dir: Path, hf_dir: Path) -> None:
    for convert, source in ((export_hf, step_dir), (import_hf, hf_dir)):
        with (
            full_disk(),
            pytest.raises(StorageError, match="out.* cannot be written: .*; make room"),
        ):
            convert(source, tmp_path / "out")
        assert list(tmp_path.iterdir()) == [hf_dir]


def test_a_folder_that_cannot_be_made(tmp_path: Path, step_dir: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        StorageError, match="file/.tmp-out cannot be written: Not a directory; make room"
    ):
        export_hf(step_dir, tmp_path / "file/out")


def test_without_safetensors(tmp_path: Path, hf_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(
        ConfigError, match=r'safetensors is not installed; pip install "torchtitan-lite\[hf\]"'
    ):
        import_hf(hf_dir, tmp_path / "out")


def exported_tokenizer(tmp_path: Path, **settings: str) -> Path:
    """The export of a checkpoint whose [model] table had `settings`."""
    folder = save(tmp_path / "step", state_of(build(ARGS)), ARGS, **settings)
    export_hf(folder, tmp_path / "out")
    return tmp_path / "out"


def end_ids(folder: Path) -> tuple[object, object]:
    """BOS and EOS, which generation_config.json must have as config.json has them, if there are
    any."""
    config = json.loads((folder / "config.json").read_text())
    ids = {key: config[key] for key in ("bos_token_id", "eos_token_id")}
    generation = folder / "generation_config.json"
    assert (
        json.loads(generation.read_text()) if generation.exists() else dict.fromkeys(ids)
    ) == ids
    return ids["bos_token_id"], ids["eos_token_id"]


def test_the_shipped_tokenizer_is_exported(tmp_path: Path) -> None:
    out = exported_tokenizer(tmp_path, tokenizer_path="")
    ours, theirs = build_tokenizer(""), transformers.AutoTokenizer.from_pretrained(out)
    assert end_ids(out) == (ours.bos_id, ours.eos_id)
    source = SHIPPED_MODEL.with_name("dataloader.py").read_text()
    text = "def f(x):\n    return x  # \t∑é\n" + source
    assert theirs.encode(text, add_special_tokens=False) == ours.encode(text)
    assert theirs(text).input_ids == [ours.bos_id, *ours.encode(text)]


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077])
def test_exported_files_follow_the_umask(tmp_path: Path, step_dir: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        export_hf(step_dir, tmp_path / "out")
    finally:
        os.umask(before)
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()}
    assert modes == {0o666 & ~umask}


def test_weights_that_are_not_finite_are_not_imported(tmp_path: Path, hf_dir: Path) -> None:
    head = safetensors.torch.load_file(hf_dir / "model.safetensors")["lm_head.weight"].clone()
    head[3, :5], head[4, 0] = torch.nan, -torch.inf
    edit_weights(hf_dir, **{"lm_head.weight": head})
    with pytest.raises(
        CheckpointError, match=r"NaN or infinite: model\.output\.weight \(6 values\)"
    ):
        import_hf(hf_dir, tmp_path / "out")


def test_a_tokenizer_json_is_exported_with_its_config(tmp_path: Path) -> None:
    vocabulary = {"a": 0, "<bos>": 1, "<eos>": 2}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="a"))
    tokenizer.save(str(tmp_path / "words.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<bos>", "eos_token": "<eos>"}')
    out = exported_tokenizer(tmp_path, tokenizer_path=str(tmp_path / "words.json"))
    assert end_ids(out) == (1, 2)
    assert (out / "tokenizer.json").read_bytes() == (tmp_path / "words.json").read_bytes()
    assert (out / "tokenizer_config.json").read_bytes() == (
        tmp_path / "tokenizer_config.json"
    ).read_bytes()


def test_of_a_tiktoken_file_only_the_ids_are_exported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lines = [base64.b64encode(bytes([byte])) + b" %d\n" % byte for byte in range(256)]
    (tmp_path / "tokenizer.model").write_bytes(b"".join(lines))
    out = exported_tokenizer(tmp_path, tokenizer_path=str(tmp_path))
    assert end_ids(out) == (256, 257)
    assert not (out / "tokenizer.model").exists()
    assert "transformers finds no special tokens in a tiktoken file" in caplog.text


def test_without_a_tokenizer_the_weights_are_exported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out = exported_tokenizer(tmp_path, tokenizer_path="nowhere")
    assert end_ids(out) == (None, None)
    assert (
        'no tokenizer is exported: [model] tokenizer_path = "nowhere" cannot be read' in caplog.text
    )
    assert load(out).config.bos_token_id is None


def test_a_tokenizer_of_another_type_is_none(
    tmp_path: Path, step_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manifest = replace(read_manifest(step_dir), config="[model]\ntokenizer_path = 3\n")
    assert convert_hf.copy_tokenizer(manifest, tmp_path) is None
    assert "no tokenizer is exported: the checkpoint's config names none" in caplog.text


def test_a_tokenizer_that_has_no_end_is_not_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in ("/dev/zero", str(tmp_path / "pipe")):
        manifest = CheckpointManifest(
            world_size=1, model={}, config=tomli_w.dumps({"model": {"tokenizer_path": path}})
        )
        assert convert_hf.copy_tokenizer(manifest, tmp_path) is None
        assert f'tokenizer_path = "{path}" is not a regular file' in caplog.text


def test_a_config_without_a_model_names_no_tokenizer(
    tmp_path: Path, step_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert (
        convert_hf.copy_tokenizer(replace(read_manifest(step_dir), config="[job]\n"), tmp_path)
        is None
    )
    assert "no tokenizer is exported: the checkpoint's config names none" in caplog.text


def test_an_imports_tokenizer_is_exported_again(
    tmp_path: Path, hf_dir: Path, step_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    import_hf(hf_dir, tmp_path / "without")
    export_hf(tmp_path / "without", tmp_path / "out")
    assert "no tokenizer is exported: the checkpoint's config names none" in caplog.text
    assert end_ids(tmp_path / "out") == (None, None)
    shutil.copyfile(SHIPPED_MODEL, hf_dir / "tokenizer.model")
    import_hf(hf_dir, tmp_path / "with")
    export_hf(tmp_path / "with", tmp_path / "again")
    assert (tmp_path / "again/tokenizer.model").read_bytes() == SHIPPED_MODEL.read_bytes()


def run_script(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / "convert_hf.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_the_command_line(tmp_path: Path, step_dir: Path) -> None:
    exported = run_script("export", step_dir, tmp_path / "out", "--dtype", "bfloat16")
    assert exported.returncode == 0, exported.stderr
    assert "out: 21 tensors of step 100, bfloat16" in exported.stderr
    (tmp_path / "out/config.json").unlink()
    refused = run_script("import", tmp_path / "out", tmp_path / "step")
    assert (refused.returncode, refused.stdout) == (4, "")
    assert "out/config.json cannot be read: No such file" in refused.stderr
    assert "Traceback" not in refused.stderr
