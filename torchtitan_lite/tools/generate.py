"""Generate text by a model: from a checkpoint, a run, or a Hugging Face model."""

from collections.abc import Sequence
from pathlib import Path

import torch

from torchtitan_lite.base.errors import ConfigError
from torchtitan_lite.base.paths import open_path
from torchtitan_lite.checkpoint.folders import find_checkpoints, naming
from torchtitan_lite.checkpoint.hf_folder import HfReader, open_weights
from torchtitan_lite.checkpoint.reading import SafeReader
from torchtitan_lite.checkpoint.state import PREFIX
from torchtitan_lite.data.tokenizer import Tokenizer, build_tokenizer
from torchtitan_lite.models.generate import Sample, Sampling, build_empty_model, continue_prompts
from torchtitan_lite.models.llama3 import Transformer


def generate(
    source: Path | str, prompts: Sequence[str], sampling: Sampling | None = None
) -> list[Sample]:
    """Return a text that follows each prompt, by the model in `source`: a checkpoint's folder, a
    run's, whose newest is taken, or a Hugging Face model's. Raises RunError."""
    model, tokenizer = load_model(open_path(str(source)))
    return continue_prompts(model, tokenizer, prompts, sampling or Sampling())


def load_model(
    source: Path,
    *,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
    tokenizer_path: str | None = None,
) -> tuple[Transformer, Tokenizer]:
    """Load the weights of a checkpoint's folder, a run's newest checkpoint, or a Hugging Face
    model, and its tokenizer or another one. By default on a GPU if there is one, in bfloat16, else
    in float32. Raises RunError."""
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = dtype or (torch.float32 if device.type == "cpu" else torch.bfloat16)
    reader: HfReader | SafeReader
    if (source / "config.json").is_file():
        reader = HfReader(source)
        args, own_tokenizer = reader.args, str(reader.folder)
    else:
        step_dir = find_checkpoints(source)[-1]
        with naming(step_dir, fix="; name another step."):
            reader, args = open_weights(step_dir)
        own_tokenizer = reader.manifest.tables.get("model", {}).get("tokenizer_path", "")

    tokenizer = build_tokenizer(own_tokenizer if tokenizer_path is None else tokenizer_path)
    if tokenizer.vocab_size > args.vocab_size:
        raise ConfigError(
            f"tokenizer {tokenizer.path} has {tokenizer.vocab_size} ids, more than the model's "
            f"{args.vocab_size}; name the model's own by --tokenizer."
        )
    model = build_empty_model(args, device=device, dtype=dtype)
    reader.load({PREFIX + name: parameter for name, parameter in model.named_parameters()})
    return model, tokenizer
