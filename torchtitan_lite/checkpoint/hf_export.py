"""Export a checkpoint's weights as a Hugging Face model."""

import functools
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import sentencepiece
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from torchtitan_lite.base.errors import CheckpointError, ConfigError, DataError
from torchtitan_lite.base.files import fsync_folder, is_remote, replace_file
from torchtitan_lite.base.jsonfile import read_json_object
from torchtitan_lite.base.logger import logger
from torchtitan_lite.base.progress import progress
from torchtitan_lite.catalog.flavors import ModelArgs
from torchtitan_lite.config import Float8Config, read_table
from torchtitan_lite.data.tokenizer import TIKTOKEN_LINE, Tokenizer, build_tokenizer
from torchtitan_lite.models.hf_float8 import SCALE, quantization_config, quantize, trained_in_float8
from torchtitan_lite.models.hf_llama import hf_config, hf_names, to_hf
from torchtitan_lite.models.init import all_finite

from .folders import naming, storage_errors, unwritable
from .hf_folder import INDEX, SINGLE, open_weights
from .manifest import CheckpointManifest, TensorEntry
from .model_card import model_card
from .reading import SafeReader
from .state import PREFIX

FRAME = {"add_bos_token": True, "add_eos_token": False}
"""Settings of an exported tokenizer: BOS begins a text, as in training; EOS would end a prompt."""


