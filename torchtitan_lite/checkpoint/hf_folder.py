"""Read the weights of a Hugging Face model: config.json and safetensors files.

Such a folder has no hashes: names, shapes and data types are compared with config.json, but flipped
bits go unnoticed. Weights are mapped into memory one at a time. Nothing in the folder can run code.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import tomli_w
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor

from torchtitan_lite.base.collectives import on_all_ranks
from torchtitan_lite.base.errors import CheckpointError
from torchtitan_lite.base.jsonfile import read_json_object, regular_size
from torchtitan_lite.base.logger import logger
from torchtitan_lite.base.paths import fetch
from torchtitan_lite.catalog.flavors import FLAVORS, ModelArgs, RopeScaling
from torchtitan_lite.config import read_table, resolve_model
from torchtitan_lite.config.keys import changes
from torchtitan_lite.models.hf_float8 import SCALE
from torchtitan_lite.models.hf_llama import HEAD, from_hf, hf_config, hf_names, model_args
from torchtitan_lite.models.init import local_offset, local_part
from torchtitan_lite.models.llama3 import Transformer

from .manifest import BrokenCheckpoint, TensorEntry, check_model, listed, unreadable
from .reading import SafeReader, open_checkpoint
from .state import PREFIX, entries

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = ("float32", "bfloat16", "float16")
"""Data types of weights."""


def load_hf(
    folder: Path, state: dict[str, Tensor], args: ModelArgs, *, group: dist.ProcessGroup | None
) -> None:
    """Read the weights of a Hugging Face model into `state`. Collective. Raises CheckpointError, on
    all ranks, if the folder is damaged or of another model than `args`."""

    def load() -> None:
        reader = HfReader(folder)
        try:
            fix = "Set the keys of [model] to those in status.json and the run's report"
            check_model(asdict(reader.args), asdict(args), path=folder, fix=fix)
        except CheckpointError as error:
            error.paste = tomli_w.dumps({"model": model_settings(reader.args)})
            raise
        reader.load(state)

    on_all_ranks(load, group=group)
    logger.info(f"{folder} is a Hugging Face model, which has no hashes: its values are unverified")


class HfReader:
    """Reader of a Hugging Face model's weights, by their names in a checkpoint."""

    def __init__(self, folder: Path) -> None:
        """Compare the headers of all files with config.json. Raises CheckpointError if they differ,
        or if one is missing or damaged; StorageError if a URL cannot be copied to the cache."""
        try:
            self.folder = folder = fetch(folder)
        except OSError as error:
            raise unreadable(folder, error) from error
        config = folder / "config.json"
        with hf_errors(config):
            self.args = model_args(read_json_object(config))
        self._files = weight_files(folder)
        found: dict[str, TensorEntry] = {}
        for name in self._files:
            # Llama 2's files have these buffers too, whose values follow from config.json.
            if not name.endswith((".rotary_emb.inv_freq", f".weight{SCALE}")):
                found |= entries({name: self._map(name, device="meta")})

        if self.args.tie_embeddings:  # transformers ignores a saved output too
            found.pop(HEAD, None)
        with hf_errors(config):
            shapes = weight_shapes(self.args, most_layers=len(found))
        self._names = hf_names(self.args, prefix=PREFIX)
        problems = weight_problems({self._names[name]: shapes[name] for name in self._names}, found)
        if problems:
            raise CheckpointError(
                f"{folder} differs from its config.json (expected -> found): {listed(problems)}."
            )

    def _map(self, name: str, *, device: str = "cpu") -> Tensor:
        # Each call maps the file for this tensor alone, so that its memory ends with it.
        path, scale = self._files[name], f"{name}{SCALE}"
        with hf_errors(path):
            regular_size(path)  # safe_open would wait for a pipe
            with safe_open(path, framework="pt") as file:
                weight = file.get_tensor(name).to(device)
            if weight.dtype == torch.float8_e4m3fn and scale in self._files:
                scales = self._map(scale, device=device).float()
                weight = weight.float() * scales.view(len(scales), 1)  # [1, 1] or [R, 1]
            return weight

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Copy this rank's part of each weight into `state`, sharded or not, of any data type."""
        for name, target in state.items():
            local, start = local_part(target), local_offset(target)
            rows, *columns = (slice(i, i + n) for i, n in zip(start, local.shape, strict=True))
            all_rows = (slice(None), *columns)
            weight = self._map(self._names[name])[all_rows]
            # Of wq and wk, row i of ours is row `there[i]` of theirs.
            here = torch.arange(len(weight))
            there = from_hf(name, here, self.args)
            local.copy_(weight[rows if there is here else there[rows]])
        if count := sum(f"{name}{SCALE}" in self._files for name in self._names.values()):
            logger.info(f"its {count} float8 weights are converted to {target.dtype}")


