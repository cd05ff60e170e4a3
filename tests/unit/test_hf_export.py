"""Checkpoints as Hugging Face models, with transformers as the judge of them."""

import json
import os
import resource
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from sample_checkpoints import differing, edit_manifest, flip_bit
from sample_exports import load, read, read_json, save, state_of
from sample_llamas import ARGS, EACH_FAMILY, build, logit_difference

from torchtitan_lite.base.errors import CheckpointError, ConfigError, StorageError
from torchtitan_lite.catalog.flavors import FLAVORS
from torchtitan_lite.checkpoint.hf_export import copy_tokenizer, export_hf
from torchtitan_lite.checkpoint.hf_folder import INDEX, HfReader
from torchtitan_lite.checkpoint.manifest import CheckpointManifest, read_manifest
from torchtitan_lite.checkpoint.state import model_state
from torchtitan_lite.cli import run_command
from torchtitan_lite.data.tokenizer import SHIPPED_MODEL, build_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

ROOT = Path(__file__).parents[2]
DEBUG_ARGS = replace(FLAVORS["debugmodel_gqa"], vocab_size=300, max_seq_len=48)


@pytest.fixture(scope="module")
def step_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "step-00000100"
    return save(folder, state_of(build(ARGS)), tokenizer_path="")


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
        weights = model_state(model)
        again = {name: torch.empty_like(weight) for name, weight in weights.items()}
        HfReader(out).load(again)
        assert differing(again, weights) == []
    assert list(tmp_path.glob(".tmp-*")) == []


def test_shards_and_their_index(tmp_path, step_dir):
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

    # A weight that is larger has a file of its own.
    export_hf(step_dir, tmp_path / "small", max_shard_bytes=1)
    assert len(list(tmp_path.glob("small/*.safetensors"))) == len(names)


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


MEMORY = """
import re, sys
from pathlib import Path
from torchtitan_lite.checkpoint.hf_export import export_hf

def peak(name, **options):
    export_hf(Path(name) / "step", Path(name) / "hf", **options)
    # ru_maxrss would be that of the parent process, if larger.
    return 1024 * int(re.search(r"VmHWM:\\s*(\\d+) kB", Path("/proc/self/status").read_text())[1])

before = peak(sys.argv[1])  # with all libraries loaded
print(peak(sys.argv[2], max_shard_bytes=12_000_000) - before)
"""


@pytest.mark.slow
def test_export_hf_has_one_file_in_memory_at_a_time(tmp_path):
    large = replace(ARGS, dim=512, n_layers=10, ffn_dim=1024)
    for name, args in (("small", ARGS), ("large", large)):
        state = {key: tensor for key, tensor in state_of(build(args)).items() if "model" in key}
        save(tmp_path / name / "step", state, args)
    command = [sys.executable, "-c", MEMORY, str(tmp_path / "small"), str(tmp_path / "large")]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    total = sum(path.stat().st_size for path in (tmp_path / "large/hf").glob("*.safetensors"))
    assert total > 80_000_000
    assert int(result.stdout.splitlines()[-1]) < 0.8 * total


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
def test_existing_folders_and_files_are_not_overwritten(tmp_path, step_dir, name):
    kept = tmp_path / name / "kept"
    kept.parent.mkdir()
    kept.write_text("kept")
    with pytest.raises(ConfigError, match=f"/{name} exists; remove it, or write to another"):
        export_hf(step_dir, tmp_path / "out")
    for there in (kept, Path("/")):
        with pytest.raises(ConfigError, match=f"{there} exists; remove it"):
            export_hf(step_dir, there)
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(ConfigError, match="/loop exists; remove it"):
        export_hf(step_dir, tmp_path / "loop")
    with pytest.raises(StorageError, match="kept/.tmp-x cannot be written: Not a directory; "):
        export_hf(step_dir, kept / "x")
    assert kept.read_text() == "kept"


def test_a_full_disk(tmp_path, step_dir):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    # No file may grow past 40 kB, which a writer cannot tell from a full disk.
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, limits[1]))
    try:
        with pytest.raises(StorageError, match="out.* cannot be written: .*; make "):
            export_hf(step_dir, tmp_path / "out")
        assert list(tmp_path.iterdir()) == []
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


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
        ('model.tokenizer_path = "pipe"', '"pipe" is not a regular file'),
    ],
)
def test_a_tokenizer_that_cannot_be_read_is_none(config, reason, tmp_path, notices):
    os.chdir(tmp_path)
    os.mkfifo("pipe")
    manifest = CheckpointManifest(world_size=1, model={}, config=config)
    assert copy_tokenizer(manifest, tmp_path) is None
    assert "no tokenizer is exported: " in notices.text and reason in notices.text


# ----- convert export -----
def test_convert(tmp_path, step_dir, notices):
    out = str(tmp_path / "out")
    run_command(["convert", "export", str(step_dir.parent), out, "--dtype", "bfloat16"])
    assert "out: 21 tensors of step 100, bfloat16" in notices.text
    with pytest.raises(ConfigError, match="out exists"):
        run_command(["convert", "export", str(step_dir), out])
