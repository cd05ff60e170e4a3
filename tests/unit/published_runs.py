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
    """A name of metrics/devices.py."""
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
    """Of recipes.RECIPES, the nearest, or "bf16"; `published_recipe` has the source's name where it differs."""
    published_recipe: str = ""
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
    def unsupported(self) -> str:
        """Parallelisms that the planner does not have; "" for a run that it can plan."""
        degrees = {"context": self.cp, "pipeline": self.pp}
        return ", ".join(f"{name} {degree}" for name, degree in degrees.items() if degree > 1)


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
_T2024 = PublishedRun(
    name="T2024 8B 8 eager",
    source="pytorch/torchtitan benchmarks/llama3_h100_202412_torchtitan.md @ 31a17bf, table 1",
    framework="torchtitan 9dec370, torch 1963fc8, torchao eab345c (2024-12)",
    model="8B",
    device="H100 SXM",
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
    _T2024, name="T2024 8B 128 eager", gpus=128, dp_shard=128, tps=5605, source="the same, table 3"
)
_T2024_TP = replace(
    _T2024,
    name="T2024 70B 256 TP 8 float8",
    source="the same, table 4",
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
    source="the same, table 5",
    model="405B",
    gpus=512,
    dp_shard=8,
    pp=8,
    async_tp=True,
    local_batch_size=32,
    tps=100,
)
_T2024_4D = replace(
    _T2024_PP,
    name="T2024 405B 512 TP 8 PP 8 32K",
    source="the same, table 6",
    local_batch_size=8,
    seq_len=32768,
    tps=76,
)
_T2024_CP = replace(
    _T2024,
    name="T2024 8B 8 32K float8",
    source="the same, table 2",
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
    device="H100 SXM",
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
    device="H100 SXM",
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
    device="H100 SXM",
    gpus=4,
    dp_shard=2,
    tp=2,
    tps=5378,
    doubt="batch 1, 8192 tokens and compile are not said: config defaults, and float8's need; "
    "the machine is not named (45.68 GiB of peak memory)",
)
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
    device="H100 SXM",
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
    device="H100 SXM",
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

# NVIDIA: Megatron-Bridge and NeMo. Vocabulary padded, synthetic data.
_BRIDGE = "NVIDIA-NeMo/Megatron-Bridge docs/performance-summary-archive.md @ 0a25f91"
_CONFIGS = "scripts/performance/configs at 0fa501a, near the release, "
_CS: dict[str, Any] = {
    "recipe": "tensorwise",
    "published_recipe": "FP8-CS, per-tensor current scaling",
    "float8_gather": True,
}
_MX: dict[str, Any] = {
    "recipe": "mxfp8",
    "published_recipe": "FP8-MX, 32 x 1 blocks",
    "float8_gather": True,
}
_B200_8B = PublishedRun(
    name="Bridge 25.11 B200 8B CS",
    source=_BRIDGE + ", 25.11",
    framework="Megatron-Bridge, NeMo 25.11",
    model="3-8B",
    device="B200",
    gpus=8,
    dp_replicate=8,
    sharding="optimizer",
    local_batch_size=2,
    accumulation=8,
    checkpointing="none",
    compiled=False,
    attention="cuDNN through Transformer Engine",
    optimizer=MEGATRON_OPTIMIZER,
    flops="causal",
    tps=30624,
    tflops=1576,
    doubt=_CONFIGS + "replay a step as a CUDA graph; the recipe keeps the first and last block in "
    "bf16 (mixed_precision.py) unless turned off; no recomputation is named there",
    **_CS,
)
_GB200_8B = replace(
    _B200_8B,
    name="Bridge 25.11 GB200 8B CS",
    device="GB200",
    gpus_per_node=None,
    fabric="NVLink of NVL72",
    tps=31508,
    tflops=1622,
)
_GB300_8B = replace(
    _GB200_8B,
    name="Bridge 25.11 GB300 8B CS",
    device="GB300",
    tps=37556,
    tflops=1933,
    doubt=_B200_8B.doubt + "; they have microbatches of 4, the table of 2",
)
_H100_8B = replace(
    _B200_8B,
    name="Bridge 25.11 H100 8B CS",
    device="H100 SXM",
    dp_replicate=1,
    dp_shard=8,
    sharding="fsdp",
    local_batch_size=1,
    accumulation=16,
    tps=14451,
    tflops=744,
    doubt=_CONFIGS
    + "use Megatron's FSDP with registered buffers and keep float8 transposes; later "
    "recipes for this row are described as recomputing; first and last block perhaps in bf16",
)
_GB200_70B = replace(
    _GB200_8B,
    name="Bridge 25.11 GB200 70B CS",
    model="3-70B",
    gpus=64,
    dp_replicate=1,
    dp_shard=64,
    sharding="fsdp",
    accumulation=2,
    tps=4312,
    tflops=1937,
    doubt=_CONFIGS + "offload activations of 40 of 80 blocks to the CPU (20 on GB300); a draft of "
    "the table has the same rate with one microbatch; first and last block perhaps in bf16",
)
_GB300_70B = replace(
    _GB200_70B, name="Bridge 25.11 GB300 70B CS", device="GB300", tps=4520, tflops=2030
)
_GB200_405B = replace(
    _GB200_70B,
    name="Bridge 25.09 GB200 405B TP 2 CS",
    source=_BRIDGE + ", 25.09",
    model="405B",
    gpus=128,
    tp=2,
    async_tp=True,
    local_batch_size=1,
    accumulation=1,
    tps=729,
    tflops=1840,
    doubt=_CONFIGS + "offload activations of 95 of 126 blocks to the CPU (10 on GB300); FP8-CS "
    "inferred, the table of 25.09 has no column for it",
)
_DRAFT = "a draft of the 25.11 table (stored file 33752608522), replaced in the release"


