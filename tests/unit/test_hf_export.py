"""Checkpoints as Hugging Face models and back, with transformers as the judge of them."""

import base64
import json
import os
import resource
import shutil
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import safetensors.torch
import tokenizers
import tomli_w
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_checkpoints import add_manifest, differing, edit_manifest, flip_bit
from sample_checkpoints import save as save_tensors
from sample_hostile import edits
from sample_llamas import ARGS, EACH_FAMILY, build, build_hf, config_of, logit_difference
from torch import Tensor

from torchtitan_lite.base.errors import CheckpointError, ConfigError, StorageError
from torchtitan_lite.catalog.flavors import FLAVORS, ModelArgs
from torchtitan_lite.checkpoint.hf_export import copy_tokenizer, export_hf, import_hf, plan_shards
from torchtitan_lite.checkpoint.hf_folder import INDEX
from torchtitan_lite.checkpoint.manifest import NEW_RUN, CheckpointManifest, read_manifest
from torchtitan_lite.checkpoint.reading import SafeReader
from torchtitan_lite.cli import run_command
from torchtitan_lite.data.tokenizer import SHIPPED_MODEL, build_tokenizer
from torchtitan_lite.models.llama3 import Transformer

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

ROOT = Path(__file__).parents[2]
DEBUG_ARGS = replace(FLAVORS["debugmodel_gqa"], vocab_size=300, max_seq_len=48)


def save(folder: Path, state: dict[str, Tensor], args: ModelArgs = ARGS, **model: str) -> Path:
    """A checkpoint of `state` in `folder`, of a run whose [model] table is `model`."""
    save_tensors(folder, state)
    config = tomli_w.dumps({"model": model})
    add_manifest(folder, state, 100, model=asdict(args), config=config)
    return folder


def state_of(model: Transformer) -> dict[str, Tensor]:
    state = {f"model.{name}": weight.detach() for name, weight in model.named_parameters()}
    return state | {"optimizer.norm.weight.step": torch.tensor(100.0)}


def load(folder: Path, **options: Any) -> transformers.LlamaForCausalLM:
    """The model that transformers reads, with no weight left out or made up."""
    auto = transformers.AutoModelForCausalLM
    model, info = auto.from_pretrained(folder, output_loading_info=True, **options)
    assert not any(info.values()), info
    return model


def read(path: Path) -> dict[str, Tensor]:
    return safetensors.torch.load(path.read_bytes())


def read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def step_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "step-00000100"
    return save(folder, state_of(build(ARGS)), tokenizer_path="")


@pytest.fixture(scope="module")
def llama():
    """A model of transformers' own with the dimensions of debugmodel_gqa."""
    return build_hf(DEBUG_ARGS)


@pytest.fixture
def hf_dir(tmp_path, llama):
    llama.save_pretrained(tmp_path / "hf")
    return tmp_path / "hf"


# ----- export_hf -----


@EACH_FAMILY
def test_transformers_loads_an_export_and_gives_our_logits(tmp_path, args):
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
        assert (out / INDEX).exists() is not single
    assert list(tmp_path.glob(".tmp-*")) == []


def test_shards_and_their_index(tmp_path, step_dir, monkeypatch):
    (tmp_path / "out").mkdir()  # it may exist if it is empty
    reads = Mock(wraps=SafeReader(step_dir).read_whole)
    monkeypatch.setattr(SafeReader, "read_whole", reads)
    export_hf(step_dir, tmp_path / "out", max_shard_bytes=50_000)
    index, files = read_json(tmp_path / "out" / INDEX), sorted(tmp_path.glob("out/*.safetensors"))
    assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors" and len(files) > 2
    found = {file.name: read(file) for file in files}
    names = {name: file for file, weights in found.items() for name in weights}
    assert index["weight_map"] == names
    sizes = [sum(each.nbytes for each in weights.values()) for weights in found.values()]
    assert max(sizes) <= 50_000
    total = 4 * sum(map(torch.numel, build(ARGS).parameters()))
    assert index["metadata"]["total_size"] == sum(sizes) == total
    # One tensor is in memory at a time.
    assert [len(call.args[0]) for call in reads.call_args_list] == 21 * [1]


