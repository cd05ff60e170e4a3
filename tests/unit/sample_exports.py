"""Checkpoints of small models, and what was exported from them."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import safetensors.torch
import tomli_w
import torch
import transformers
from sample_checkpoints import add_manifest
from sample_checkpoints import save as save_tensors
from sample_llamas import ARGS
from torch import Tensor

from torchtitan_lite.catalog.flavors import ModelArgs
from torchtitan_lite.models.llama3 import Transformer


def save(
    folder: Path,
    state: dict[str, Tensor],
    args: ModelArgs = ARGS,
    *,
    float8: dict[str, Any] | None = None,
    **model: str,
) -> Path:
    """A checkpoint of `state` in `folder`, of a run with the tables [model] and [float8]."""
    save_tensors(folder, state)
    config = tomli_w.dumps({"model": model, "float8": float8 or {}})
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