def _at(run: PublishedRun, name: str, tps: float, tflops: float, **changes: Any) -> PublishedRun:
    return replace(run, name=name, tps=tps, tflops=tflops, **changes)


_2509: dict[str, Any] = {"source": _BRIDGE + ", 25.09", "framework": "Megatron-Bridge, NeMo 25.09"}
_2602: dict[str, Any] = {"source": _BRIDGE + ", 26.02", "framework": "Megatron-Bridge, NeMo 26.02"}
_2604: dict[str, Any] = {
    "source": "NVIDIA-NeMo/Megatron-Bridge docs/performance-summary.md (stored file 51905015924), "
    "26.04",
    "framework": "Megatron-Bridge, NeMo 26.04",
}

_NEMO = PublishedRun(
    name="NeMo 24.07 H100 2-7B",
    source="NVIDIA/NeMo docs/source/performance/performance_summary.md @ 070a0bb",
    framework="NeMo 24.07",
    model="2-7B",
    device="H100 SXM",
    gpus=8,
    dp_replicate=8,
    sharding="optimizer",
    seq_len=4096,
    accumulation=16,
    checkpointing="none",
    compiled=False,
    recipe="tensorwise",
    published_recipe="FP8, delayed scaling inferred: NeMo's default then",
    float8_gather=None,
    attention="cuDNN or FlashAttention through Transformer Engine",
    optimizer=MEGATRON_OPTIMIZER,
    flops="full",
    tps=16847,
    tflops=776,
    doubt="other commits have 16,934 and 16,634; checkpointing not published",
)
_NEMO_LONG = replace(
    _NEMO,
    name="NeMo 24.03 H100 2-7B 16K TP 2",
    gpus=16,
    tp=2,
    seq_len=16384,
    accumulation=32,
    source="NVIDIA/NeMo docs/source/performance (stored file 28718048417), long sequences",
    framework="NeMo 24.03.01",
    async_tp=True,
    tps=10082,
    tflops=660,
    doubt="overlap of tensor parallelism and checkpointing not published",
)

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
    *_recipes(_TP2, rowwise=5189),
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
    _B200_8B,
    _at(_B200_8B, "Bridge 25.11 B200 8B MX", 29521, 1519, **_MX),
    _at(_B200_8B, "Bridge 25.09 B200 8B CS", 29994, 1544, **_2509),
    _at(_B200_8B, "Bridge 25.09 B200 8B MX", 29388, 1513, **_2509, **_MX),
    _GB200_8B,
    _at(_GB200_8B, "Bridge 25.11 GB200 8B MX", 29789, 1533, **_MX),
    _at(_GB200_8B, "Bridge 25.09 GB200 8B CS", 31357, 1614, **_2509),
    _at(_GB200_8B, "Bridge 25.09 GB200 8B MX", 29925, 1540, **_2509, **_MX),
    _GB300_8B,
    _at(_GB300_8B, "Bridge 25.11 GB300 8B MX", 36108, 1858, **_MX),
    _H100_8B,
    _at(_H100_8B, "Bridge 25.09 H100 8B CS", 14079, 725, **_2509),
    _GB200_70B,
    _at(_GB200_70B, "Bridge 25.09 GB200 70B CS", 3986, 1791, accumulation=1, **_2509),
    _at(_GB200_70B, "Bridge 26.02 GB200 70B CS", 4040, 1815, **_2602),
    _at(_GB200_70B, "Bridge 26.04 GB200 70B CS", 4143, 1861, **_2604),
    _GB300_70B,
    _at(_GB300_70B, "Bridge 26.02 GB300 70B CS", 5003, 2248, **_2602),
    _at(_GB300_70B, "Bridge 26.04 GB300 70B CS", 5243, 2355, **_2604),
    _GB200_405B,
    _at(_GB200_405B, "Bridge 25.11 GB200 405B TP 2 CS", 706, 1782, source=_DRAFT),
    _at(_GB200_405B, "Bridge 25.11 GB300 405B TP 2 CS", 850, 2145, source=_DRAFT, device="GB300"),
    _NEMO,
    replace(
        _NEMO,
        name="NeMo 24.03 H100 2-7B 4",
        source=_NEMO_LONG.source,
        gpus=4,
        dp_replicate=4,
        accumulation=256,
        framework="NeMo 24.03.01",
        tps=16671,
        tflops=768,
        doubt="",
    ),
    _NEMO_LONG,
)
"""Runs that the planner can plan."""

