"""A checkpoint's weights as a Hugging Face model, and such a model as a checkpoint to start from. A
hub."""

import functools
import json
import math
import os
import shutil
import uuid
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import tomli
import tomli_w
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem

from torchtitan_lite.checkpoint.manifest import (
    NEW_RUN,
    BrokenCheckpoint,
    Manifest,
    broken_files,
    hash_file,
    installed_versions,
    write_manifest,
)
from torchtitan_lite.checkpoint.reading import SafeReader, load_failure, tensor_entries
from torchtitan_lite.data.tokenizer import FILES_OF_A_FOLDER, Tokenizer, build_tokenizer
from torchtitan_lite.data.vocabularies import TIKTOKEN_LINE
from torchtitan_lite.errors import CheckpointError, ConfigError, DataError, StorageError
from torchtitan_lite.files import fsync_folder
from torchtitan_lite.logger import logger
from torchtitan_lite.models.flavors import FLAVORS, ModelArgs, RopeScaling
from torchtitan_lite.models.hf_llama import from_hf, hf_config, hf_names, model_args, to_hf
from torchtitan_lite.models.llama3 import Transformer

MAX_SHARD_BYTES = 5_000_000_000
"""Of a file of an exported model, unless one tensor is larger."""
PREFIX = "model."
"""Of the names that weights have in a checkpoint."""
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
IMPORTED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MOST_LISTED = 20
"""Tensors that a message names."""

Shapes = Mapping[str, tuple[int, ...]]


