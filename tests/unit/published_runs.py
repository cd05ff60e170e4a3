"""Throughputs of Llama training runs that others published: the planner's test set.

No constant of the planner is set from these rows. A field is None where its source does not say,
and `doubt` names what is inferred or uncertain. All runs keep the projection to the vocabulary and
attention in bf16. Sources are given as repository and path at a commit, as an issue, or as a page.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

from torchtitan_lite.models.flavors import FLAVORS, ModelArgs

MEGATRON_OPTIMIZER = (
    "bf16 parameters; float32 copy and moments sharded over data parallelism; gradients reduced in "
    "bf16"
)


@dataclass(frozen=True)
class PublishedRun:
    """A training run: what ran, where, in which layout, and how fast."""

    name: str
    source: str
    """Repository, path and commit; or issue; or page."""
    framework: str
    model: str
    """A key of MODELS."""
    device: str
    """A name of metrics/devices.py. Meta's H100s are taken to be those of 500 W."""
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
    """Stages of each rank of a pipeline. Above 1 they are interleaved. None: not published."""
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


@dataclass(frozen=True)
class PublishedRatio:
    """A published ratio of throughputs whose runs are not described well enough for a row."""

    name: str
    source: str
    model: str
    device: str
    layout: str
    low: float
    high: float
    """Equal to `low` where one figure is published."""
    compared: str
    """Numerator over denominator."""
    doubt: str = ""


_LLAMA_2: dict[str, Any] = {"vocab_size": 32000, "max_seq_len": 4096, "rope_theta": 10000.0}
MODELS = FLAVORS | {
    "2-7B": ModelArgs(n_kv_heads=32, ffn_dim=11008, **_LLAMA_2),
    "2-13B": ModelArgs(5120, 40, 40, 40, 13824, **_LLAMA_2),
    "2-34B": ModelArgs(8192, 48, 64, 8, 22016, **_LLAMA_2),
    "2-70B": ModelArgs(8192, 80, 64, 8, 28672, **_LLAMA_2),
}

GRAND_TETON = "Grand Teton: 500 W power limit, 96 GB of HBM2e at 2.4 TB/s; 700 W not tried"
RDMA = "RDMA, 400 Gb/s per GPU; NVLink within a node"
TENSORWISE_GATHER: dict[str, Any] = {
    "recipe": "tensorwise",
    "float8_gather": True,
    "precomputed_scales": True,
}

# torchtitan, end of 2024. The page says "Float8" and no recipe; sequence lengths are those of
# torchtitan's train_configs.
_FLOAT8_2024 = (
    'only "Float8" is published: torchtitan had tensorwise scaling alone, docs/float8.md advises '
    "float8 gathers, precomputed scales; pytorch/torchtitan#1344 asks in vain which ones ran"
)
_PAGE_2024 = "pytorch/torchtitan benchmarks/llama3_h100_202412_torchtitan.md @ 31a17bf, "
_T2024 = PublishedRun(
    name="T2024 8B 8 eager",
    source=_PAGE_2024 + "table 1",
    framework="torchtitan 9dec370, torch 1963fc8, torchao eab345c (2024-12)",
    model="8B",
    device="H100 500W",
    machine=GRAND_TETON,
    fabric=RDMA,
    gpus=8,
    dp_shard=8,
    local_batch_size=2,
    compiled=False,
    tps=5762,
    doubt="sequence length 8192 and selective op checkpointing from train_configs/llama3_8b.toml",
)
_T2024_128 = replace(
    _T2024,
    name="T2024 8B 128 eager",
    gpus=128,
    dp_shard=128,
    tps=5605,
    source=_PAGE_2024 + "table 3",
)
_T2024_TP = replace(
    _T2024,
    name="T2024 70B 256 TP 8 float8",
    source=_PAGE_2024 + "table 4",
    model="70B",
    gpus=256,
    dp_shard=32,
    tp=8,
    local_batch_size=16,
    checkpointing="full",
    compiled=True,
    recipe="tensorwise",
    float8_gather=None,
    precomputed_scales=None,
    tps=829,
    doubt=_FLOAT8_2024 + "; tensor parallelism gathers in float8 with it",
)
_T2024_PP = replace(
    _T2024_TP,
    name="T2024 405B 512 TP 8 PP 8 1F1B",
    source=_PAGE_2024 + "table 5",
    model="405B",
    gpus=512,
    dp_shard=8,
    pp=8,
    async_tp=True,
    local_batch_size=4,
    accumulation=8,
    tps=100,
    doubt=_T2024_TP.doubt + "; microbatches are not published: by default torchtitan then made as "
    "many as pipeline ranks, of interleaved schedules too until pytorch/torchtitan#781 (2025-01)",
)
_T2024_4D = replace(
    _T2024_PP,
    name="T2024 405B 512 TP 8 PP 8 32K",
    source=_PAGE_2024 + "table 6",
    local_batch_size=1,
    seq_len=32768,
    tps=76,
)
_T2024_CP = replace(
    _T2024,
    name="T2024 8B 8 32K float8",
    source=_PAGE_2024 + "table 2",
    seq_len=32768,
    local_batch_size=1,
    checkpointing="full",
    compiled=True,
    tps=3890,
    doubt=_FLOAT8_2024,
    **TENSORWISE_GATHER,
)


def _bf16_then_float8(eager: PublishedRun, bf16: float, float8: float) -> tuple[PublishedRun, ...]:
    """Return the eager run, and its compiled successors in bf16 and in float8."""
    name = eager.name.removesuffix(" eager")
    compiled = replace(eager, name=name + " bf16", compiled=True, tps=bf16)
    gathered = replace(
        compiled, name=name + " float8", tps=float8, baseline=compiled.name, **TENSORWISE_GATHER
    )
    return eager, compiled, replace(gathered, doubt=_FLOAT8_2024)