def test_plan_shards():
    for shards in ([[5, 5]], [[5], [6]], [[11], [1, 9]], [[1], [11], [11], [1]]):
        sizes = {str(number): size for number, size in enumerate(sum(shards, []))}
        found = plan_shards(sizes, max_bytes=10)
        assert [[sizes[name] for name in names] for names in found] == shards


def test_export_as_bfloat16(tmp_path, step_dir):
    before = os.umask(0o027)
    try:
        export_hf(step_dir, tmp_path / "out", dtype="bfloat16")
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()} == {0o640}
    exported = load(tmp_path / "out")  # in the type that config.json names
    assert {weight.dtype for weight in exported.parameters()} == {torch.bfloat16}
    rounded = build(ARGS)
    for weight in rounded.parameters():
        weight.data = weight.data.bfloat16().float()
    assert logit_difference(rounded, load(tmp_path / "out", dtype=torch.float32)) < 1e-5


def test_export_of_mixed_types_keeps_each_and_names_the_wider(tmp_path):
    state = state_of(build(ARGS))
    state["model.norm.weight"][3] = 70000.0
    mixed = {name: each if "norm" in name else each.bfloat16() for name, each in state.items()}
    folder = save(tmp_path / "step", mixed)
    message = r"model\.norm\.weight has values that float16 cannot hold; use float32"
    with pytest.raises(CheckpointError, match=message):
        export_hf(folder, tmp_path / "out", dtype="float16")
    assert list(tmp_path.iterdir()) == [folder]
    export_hf(folder, tmp_path / "out")
    weights = read(tmp_path / "out/model.safetensors")
    assert weights["model.norm.weight"].dtype == torch.float32
    assert weights["lm_head.weight"].dtype == torch.bfloat16
    assert read_json(tmp_path / "out/config.json")["torch_dtype"] == "float32"
    export_hf(folder, tmp_path / "wide", dtype="float32")
    wide = read(tmp_path / "wide/model.safetensors")
    assert {weight.dtype for weight in wide.values()} == {torch.float32}


# ----- import_hf -----


@EACH_FAMILY
def test_an_import_computes_transformers_logits_and_is_exported_bit_by_bit(tmp_path, args):
    llama = build_hf(args)
    llama.save_pretrained(tmp_path / "hf", max_shard_size="50KB")
    import_hf(tmp_path / "hf", tmp_path / "step")
    assert read_manifest(tmp_path / "step").model == asdict(args)
    model, state = Transformer(args), SafeReader(tmp_path / "step").read_whole()
    weights = {name.removeprefix("model."): tensor for name, tensor in state.items()}
    model.load_state_dict(weights, strict=not args.tie_embeddings)
    assert logit_difference(model, llama) < 1e-5
    export_hf(tmp_path / "step", tmp_path / "out")
    parameters = [dict(each.named_parameters()) for each in (load(tmp_path / "out"), llama)]
    assert differing(*parameters) == []


def test_an_import_is_a_checkpoint_of_weights_alone(tmp_path, hf_dir, notices):
    import_hf(hf_dir, tmp_path / "step")
    manifest = read_manifest(tmp_path / "step")
    assert manifest.progress == NEW_RUN
    assert (manifest.world_size, manifest.model) == (1, asdict(DEBUG_ARGS))
    assert manifest.config == '[model]\nflavor = "debugmodel_gqa"\nvocab_size = 300\n'
    files = {f"__0_{number}.distcp" for number in range(6 * 9 + 3)}  # one for each tensor
    assert manifest.files.keys() == files | {".metadata"}
    names = {f"model.{name}" for name in Transformer(DEBUG_ARGS).state_dict()}
    assert manifest.tensors.keys() == names
    assert manifest.versions.keys() == {"torchtitan_lite", "torch", "torchao", "python"}
    keys = 'set [model] flavor = "debugmodel_gqa", vocab_size = 300 and [checkpoint] initial_load'
    assert f'{keys}_path = "{tmp_path / "step"}"' in notices.text


