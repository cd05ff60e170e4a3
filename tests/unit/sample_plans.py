"""Devices, rates and rooflines for tests of the planner. The figures are round, to compute with."""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from sample_jobs import job_of

from torchtitan_lite.catalog.devices import DeviceSpec
from torchtitan_lite.catalog.flavors import (
    FLAVORS,
    OUTPUT,
    ROW_SPLIT,
    ModelArgs,
    block_linear_shapes,
)
from torchtitan_lite.config import Config, Float8Config
from torchtitan_lite.float8.selection import LinearChoice
from torchtitan_lite.planner.constants import Rates, rates_of
from torchtitan_lite.planner.plan import find_device
from torchtitan_lite.planner.time import Roofline

DEVICE = DeviceSpec(
    "with round figures",
    bf16_tflops=1000,
    fp8_tflops=2000,
    memory_gib=80,
    bandwidth_tb_s=2.5,
    architecture="Hopper",
    link_gb_s=500,
    node_devices=8,
    network_gb_s=50,
)
RATES = Rates(
    bf16_matmul=0.5,  # 500 TFLOPS
    fp8_matmul=0.4,  # 800 TFLOPS
    slow_accumulation=1.25,
    row_scales=1.125,
    attention_cudnn=0.5,
    attention_flash=0.25,
    attention_flex=0.2,
    contiguous=0.8,  # 2 TB/s
    kernel_seconds=3e-6,
    host_seconds_per_block=2e-3,
    link=0.8,  # 400 GB/s
    network=0.9,  # 45 GB/s
    hop_seconds=2e-6,
    in_training=1.25,
    overlap_slowdown=0.125,
    async_tensor_parallel=0.25,
)
H100, B200 = find_device("H100 SXM"), find_device("B200")


def scheme_of(recipe: str, *, gathered: bool = False) -> Float8Config:
    """Return [float8] with `recipe`, and with FSDP's float8 all-gather if `gathered`."""
    return Float8Config(
        enable_float8_linear=True, recipe_name=recipe, enable_fsdp_float8_all_gather=gathered
    )


def linears_of(
    args: ModelArgs, *, tp: int = 1, kept: Collection[str] = (), output: bool = False
) -> list[LinearChoice]:
    """Return the linears of all blocks, in float8 but for those `kept`. With `output`, also the
    projection to the vocabulary, in bf16."""
    linears = []
    for kind, (n, k) in block_linear_shapes(args).items():
        local = (n, k // tp) if kind.split(".")[1] in ROW_SPLIT.values() else (n // tp, k)
        names = tuple(f"layers.{i}.{kind}" for i in range(args.n_layers))
        linears.append(LinearChoice(kind, names, (n, k), local, "kept" if kind in kept else ""))
    projection = (args.vocab_size, args.dim), (args.vocab_size // tp, args.dim)
    return [*linears, LinearChoice(OUTPUT, (OUTPUT,), *projection, "kept")][: 7 + output]


def roofline_of(
    tokens: int,
    scheme: Float8Config | None = None,
    args: ModelArgs = FLAVORS["8B"],
    *,
    device: DeviceSpec = DEVICE,
    rates: Rates | None = None,
    degrees: tuple[int, int, int] = (1, 1, 1),
    cp: int = 1,
    pp: int = 1,
    compiled: bool = True,
    recomputed: Collection[str] = (),
    **tables: dict[str, Any],
) -> Roofline:
    """Return a roofline for one sequence of `tokens` and the settings in `tables` of the config.
    The rates are RATES for DEVICE, and for others the planner's."""
    config = Config.model_validate(
        {
            "activation_checkpoint": {"mode": "none"},
            "compile": {"enable": compiled},
            "float8": scheme or Float8Config(),
        }
        | tables
        | {"training": {"seq_len": tokens, "local_batch_size": 1} | tables.get("training", {})}
    )
    job = job_of(config, replace(args, max_seq_len=tokens), degrees=degrees, cp=cp, pp=pp)
    rates = rates or (RATES if device.name == DEVICE.name else rates_of(device))
    return Roofline(device, rates, job, frozenset(recomputed))