# torchtitan, June 2025: tensor parallelism, plain and asynchronous. Without flags for it, FSDP
# gathers in bf16. Global batches are local batch x FSDP ranks.
_TP_2025 = PublishedRun(
    name="TP2025 8B bf16",
    source="pytorch/torchtitan benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md @ 2887250",
    framework="torchtitan 820504e, torch 38410cf9, torchao 6243040 (2025-06)",
    model="8B",
    device="H100 500W",
    machine=GRAND_TETON,
    fabric=RDMA,
    gpus=64,
    dp_shard=8,
    tp=8,
    local_batch_size=12,
    tps=4378,
    doubt="64 GPUs, the averages and seq_len 8192 are in the page's first version and the config; "
    "its last version (5ecb74e) has the table as a picture, and its torchao and torchtitan dates "
    "say 2024 for 2025",
)
_TP_2025_70B = replace(
    _TP_2025,
    name="TP2025 70B bf16",
    model="70B",
    gpus=256,
    dp_shard=32,
    local_batch_size=16,
    checkpointing="full",
    tps=597.3,
    source=_TP_2025.source + "; pytorch/torchtitan#1299",
)


def _with_async_tp(bf16: PublishedRun, *rates: float) -> tuple[PublishedRun, ...]:
    """Return the runs of one model: bf16, tensorwise, rowwise, each plain and asynchronous."""
    prefix, runs = bf16.name.removesuffix(" bf16"), []
    for i, recipe in enumerate(("bf16", "tensorwise", "rowwise")):
        for async_tp, tps in zip((False, True), rates[2 * i : 2 * i + 2], strict=True):
            name = f"{prefix} {recipe}" + " async" * async_tp
            baseline = None if recipe == "bf16" else bf16.name + " async" * async_tp
            run = replace(bf16, name=name, recipe=recipe, async_tp=async_tp, tps=tps)
            runs.append(replace(run, baseline=baseline))
    return tuple(runs)


# Meta, 8 H100: torchao's table (its README says nothing of the machine), and a torchtitan commit.
_AO = PublishedRun(
    name="AO H100 bf16",
    source="pytorch/ao torchao/float8/README.md @ 9519beb, NVIDIA H100",
    framework="torchtitan 0.0.2, torch 2.7.0a0+gitb98af95, torchao 0.10.0+git890e0ac8",
    model="3-8B",
    device="H100 500W",
    gpus=8,
    dp_shard=8,
    tps=6150,
    doubt="the README does not name the machine; Meta's other H100 tables are of 500 W machines. "
    "Median of 100 steps",
)
_AO_JAN = replace(
    _AO,
    name="Jan 2025 bf16",
    source="pytorch/torchtitan commit 7a04053 (2025-01-27)",
    framework="torchtitan and torchao of 2025-01",
    tps=5760,
    doubt="one logged step (20 or 40); a card has 95.0 GiB, as the 500 W ones; 8 GPUs by "
    "pytorch/ao#1629",
)
_AO_JULY = replace(
    _AO,
    name="July 2025 rowwise",
    source="pytorch/ao#2595 (2025-07-24)",
    framework="torchtitan and torchao of 2025-07",
    recipe="rowwise",
    tps=6984.5,
    doubt="7,013 before the change; no bf16 run beside it; the machine is not named",
)
_MI300X = replace(
    _AO,
    name="AO MI300X bf16",
    source="pytorch/ao torchao/float8/README.md @ 9519beb, AMD MI300x",
    framework="torchtitan 2c8b594, torch 2.9.0.dev20250811+rocm6.4, torchao 0.13.0+git4fc4068d6",
    device="MI300X",
    attention="SDPA of ROCm (AOTriton or CK: not published)",
    tps=5376.5,
    doubt="",
)
_B200 = replace(
    _AO,
    name="AO B200 bf16",
    source="pytorch/ao torchao/prototype/mx_formats/README.md @ 09f1325",
    framework="torchtitan 6fc499f, torch 2.9.0.dev20250815+cu128, torchao 0.13.0+gite4e681be6",
    device="B200",
    machine="power limited, the watts not published (pytorch/ao#3566 mentions 750 and 1000 W)",
    attention="cuDNN or FlashAttention 2 through SDPA: not published",
    tps=8307.5,
    doubt="the review of pytorch/ao#2777 calls the cards power throttled; its draft wrote B100",
)


def _recipes(bf16: PublishedRun, **rates: float) -> tuple[PublishedRun, ...]:
    """Return the bf16 run and, by recipe, those beside it; tensorwise ones gather in float8."""
    prefix, runs = bf16.name.removesuffix(" bf16"), [bf16]
    for recipe, tps in rates.items():
        run = replace(bf16, name=f"{prefix} {recipe}", recipe=recipe, tps=tps, baseline=bf16.name)
        runs.append(replace(run, **TENSORWISE_GATHER) if recipe == "tensorwise" else run)
    return tuple(runs)