MEMORY = """
import re, sys
from pathlib import Path
from torchtitan_lite.checkpoint.hf_export import export_hf, import_hf

def peak(convert, source, target, **options):
    convert(source, target, **options)  # ru_maxrss would be that of the parent process, if larger
    return 1024 * int(re.search(r"VmHWM:\\s*(\\d+) kB", Path("/proc/self/status").read_text())[1])

small, large = map(Path, sys.argv[1:])
export_hf(small / "step", small / "hf")
before = peak(import_hf, small / "hf", small / "back")  # with all libraries loaded
exported = peak(export_hf, large / "step", large / "hf", max_shard_bytes=48_000_000)
print(exported - before, peak(import_hf, large / "hf", large / "back") - before)
"""


@pytest.mark.slow
def test_export_hf_and_import_hf_have_one_tensor_in_memory_at_a_time(tmp_path):
    large = replace(ARGS, dim=512, n_layers=10, ffn_dim=1024)
    for name, args in (("small", ARGS), ("large", large)):
        state = {key: tensor for key, tensor in state_of(build(args)).items() if "model" in key}
        save(tmp_path / name / "step", state, args)
    command = [sys.executable, "-c", MEMORY, str(tmp_path / "small"), str(tmp_path / "large")]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    shards = [path.stat().st_size for path in (tmp_path / "large/hf").glob("*.safetensors")]
    assert len(shards) == 2 and min(shards) > 40_000_000
    growths = [int(word) for word in result.stdout.splitlines()[-1].split()]
    assert max(growths) < 0.8 * min(shards)  # the largest tensor has 2 MB


# ----- import_hf: broken models -----


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(read_json(path) | changes))


def edit_weights(folder: Path, **changes: Tensor | None) -> None:
    path = folder / "model.safetensors"
    weights: dict[str, Any] = read(path) | changes
    kept = {name: weight for name, weight in weights.items() if weight is not None}
    safetensors.torch.save_file(kept, path, metadata={"format": "pt"})


def truncate(path: Path, to: int = -1) -> None:
    os.truncate(path, to % path.stat().st_size)


def split(folder: Path, *files: str) -> None:
    """The model in a part, and an index that names `files`."""
    (folder / "model.safetensors").rename(folder / "part.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": dict(enumerate(files))}))


CONFIG, ONE = "config.json", "model.safetensors"
HEAD, NORM = "lm_head.weight", "model.norm.weight"
UNFIT = torch.tensor([torch.nan, -torch.inf] + 254 * [1.0])
STRANGERS = {f"extra{i:02d}": torch.zeros(1) for i in range(23)}


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: (d / CONFIG).unlink(), "config.json cannot be read: No such file .*; name the"),
        (lambda d: (d / CONFIG).write_text("{"), "config.json cannot be imported: not JSON: "),
        (lambda d: (d / CONFIG).write_text("[]"), "config.json cannot .*: not a JSON object"),
        (lambda d: edit_config(d, mlp_bias=True), "config.json cannot be imported: mlp_bias = "),
        (lambda d: edit_config(d, rms_norm_eps=2.0), rf"{CONFIG} .*: \[model\] norm_eps = 2.0 "),
        (lambda d: edit_config(d, num_hidden_layers=5), r"s.5.input\S+ missing -> \[256\]; "),
        (lambda d: edit_config(d, num_hidden_layers=10**9), "n_layers is 10{9}, .* 57 weights"),
        (lambda d: edit_config(d, tie_word_embeddings=True), f"{HEAD}: tied to .* -> another"),
        (lambda d: edit_config(d, vocab_size=301), rf"{HEAD}: \[301, 256\] -> \[300, 256\]"),
        (lambda d: edit_weights(d, **{HEAD: None}), rf"{CONFIG} .*: {HEAD}: .* -> missing"),
        (lambda d: edit_weights(d, **{NORM: torch.zeros(256).double()}), r"float16 -> float64"),
        (lambda d: edit_weights(d, **{NORM: UNFIT}), r"infinite: model\.norm\.weight \(2 values\)"),
        (lambda d: edit_weights(d, **STRANGERS), r"extra07: missing -> \[1\]; and 15 more"),
        (lambda d: (d / ONE).unlink(), f"{INDEX} cannot be read: No such file"),
        (lambda d: truncate(d / ONE), f"{ONE} cannot be imported: "),
        (lambda d: truncate(d / ONE, to=0), f"{ONE} cannot be imported: "),
        (lambda d: split(d, "part.safetensors", "b.safetensors"), "b.safetensors cannot be read"),
        (lambda d: split(d, "../hf/part.safetensors"), "../hf/part.safetensors is not a file's"),
        (lambda d: (d / ONE).rename(d / INDEX), f"{INDEX} cannot be imported: "),
    ],
)
def test_broken_models_are_not_imported(tmp_path, hf_dir, damage, message):
    damage(hf_dir)
    with pytest.raises(CheckpointError, match=message):
        import_hf(hf_dir, tmp_path / "out")
    assert list(tmp_path.iterdir()) == [hf_dir]