def weight_files(folder: Path) -> dict[str, Path]:
    """Return the safetensors file of each tensor of a model. Raises CheckpointError."""
    single, index = folder / SINGLE, folder / INDEX
    if single.exists():
        with hf_errors(single):
            regular_size(single)
            with safe_open(single, framework="pt") as file:
                return dict.fromkeys(file.keys(), single)
    with hf_errors(index):
        places = read_json_object(index)["weight_map"]
        for name in places.values():
            if Path(name).name != name:
                raise ValueError(f"{name} is not a file's name")
        return {tensor: folder / name for tensor, name in places.items()}


def open_weights(folder: Path, *, hashes: bool = False) -> tuple[SafeReader, ModelArgs]:
    """Return the reader and the dimensions of a checkpoint after `open_checkpoint` has checked its
    files, and its weights fit the dimensions. Raises BrokenCheckpoint."""
    reader = open_checkpoint(folder, hashes=hashes)
    model = reader.manifest.model
    weights = {name: each for name, each in reader.tensors.items() if name.startswith(PREFIX)}
    try:
        scaling = model["rope_scaling"]
        args = ModelArgs(**model | {"rope_scaling": scaling and RopeScaling(**scaling)})
        # An export that cannot be loaded again is refused too.
        model_args(hf_config(args, dtype=torch.float32, bos_id=None, eos_id=None))
        expected = weight_shapes(args, most_layers=len(weights))
    except (ValueError, TypeError, LookupError, ArithmeticError, RuntimeError) as error:
        reason = f"model: {type(error).__name__}: {' '.join(str(error).split())}"
        raise BrokenCheckpoint(f"manifest.json: {reason}") from error
    if problems := weight_problems(expected, weights):
        raise BrokenCheckpoint(f"its model (expected -> saved): {listed(problems)}")
    return reader, args


def weight_shapes(args: ModelArgs, *, most_layers: int) -> dict[str, tuple[int, ...]]:
    """Return the shape of each weight of a model by its name in a checkpoint. Raises ValueError for
    more layers than `most_layers`: even on the meta device they would take much memory."""
    if args.n_layers > most_layers:
        raise ValueError(f"n_layers is {args.n_layers}, and there are {most_layers} weights")
    with torch.device("meta"):
        weights = Transformer(args).named_parameters()
    return {PREFIX + name: tuple(weight.shape) for name, weight in weights}


def weight_problems(
    shapes: Mapping[str, tuple[int, ...]], found: Mapping[str, TensorEntry]
) -> list[str]:
    """Return how weights differ from the expected `shapes`, as expected -> found."""
    found_shapes = {name: entry.shape for name, entry in found.items()}
    return changes(shapes, found_shapes, absent="missing") + [
        f"{name}: one of {', '.join(DTYPES)} -> {entry.dtype}"
        for name, entry in found.items()
        if entry.dtype not in DTYPES
    ]


def model_settings(args: ModelArgs) -> dict[str, Any]:
    """Return the keys of [model] that give a run the dimensions `args`: a flavor, or all keys.
    Raises ConfigError for dimensions that no run can have."""
    for flavor, dimensions in FLAVORS.items():
        # Some flavors take the vocabulary from the tokenizer. max_seq_len is always the run's.
        left: dict[str, Any] = {} if dimensions.vocab_size else {"vocab_size": args.vocab_size}
        if replace(dimensions, max_seq_len=args.max_seq_len, **left) == args:
            settings = {"flavor": flavor, **left}
            break
    else:
        keys = {key: value for key, value in asdict(args).items() if value is not None}
        del keys["max_seq_len"]
        settings = {"flavor": "", **keys}
    resolve_model(read_table("model", settings).model)
    return settings


@contextmanager
def hf_errors(path: Path) -> Iterator[None]:
    """Turn an error in reading a file of a Hugging Face model into a CheckpointError."""
    try:
        yield
    except Exception as error:  # a malformed file can raise any
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())[:300]
        raise CheckpointError(
            f"{path} cannot be loaded: {reason}; name the folder of a whole Llama 2, 3, 3.1 or 3.2 "
            "model with safetensors files (transformers' save_pretrained writes one), or if the "
            "file is damaged, download it again."
        ) from error