_TP2 = PublishedRun(
    name="#1207 8B TP 2 bf16",
    source="pytorch/torchtitan#1207 (2025-05-20)",
    framework="torchtitan of 2025-05, torch 2.8.0a0+gite21ad6e, torchao 0.11.0",
    model="8B",
    device="H100 500W",
    gpus=4,
    dp_shard=2,
    tp=2,
    tps=5378,
    doubt="batch 1, 8192 tokens and compile are not said: config defaults, and float8's need; "
    "the machine is not named (45.68 GiB of peak memory)",
)
_SHORT = replace(
    _T2024,
    name="#778 8B 4K eager",
    source="pytorch/torchtitan#778 (2025-01-07)",
    framework="torchtitan of 2025-01",
    machine="",
    fabric=None,
    seq_len=4096,
    local_batch_size=1,
    checkpointing="none",
    tps=4495,
    doubt="a user's machine; the text says 4 H100, the table 8, and 28.07 GB of memory fits 8; one "
    "logged step; flags of float8 not published",
)
_SHORT_BF16 = replace(_SHORT, name="#778 8B 4K bf16", compiled=True, tps=5033.8)
_MARCH = replace(
    _TP_2025_70B,
    name="#1185 70B 128 bf16",
    source="pytorch/torchtitan#1185 (2025-05-20, of data of 2025-03-25)",
    framework="torchtitan of 2025-03",
    gpus=128,
    dp_shard=16,
    local_batch_size=None,
    compiled=None,
    tps=598,
    doubt="batch not published; 71.51 GB of peak memory in bf16, 55.26 in float8",
)
_DEBUG = PublishedRun(
    name="#1191 debug model bf16",
    source="pytorch/torchtitan#1191 (2025-05-14)",
    framework="torchtitan of 2025-05",
    model="debugmodel",
    device="H100 500W",
    gpus=8,
    dp_shard=8,
    seq_len=2048,
    local_batch_size=8,
    checkpointing="none",
    compiled=None,
    tps=427040,
    doubt="one logged step; later steps of the log read 392,553 to 427,040. GPUs, batch and length "
    "are the config's; 0.82 GiB is 0.86 % of the card, so one of 95 GiB",
)

# An AWS post with Meta: 4 p5.48xlarge (8 H100 each).
_AWS = PublishedRun(
    name="AWS 8B 32 eager",
    source="aws.amazon.com/blogs/machine-learning/efficient-pre-training-of-llama-3-like-model-"
    "architectures-using-torchtitan-on-amazon-sagemaker, performance numbers (2024)",
    framework="torchtitan of 2024",
    model="3-8B",
    device="H100 SXM",
    fabric="EFA of p5.48xlarge; rate not in the post",
    gpus=32,
    dp_shard=32,
    compiled=False,
    tps=6475,
    doubt='"default configuration": batch 1, 8192 tokens and op checkpointing are the config\'s; '
    "the table was read in a copy of the post (digitaleventhorizon.com)",
)
_AWS_BF16 = replace(_AWS, name="AWS 8B 32 bf16", compiled=True, tps=7166)
_AWS_FLOAT8 = replace(
    _AWS_BF16, name="AWS 8B 32 tensorwise", recipe="tensorwise", baseline=_AWS_BF16.name, tps=8624
)

# Two hosts of H200: Trainy on WhiteFiber.
_H200 = PublishedRun(
    name="H200 8B 32",
    source="pytorch/torchtitan benchmarks/llama3-8b_h200_202506_trainy-whitefiber.md @ 1af2937",
    framework="torchtitan e7c0cae, torch 2.8.0a0+5228986c39, torchao 0afa4c1 (2025-06)",
    model="8B",
    device="H200",
    fabric="RDMA, ConnectX-7, 400 Gb/s per GPU",
    gpus=32,
    dp_shard=32,
    local_batch_size=2,
    tps=10938,
    doubt="the 100th step; 8192 tokens and op checkpointing are the config's; no bf16 run",
    **TENSORWISE_GATHER,
)

# 405B on 128 H100 of 95 GB, summer 2024.
_T405B = PublishedRun(
    name="T2024-08 405B 128 bf16",
    source="pytorch/torchtitan docs/performance.md of 2024-08 (pull 554) and pull 481",
    framework="torchtitan of 2024-08",
    model="405B",
    device="H100 500W",
    machine="HBM2e, lower power limit, 94 or 95 GB",
    gpus=128,
    dp_shard=16,
    tp=8,
    local_batch_size=2,
    checkpointing="full",
    compiled=None,
    tps=109,
    doubt="compile not said; published MFU of 29.0 % fits 109 x 2.6 TFLOP / 989",
)
_T405B_FLOAT8 = replace(
    _T405B,
    name="T2024-08 405B 128 float8",
    recipe="tensorwise",
    float8_gather=None,
    precomputed_scales=None,
    baseline=_T405B.name,
    tps=177,
    doubt=_T405B.doubt.split(";")[0] + "; gathers in float8 not said",
)

# IBM and Meta, float8 with FSDP2 on 512 H100 of IBM Cloud.
_IBM_70B = PublishedRun(
    name="IBM 70B 512 bf16",
    source="pytorch/pytorch.github.io _posts/2024-11-25-training-using-float8-fsdp2.md @ 1580429, "
    "table 3",
    framework="torchtitan with IBM's data loader, torch nightly of 2024-11",
    model="3-70B",
    device="H100 SXM",
    fabric="RoCE, 3.2 Tb/s per node",
    gpus=512,
    dp_shard=512,
    local_batch_size=None,
    checkpointing=None,
    tps=960,
    doubt="batch and checkpointing were the best of a search, bf16 and float8 apart, and are not "
    "published; FSDP alone is inferred, as only 405B is marked TP 4",
)
_IBM_405B = replace(
    _IBM_70B, name="IBM 405B 512 TP 4 bf16", model="405B", dp_shard=128, tp=4, tps=152
)


def _gathered(run: PublishedRun, name: str, tps: float) -> PublishedRun:
    return replace(run, name=name, baseline=run.name, tps=tps, **TENSORWISE_GATHER)