# Runs with context or pipeline parallelism.
_B200_405B = replace(
    _GB200_405B,
    name="Bridge 25.11 B200 405B CS",
    source=_BRIDGE + ", 25.11",
    device="B200",
    gpus_per_node=8,
    fabric=None,
    gpus=128,
    dp_replicate=2,
    dp_shard=1,
    tp=4,
    cp=2,
    pp=8,
    sharding="optimizer",
    accumulation=32,
    tps=661,
    tflops=1667,
    doubt=_CONFIGS.removesuffix(", ") + ": not compared for this row",
)
_H100_70B = replace(
    _B200_405B,
    name="Bridge 25.11 H100 70B CS",
    model="3-70B",
    device="H100 SXM",
    gpus=64,
    cp=1,
    accumulation=64,
    tps=1602,
    tflops=719,
)
_H100_405B = replace(
    _B200_405B,
    name="Bridge 25.11 H100 405B CS",
    device="H100 SXM",
    gpus=1024,
    dp_replicate=8,
    tp=8,
    accumulation=64,
    tps=292,
    tflops=737,
)
_GB200_405B_PP = replace(
    _B200_405B,
    name="Bridge 25.11 GB200 405B CS",
    device="GB200",
    gpus_per_node=None,
    fabric="NVLink of NVL72",
    gpus=256,
    dp_replicate=4,
    cp=1,
    pp=16,
    accumulation=384,
    tps=813,
    tflops=2053,
)
_GB300_405B_PP = replace(
    _GB200_405B_PP,
    name="Bridge 25.11 GB300 405B CS",
    device="GB300",
    dp_replicate=8,
    tp=2,
    cp=2,
    pp=8,
    accumulation=192,
    tps=999,
    tflops=2522,
)
_NEMO_8B = replace(
    _NEMO,
    name="NeMo 24.07 H100 8B CP 2",
    model="3-8B",
    seq_len=8192,
    dp_replicate=4,
    cp=2,
    accumulation=32,
    tps=12036,
    tflops=697,
    doubt="checkpointing not published",
)
_DGXC = replace(
    _NEMO_8B,
    name="dgxc 24.09 H100 8B CP 2 bf16",
    framework="NeMo 24.09",
    source="NVIDIA/dgxc-benchmarking llama3.1/README_8b.md, _70b.md, _405b.md @ 143b90d",
    recipe="bf16",
    published_recipe="",
    float8_gather=False,
    tps=10153,
    tflops=None,
    flops=None,
    step_s=12.91,
)
_DGXC_70B = replace(
    _DGXC,
    name="dgxc 24.09 H100 70B TP 4 PP 4 CP 2 bf16",
    model="3-70B",
    gpus=64,
    dp_replicate=2,
    tp=4,
    pp=4,
    accumulation=64,
    step_s=14.72,
    tps=1113,
)
_DGXC_405B = replace(
    _DGXC,
    name="dgxc 24.09 H100 405B TP 8 PP 9 CP 2 bf16",
    model="405B",
    gpus=576,
    dp_replicate=4,
    tp=8,
    pp=9,
    accumulation=63,
    step_s=17.20,
    tps=208,
)


