"""Read the weights of a Hugging Face model: config.json and safetensors files.

Such a folder has no hashes: names, shapes, data types and sizes are compared with config.json, but
flipped bits go unnoticed. Weights are mapped into memory one at a time, and nothing in the folder
can run code.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_lite.base.collectives import on_all_ranks
from torchtitan_lite.base.errors import CheckpointError, ConfigError
from torchtitan_lite.base.files import ABSENT, storage_fix
from torchtitan_lite.base.jsonfile import read_json_object, regular_size
from torchtitan_lite.base.logger import logger
from torchtitan_lite.catalog.flavors import FLAVORS, ModelArgs, RopeScaling
from torchtitan_lite.config import check_model_table, show_settings
from torchtitan_lite.config.differences import changes
from torchtitan_lite.models.hf_llama import (
    EMBEDDING,
    HEAD,
    from_hf,
    hf_config,
    hf_names,
    model_args,
)
from torchtitan_lite.models.init import local_offset, local_part
from torchtitan_lite.models.llama3 import Transformer

from .manifest import BrokenCheckpoint, TensorEntry
from .matching import check_model, listed
from .reading import SafeReader, open_checkpoint
from .state import entries

PREFIX = "model."
"""Prefix of the names of weights in a checkpoint."""
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
ADAPTER = "adapter_config.json"
DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
"""Name in safetensors files of each data type of weights."""
ROPE_BUFFER = ".rotary_emb.inv_freq"
"""Suffix of the names of buffers in Llama 2's files; their values follow from config.json."""