# torchtitan on 64 A100 80GB, 2024: FSDP alone, bf16.
_A100 = PublishedRun(
    name="A100 8B op",
    source="pytorch/torchtitan docs/performance.md @ 0413364",
    framework="torchtitan of 2024",
    model="3-8B",
    device="A100 SXM 80GB",
    gpus=64,
    gpus_per_node=None,
    dp_shard=64,
    compiled=None,
    tps=2973,
    doubt="SXM, the nodes and compile are not said; MFU of 58.2 % counts the embedding's FLOPs",
)
_A100_13B = replace(
    _A100,
    name="A100 2-13B none",
    model="2-13B",
    seq_len=4096,
    local_batch_size=2,
    tps=2162,
    checkpointing="none",
    doubt=_A100.doubt.split(";")[0],
)
_A100_70B = replace(_A100_13B, name="A100 2-70B full", model="2-70B", checkpointing="full", tps=353)
_LAYER = "; which blocks recompute is not said"

# IBM with Meta, FSDP1 of Llama 2, bf16, on H100.
_FMS = PublishedRun(
    name="FMS 2-7B 96 eager",
    source="pytorch/pytorch.github.io _posts/2024-03-13-maximizing-training.md @ 2ad1005, table 1",
    framework="fms-fsdp, FSDP1, torch nightly after 2.2",
    model="2-7B",
    device="H100 SXM",
    fabric="800 Gb/s between nodes",
    gpus=96,
    dp_replicate=12,
    dp_shard=8,
    seq_len=4096,
    local_batch_size=2,
    checkpointing="none",
    compiled=False,
    tps=7500,
    doubt="HSDP by the README of foundation-model-stack/fms-fsdp, sharded within a node by "
    "inference; published MFU of 0.37 would be 7,900 tokens/s",
)
_FMS_70B = replace(
    _FMS,
    name="FMS 2-70B 96 eager",
    model="2-70B",
    dp_replicate=1,
    dp_shard=96,
    tps=800,
    checkpointing="full",
    doubt="published MFU of 0.34 fits",
)

# NVIDIA: Megatron-Bridge and NeMo, synthetic data. A vocabulary is padded, which costs under 1 %.
_MEGATRON = PublishedRun(
    name="",
    source="",
    framework="",
    model="",
    device="H100 SXM",
    tps=0,
    gpus=0,
    checkpointing="none",
    compiled=False,
    attention="cuDNN through Transformer Engine",
    optimizer=MEGATRON_OPTIMIZER,
)
_ARCHIVE = "NVIDIA-NeMo/Megatron-Bridge docs/performance-summary-archive.md @ 0a25f91, "
_RELEASES = {
    "25.09": _ARCHIVE + "25.09",
    "25.11 draft": "a draft of that of 25.11, replaced in the release",
    "25.11": _ARCHIVE + "25.11",
    "26.02": _ARCHIVE + "26.02",
    "26.04": "NVIDIA-NeMo/Megatron-Bridge docs/performance-summary.md",
}
_FP8: dict[str, dict[str, Any]] = {
    "CS": {"recipe": "tensorwise", "published_recipe": "FP8-CS, per-tensor current scaling"},
    "MX": {"recipe": "mxfp8", "published_recipe": "FP8-MX, blocks of 32"},
}
_ENDS = "; its FP8-CS keeps the first and last block in bf16 by default (mixed_precision.py)"
_CONFIGS = "scripts/performance/configs @ 0fa501a, near 25.11: "
_DOUBTS = {
    ("3-8B", "optimizer"): _CONFIGS + "a step is replayed as a CUDA graph, microbatches of 4 on "
    "GB300 where the table has 2, no recomputation named" + _ENDS,
    ("3-8B", "fsdp"): _CONFIGS + "Megatron's FSDP with registered buffers, float8 transposes kept; "
    "later recipes of this row are described as recomputing" + _ENDS,
    ("3-70B", "fsdp"): _CONFIGS + "activations of 40 of 80 blocks are offloaded to the CPU, of 20 "
    "on GB300; the draft of 25.11 has 25.11's rates with half the batch" + _ENDS,
    ("405B", "fsdp"): _CONFIGS + "activations of 95 of 126 blocks are offloaded to the CPU, of 10 "
    "on GB300; that it is FP8-CS is inferred in 25.09" + _ENDS,
}


