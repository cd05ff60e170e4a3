"""Convert a checkpoint's weights to a Hugging Face model, and such a model to a checkpoint."""

import functools
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

import sentencepiece
import tomli_w
import torch

from torchtitan_lite.base.errors import CheckpointError, ConfigError, DataError
from torchtitan_lite.base.files import fsync_folder, replace_file
from torchtitan_lite.base.jsonfile import parse_toml, read_json_object
from torchtitan_lite.base.logger import logger
from torchtitan_lite.catalog.flavors import ModelArgs
from torchtitan_lite.config import show_settings
from torchtitan_lite.data.tokenizer import (
    FILES_OF_A_FOLDER,
    TIKTOKEN_LINE,
    Tokenizer,
    build_tokenizer,
)
from torchtitan_lite.models.hf_llama import hf_config, hf_names, to_hf
from torchtitan_lite.models.init import all_finite

from .checkpointer import write_tensors
from .folders import naming, storage_errors
from .hf_folder import (
    DTYPES,
    INDEX,
    PREFIX,
    SINGLE,
    HfReader,
    hf_errors,
    model_settings,
    open_weights,
)
from .manifest import CheckpointManifest, TensorEntry, hash_file, write_manifest
from .matching import listed
from .reading import SafeReader
from .state import count_not_finite

FRAME = {"add_bos_token": True, "add_eos_token": False}
"""Settings of an exported tokenizer. As in training, a text begins with BOS; EOS would end a
prompt."""
MAX_SHARD_BYTES = 5_000_000_000
"""Largest file of an exported model, unless one tensor is larger."""