def export_hf(
    step_dir: Path,
    out_dir: Path,
    *,
    dtype: Literal["float32", "bfloat16", "keep"] = "keep",
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write the weights of the checkpoint `step_dir` as a Hugging Face model, which `out_dir` is
    once it is complete.

    Memory holds one file's tensors at a time. Raises CheckpointError for a checkpoint that does not
    verify, every byte read; ConfigError for an `out_dir` with something in it; StorageError if the
    disk fails."""
    check_safetensors_installed()
    with new_folder(out_dir) as draft:
        try:
            reader = open_verified(step_dir)
            args = saved_args(reader.manifest)
            dtypes: dict[str, torch.dtype] = {
                name: getattr(
                    torch,
                    reader.manifest.tensors[PREFIX + name].dtype if dtype == "keep" else dtype,
                )
                for name in hf_names(args.n_layers)
            }
            write_weights(reader, draft, args, dtypes, max_shard_bytes=max_shard_bytes)
        except BrokenCheckpoint as broken:
            raise CheckpointError(
                f"{step_dir} is broken: {broken}; export another step."
            ) from broken
        # One type for all, to which transformers casts: the narrowest that loses nothing.
        common = functools.reduce(torch.promote_types, dtypes.values())
        tokenizer = copy_tokenizer(reader.manifest, draft)
        bos_id, eos_id = (tokenizer.bos_id, tokenizer.eos_id) if tokenizer else (None, None)
        config = hf_config(args, dtype=common, bos_id=bos_id, eos_id=eos_id)
        _write_json(draft / "config.json", config)
        if tokenizer:
            _write_json(
                draft / "generation_config.json", {"bos_token_id": bos_id, "eos_token_id": eos_id}
            )
    logger.info(
        f"{out_dir}: {len(dtypes)} tensors of step {reader.manifest.progress.step}, {config['torch_dtype']}"
    )


def import_hf(hf_dir: Path, out_dir: Path) -> None:
    """Write the Hugging Face model in `hf_dir` as a checkpoint of weights alone, in their data
    type, which `out_dir` is once it is complete. `[checkpoint] initial_load_path` takes it.

    Memory holds one tensor at a time. Raises CheckpointError for a model that is broken or fits no
    flavor; ConfigError for an `out_dir` with something in it; StorageError if the disk fails."""
    check_safetensors_installed()
    with new_folder(out_dir) as draft:
        args = read_model_args(hf_dir / "config.json")
        flavor = fitting_flavor(args, hf_dir)
        weights = map_weights(hf_dir)
        check_weights(weights, args, hf_dir)
        state = {PREFIX + ours: weights[theirs] for ours, theirs in hf_names(args.n_layers).items()}
        _save(state, draft, _FromHF(args))
        settings = {"flavor": flavor}
        if any((hf_dir / name).is_file() for name in FILES_OF_A_FOLDER):
            settings["tokenizer_path"] = str(hf_dir.resolve())
        manifest = Manifest(
            save_id=uuid.uuid4().hex,
            progress=NEW_RUN,
            world_size=1,
            mesh={},
            versions=installed_versions(),
            model=asdict(args),
            config=tomli_w.dumps({"model": settings}),
            files={path.name: hash_file(path) for path in sorted(draft.iterdir())},
            tensors=tensor_entries(draft),
        )
        write_manifest(draft, manifest)
    logger.info(
        f'{out_dir}: {len(state)} tensors of [model] flavor = "{flavor}", vocabulary {args.vocab_size}; to train from '
        f'it set [checkpoint] initial_load_path = "{out_dir}"'
    )


def check_safetensors_installed() -> None:
    """Raise ConfigError unless safetensors is there."""
    if find_spec("safetensors") is None:
        raise ConfigError(
            'the package safetensors is not installed; pip install "torchtitan-lite[hf]".'
        )


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A folder to write files into, which becomes `target`, on disk, when the block ends, and is
    removed if it raises.

    Raises ConfigError where `target` is not free, or what a killed call left stands beside it;
    StorageError if the disk fails."""
    target = target.resolve()
    draft = target.with_name(f".tmp-{target.name}")
    try:
        if draft.exists() or (target.exists() and (not target.is_dir() or any(target.iterdir()))):
            raise ConfigError(
                f"{draft if draft.exists() else target} exists; remove it, or write to another folder."
            )
        draft.mkdir(parents=True)
        try:
            yield draft
            for path in draft.iterdir():
                with path.open("rb") as file:
                    os.fsync(file.fileno())
            fsync_folder(draft)
            draft.rename(target)
        except BaseException:
            shutil.rmtree(draft)
            raise
        fsync_folder(target.parent)
    except OSError as error:
        raise _unwritable(error.filename or target, error.strerror) from error


def _unwritable(path: Path | str, reason: object) -> StorageError:
    return StorageError(f"{path} cannot be written: {reason}; make room or mend its permissions.")


def _write_json(path: Path, fields: dict[str, Any]) -> None:
    path.write_text(json.dumps(fields, indent=2) + "\n")


def open_verified(folder: Path) -> SafeReader:
    """The reader of a checkpoint of which every byte is what was saved, and the weights are those
    of its model. Raises BrokenCheckpoint."""
    reader = SafeReader(folder)
    manifest = reader.manifest
    found = {
        name.removeprefix(PREFIX): entry.shape
        for name, entry in manifest.tensors.items()
        if name.startswith(PREFIX)
    }
    try:
        args = saved_args(manifest)
        if args.n_layers > len(
            found
        ):  # a model of very many layers takes memory, on the meta device too
            raise ValueError(f"n_layers is {args.n_layers}, and there are {len(found)} weights")
        expected = parameter_shapes(args)
    except (ValueError, TypeError, LookupError, ArithmeticError, RuntimeError) as error:
        raise BrokenCheckpoint(f"manifest.json: model: {type(error).__name__}: {error}") from error
    if problems := broken_files(folder, manifest, hashes=True) or differing_tensors(
        expected=expected, found=found
    ):
        raise BrokenCheckpoint(_listed(problems))
    return reader


def saved_args(manifest: Manifest) -> ModelArgs:
    """The dimensions of a checkpoint's model."""
    scaling = manifest.model["rope_scaling"]
    return ModelArgs(**manifest.model | {"rope_scaling": scaling and RopeScaling(**scaling)})


def parameter_shapes(args: ModelArgs) -> dict[str, tuple[int, ...]]:
    """Shape of each parameter of a model."""
    with torch.device("meta"):
        return {name: tuple(weight.shape) for name, weight in Transformer(args).named_parameters()}


def differing_tensors(*, expected: Shapes, found: Shapes) -> list[str]:
    """What is wrong with the tensors found, a phrase each."""
    missing = [f"{name} is missing" for name in expected.keys() - found.keys()]
    extra = [f"{name} is not of this model" for name in found.keys() - expected.keys()]
    misshapen = [
        f"{name} is {list(found[name])}, not {list(expected[name])}"
        for name in expected.keys() & found.keys()
        if found[name] != expected[name]
    ]
    return sorted(missing) + sorted(extra) + sorted(misshapen)


def _listed(problems: list[str]) -> str:
    more = [f"and {len(problems) - MOST_LISTED} more"] if len(problems) > MOST_LISTED else []
    return "; ".join(problems[:MOST_LISTED] + more)


def plan_shards(sizes: Mapping[str, int], *, max_bytes: int) -> list[list[str]]:
    """The names of `sizes`, in order, in lists of at most `max_bytes`; a larger one has a list of
    its own."""
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
    """Write the weights of a checkpoint, each in the type that `dtypes` has for it, into `folder`:
    in one file, or in several with an index."""
    names, tensors = hf_names(args.n_layers), reader.manifest.tensors
    sizes = {
        name: math.prod(tensors[PREFIX + name].shape) * dtype.itemsize
        for name, dtype in dtypes.items()
    }
    shards = plan_shards(sizes, max_bytes=max_shard_bytes)
    files: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = (
            SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        )
        _write_shard(reader, folder / file, args, {name: dtypes[name] for name in shard})
        files |= {names[name]: file for name in shard}
    if len(shards) > 1:
        _write_json(
            folder / INDEX, {"metadata": {"total_size": sum(sizes.values())}, "weight_map": files}
        )


def _write_shard(
    reader: SafeReader, path: Path, args: ModelArgs, dtypes: Mapping[str, torch.dtype]
) -> None:
    # Of the [hf] extra.
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    names = hf_names(args.n_layers)
    weights = reader.read_whole(PREFIX + name for name in dtypes)
    converted = {
        names[name]: to_hf(name, weights.pop(PREFIX + name), args).to(dtype)
        for name, dtype in dtypes.items()
    }
    try:
        save_file(converted, path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise _unwritable(path, error) from error


def copy_tokenizer(manifest: Manifest, folder: Path) -> Tokenizer | None:
    """The tokenizer that a checkpoint's config names, its file in `folder` too if transformers
    reads the whole of its form. None if the config names none that can be read. Either lack is told
    of."""
    path = tomli.loads(manifest.config).get("model", {}).get("tokenizer_path")
    if path is None:
        logger.warning("no tokenizer is exported: the checkpoint's config names none")
        return None
    try:
        tokenizer = build_tokenizer(path)
    except DataError as error:
        logger.warning(f"no tokenizer is exported: {error}")
        return None
    content = tokenizer.path.read_bytes()
    if content.startswith(b"{"):
        beside = tokenizer.path.with_name("tokenizer_config.json")
        (folder / "tokenizer.json").write_bytes(content)
        if beside.exists():
            shutil.copyfile(beside, folder / beside.name)
    elif TIKTOKEN_LINE.match(content):
        logger.warning(
            f"no tokenizer is exported: transformers finds no special tokens in a tiktoken file, {path}"
        )
    else:
        (folder / "tokenizer.model").write_bytes(content)
    return tokenizer


def read_model_args(path: Path) -> ModelArgs:
    """The dimensions that a config.json gives. Raises CheckpointError, which names the file and the
    key."""
    try:
        return model_args(json.loads(path.read_bytes()))
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read: {error.strerror}; name a Hugging Face model's folder."
        ) from error
    except (ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is not of a model that can be imported: {error}.") from error


def fitting_flavor(args: ModelArgs, folder: Path) -> str:
    """The flavor that has the dimensions of the model in `folder`. Raises CheckpointError, with
    what differs from the nearest one, if there is none."""
    given = asdict(args)
    unlike: dict[str, list[str]] = {}
    for flavor, dimensions in FLAVORS.items():
        # A run has its own sequence length, and the vocabulary of its tokenizer where the flavor
        # has none.
        known = replace(
            dimensions,
            max_seq_len=args.max_seq_len,
            vocab_size=dimensions.vocab_size or args.vocab_size,
        )
        unlike[flavor] = [
            f"{key} is {given[key]}, not {own}"
            for key, own in asdict(known).items()
            if given[key] != own
        ]
    nearest = min(unlike, key=lambda flavor: len(unlike[flavor]))
    if unlike[nearest]:
        raise CheckpointError(
            f"{folder} fits no [model] flavor; for the nearest, {nearest}, {'; '.join(unlike[nearest])}."
        )
    return nearest


def map_weights(folder: Path) -> dict[str, Tensor]:
    """Every tensor of the Hugging Face model in `folder`, mapped into memory, not read. Raises
    CheckpointError for files that are missing or damaged."""
    # Of the [hf] extra.
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = folder / SINGLE
    try:
        if path.exists():
            return load_file(path)
        path = folder / INDEX
        weights: dict[str, Tensor] = {}
        for name in sorted(set(json.loads(path.read_bytes())["weight_map"].values())):
            if Path(name).name != name:
                raise ValueError(f"{name} is not a file's name")
            path = folder / name
            weights |= load_file(path)
        return weights
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read: {error.strerror or error}; get the model again."
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise CheckpointError(f"{path} is damaged: {error}; get the model again.") from error


def check_weights(weights: Mapping[str, Tensor], args: ModelArgs, folder: Path) -> None:
    """Raise CheckpointError, with all that is wrong, unless the weights of the Hugging Face model
    in `folder` are those of a model of `args`."""
    names = hf_names(args.n_layers)
    problems = differing_tensors(
        expected={names[name]: shape for name, shape in parameter_shapes(args).items()},
        found={name: tuple(weight.shape) for name, weight in weights.items()},
    )
    problems += [
        f"{name} is {weight.dtype}, not of {', '.join(map(str, IMPORTED_DTYPES))}"
        for name, weight in weights.items()
        if weight.dtype not in IMPORTED_DTYPES
    ]
    if problems:
        raise CheckpointError(f"{folder} is not what its config.json says: {_listed(problems)}.")


class _FromHF(DefaultSavePlanner):
    """Puts the rows of a weight in our order when it is written, so that there is no copy of all of
    them."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__(
            flatten_state_dict=False, flatten_sharded_tensors=False
        )  # the names as they are
        self._args = args

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        return from_hf(write_item.index.fqn.removeprefix(PREFIX), object, self._args)


def _save(state: dict[str, Tensor], folder: Path, planner: DefaultSavePlanner) -> None:
    """Have DCP write tensors from this process alone."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.save(
                state, storage_writer=dcp.FileSystemWriter(folder), planner=planner, no_dist=True
            )
    except CheckpointException as error:
        free_gib = (
            shutil.disk_usage(folder).free / 2**30
        )  # torch.save does not always say that the disk is full
        raise _unwritable(
            folder, f"{load_failure(error)}; {free_gib:,.2f} GiB are free there"
        ) from error
