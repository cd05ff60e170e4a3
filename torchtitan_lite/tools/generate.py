"""Load a model to generate text: from a checkpoint, a run, or a Hugging Face model."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from torchtitan_lite.base.jsonfile import parse_toml
from torchtitan_lite.catalog.flavors import ModelArgs
from torchtitan_lite.checkpoint.folders import find_checkpoints, naming
from torchtitan_lite.checkpoint.hf_folder import ADAPTER, PREFIX, HfReader, open_weights
from torchtitan_lite.data.tokenizer import build_tokenizer
from torchtitan_lite.models.generate import Generator, build_empty_model
from torchtitan_lite.models.llama3 import Transformer

ReadWeight = Callable[[str], Tensor]


def build_plain_model(
    args: ModelArgs, read: ReadWeight, *, device: torch.device, dtype: torch.dtype
) -> Transformer:
    """Build a model on one device, and read its weights by their names in it."""
    model = build_empty_model(args, device=device, dtype=dtype)
    for name, parameter in model.named_parameters():
        parameter.copy_(read(name))
    return model


def open_source(source: Path) -> tuple[ModelArgs, ReadWeight, str]:
    """Open the weights of a checkpoint's folder, a run's newest checkpoint, or a Hugging Face
    model. Return its dimensions, the reader and the path of its tokenizer. Raises CheckpointError.
    """
    if any((source / name).is_file() for name in ("config.json", ADAPTER)):
        hf = HfReader(source)
        return hf.args, lambda name: hf.read(PREFIX + name), str(source)

    step_dir = find_checkpoints(source)[-1]
    with naming(step_dir, fix="; name another step."):
        reader, args = open_weights(step_dir)
    config = parse_toml(reader.manifest.config.encode())
    path = config.get("model", {}).get("tokenizer_path", "")
    return args, lambda name: reader.read_whole([PREFIX + name])[PREFIX + name], path


def load_generator(
    source: Path, *, device: torch.device, dtype: torch.dtype, tokenizer_path: str | None = None
) -> Generator:
    """Load a model and its tokenizer, or another one. Raises RunError."""
    args, read, own_tokenizer = open_source(source)
    tokenizer = build_tokenizer(own_tokenizer if tokenizer_path is None else tokenizer_path)
    return Generator(build_plain_model(args, read, device=device, dtype=dtype), tokenizer)