def refusal(folder: Path) -> str:
    """Why the model in `folder` is not imported."""
    with pytest.raises(CheckpointError) as caught:
        import_hf(folder, folder.parent / "out")
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
def test_only_regular_files_are_imported(hf_dir, name, kind):
    (hf_dir / (CONFIG if name == CONFIG else ONE)).unlink()
    kind(hf_dir / name)
    assert f"{name} cannot be imported: is not a regular file; " in refusal(hf_dir)


# ----- export_hf: broken checkpoints -----


def set_model(folder: Path, **dimensions: Any) -> None:
    """Have the manifest tell of another model, as one who can write into the folder could."""
    edit_manifest(folder, model=read_manifest(folder).model | dimensions)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: (d / "manifest.json").unlink(), "manifest.json: No such file .*; export"),
        (lambda d: flip_bit(d / "__0_0.distcp", -1), "__0_0.distcp: its contents have changed;"),
        (lambda d: flip_bit(d / ".metadata", -1), ".metadata: its contents have changed;"),
        (lambda d: set_model(d, n_layers=10**9), "ValueError: n_layers is 10{9}, .* 21 weights"),
        (lambda d: set_model(d, n_heads=0), "manifest.json: model: ZeroDivisionError"),
        (lambda d: set_model(d, n_heads="8"), "manifest.json: model: TypeError"),
        (lambda d: set_model(d, norm_eps=None), "rms_norm_eps = null: must be a positive number"),
        (lambda d: set_model(d, max_seq_len=-1), "max_position_embeddings = -1: must be a"),
    ],
)
def test_a_broken_checkpoint_is_not_exported(tmp_path, step_dir, damage, message):
    folder = Path(shutil.copytree(step_dir, tmp_path / "step"))
    damage(folder)
    with pytest.raises(CheckpointError, match=f"step is broken: .*{message}"):
        export_hf(folder, tmp_path / "out")
    assert list(tmp_path.iterdir()) == [folder]


def test_a_checkpoint_without_some_weights_is_not_exported(tmp_path):
    state = state_of(build(ARGS))
    del state["model.norm.weight"]
    folder = save(tmp_path / "step", state | {"model.other": torch.zeros(1)})
    message = "broken: .*: model.norm.weight: .* -> missing; model.other: missing -> .*; export"
    with pytest.raises(CheckpointError, match=message):
        export_hf(folder, tmp_path / "out")


# ----- new_folder -----