def _fp8(bf16: PublishedRun, step_s: float, tps: float) -> PublishedRun:
    """Return NeMo's FP8 run beside the bf16 one."""
    name = bf16.name.removesuffix("bf16") + "FP8"
    return replace(
        bf16,
        name=name,
        step_s=step_s,
        tps=tps,
        float8_gather=None,
        baseline=bf16.name,
        recipe="tensorwise",
        published_recipe=_NEMO.published_recipe,
    )


OUT_OF_REACH = (
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
    replace(_T2024_PP, name="T2024 405B 512 TP 8 PP 8 interleaved", tps=128),
    _T2024_4D,
    replace(_T2024_4D, name="T2024 405B 512 CP 2 64K", dp_shard=4, cp=2, seq_len=65536, tps=47),
    replace(_T2024_4D, name="T2024 405B 512 CP 4 128K", dp_shard=2, cp=4, seq_len=131072, tps=31),
    replace(_T2024_4D, name="T2024 405B 512 CP 8 256K", dp_shard=1, cp=8, seq_len=262144, tps=16),
    _H100_70B,
    _at(_H100_70B, "Bridge 25.09 H100 70B CS", 1619, 727, **_2509),
    _at(_H100_70B, "Bridge 26.02 H100 70B CS", 1621, 728, accumulation=128, **_2602),
    _at(_H100_70B, "Bridge 26.04 H100 70B CS", 1633, 734, accumulation=128, **_2604),
    _H100_405B,
    _at(_H100_405B, "Bridge 25.09 H100 405B CS", 302, 763, **_2509),
    _at(_H100_405B, "Bridge 26.02 H100 405B CS", 311, 784, accumulation=192, **_2602),
    _B200_405B,
    _at(_B200_405B, "Bridge 25.11 B200 405B MX", 624, 1576, **_MX),
    _at(_B200_405B, "Bridge 25.09 B200 405B CS", 664, 1676, **_2509),
    _at(_B200_405B, "Bridge 25.09 B200 405B MX", 622, 1569, **_2509, **_MX),
    _GB200_405B_PP,
    _at(_GB200_405B_PP, "Bridge 26.02 GB200 405B CS", 793, 2004, **_2602),
    _at(_GB200_405B_PP, "Bridge 26.02 GB200 405B MX", 786, 1983, **_2602, **_MX),
    _at(_GB200_405B_PP, "Bridge 26.04 GB200 405B CS", 842, 2126, **_2604),
    _at(_GB200_405B_PP, "Bridge 26.04 GB200 405B MX", 793, 2002, **_2604, **_MX),
    _GB300_405B_PP,
    _at(_GB300_405B_PP, "Bridge 26.02 GB300 405B MX", 931, 2349, **_2602, **_MX),
    _at(_GB300_405B_PP, "Bridge 26.04 GB300 405B MX", 968, 2443, **_2604, **_MX),
    _NEMO_8B,
    replace(
        _NEMO_8B,
        name="NeMo 24.07 H100 70B TP 4 PP 4 CP 2",
        model="3-70B",
        gpus=64,
        dp_replicate=2,
        tp=4,
        pp=4,
        accumulation=64,
        tps=1533,
        tflops=738,
    ),
    replace(
        _NEMO,
        name="NeMo 24.07 H100 2-13B PP 4",
        model="2-13B",
        gpus=16,
        dp_replicate=4,
        pp=4,
        accumulation=32,
        tps=8646,
        tflops=754,
        doubt=_NEMO_8B.doubt,
    ),
    replace(
        _NEMO,
        name="NeMo 24.07 H100 2-70B TP 4 PP 4",
        model="2-70B",
        gpus=64,
        dp_replicate=4,
        tp=4,
        pp=4,
        accumulation=32,
        tps=1707,
        tflops=759,
        doubt=_NEMO_8B.doubt,
    ),
    _DGXC,
    _fp8(_DGXC, 9.67, 13555),
    _DGXC_70B,
    _fp8(_DGXC_70B, 11.01, 1488),
    _DGXC_405B,
    _fp8(_DGXC_405B, 11.24, 319),
)
"""Runs with parallelism that the planner does not have; `unsupported` names it."""

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
        "not found in any stored copy",
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
