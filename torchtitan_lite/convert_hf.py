"""Convert a checkpoint's weights to a Hugging Face model, and such a model to a checkpoint."""

import functools
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import sentencepiece
import tomli_w
import torch
from torch import Tensor

from torchtitan_lite.checkpoint.checkpointer import write_tensors
from torchtitan_lite.checkpoint.compare import changes, listed
from torchtitan_lite.checkpoint.folders import naming, storage_errors, unwritable
from torchtitan_lite.checkpoint.manifest import (
    BrokenCheckpoint,
    CheckpointManifest,
    hash_file,
    write_manifest,
)
from torchtitan_lite.checkpoint.reading import SafeReader, verify_checkpoint
from torchtitan_lite.checkpoint.state import count_not_finite, entries
from torchtitan_lite.data.tokenizer import (
    FILES_OF_A_FOLDER,
    TIKTOKEN_LINE,
    Tokenizer,
    build_tokenizer,
)
from torchtitan_lite.documents import parse_toml, read_json_object, regular_size
from torchtitan_lite.errors import CheckpointError, ConfigError, DataError
from torchtitan_lite.files import fsync_folder, replace_file
from torchtitan_lite.logger import logger
from torchtitan_lite.models.flavors import FLAVORS, ModelArgs, RopeScaling
from torchtitan_lite.models.hf_llama import from_hf, hf_config, hf_names, model_args, to_hf
from torchtitan_lite.models.llama3 import Transformer