@pytest.mark.parametrize("name", ["out", ".tmp-out"])
def test_existing_folders_and_files_are_not_overwritten(tmp_path, step_dir, hf_dir, name):
    kept = tmp_path / name / "kept"
    kept.parent.mkdir()
    kept.write_text("kept")
    for convert, source in ((export_hf, step_dir), (import_hf, hf_dir)):
        with pytest.raises(ConfigError, match=f"/{name} exists; remove it, or write to another"):
            convert(source, tmp_path / "out")
    for there in (kept, Path("/")):
        with pytest.raises(ConfigError, match=f"{there} exists; remove it"):
            export_hf(step_dir, there)
    with pytest.raises(StorageError, match="kept/.tmp-x cannot be written: Not a directory; "):
        export_hf(step_dir, kept / "x")
    assert kept.read_text() == "kept"


def test_a_full_disk(tmp_path, step_dir, hf_dir):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    # No file may grow past 40 kB, which a writer cannot tell from a full disk.
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, limits[1]))
    try:
        for convert, source in ((export_hf, step_dir), (import_hf, hf_dir)):
            with pytest.raises(StorageError, match="out.* cannot be written: .*; (make|raise) "):
                convert(source, tmp_path / "out")
            assert list(tmp_path.iterdir()) == [hf_dir]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_import_hf_without_safetensors(tmp_path, hf_dir, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    message = r'safetensors is not installed; pip install "torchtitan-lite\[hf\]"'
    with pytest.raises(ConfigError, match=message):
        import_hf(hf_dir, tmp_path / "out")


# ----- copy_tokenizer -----


def end_ids(folder: Path) -> tuple[object, object]:
    """BOS and EOS of config.json, which generation_config.json must have too, if there are any."""
    config, generation = read_json(folder / "config.json"), folder / "generation_config.json"
    ids = {key: config[key] for key in ("bos_token_id", "eos_token_id")}
    assert (read_json(generation) if generation.exists() else dict.fromkeys(ids)) == ids
    return ids["bos_token_id"], ids["eos_token_id"]


def exported_tokenizer(tmp_path: Path, path: Path | str) -> Path:
    """The export of a checkpoint whose run had this tokenizer_path."""
    folder = save(tmp_path / "step", state_of(build(ARGS)), tokenizer_path=str(path))
    export_hf(folder, tmp_path / "out")
    return tmp_path / "out"


def test_the_shipped_tokenizer_is_exported(tmp_path, step_dir):
    export_hf(step_dir, tmp_path / "out")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    ours = build_tokenizer("")
    assert end_ids(tmp_path / "out") == (ours.bos_id, ours.eos_id)
    source = SHIPPED_MODEL.with_name("dataloader.py").read_text()
    text = "def f(x):\n    return x  # \t∑é\n" + source
    assert theirs.encode(text, add_special_tokens=False) == ours.encode(text)
    assert theirs(text).input_ids == [ours.bos_id, *ours.encode(text)]


def test_a_tokenizer_json_is_exported_with_its_config(tmp_path):
    model = tokenizers.models.WordLevel({"a": 0, "<bos>": 1, "<eos>": 2}, unk_token="a")
    words, config = tmp_path / "words.json", tmp_path / "tokenizer_config.json"
    tokenizers.Tokenizer(model).save(str(words))
    config.write_text('{"bos_token": "<bos>", "eos_token": "<eos>"}')
    out = exported_tokenizer(tmp_path, words)
    assert end_ids(out) == (1, 2)
    ours, theirs = build_tokenizer(str(words)), transformers.AutoTokenizer.from_pretrained(out)
    assert theirs("a").input_ids == [ours.bos_id, *ours.encode("a")]
    # A file that begins with BOS is copied.
    again = exported_tokenizer(tmp_path / "again", out)
    names = ("tokenizer.json", "tokenizer_config.json")
    assert [(again / name).read_bytes() for name in names] == [
        (out / name).read_bytes() for name in names
    ]


@pytest.mark.parametrize(("kind", "processor"), [
    (None, "none"),
    ("GPT2Tokenizer", "bytes"),
    ("LlamaTokenizer", "cut"),
    ("PreTrainedTokenizerFast", "eos"),
])  # fmt: skip
def test_an_exported_byte_level_tokenizer_gives_the_ids_of_training(tmp_path, kind, processor):
    """Whatever the file says on BOS, EOS and the longest text, and its config on BOS."""
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    words = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    words.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = tokenizers.decoders.ByteLevel()
    words.add_special_tokens(["<s>", "</s>"])
    if processor == "bytes":
        words.post_processor = tokenizers.processors.ByteLevel(trim_offsets=False)
    elif processor == "cut":
        words.enable_truncation(4)
    elif processor == "eos":
        words.post_processor = tokenizers.processors.TemplateProcessing(
            single="<s> $A </s>", special_tokens=[("<s>", 256), ("</s>", 257)]
        )
    words.save(str(tmp_path / "tokenizer.json"))
    if kind:
        config = {"tokenizer_class": kind, "add_bos_token": True, "bos_token": "<s>"}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))

    ours = build_tokenizer(str(tmp_path))
    theirs = transformers.AutoTokenizer.from_pretrained(exported_tokenizer(tmp_path, tmp_path))
    assert (theirs.bos_token, theirs.eos_token) == ("<s>", "</s>")
    for text in ("", "def f(x):\n    return x  # \t∑é 日本"):
        assert theirs(text).input_ids == [256, *ours.encode(text)]
        assert theirs.decode(theirs(text).input_ids, skip_special_tokens=True) == text