def export_hf(
    step_dir: Path,
    out_dir: Path,
    *,
    dtype: Literal["float32", "bfloat16", "float16", "keep"] = "keep",
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write the weights of a checkpoint as a Hugging Face model into a new folder.

    One tensor is in memory at a time. Raises CheckpointError unless every byte of the checkpoint
    verifies; ConfigError if `out_dir` is not empty; StorageError if the disk fails."""
    with new_folder(out_dir) as draft:
        with naming(step_dir, fix="; export another step."):
            reader, args = open_weights(step_dir, hashes=True)
            weights = {
                name: saved if dtype == "keep" else replace(saved, dtype=dtype)
                for name, saved in reader.manifest.tensors.items()
                if name.startswith(PREFIX)
            }
            write_weights(reader, draft, args, weights, max_shard_bytes=max_shard_bytes)

        tokenizer = copy_tokenizer(reader.manifest, draft)
        # transformers casts all weights to one type: here the narrowest that loses nothing.
        types = (getattr(torch, entry.dtype) for entry in weights.values())
        common = functools.reduce(torch.promote_types, types)
        ids = {key: getattr(tokenizer, key, None) for key in ("bos_id", "eos_id")}
        config = hf_config(args, dtype=common, **ids)
        write_json(draft / "config.json", config)
        if tokenizer:
            ends = {key: config[key] for key in ("bos_token_id", "eos_token_id")}
            write_json(draft / "generation_config.json", ends)
    step = reader.manifest.progress.step
    logger.info(f"{out_dir}: {len(weights)} tensors of step {step}, {config['torch_dtype']}")


def import_hf(hf_dir: Path, out_dir: Path) -> None:
    """Write the weights of a Hugging Face model as a checkpoint into a new folder, in their types.

    One tensor is in memory at a time. Raises CheckpointError for a model that is broken or is not a
    Llama; ConfigError if `out_dir` is not empty; StorageError if the disk fails."""
    with new_folder(out_dir) as draft:
        reader = HfReader(hf_dir)
        with hf_errors(hf_dir / "config.json"):
            settings = model_settings(reader.args)
        counts = {
            name: count
            for name in reader.entries
            for count in count_not_finite({name: reader.read(name)}).values()
        }
        if counts:
            bad = listed([f"{name} ({count} values)" for name, count in counts.items()])
            raise CheckpointError(f"{hf_dir} has weights that are NaN or infinite: {bad}.")

        state = {
            name: torch.empty(entry.shape, dtype=getattr(torch, entry.dtype), device="meta")
            for name, entry in reader.entries.items()
        }
        write_tensors(state, draft, read=reader.read)

        if any((hf_dir / name).is_file() for name in FILES_OF_A_FOLDER):
            settings["tokenizer_path"] = str(hf_dir.resolve())
        manifest = CheckpointManifest(
            world_size=1,
            model=asdict(reader.args),
            config=tomli_w.dumps({"model": settings}),
            files={path.name: hash_file(path) for path in sorted(draft.iterdir())},
            tensors=reader.entries,
        )
        write_manifest(draft, manifest)
    logger.info(
        f"{out_dir}: {len(state)} tensors; to train from it set [model] {show_settings(settings)} "
        f'and [checkpoint] initial_load_path = "{out_dir}"'
    )


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Create a folder that is renamed to `target`, durably, at the end of the block, and removed if
    the block raises. Raises ConfigError if `target` or the draft of a killed call is in the way;
    StorageError if the disk fails."""
    target = target.resolve()
    draft = target.parent / f".tmp-{target.name}"  # the root of all folders has no name
    with storage_errors(target):
        is_empty = target.is_dir() and not any(target.iterdir())
        for path in (draft, target):
            if path.exists() and not (path == target and is_empty):
                raise ConfigError(f"{path} exists; remove it, or write to another folder.")

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


def plan_shards(sizes: Mapping[str, int], *, max_bytes: int) -> list[list[str]]:
    """Split tensors of these `sizes` in bytes, in order, into files of at most `max_bytes`, and
    return the names in each; a larger tensor has a file of its own."""
    shards: list[list[str]] = []
    room = 0
    for name, size in sizes.items():
        if size > room:
            shards.append([])
            room = max_bytes
        shards[-1].append(name)
        room -= size
    return shards


def write_weights(
    reader: SafeReader,
    folder: Path,
    args: ModelArgs,
    weights: Mapping[str, TensorEntry],
    *,
    max_shard_bytes: int,
) -> None:
    """Write the weights of a checkpoint, each in its type of `weights`, into one file, or into
    several files with an index."""
    names = hf_names(args, prefix=PREFIX)
    sizes = {name: size_of(weights[name]) for name in names}
    shards = plan_shards(sizes, max_bytes=max_shard_bytes)
    files: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        several = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        file = SINGLE if len(shards) == 1 else several
        write_safetensors(folder / file, {name: weights[name] for name in shard}, reader, args)
        files |= {names[name]: file for name in shard}
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": files}
        write_json(folder / INDEX, index)


def write_safetensors(
    path: Path, weights: Mapping[str, TensorEntry], reader: SafeReader, args: ModelArgs
) -> None:
    """Write one file of an exported model: the length of its header, the header, the weights.

    The format is that of https://huggingface.co/docs/safetensors, whose own function needs all
    weights of a file in memory."""
    names, end = hf_names(args, prefix=PREFIX), 0
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    # Wider types first, so that each weight is aligned to its type.
    order = sorted(weights, key=lambda name: -getattr(torch, weights[name].dtype).itemsize)
    for name in order:
        entry, start, end = weights[name], end, end + size_of(weights[name])
        place = {"dtype": DTYPES[entry.dtype], "shape": entry.shape, "data_offsets": (start, end)}
        header[names[name]] = place
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)

    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            weight = to_hf(name, reader.read_whole([name])[name], args)
            weight = weight.to(getattr(torch, weights[name].dtype))
            if not all_finite(weight):
                rule = f"has values that {weights[name].dtype} cannot hold; use float32 or bfloat16"
                raise CheckpointError(f"{name} {rule}.")
            file.write(weight.flatten().view(torch.uint8).numpy().data)


def size_of(entry: TensorEntry) -> int:
    """Return the size of a tensor in bytes."""
    return math.prod(entry.shape) * getattr(torch, entry.dtype).itemsize


def write_json(path: Path, fields: dict[str, Any]) -> None:
    """Write a JSON file durably."""
    replace_file(path, json.dumps(fields, indent=2))


def copy_tokenizer(manifest: CheckpointManifest, folder: Path) -> Tokenizer | None:
    """Return the tokenizer of a checkpoint's run, and copy its file if transformers can read it.
    Warns if there is none, or none that can be copied."""
    missing = "no tokenizer is exported: "
    path = parse_toml(manifest.config.encode()).get("model", {}).get("tokenizer_path")
    if not isinstance(path, str):
        logger.warning(f"{missing}the checkpoint's config names none")
        return None
    try:
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
        model = sentencepiece.SentencePieceProcessor(model_proto=content)
        ends = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id}
        settings: dict[str, Any] = {key: model.id_to_piece(id_) for key, id_ in ends.items()}
        write_json(folder / "tokenizer_config.json", settings | FRAME)
    return tokenizer


def begin_with_bos(content: bytes, tokenizer: Tokenizer) -> tuple[bytes, dict[str, str | None]]:
    """Return a tokenizer.json that gives a text the ids of training, BOS first and never cut, and
    the names of BOS and EOS in it. For transformers, this file alone decides how a text begins."""
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