def _layout(
    run: PublishedRun,
    gpus: int,
    batch: int,
    *,
    tp: int = 1,
    pp: int = 1,
    vp: int | None = 1,
    cp: int = 1,
    micro: int = 1,
    fsdp: bool = False,
) -> PublishedRun:
    """Return the run with `batch` sequences per step. The rest of the GPUs is data-parallel."""
    dp = gpus // (tp * pp * cp)
    run = replace(run, gpus=gpus, tp=tp, pp=pp, vp=vp, cp=cp, local_batch_size=micro)
    # Megatron's linears overlap with the collectives of tensor parallelism.
    run = replace(run, accumulation=batch // (dp * micro), async_tp=tp > 1)
    if fsdp:
        return replace(run, dp_shard=dp)
    return replace(run, dp_replicate=dp, sharding="optimizer")


def _bridge(
    release: str,
    device: str,
    model: str,
    recipe: str,
    tps: float,
    tflops: float,
    gpus: int,
    batch: int,
    **layout: Any,
) -> PublishedRun:
    """Return a row of Megatron-Bridge's tables."""
    name = f"Bridge {release} {device.split()[0]} {model.removeprefix('3-')} {recipe}"
    racks: dict[str, Any] = (
        {"gpus_per_node": None, "fabric": "NVLink within NVL72"} if "GB" in device else {}
    )
    run = replace(
        _MEGATRON,
        name=name,
        source=_RELEASES[release],
        framework=f"NeMo {release}",
        model=model,
        device=device,
        tps=tps,
        tflops=tflops,
        flops="causal",
        float8_gather=True,
        **_FP8[recipe],
        **racks,
    )
    run = _layout(run, gpus, batch, **layout)
    doubt = "recomputation not published" if run.in_stages else _DOUBTS[model, run.sharding]
    if run.in_stages and "draft" in release:
        doubt += "; stages of a rank as in other releases"
    return replace(run, doubt=doubt)


def _nemo(
    model: str,
    tps: float,
    tflops: float,
    gpus: int,
    batch: int,
    seq_len: int = 8192,
    **layout: Any,
) -> PublishedRun:
    """Return a row of NeMo's tables, on H100."""
    run = replace(
        _MEGATRON,
        name=f"NeMo 24.07 H100 {model.removeprefix('3-')}",
        framework="NeMo 24.07",
        source="NVIDIA/NeMo docs/source/performance/performance_summary.md @ 070a0bb",
        model=model,
        tps=tps,
        tflops=tflops,
        seq_len=seq_len,
        flops="full",
        recipe="tensorwise",
        published_recipe=_DELAYED,
        float8_gather=None,
        doubt=_NEMO_DOUBT,
    )
    return _layout(run, gpus, batch, **layout)


def _long(seq_len: int, tps: float, tflops: float, gpus: int, **layout: Any) -> PublishedRun:
    """Return a row of NeMo's table of long sequences: Llama 2 7B, 4 Mi tokens per step."""
    run = _nemo("2-7B", tps, tflops, gpus, 2**22 // seq_len, seq_len, **layout)
    source = "NVIDIA/NeMo docs/source/performance, long sequences"
    name = f"NeMo 24.03 H100 2-7B {seq_len // 1024}K"
    return replace(run, name=name, source=source, framework="NeMo 24.03.01")


def _dgxc(
    model: str, recipe: str, tps: float, step_s: float, gpus: int, batch: int, **layout: Any
) -> PublishedRun:
    """Return a row of NVIDIA's benchmark recipes, on H100."""
    source = "NVIDIA/dgxc-benchmarking llama3.1/README_8b.md, _70b.md, _405b.md @ 143b90d"
    name = f"dgxc 24.09 H100 {model.removeprefix('3-')} {gpus} "
    run = replace(
        _MEGATRON,
        name=name + recipe,
        source=source,
        framework="NeMo 24.09",
        model=model,
        tps=tps,
        step_s=step_s,
        doubt=_NEMO_DOUBT,
    )
    run = _layout(run, gpus, batch, **layout)
    if recipe == "bf16":
        return run
    return replace(
        run,
        recipe="tensorwise",
        published_recipe=_DELAYED,
        float8_gather=None,
        baseline=name + "bf16",
    )


_DELAYED = "FP8, delayed scaling inferred: NeMo's default then"
_NEMO_DOUBT = "checkpointing and the overlap of tensor parallelism are not published"

PUBLISHED_RUNS = (
    *_bf16_then_float8(_T2024, 6667, 8532),
    *_bf16_then_float8(_T2024_128, 6514, 8380),
    _T2024_CP,
    _T2024_TP,
    replace(_T2024_TP, name="T2024 70B 256 TP 8 float8 async", async_tp=True, tps=876),
    *_with_async_tp(_TP_2025, 4378, 4809.4, 5078.1, 5570.1, 3708.5, 3914.9),
    *_with_async_tp(_TP_2025_70B, 597.3, 652.4, 809.8, 942.4, 599.6, 624.8),
    *_recipes(_AO, tensorwise=7689.5, rowwise=6768),
    *_recipes(_AO_JAN, tensorwise=7186, rowwise=6424),
    _AO_JULY,
    replace(_AO_JULY, name="July 2025 gw_hp", recipe="rowwise_with_gw_hp", tps=7319.5),
    *_recipes(_MI300X, tensorwise=6166, rowwise=5891, rowwise_with_gw_hp=6100),
    *_recipes(_B200, tensorwise=10417, mxfp8=9969, rowwise=8640.5),
    replace(
        _B200,
        name="AO B200 mxfp8 rceil",
        recipe="mxfp8",
        published_recipe="mxfp8_cublas_rceil",
        baseline=_B200.name,
        tps=9642,
    ),
    *_recipes(_TP2, rowwise=5189),
    _SHORT,
    *_recipes(_SHORT_BF16, tensorwise=5768.6),
    _MARCH,
    replace(_MARCH, name="#1185 70B 128 bf16 async", async_tp=True, tps=673),
    replace(
        _MARCH, name="#1185 70B 128 tensorwise", recipe="tensorwise", baseline=_MARCH.name, tps=820
    ),
    _DEBUG,
    _AWS,
    _AWS_BF16,
    _AWS_FLOAT8,
    _gathered(_AWS_BF16, "AWS 8B 32 tensorwise gathered", 8950),
    _H200,
    replace(_H200, name="H200 8B 64", gpus=64, dp_shard=64, tps=10753),
    _T405B,
    _T405B_FLOAT8,
    replace(
        _T405B_FLOAT8, name="T2024-08 405B 128 float8 async", async_tp=True, tps=185, baseline=None
    ),
    _IBM_70B,
    _gathered(_IBM_70B, "IBM 70B 512 tensorwise", 1448),
    _IBM_405B,
    _gathered(_IBM_405B, "IBM 405B 512 TP 4 tensorwise", 217),
    _A100,
    replace(
        _A100, name="A100 8B layer", checkpointing="layer", tps=2904, doubt=_A100.doubt + _LAYER
    ),
    replace(_A100, name="A100 70B full", model="3-70B", checkpointing="full", tps=331),
    _A100_13B,
    replace(_A100_13B, name="A100 2-13B layer", checkpointing="layer", tps=1914),
    replace(_A100_13B, name="A100 2-13B op", checkpointing="op", tps=1904),
    _A100_70B,
    replace(_A100_70B, name="A100 2-70B op", checkpointing="op", local_batch_size=1, tps=355),
    _FMS,
    replace(
        _FMS,
        name="FMS 2-13B 96 eager",
        model="2-13B",
        checkpointing="layer",
        dp_replicate=1,
        dp_shard=96,
        tps=3800,
        doubt="which blocks recompute is not said",
    ),
    replace(_FMS_70B, name="FMS 2-34B 96 eager", model="2-34B", tps=1550, doubt=""),
    _FMS_70B,
    replace(
        _T2024_CP, name="T2024 8B 8 CP 2 64K float8", dp_shard=4, cp=2, seq_len=65536, tps=2540
    ),
    replace(
        _T2024_CP, name="T2024 8B 8 CP 4 128K float8", dp_shard=2, cp=4, seq_len=131072, tps=1071
    ),
    replace(
        _T2024_CP, name="T2024 8B 8 CP 8 256K float8", dp_shard=1, cp=8, seq_len=262144, tps=548
    ),
    _T2024_PP,
    replace(_T2024_PP, name="T2024 405B 512 TP 8 PP 8 interleaved", vp=2, tps=128),
    _T2024_4D,
    replace(_T2024_4D, name="T2024 405B 512 CP 2 64K", dp_shard=4, cp=2, seq_len=65536, tps=47),
    replace(_T2024_4D, name="T2024 405B 512 CP 4 128K", dp_shard=2, cp=4, seq_len=131072, tps=31),
    replace(_T2024_4D, name="T2024 405B 512 CP 8 256K", dp_shard=1, cp=8, seq_len=262144, tps=16),
    _bridge("25.09", "H100 SXM", "3-8B", "CS", 14079, 725, 8, 128, fsdp=True),
    _bridge("25.11", "H100 SXM", "3-8B", "CS", 14451, 744, 8, 128, fsdp=True),
    _bridge("25.09", "B200", "3-8B", "CS", 29994, 1544, 8, 128, micro=2),
    _bridge("25.09", "B200", "3-8B", "MX", 29388, 1513, 8, 128, micro=2),
    _bridge("25.11", "B200", "3-8B", "CS", 30624, 1576, 8, 128, micro=2),
    _bridge("25.11", "B200", "3-8B", "MX", 29521, 1519, 8, 128, micro=2),
    _bridge("25.09", "GB200", "3-8B", "CS", 31357, 1614, 8, 128, micro=2),
    _bridge("25.09", "GB200", "3-8B", "MX", 29925, 1540, 8, 128, micro=2),
    _bridge("25.11", "GB200", "3-8B", "CS", 31508, 1622, 8, 128, micro=2),
    _bridge("25.11", "GB200", "3-8B", "MX", 29789, 1533, 8, 128, micro=2),
    _bridge("25.11", "GB300", "3-8B", "CS", 37556, 1933, 8, 128, micro=2),
    _bridge("25.11", "GB300", "3-8B", "MX", 36108, 1858, 8, 128, micro=2),
    _bridge("25.09", "GB200", "3-70B", "CS", 3986, 1791, 64, 128, micro=2, fsdp=True),
    _bridge("25.11", "GB200", "3-70B", "CS", 4312, 1937, 64, 256, micro=2, fsdp=True),
    _bridge("26.02", "GB200", "3-70B", "CS", 4040, 1815, 64, 256, micro=2, fsdp=True),
    _bridge("26.04", "GB200", "3-70B", "CS", 4143, 1861, 64, 256, micro=2, fsdp=True),
    _bridge("25.11", "GB300", "3-70B", "CS", 4520, 2030, 64, 256, micro=2, fsdp=True),
    _bridge("26.02", "GB300", "3-70B", "CS", 5003, 2248, 64, 256, micro=2, fsdp=True),
    _bridge("26.04", "GB300", "3-70B", "CS", 5243, 2355, 64, 256, micro=2, fsdp=True),
    _bridge("25.09", "GB200", "3-70B", "MX", 3546, 1593, 64, 128, tp=2, pp=4, vp=5),
    _bridge("25.11 draft", "GB200", "3-70B", "MX", 3617, 1625, 64, 128, tp=2, pp=4, vp=5),
    _bridge("26.02", "GB200", "3-70B", "MX", 3613, 1623, 64, 256, tp=2, pp=4, vp=5),
    _bridge("26.04", "GB200", "3-70B", "MX", 3828, 1721, 64, 256, tp=2, pp=4, vp=5),
    _bridge("25.11 draft", "GB300", "3-70B", "MX", 4346, 1952, 64, 128, tp=2, pp=4, vp=5),
    _bridge("26.02", "GB300", "3-70B", "MX", 4596, 2064, 64, 256, pp=4, vp=5),
    _bridge("26.04", "GB300", "3-70B", "MX", 4742, 2131, 64, 256, pp=4, vp=5),
    _bridge("25.09", "H100 SXM", "3-70B", "CS", 1619, 727, 64, 128, tp=4, pp=8, vp=5),
    _bridge("25.11", "H100 SXM", "3-70B", "CS", 1602, 719, 64, 128, tp=4, pp=8, vp=5),
    _bridge("26.02", "H100 SXM", "3-70B", "CS", 1621, 728, 64, 256, tp=4, pp=8, vp=5),
    _bridge("26.04", "H100 SXM", "3-70B", "CS", 1633, 734, 64, 256, tp=4, pp=8, vp=5),
    _bridge("25.09", "GB200", "405B", "CS", 729, 1840, 128, 64, tp=2, fsdp=True),
    _bridge("25.11 draft", "GB200", "405B", "CS", 706, 1782, 128, 64, tp=2, fsdp=True),
    _bridge("25.11 draft", "GB300", "405B", "CS", 850, 2145, 128, 64, tp=2, fsdp=True),
    _bridge("25.09", "GB200", "405B", "MX", 578, 1458, 128, 64, tp=4, pp=8, vp=8, cp=2),
    _bridge("25.11 draft", "GB200", "405B", "MX", 563, 1420, 128, 64, tp=4, pp=8, vp=8, cp=2),
    _bridge("25.11 draft", "GB300", "405B", "MX", 638, 1610, 128, 64, tp=4, pp=8, vp=8, cp=2),
    _bridge("25.09", "B200", "405B", "CS", 664, 1676, 128, 64, tp=4, pp=8, vp=8, cp=2),
    _bridge("25.09", "B200", "405B", "MX", 622, 1569, 128, 64, tp=4, pp=8, vp=8, cp=2),
    _bridge("25.11", "B200", "405B", "CS", 661, 1667, 128, 64, tp=4, pp=8, vp=8, cp=2),
    _bridge("25.11", "B200", "405B", "MX", 624, 1576, 128, 64, tp=4, pp=8, vp=8, cp=2),
    _bridge("25.11", "GB200", "405B", "CS", 813, 2053, 256, 1536, tp=4, pp=16, vp=4),
    _bridge("26.02", "GB200", "405B", "CS", 793, 2004, 256, 1536, tp=4, pp=16, vp=4),
    _bridge("26.02", "GB200", "405B", "MX", 786, 1983, 256, 1536, tp=4, pp=16, vp=8),
    _bridge("26.04", "GB200", "405B", "CS", 842, 2126, 256, 1536, tp=4, pp=16, vp=4),
    _bridge("26.04", "GB200", "405B", "MX", 793, 2002, 256, 1536, tp=4, pp=16, vp=8),
    _bridge("25.11", "GB300", "405B", "CS", 999, 2522, 256, 1536, tp=2, pp=8, vp=4, cp=2),
    _bridge("26.02", "GB300", "405B", "CS", 988, 2495, 256, 1536, tp=4, pp=8, vp=4),
    _bridge("26.02", "GB300", "405B", "MX", 931, 2349, 256, 1536, tp=2, pp=8, vp=4, cp=2),
    _bridge("26.04", "GB300", "405B", "CS", 1036, 2615, 256, 1536, tp=4, pp=8, vp=4),
    _bridge("26.04", "GB300", "405B", "MX", 968, 2443, 256, 1536, tp=2, pp=8, vp=4, cp=2),
    _bridge("25.09", "H100 SXM", "405B", "CS", 302, 763, 1024, 512, tp=8, pp=8, vp=8, cp=2),
    _bridge("25.11", "H100 SXM", "405B", "CS", 292, 737, 1024, 512, tp=8, pp=8, vp=8, cp=2),
    _bridge("26.02", "H100 SXM", "405B", "CS", 311, 784, 1024, 1536, tp=8, pp=8, vp=8, cp=2),
    _nemo("2-7B", 16847, 776, 8, 128, 4096),
    _nemo("2-13B", 8646, 754, 16, 128, 4096, pp=4, vp=10),
    _nemo("2-70B", 1707, 759, 64, 128, 4096, tp=4, pp=4, vp=20),
    _nemo("3-8B", 12036, 697, 8, 128, cp=2),
    _nemo("3-70B", 1533, 738, 64, 128, tp=4, pp=4, vp=5, cp=2),
    _long(4096, 16671, 768, 4),
    _long(8192, 13907, 730, 8, pp=2, vp=None),
    _long(16384, 10082, 660, 16, tp=2),
    _long(32768, 6687, 610, 32, tp=2, cp=2),
    _long(65536, 4021, 574, 64, tp=4, cp=2),
    _long(131072, 2260, 555, 128, tp=4, cp=4),
    _long(262144, 1214, 549, 256, tp=4, cp=8),
    _long(524288, 635, 549, 512, tp=8, cp=16),
    _long(1048576, 318, 536, 1024, tp=8, cp=32),
    _dgxc("3-8B", "bf16", 10153, 12.91, 8, 128, cp=2),
    _dgxc("3-8B", "FP8", 13555, 9.67, 8, 128, cp=2),
    _dgxc("3-70B", "bf16", 1113, 14.72, 64, 128, tp=4, pp=4, vp=5, cp=2),
    _dgxc("3-70B", "FP8", 1488, 11.01, 64, 128, tp=4, pp=4, vp=5, cp=2),
    _dgxc("405B", "bf16", 208, 17.20, 576, 252, tp=8, pp=9, vp=7, cp=2),
    _dgxc("405B", "FP8", 319, 11.24, 576, 252, tp=8, pp=9, vp=7, cp=2),
)

_FLOAT8_BLOG = _IBM_70B.source.replace("table 3", "table 1")
_COMPILE_BLOG = (
    "pytorch/pytorch.github.io _posts/2024-05-21-maximizing-training-throughput.md; Llama 2, MFU"
)
_GATHERED = "tensorwise float8 with float8 gathers over bf16, both compiled"
_COMPILED = "compiled over eager, bf16"
_MI355X_BLOG = "ROCm blog, ROCm 7 on MI355X, 2025-12-02 @ 7552dae"
_BEST = "each with its best batch and checkpointing"
RATIOS = (
    PublishedRatio(
        "IBM 1.8B",
        _FLOAT8_BLOG,
        "1.8B",
        "H100 SXM",
        "FSDP on 128 or 256",
        1.18,
        1.18,
        _GATHERED,
        "29K and 35K tokens/s; model dimensions not published; " + _BEST,
    ),
    PublishedRatio(
        "IBM 8B",
        _FLOAT8_BLOG,
        "3-8B",
        "H100 SXM",
        "FSDP on 128 or 256",
        1.28,
        1.28,
        _GATHERED,
        "8K and 10K tokens/s; " + _BEST,
    ),
    PublishedRatio(
        "IBM 70B",
        _FLOAT8_BLOG,
        "3-70B",
        "H100 SXM",
        "FSDP on 128 or 256",
        1.50,
        1.50,
        _GATHERED,
        "956 and 1,430 tokens/s; " + _BEST,
    ),
    PublishedRatio(
        "IBM 405B",
        _FLOAT8_BLOG,
        "405B",
        "H100 SXM",
        "FSDP, TP 4 on 128 or 256",
        1.52,
        1.52,
        _GATHERED,
        "149 and 227 tokens/s; " + _BEST,
    ),
    PublishedRatio(
        "Meta 70B 128",
        "dev-discuss.pytorch.org 2359, float8 all-gather in FSDP2",
        "3-70B",
        "H100 SXM",
        "FSDP on 128",
        1.50,
        1.50,
        _GATHERED,
        "a fifth of the gain is the gather's; batch and checkpointing not published",
    ),
    PublishedRatio(
        "Crusoe H200 70B",
        "pytorch/pytorch.github.io _posts/2025-04-28-accelerating-"
        "training-float8-rowwise-crusoe.md @ e79f441",
        "3-70B",
        "H200",
        "HSDP 2 and CP on 960 to 1,920",
        1.34,
        1.43,
        "rowwise over bf16, both compiled",
        "1.305 for the deterministic pair (31 h 19 min and 24 h); context parallel",
    ),
    PublishedRatio(
        "Crusoe B200 70B",
        "PyTorch blog, MXFP8 on Crusoe B200, 2025-09",
        "3-70B",
        "B200",
        "HSDP, CP 2 on 32 to 1,856",
        1.22,
        1.28,
        "mxfp8 over bf16",
        "context parallel; a draft (pytorch/torchtitan#1350) said about 1.19",
    ),
    PublishedRatio(
        "#1319 70B",
        "pytorch/torchtitan#1319",
        "70B",
        "H100 SXM",
        "FSDP 32 x TP 8",
        1.10,
        1.10,
        "rowwise without wk and wv over bf16, plain TP",
        "1.15 with async TP over bf16 with plain TP; rounded",
    ),
    PublishedRatio(
        "#866 async TP",
        "pytorch/torchtitan#866",
        "70B",
        "H100 SXM",
        "FSDP 128 x TP 2, full checkpointing",
        1.23,
        1.23,
        "async TP over plain TP, bf16",
        "model and GPUs approximate; rowwise gained nothing there",
    ),
    PublishedRatio(
        "user's 8B pair",
        "not found",
        "8B",
        "H100 SXM",
        "FSDP 8",
        1.234,
        1.234,
        _GATHERED,
        "6,297 and 7,773 tokens/s; its source is unverified",
    ),
    PublishedRatio(
        "IBM compile 7B",
        _COMPILE_BLOG,
        "2-7B",
        "H100 SXM",
        "464 GPUs",
        1.21,
        1.21,
        _COMPILED,
        "0.37 and 0.45 of the peak",
    ),
    PublishedRatio(
        "IBM compile 13B",
        _COMPILE_BLOG,
        "2-13B",
        "H100 SXM",
        "464 GPUs",
        1.23,
        1.23,
        _COMPILED,
        "0.35 and 0.43 of the peak",
    ),
    PublishedRatio(
        "IBM compile 34B",
        _COMPILE_BLOG,
        "2-34B",
        "H100 SXM",
        "464 GPUs",
        1.19,
        1.19,
        _COMPILED,
        "0.32 and 0.38 of the peak",
    ),
    PublishedRatio(
        "IBM compile 70B",
        _COMPILE_BLOG,
        "2-70B",
        "H100 SXM",
        "464 GPUs",
        1.19,
        1.19,
        _COMPILED,
        "0.32 and 0.38 of the peak",
    ),
    PublishedRatio(
        "AMD 8B FP8",
        _MI355X_BLOG,
        "3-8B",
        "MI355X",
        "8 GPUs, batch 8 each",
        1.08,
        1.08,
        "MI355X over B200, FP8, Primus-Megatron",
        "the vendor's own comparison",
    ),
    PublishedRatio(
        "AMD 8B bf16",
        _MI355X_BLOG,
        "3-8B",
        "MI355X",
        "8 GPUs, batch 8 each",
        1.02,
        1.02,
        "MI355X over B200, bf16, Primus-Megatron",
        "the vendor's own comparison",
    ),
    PublishedRatio(
        "AMD 70B FP8",
        _MI355X_BLOG,
        "3-70B",
        "MI355X",
        "8 GPUs",
        1.00,
        1.00,
        "MI355X over B200, FP8, Primus-TorchTitan",
        "the vendor's own comparison",
    ),
    PublishedRatio(
        "AMD 70B bf16",
        _MI355X_BLOG,
        "3-70B",
        "MI355X",
        "8 GPUs",
        1.16,
        1.16,
        "MI355X over B200, bf16, Primus-TorchTitan",
        "the vendor's own comparison",
    ),
)