def load_hf(
    folder: Path,
    state: dict[str, Tensor],
    args: ModelArgs,
    *,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Read the weights of a Hugging Face model into the tensors of `state`, sharded or not, of any
    data type. Each rank reads its own part of each weight.

    Collective. Raises, on all ranks, CheckpointError if the folder is damaged or of another model
    than `args`, and ConfigError if safetensors is not installed."""

    def load() -> None:
        reader = HfReader(folder)
        fix = f"Set [model] {show_settings(model_settings(reader.args))}"
        check_model(asdict(reader.args), asdict(args), path=folder, fix=fix)
        for name in reader.entries:
            reader.read_into(name, state[name])

    on_all_ranks(load, group=group)
    logger.info(f"{folder} is a Hugging Face model, which has no hashes: its values are unverified")


class HfReader:
    """Reader of a Hugging Face model's weights, by their names in a checkpoint."""

    def __init__(self, folder: Path) -> None:
        """Compare the headers of all files with config.json. Raises CheckpointError if they differ,
        or if a file is missing or damaged; ConfigError if safetensors is not installed."""
        try:
            from safetensors import safe_open  # only the [hf] extra installs it
        except ImportError as error:
            fix = 'pip install "torchtitan-lite[hf]"'
            raise ConfigError(f"the package safetensors is not installed; {fix}.") from error
        refuse_other_weights(folder)
        with hf_errors(folder / "config.json"):
            self.args = model_args(read_json_object(folder / "config.json"))

        # Names, shapes and data types of the weights, from the headers of the files.
        self._open, self._files = partial(safe_open, framework="pt"), dict[str, Path]()
        found: dict[str, TensorEntry] = {}
        paths, places = weight_files(folder)
        for path in paths:
            with hf_errors(path):
                regular_size(path)  # safe_open would wait for a pipe
                with self._open(path) as file:
                    # Of a tensor in several files, the one in the file that the index names counts.
                    here = [n for n in list(file.keys()) if places.get(n, path.name) == path.name]
                    headers = {name: file.get_tensor(name) for name in here}
            if twice := sorted(headers.keys() & self._files.keys()):
                files = f"{self._files[twice[0]].name} and in {path.name}"
                raise CheckpointError(
                    f"{folder}: {twice[0]} is in {files}, and {INDEX} names neither; download the "
                    "folder again, or remove the file that is not of this model."
                )
            found |= entries({n: each for n, each in headers.items() if ROPE_BUFFER not in n})
            self._files |= dict.fromkeys(headers, path)

        # They must be those of a model with the dimensions in config.json.
        head = found.pop(HEAD, None) if self.args.tie_embeddings else None
        with hf_errors(folder / "config.json"):
            shapes = weight_shapes(self.args, most_layers=len(found))
        self._names = hf_names(self.args, prefix=PREFIX)
        shapes = {theirs: shapes[ours] for ours, theirs in self._names.items()}
        problems = weight_problems(shapes, found)
        if head is not None and not problems:
            same = head == found[EMBEDDING] and self._map(HEAD).equal(self._map(EMBEDDING))
            problems += [] if same else [f"{HEAD}: tied to {EMBEDDING} -> another"]
        if problems:
            raise CheckpointError(
                f"{folder} differs from its config.json (expected -> found): {listed(problems)}."
            )
        self.entries = {ours: found[theirs] for ours, theirs in self._names.items()}

    def _map(self, name: str) -> Tensor:
        # Each call maps the file for this tensor alone, so that its memory ends with it.
        with hf_errors(self._files[name]), self._open(self._files[name]) as file:
            return file.get_tensor(name)

    def read(self, name: str) -> Tensor:
        """Return a weight, mapped into memory unless its rows are permuted."""
        return from_hf(name, self._map(self._names[name]), self.args)

    def read_into(self, name: str, target: Tensor) -> None:
        """Copy this rank's part of a weight into `target`, sharded or not, of any data type."""
        local, start = local_part(target), local_offset(target)
        rows, *columns = (slice(i, i + n) for i, n in zip(start, local.shape, strict=True))
        all_rows = (slice(None), *columns)
        weight = self._map(self._names[name])[all_rows]
        # Of wq and wk, row i of ours is row `there[i]` of theirs.
        here = torch.arange(len(weight))
        there = from_hf(name, here, self.args)
        local.copy_(weight[rows if there is here else there[rows]])


def open_weights(folder: Path, *, hashes: bool = False) -> tuple[SafeReader, ModelArgs]:
    """Return the reader and the dimensions of a checkpoint. Compare the sizes of its files with the
    manifest first, or with `hashes` every byte, and the weights with the dimensions. Raises
    BrokenCheckpoint."""
    reader = open_checkpoint(folder, hashes=hashes)
    model, tensors = reader.manifest.model, reader.manifest.tensors.items()
    weights = {name: entry for name, entry in tensors if name.startswith(PREFIX)}
    try:
        scaling = model["rope_scaling"]
        args = ModelArgs(**model | {"rope_scaling": scaling and RopeScaling(**scaling)})
        # An export that an import would refuse is refused too.
        model_args(hf_config(args, dtype=torch.float32, bos_id=None, eos_id=None))
        expected = weight_shapes(args, most_layers=len(weights))
    except (ValueError, TypeError, LookupError, ArithmeticError, RuntimeError) as error:
        reason = f"model: {type(error).__name__}: {' '.join(str(error).split())}"
        raise BrokenCheckpoint(f"manifest.json: {reason}") from error
    if problems := weight_problems(expected, weights):
        raise BrokenCheckpoint(f"its model (expected -> saved): {listed(problems)}")
    return reader, args


def weight_files(folder: Path) -> tuple[list[Path], dict[str, str]]:
    """Return the safetensors files of a Hugging Face model, and the file of each tensor by name: a
    single file and no names, or what its index says."""
    if (folder / SINGLE).exists():
        return [folder / SINGLE], {}
    with hf_errors(folder / INDEX):
        places = read_json_object(folder / INDEX)["weight_map"]
        files = sorted(set(places.values()))
        if paths := [file for file in files if Path(file).name != file]:
            raise ValueError(f"{paths[0]} is not a file's name")
    return [folder / file for file in files], places


def refuse_other_weights(folder: Path) -> None:
    """Raise CheckpointError, with a command, for a folder whose weights are no safetensors files of
    a whole model: pickled ones, or a LoRA adapter."""
    if (folder / SINGLE).exists() or (folder / INDEX).exists():
        return
    if (folder / ADAPTER).exists():
        raise CheckpointError(
            f"{folder} is a LoRA adapter ({ADAPTER}) without the weights of its model; merge both: "
            'python -c "from peft import AutoPeftModelForCausalLM as M; '
            f"M.from_pretrained('{folder}').merge_and_unload().save_pretrained('MERGED')\"."
        )
    if pickled := sorted(folder.glob("pytorch_model*.bin")):
        raise CheckpointError(
            f"{folder} has its weights in {pickled[0].name}, which can run code as it is read, and "
            "no safetensors files; convert it where you trust it, and copy the tokenizer's files: "
            'python -c "from transformers import AutoModelForCausalLM as M; '
            f"M.from_pretrained('{folder}').save_pretrained('NEW_FOLDER')\"."
        )


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
    """Return how weights differ from those of the expected `shapes`, as expected -> found."""
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
    check_model_table(settings, source="the model")
    return settings


@contextmanager
def hf_errors(path: Path) -> Iterator[None]:
    """Turn an error in reading a file of a Hugging Face model into a CheckpointError."""
    try:
        yield
    except OSError as error:
        fix = "name the folder of a complete Hugging Face model"
        if error.errno and not isinstance(error, ABSENT):
            fix = storage_fix(error)
        raise CheckpointError(
            f"{path} cannot be read: {error.strerror or error}; {fix}."
        ) from error
    except Exception as error:  # a malformed file can raise any
        reason = " ".join(str(error).split())[:300]
        raise CheckpointError(
            f"{path} cannot be imported: {reason}; use a Llama 2, 3, 3.1 or 3.2 model, or if the "
            "file is damaged, download it again."
        ) from error