def export_hf(
    step_dir: Path,
    out_dir: Path,
    *,
    dtype: Literal["float32", "bfloat16", "float16", "float8", "keep"] = "keep",
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Write the weights of a checkpoint as a Hugging Face model into a new folder, in files of at
    most `max_shard_bytes`, unless one tensor is larger; one file is in memory at a time. "float8"
    is for the linears that trained in it, with scales beyond those bytes; the rest is bfloat16.

    Raises CheckpointError unless every byte of the checkpoint verifies; ConfigError if `out_dir`
    exists, or if nothing trained in float8; StorageError if the disk fails."""
    with new_folder(out_dir) as draft:
        with naming(step_dir, fix="; export another step."):
            reader, args = open_weights(step_dir, hashes=True)
            manifest, whole = reader.manifest, "bfloat16" if dtype == "float8" else dtype
            weights = {
                name: saved if whole == "keep" else replace(saved, dtype=whole)
                for name, saved in reader.tensors.items()
                if name.startswith(PREFIX)
            }
            # transformers casts all weights to one type: here the narrowest that loses nothing.
            types = (getattr(torch, entry.dtype) for entry in weights.values())
            common = functools.reduce(torch.promote_types, types)

            table = manifest.tables.get("float8", {}) if dtype == "float8" else {}
            float8 = read_table("float8", table).float8
            trained, others = trained_in_float8(args, float8) if dtype == "float8" else ([], [])
            for name in trained:
                weights[PREFIX + name] = replace(weights[PREFIX + name], dtype="float8_e4m3fn")
            write_weights(reader, draft, args, weights, float8, max_shard_bytes=max_shard_bytes)

        tokenizer = copy_tokenizer(manifest, draft)
        ids = {key: getattr(tokenizer, key, None) for key in ("bos_id", "eos_id")}
        config = hf_config(args, dtype=common, **ids)
        if trained:
            config["quantization_config"] = quantization_config(float8, ignore=others)
        write_json(draft / "config.json", config)
        if tokenizer:
            ends = {key: config[key] for key in ("bos_token_id", "eos_token_id")}
            write_json(draft / "generation_config.json", ends)
        kind = "float8 (compressed-tensors)" if trained else config["torch_dtype"]
        replace_file(draft / "README.md", model_card(manifest, dtype=kind))
    logger.info(f"{out_dir}: {len(weights)} tensors of step {manifest.progress.step}, {kind}")


@contextmanager
def new_folder(target: Any) -> Iterator[Path]:
    """Create a folder that is renamed to `target`, durably, at the end of the block, or copied to
    it if it is a URL, and removed if the block raises. Raises ConfigError if something is in the
    way; StorageError."""
    exists = "exists; remove it, or write to another folder."
    if is_remote(target):
        with storage_errors(target):
            if target.exists():
                raise ConfigError(f"{target} {exists}")
        with TemporaryDirectory() as made:
            with storage_errors(Path(made)):
                yield Path(made)
            # Without config.json, which is copied last, the folder is no model.
            files = sorted(Path(made).iterdir(), key=lambda file: file.name == "config.json")
            with storage_errors(target):
                for file in files:
                    target.fs.put_file(str(file), (target / file.name).path)
        return
    target = Path(os.path.realpath(target))  # a loop of links stays as it is
    draft = target.parent / f".tmp-{target.name}"
    for path in (target, draft):  # "/" is refused too, though it has no name
        if os.path.lexists(path):
            raise ConfigError(f"{path} {exists}")

    with storage_errors(target):
        draft.mkdir(parents=True)
        try:
            yield draft
            # On disk before the rename, so that a power cut leaves no incomplete `target`.
            for path in draft.iterdir():
                with path.open("rb") as file:
                    os.fsync(file.fileno())
            fsync_folder(draft)
            draft.rename(target)
        except BaseException:
            shutil.rmtree(draft)
            raise
        fsync_folder(target.parent)


def write_weights(
    reader: SafeReader,
    folder: Path,
    args: ModelArgs,
    weights: Mapping[str, TensorEntry],
    float8: Float8Config,
    *,
    max_shard_bytes: int,
) -> None:
    """Write each weight in its type in `weights`, into one file or several with an index."""
    names, room, total = hf_names(args, prefix=PREFIX), 0, 0
    shards: list[list[str]] = []
    for name in names:
        size = math.prod(weights[name].shape) * getattr(torch, weights[name].dtype).itemsize
        if size > room:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(name)
        room -= size
        total += size

    files: dict[str, str] = {}
    with progress(f"exporting step {reader.manifest.progress.step}", total) as bar:
        for number, shard in enumerate(shards, start=1):
            file = f"model-{number:05d}-of-{len(shards):05d}.safetensors" if shards[1:] else SINGLE
            tensors: dict[str, Tensor] = {}
            for name in shard:
                parts = read_weight(reader, name, args, weights[name], float8)
                tensors |= zip((names[name], f"{names[name]}{SCALE}"), parts, strict=False)
                bar.update(parts[0].nbytes)
            try:
                save_file(tensors, folder / file, metadata={"format": "pt"})
                # safetensors lets the owner alone read it.
                (folder / file).chmod(folder.stat().st_mode & 0o666)
            except SafetensorError as error:  # with such tensors only the disk can fail
                raise unwritable(folder / file, f"{error}; make room") from error
            files |= dict.fromkeys(tensors, file)
    if len(shards) > 1:
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": files})


def read_weight(
    reader: SafeReader, name: str, args: ModelArgs, entry: TensorEntry, float8: Float8Config
) -> list[Tensor]:
    """Return a weight in Hugging Face's layout and the type of `entry`, and its scales if that is
    float8. Raises CheckpointError if the type cannot hold a value."""
    weight, dtype = to_hf(name, reader.read_whole([name])[name], args), getattr(torch, entry.dtype)
    parts = quantize(weight, float8) if dtype.itemsize == 1 else [weight.to(dtype)]
    if not all_finite(parts[-1]):  # a value that is not finite makes its scale so
        rule = f"has values that {entry.dtype} cannot hold; use float32 or bfloat16"
        raise CheckpointError(f"{name} {rule}.")
    return parts


def write_json(path: Path, fields: dict[str, Any]) -> None:
    """Write a JSON file durably."""
    replace_file(path, json.dumps(fields, indent=2))


def copy_tokenizer(manifest: CheckpointManifest, folder: Path) -> Tokenizer | None:
    """Return the tokenizer of a checkpoint's run, and copy its file if transformers can read it.
    Warns if there is none, or none that can be copied."""
    missing = "no tokenizer is exported: "
    path = manifest.tables.get("model", {}).get("tokenizer_path")
    try:
        if not isinstance(path, str):
            raise ConfigError("the checkpoint's config names none")
        tokenizer = build_tokenizer(path)
    except (ConfigError, DataError) as error:
        logger.warning(f"{missing}{error}")
        return None

    content = tokenizer.path.read_bytes()
    if content.startswith(b"{"):
        beside = tokenizer.path.with_name("tokenizer_config.json")
        begun, names = begin_with_bos(content, tokenizer)
        (folder / "tokenizer.json").write_bytes(begun)
        given = read_json_object(beside) if beside.exists() else {}
        # Other classes of transformers 5.20 and earlier split text by rules of their own.
        kind = {"tokenizer_class": "PreTrainedTokenizerFast"}
        write_json(folder / beside.name, given | names | FRAME | kind)
    elif TIKTOKEN_LINE.match(content):
        logger.warning(f"{missing}transformers finds no special tokens in a tiktoken file, {path}")
    else:
        (folder / "tokenizer.model").write_bytes(content)
        name_of = sentencepiece.SentencePieceProcessor(model_proto=content).id_to_piece
        ends = {"bos_token": name_of(tokenizer.bos_id), "eos_token": name_of(tokenizer.eos_id)}
        write_json(folder / "tokenizer_config.json", ends | FRAME)
    return tokenizer


def begin_with_bos(content: bytes, tokenizer: Tokenizer) -> tuple[bytes, dict[str, str | None]]:
    """Return a tokenizer.json that gives a text the ids of training, BOS first and never cut, and
    the names of BOS and EOS in it."""
    import tokenizers  # of the [llama] extra

    model = tokenizers.Tokenizer.from_buffer(content)
    bos, eos = map(model.id_to_token, (tokenizer.bos_id, tokenizer.eos_id))
    text = "a b"
    begins = model.encode(text).ids == [tokenizer.bos_id, *tokenizer.encode(text)]
    if not begins or model.truncation or model.padding:
        model.no_truncation()
        model.no_padding()
        model.post_processor = tokenizers.processors.TemplateProcessing(
            single=[bos, "$A"],
            pair=[bos, "$A", f"{bos}:1", "$B:1"],
            special_tokens=[(bos, tokenizer.bos_id)],
        )
        content = model.to_str().encode()
    return content, {"bos_token": bos, "eos_token": eos}