MAX_SHARD_BYTES = 5_000_000_000
"""Largest file of an exported model, unless one tensor is larger."""
PREFIX = "model."
"""Prefix of the names of weights in a checkpoint."""
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
IMPORTED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def export_hf(
    step_dir: Path,
    out_dir: Path,
    *,
    dtype: Literal["float32", "bfloat16", "keep"] = "keep",
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write the weights of a checkpoint as a Hugging Face model into a new folder.

    The tensors of one file are in memory at a time. Raises CheckpointError unless every byte of the
    checkpoint verifies; ConfigError if `out_dir` is not empty; StorageError if the disk fails."""
    check_safetensors_installed()
    with new_folder(out_dir) as draft:
        with naming(step_dir, fix="; export another step."):
            reader, args = open_verified(step_dir)
            dtypes: dict[str, torch.dtype] = {
                name: getattr(torch, saved.dtype if dtype == "keep" else dtype)
                for name, saved in reader.manifest.tensors.items()
                if name.startswith(PREFIX)
            }
            write_weights(reader, draft, args, dtypes, max_shard_bytes=max_shard_bytes)

        tokenizer = copy_tokenizer(reader.manifest, draft)
        # transformers casts all weights to one type: here the narrowest that loses nothing.
        common = functools.reduce(torch.promote_types, dtypes.values())
        ids = {key: getattr(tokenizer, key, None) for key in ("bos_id", "eos_id")}
        config = hf_config(args, dtype=common, **ids)
        write_json(draft / "config.json", config)
        if tokenizer:
            ends = {key: config[key] for key in ("bos_token_id", "eos_token_id")}
            write_json(draft / "generation_config.json", ends)
    step = reader.manifest.progress.step
    logger.info(f"{out_dir}: {len(dtypes)} tensors of step {step}, {config['torch_dtype']}")


def import_hf(hf_dir: Path, out_dir: Path) -> None:
    """Write the weights of a Hugging Face model as a checkpoint into a new folder, in their types.

    One tensor is in memory at a time. Raises CheckpointError for a model that is broken or fits no
    flavor; ConfigError if `out_dir` is not empty; StorageError if the disk fails."""
    check_safetensors_installed()
    with new_folder(out_dir) as draft:
        with hf_errors(hf_dir / "config.json"):
            args = model_args(read_json_object(hf_dir / "config.json"))
        flavor = fitting_flavor(args, hf_dir)
        state = map_weights(hf_dir, args)
        # Rows are permuted one tensor at a time, when it is written, to avoid a full copy.
        write_tensors(state, draft, transform=functools.partial(from_hf, args=args))

        settings = {"flavor": flavor}
        if any((hf_dir / name).is_file() for name in FILES_OF_A_FOLDER):
            settings["tokenizer_path"] = str(hf_dir.resolve())
        manifest = CheckpointManifest(
            world_size=1,
            model=asdict(args),
            config=tomli_w.dumps({"model": settings}),
            files={path.name: hash_file(path) for path in sorted(draft.iterdir())},
            tensors=entries(state),
        )
        write_manifest(draft, manifest)
    logger.info(
        f'{out_dir}: {len(state)} tensors of [model] flavor = "{flavor}", vocabulary '
        f'{args.vocab_size}; to train from it set [checkpoint] initial_load_path = "{out_dir}"'
    )


def check_safetensors_installed() -> None:
    """Raise ConfigError unless safetensors is installed."""
    if find_spec("safetensors") is None:
        fix = 'pip install "torchtitan-lite[hf]"'
        raise ConfigError(f"the package safetensors is not installed; {fix}.")


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Create a folder that is renamed to `target`, durably, at the end of the block, and removed if
    the block raises. Raises ConfigError if `target` or the draft of a killed call is in the way;
    StorageError if the disk fails."""
    target = target.resolve()
    draft = target.with_name(f".tmp-{target.name}")
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
                # safetensors lets only the owner read; the folder's mode follows the umask.
                path.chmod(draft.stat().st_mode & 0o666)
                with path.open("rb") as file:
                    os.fsync(file.fileno())
            fsync_folder(draft)
            draft.rename(target)
        except BaseException:
            shutil.rmtree(draft)
            raise
        fsync_folder(target.parent)


def open_verified(folder: Path) -> tuple[SafeReader, ModelArgs]:
    """Return the reader and the dimensions of a checkpoint, after comparing every byte with the
    manifest, and the weights with the dimensions. Raises BrokenCheckpoint."""
    if problems := verify_checkpoint(folder, hashes=True):
        raise BrokenCheckpoint(listed(problems))
    reader = SafeReader(folder)
    model, tensors = reader.manifest.model, reader.manifest.tensors.items()
    found = {name: entry.shape for name, entry in tensors if name.startswith(PREFIX)}
    try:
        scaling = model["rope_scaling"]
        args = ModelArgs(**model | {"rope_scaling": scaling and RopeScaling(**scaling)})
        # Very many layers would take much memory, on the meta device too.
        if args.n_layers > len(found):
            raise ValueError(f"n_layers is {args.n_layers}, and there are {len(found)} weights")
        # An export that an import would refuse is refused too.
        model_args(hf_config(args, dtype=torch.float32, bos_id=None, eos_id=None))
        expected = weight_shapes(args)
    except (ValueError, TypeError, LookupError, ArithmeticError, RuntimeError) as error:
        reason = f"model: {type(error).__name__}: {' '.join(str(error).split())}"
        raise BrokenCheckpoint(f"manifest.json: {reason}") from error
    if differing := changes(expected, found, absent="missing"):
        raise BrokenCheckpoint(f"its model (expected -> saved): {listed(differing)}")
    return reader, args


def weight_shapes(args: ModelArgs) -> dict[str, tuple[int, ...]]:
    """Return the shape of each weight of a model by its name in a checkpoint."""
    with torch.device("meta"):
        weights = Transformer(args).named_parameters()
    return {PREFIX + name: tuple(weight.shape) for name, weight in weights}


def plan_shards(sizes: Mapping[str, int], *, max_bytes: int) -> list[list[str]]:
    """Split the names of `sizes`, in order, into lists of at most `max_bytes`; a larger tensor has
    a list of its own."""
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
    dtypes: Mapping[str, torch.dtype],
    *,
    max_shard_bytes: int,
) -> None:
    """Write the weights of a checkpoint, each in its type of `dtypes`, into one file, or into
    several files with an index."""
    # Imported here because only the [hf] extra installs it.
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    names = hf_names(args.n_layers, prefix=PREFIX)
    tensors = reader.manifest.tensors
    sizes = {name: math.prod(tensors[name].shape) * dtypes[name].itemsize for name in names}
    shards = plan_shards(sizes, max_bytes=max_shard_bytes)
    files: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        several = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        file = SINGLE if len(shards) == 1 else several
        weights = reader.read_whole(shard)
        converted = {
            names[name]: to_hf(name, weights.pop(name), args).to(dtypes[name]) for name in shard
        }
        try:
            save_file(converted, folder / file, metadata={"format": "pt"})
        except SafetensorError as error:
            raise unwritable(folder / file, error) from error
        files |= dict.fromkeys(converted, file)
        del converted  # before the next shard is read
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": files}
        write_json(folder / INDEX, index)


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
    except DataError as error:
        logger.warning(f"{missing}{error}")
        return None

    content = tokenizer.path.read_bytes()
    if content.startswith(b"{"):
        beside = tokenizer.path.with_name("tokenizer_config.json")
        (folder / "tokenizer.json").write_bytes(content)
        if beside.exists():
            shutil.copyfile(beside, folder / beside.name)
    elif TIKTOKEN_LINE.match(content):
        logger.warning(f"{missing}transformers finds no special tokens in a tiktoken file, {path}")
    else:
        (folder / "tokenizer.model").write_bytes(content)
        model = sentencepiece.SentencePieceProcessor(model_proto=content)
        ends = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id}
        settings: dict[str, Any] = {key: model.id_to_piece(id_) for key, id_ in ends.items()}
        # As in training, a text begins with BOS; EOS would end a prompt.
        settings |= {"add_bos_token": True, "add_eos_token": False}
        write_json(folder / "tokenizer_config.json", settings)
    return tokenizer


