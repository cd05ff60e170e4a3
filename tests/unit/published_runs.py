"""Throughputs of Llama training runs that others published: the planner's test set.

No constant of the planner is set from these runs. All of them keep the projection to the
vocabulary and attention in bf16. The files beside this one have them: a run is a row of
published_runs.csv, with the texts of published_runs.toml that its last column names. An empty cell
leaves a field at its default; null is None, which says that the source does not give it.
"""

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tomli

from torchtitan_lite.catalog.flavors import FLAVORS, ModelArgs


@dataclass(frozen=True)
class PublishedRun:
    """A training run: what ran, where, in which layout, and how fast."""

    name: str
    source: str
    """A repository and path at a commit, an issue, or a page."""
    framework: str
    model: str
    """A key of MODELS."""
    device: str
    """A name of catalog/devices.py. Meta's H100s are taken to be those of 500 W."""
    tps: float
    """Tokens per second per GPU."""
    gpus: int
    seq_len: int | None = 8192
    gpus_per_node: int | None = 8
    machine: str = ""
    """How the machine differs from the data sheet, in the source's figures."""
    fabric: str | None = None
    """Between nodes. None: not published, or one node."""
    dp_replicate: int = 1
    """Replicas of the sharded model. Under `sharding` "optimizer", of the whole parameters."""
    dp_shard: int = 1
    tp: int = 1
    cp: int = 1
    pp: int = 1
    vp: int | None = 1
    """Stages of each rank of a pipeline. Above 1 they are interleaved."""
    sharding: Literal["fsdp", "optimizer"] = "fsdp"
    """"optimizer": whole parameters on each rank, sharded optimizer (Megatron's DDP, ZeRO-1)."""
    async_tp: bool = False
    """Whether matmuls overlap with tensor parallelism's collectives, by any implementation."""
    local_batch_size: int | None = 1
    """Sequences per microbatch and data-parallel rank."""
    accumulation: int = 1
    """Microbatches per step."""
    checkpointing: Literal["none", "op", "layer", "full"] | None = "op"
    """"op": torchtitan's selective op; "layer": some blocks whole."""
    compiled: bool | None = True
    """Whether torch.compile ran. False for Megatron, which has fused kernels of its own."""
    recipe: str = "bf16"
    """"bf16", or the nearest of recipes.RECIPES."""
    published_recipe: str = ""
    """The source's name for it, where it differs."""
    float8_gather: bool | None = False
    """Whether FSDP, or the distributed optimizer, gathers parameters in float8."""
    precomputed_scales: bool | None = False
    attention: str = "FlashAttention 2 through SDPA"
    optimizer: str = "float32 parameters and moments"
    tflops: float | None = None
    """Model TFLOP/s per GPU as published, of `flops` per token."""
    flops: Literal["full", "causal"] | None = None
    """Attention counted whole, 12 L S D per token, or its causal half. Inferred from `tflops`."""
    step_s: float | None = None
    """Seconds per step as published; tps is then tokens per step / step_s / gpus."""
    baseline: str | None = None
    """Name of the bf16 run that the ratio refers to."""
    doubt: str = ""
    """What is inferred or uncertain."""

    @property
    def dp(self) -> int:
        """Data-parallel ranks."""
        return self.dp_replicate * self.dp_shard

    @property
    def global_batch_size(self) -> int | None:
        """Sequences per step, None if the local batch size is unknown."""
        return self.local_batch_size and self.local_batch_size * self.accumulation * self.dp

    @property
    def in_stages(self) -> bool:
        """Whether its ranks share sequences or blocks, by context or pipeline parallelism."""
        return self.cp * self.pp > 1


_LLAMA_2: dict[str, Any] = {"vocab_size": 32000, "max_seq_len": 4096, "rope_theta": 10000.0}
MODELS = FLAVORS | {
    "2-7B": ModelArgs(n_kv_heads=32, ffn_dim=11008, **_LLAMA_2),
    "2-13B": ModelArgs(5120, 40, 40, 40, 13824, **_LLAMA_2),
    "2-34B": ModelArgs(8192, 48, 64, 8, 22016, **_LLAMA_2),
    "2-70B": ModelArgs(8192, 80, 64, 8, 28672, **_LLAMA_2),
}


def _read_runs() -> Iterator[PublishedRun]:
    texts = tomli.loads(Path(__file__).with_suffix(".toml").read_text())
    with Path(__file__).with_suffix(".csv").open(newline="") as file:
        for row in csv.DictReader(file):
            cells = {column.strip(): cell.strip() for column, cell in row.items()}
            values: dict[str, Any] = {}
            for name in cells.pop("texts").split():
                values |= texts[name]
            values |= {column: _value(cell) for column, cell in cells.items() if cell}
            yield PublishedRun(**values)


def _value(cell: str) -> Any:
    try:
        return json.loads(cell)
    except ValueError:
        return cell


PUBLISHED_RUNS = tuple(_read_runs())