def test_of_a_tiktoken_file_only_the_ids_are_exported(tmp_path, notices):
    lines = [base64.b64encode(bytes([byte])) + b" %d\n" % byte for byte in range(256)]
    (tmp_path / "tokenizer.model").write_bytes(b"".join(lines))
    out = exported_tokenizer(tmp_path, tmp_path)
    assert end_ids(out) == (256, 257)
    assert not (out / "tokenizer.model").exists()
    assert "transformers finds no special tokens in a tiktoken file" in notices.text


def test_without_a_tokenizer_the_weights_are_exported(tmp_path, notices):
    out = exported_tokenizer(tmp_path, "nowhere")
    assert end_ids(out) == (None, None)
    assert 'no tokenizer is exported: [model] tokenizer_path = "nowhere" cannot' in notices.text
    assert load(out).config.bos_token_id is None


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ("job = {}", "the checkpoint's config names none"),
        ("model.tokenizer_path = 3", "the checkpoint's config names none"),
        ('model.tokenizer_path = "/dev/zero"', '"/dev/zero" is not a regular file'),
        ('model.tokenizer_path = "pipe"', '"pipe" is not a regular file'),
    ],
)
def test_a_tokenizer_that_cannot_be_read_is_none(config, reason, tmp_path, notices):
    os.chdir(tmp_path)
    os.mkfifo("pipe")
    manifest = CheckpointManifest(world_size=1, model={}, config=config)
    assert copy_tokenizer(manifest, tmp_path) is None
    assert "no tokenizer is exported: " in notices.text and reason in notices.text


def test_an_imported_tokenizer_is_exported_again(tmp_path, hf_dir):
    import_hf(hf_dir, tmp_path / "without")
    export_hf(tmp_path / "without", tmp_path / "out")
    assert end_ids(tmp_path / "out") == (None, None)
    shutil.copyfile(SHIPPED_MODEL, hf_dir / "tokenizer.model")
    import_hf(hf_dir, tmp_path / "with")
    export_hf(tmp_path / "with", tmp_path / "again")
    assert (tmp_path / "again/tokenizer.model").read_bytes() == SHIPPED_MODEL.read_bytes()


# ----- convert export, convert import -----


def test_convert(tmp_path, step_dir, notices):
    out, back = str(tmp_path / "out"), str(tmp_path / "back")
    run_command(["convert", "export", str(step_dir), out, "--dtype", "bfloat16"])
    assert "out: 21 tensors of step 100, bfloat16" in notices.text
    run_command(["convert", "import", out, back])
    found = read_manifest(tmp_path / "back").tensors.values()
    assert len(found) == 21 and {each.dtype for each in found} == {"bfloat16"}
    with pytest.raises(ConfigError, match="back exists"):
        run_command(["convert", "import", out, back])