def fitting_flavor(args: ModelArgs, folder: Path) -> str:
    """Return the flavor with the dimensions `args`. Raises CheckpointError, with the differences
    from the nearest flavor, if there is none."""
    differing: dict[str, list[str]] = {}
    for flavor, dimensions in FLAVORS.items():
        # The run sets the sequence length. The tokenizer sets a vocabulary that the flavor omits.
        vocab_size = dimensions.vocab_size or args.vocab_size
        known = replace(dimensions, max_seq_len=args.max_seq_len, vocab_size=vocab_size)
        differing[flavor] = changes(asdict(known), asdict(args))
    nearest = min(differing, key=lambda flavor: len(differing[flavor]))
    if differing[nearest]:
        raise CheckpointError(
            f"{folder} fits no [model] flavor; the nearest, {nearest}, differs (flavor -> model): "
            f"{'; '.join(differing[nearest])}."
        )
    return nearest


def map_weights(folder: Path, args: ModelArgs) -> dict[str, Tensor]:
    """Return the weights of a Hugging Face model, memory-mapped, by their names in a checkpoint.
    Raises CheckpointError for missing or damaged files, and for weights that are not finite or not
    what config.json describes."""
    # Imported here because only the [hf] extra installs it.
    from safetensors.torch import load_file

    files = [SINGLE]
    if not (folder / SINGLE).exists():
        with hf_errors(folder / INDEX):
            files = sorted(set(read_json_object(folder / INDEX)["weight_map"].values()))
            if paths := [file for file in files if Path(file).name != file]:
                raise ValueError(f"{paths[0]} is not a file's name")
    weights: dict[str, Tensor] = {}
    for file in files:
        with hf_errors(folder / file):
            regular_size(folder / file)  # load_file would wait for a pipe
            weights |= load_file(folder / file)

    # Compare them with config.json.
    names = hf_names(args.n_layers, prefix=PREFIX)
    expected = {names[name]: shape for name, shape in weight_shapes(args).items()}
    found = {name: tuple(weight.shape) for name, weight in weights.items()}
    problems = changes(expected, found, absent="missing") + [
        f"{name}: one of {', '.join(map(str, IMPORTED_DTYPES))} -> {weight.dtype}"
        for name, weight in weights.items()
        if weight.dtype not in IMPORTED_DTYPES
    ]
    if problems:
        raise CheckpointError(
            f"{folder} differs from its config.json (expected -> found): {listed(problems)}."
        )
    if counts := count_not_finite(weights):
        bad = listed([f"{name} ({count} values)" for name, count in counts.items()])
        raise CheckpointError(f"{folder} has weights that are NaN or infinite: {bad}.")
    return {ours: weights[theirs] for ours, theirs in names.items()}


@contextmanager
def hf_errors(path: Path) -> Iterator[None]:
    """Turn an error in reading a file of a Hugging Face model into a CheckpointError."""
    try:
        yield
    except OSError as error:
        problem = f"cannot be read: {error.strerror or error}; name the folder of a complete"
        raise CheckpointError(f"{path} {problem} Hugging Face model.") from error
    except Exception as error:  # a malformed file can raise any
        reason = " ".join(str(error).split())[:300]
        problem = f"cannot be imported: {reason}; if it is damaged, download it again."
        raise CheckpointError(f"{path} {problem}") from error
