"""The rows of the benchmark: which runs, how many layers of each fit the device, what they should
reach, how long they should take. Computed on meta, before anything runs. A hub."""

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from unittest import mock

from torchtitan_lite.config import (
    ActivationCheckpointConfig,
    CompileConfig,
    Config,
    Float8Config,
    JobConfig,
    MetricsConfig,
    ModelConfig,
    OptimizerConfig,
    ProfilingConfig,
    TrainingConfig,
    resolve_degrees,
)
from torchtitan_lite.data.tokenizer import build_tokenizer
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.float8.selection import LinearChoice
from torchtitan_lite.logger import logger
from torchtitan_lite.metrics.devices import DeviceSpec, lookup_device
from torchtitan_lite.metrics.flops import Precision
from torchtitan_lite.models.flavors import FLAVORS, ModelArgs
from torchtitan_lite.planner.memory import reserved_bytes
from torchtitan_lite.planner.meta_model import (
    bf16_rates,
    build_meta_model,
    device_rates,
    estimate_memory,
    predict_step,
)
from torchtitan_lite.planner.roofline import DeviceRates

BF16 = "bf16"
"""The recipe of a row that has no float8, and that the others are held against."""
RECIPES = (BF16, "tensorwise", "rowwise", "rowwise_with_gw_hp")
BF16_STATES: dict[str, Any] = {"state_dtype": "bfloat16"}
"""Keys of [optimizer] that the 8B rows set, so that more layers fit."""
USABLE_SHARE = 0.98
"""Of a data sheet's memory, what the driver leaves."""
PROFILE_FREQ, PROFILE_STEPS = 3, 9
"""A profiled run has nine steps and writes a trace of every third; the first of the three is left
out, as warm-up."""


@dataclass(frozen=True)
class Shape:
    """A model and the sequences that it trains on."""

    name: str
    args: ModelArgs
    """With all layers."""
    seq_len: int
    optimizer: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Keys of [optimizer]."""


LLAMA_8B = Shape("8B", FLAVORS["8B"], 8192, BF16_STATES)
LLAMA_1B = Shape(
    "1B", ModelArgs(dim=2048, n_layers=16, n_heads=32, n_kv_heads=8, ffn_dim=8192), 8192
)
DEBUG = Shape("debug", FLAVORS["debugmodel"], 256)
SMALL_DEBUG = Shape("debug", FLAVORS["debugmodel_4layers"], 128)


@dataclass(frozen=True)
class Group:
    """Rows that are alike but for the recipe: one comparison."""

    shape: Shape
    checkpoint: str
    """"none", "full", or "op" for the selective mode's policy of that name."""
    batch: int
    """Sequences in a step."""
    compiled: bool
    recipes: Sequence[str] = RECIPES

    @property
    def settings(self) -> tuple[str, str, int]:
        """What it has in common with the groups that have as many layers."""
        return self.shape.name, self.checkpoint, self.batch


PAIR = RECIPES[:2]
GPU_GROUPS = (
    Group(LLAMA_8B, "op", 1, True),
    Group(LLAMA_8B, "op", 1, False, PAIR),
    Group(LLAMA_8B, "none", 1, True, PAIR),
    Group(LLAMA_1B, "none", 2, True, PAIR),
    Group(DEBUG, "none", 8, True, PAIR),
    Group(LLAMA_8B, "op", 2, True, PAIR),
    Group(LLAMA_8B, "full", 1, True, PAIR),
    Group(LLAMA_8B, "none", 2, True, PAIR),
    Group(LLAMA_8B, "full", 2, True, PAIR),
    *(
        Group(LLAMA_8B, checkpoint, batch, compiled)
        for compiled in (True, False)
        for batch in (1, 2)
        for checkpoint in ("op", "none", "full")
    ),
)
QUICK_GPU_GROUPS = (Group(LLAMA_8B, "op", 1, True, PAIR), Group(DEBUG, "none", 8, True, PAIR))
CPU_GROUPS = (
    Group(DEBUG, "none", 2, False),
    Group(DEBUG, "none", 2, True, PAIR),
    Group(DEBUG, "op", 2, False, PAIR),
    Group(DEBUG, "full", 2, False, PAIR),
    Group(DEBUG, "none", 1, False, PAIR),
    Group(DEBUG, "none", 2, True),
    Group(DEBUG, "op", 2, True, PAIR),
    Group(DEBUG, "full", 2, True, PAIR),
)
QUICK_CPU_GROUPS = tuple(
    Group(SMALL_DEBUG, "none", 1, compiled, PAIR) for compiled in (False, True)
)
"""By what is in a matrix, the most important first. A row that stands twice runs once."""


@dataclass(frozen=True)
class Device:
    """What the rows run on, or are planned for."""

    name: str
    memory_gib: float | None
    """None on CPU, where nothing is left out to fit."""
    float8: bool
    """Whether it multiplies float8 matrices; on CPU, where they are emulated, it does not."""
    ceilings: Mapping[Precision, float] = dataclasses.field(default_factory=dict)
    """TFLOPS that matmuls reach on it; empty where there is no device to measure."""

    @property
    def on_cpu(self) -> bool:
        """Whether it is no GPU."""
        return self.memory_gib is None

    @cached_property
    def rates(self) -> DeviceRates | None:
        """What the roofline needs, None where that is not known. A device without float8 has only
        bf16 rows."""
        spec = lookup_device(self.name)
        if spec is None:
            return None
        return device_rates(spec, MetricsConfig()) or bf16_rates(spec, spec.bf16_tflops)


def planned_device(spec: DeviceSpec) -> Device:
    """The device of a data sheet, which need not be there."""
    return Device(spec.name, USABLE_SHARE * spec.memory_gib, spec.fp8_tflops is not None)


@dataclass(frozen=True)
class Row:
    """A run of the benchmark."""

    shape: Shape
    layers: int
    checkpoint: str
    batch: int
    compiled: bool
    recipe: str
    warmup_steps: int
    """Left out of every figure: the first of them compiles."""
    measured_steps: int

    @property
    def name(self) -> str:
        """All that tells it from other rows, also from those of another device."""
        compiled = "compiled" if self.compiled else "eager"
        shape = f"{self.shape.name} {self.layers}L seq{self.shape.seq_len} b{self.batch}"
        return f"{shape} {self.checkpoint} {compiled} {self.recipe}"

    @property
    def flavor(self) -> str:
        """What its run calls the model."""
        return f"bench-{self.shape.name}-{self.layers}"

    @property
    def args(self) -> ModelArgs:
        """The model's dimensions, with as many layers as the row has."""
        return dataclasses.replace(self.shape.args, n_layers=self.layers)

    @property
    def steps(self) -> int:
        """Of the run."""
        return self.warmup_steps + self.measured_steps

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.batch * self.shape.seq_len

    def config(self, folder: str = "outputs", *, peak_tflops_bf16: float | None = None) -> Config:
        """The run's config. `peak_tflops_bf16` saves it from measuring that itself."""
        selective = self.checkpoint == "op"
        float8 = (
            {}
            if self.recipe == BF16
            else {"enable_float8_linear": True, "recipe_name": self.recipe}
        )
        return Config(
            job=JobConfig(dump_folder=folder),
            model=ModelConfig(flavor=self.flavor),
            optimizer=OptimizerConfig(**self.shape.optimizer),
            training=TrainingConfig(
                local_batch_size=self.batch,
                seq_len=self.shape.seq_len,
                steps=self.steps,
                gc_freq=self.steps + 1,
            ),
            activation_checkpoint=ActivationCheckpointConfig.model_validate(
                {"mode": "selective" if selective else self.checkpoint}
            ),
            compile=CompileConfig(enable=self.compiled),
            float8=Float8Config.model_validate(float8),
            metrics=MetricsConfig(enable_tensorboard=False, peak_tflops_bf16=peak_tflops_bf16),
        )


def profiled(config: Config) -> Config:
    """`config` of a run that writes traces."""
    profiling = ProfilingConfig(enable_profiling=True, profile_freq=PROFILE_FREQ)
    training = config.training.model_copy(update={"steps": PROFILE_STEPS})
    return config.model_copy(update={"profiling": profiling, "training": training})


@dataclass(frozen=True)
class Forecast:
    """What a row should come to."""

    memory_gib: float | None
    """Reserved at the peak, by the estimate; None on CPU."""
    tps: float | None
    """By the roofline; None where it does not know the device."""
    flops_by_precision: Mapping[Precision, int]
    """Of a token."""
    step_s: float
    overhead_s: float
    """From the fork to the end, besides the steps: the start and compilation."""


@dataclass(frozen=True)
class Timing:
    """How long runs are taken to need, until some have run."""

    start_s: float
    """From the fork to the first step, and from the last to the end."""
    compile_s: float
    utilisation: float
    """Of the matmul ceilings, where the roofline does not know the device."""


GPU_TIMING = Timing(start_s=9.0, compile_s=24.0, utilisation=0.4)
CPU_TIMING = Timing(start_s=1.5, compile_s=20.0, utilisation=0.15)


def forecast(row: Row, device: Device) -> Forecast:
    """What `row` should come to on `device`."""
    config, args, timing = row.config(), row.args, CPU_TIMING if device.on_cpu else GPU_TIMING
    args = dataclasses.replace(
        args,
        vocab_size=args.vocab_size or build_tokenizer("").vocab_size,
        max_seq_len=row.shape.seq_len,
    )
    with mock.patch.object(logger, "disabled", True):  # for each row the same as for the one before
        meta = build_meta_model(
            config,
            args,
            tp_degree=1,
            emulate=device.on_cpu,
            fused_attention=True,
            rates=device.rates,
        )
    degrees, tps = resolve_degrees(config.parallelism, world_size=1), None
    if device.rates is not None:
        tps = (
            row.tokens
            / predict_step(config, args, meta, degrees=degrees, rates=device.rates).float8.seconds
        )
    slowest = min(device.ceilings.values(), default=100.0)
    step_s = (
        meta.ledger.total * row.tokens / (timing.utilisation * slowest * 1e12)
        if tps is None
        else row.tokens / tps
    )
    memory_gib = None
    if not device.on_cpu:
        memory_gib = _reserved_gib(config, args, meta.choices)
    return Forecast(
        memory_gib,
        tps,
        meta.ledger.by_precision,
        step_s=step_s,
        overhead_s=timing.start_s + timing.compile_s * row.compiled,
    )


def _reserved_gib(config: Config, args: ModelArgs, choices: Iterable[LinearChoice]) -> float:
    """GiB that a GPU reserves at the peak of a step of `config`, with the dimensions `args`."""
    degrees = resolve_degrees(config.parallelism, world_size=1)
    return reserved_bytes(estimate_memory(config, args, choices, degrees=degrees)) / 2**30


def fitting_layers(
    shape: Shape, checkpoint: str, batch: int, modes: Collection[bool], device: Device
) -> int:
    """The most layers of `shape` with which bf16 fits the device in each of the `modes`, compiled
    or not; 0 if none do. Float8's linears keep no more. One number for all rows of that
    checkpointing and batch, so that their ratios mean something."""
    if device.memory_gib is None:
        return shape.args.n_layers
    for layers in range(shape.args.n_layers, 0, -1):
        rows = [Row(shape, layers, checkpoint, batch, compiled, BF16, 1, 1) for compiled in modes]
        args = dataclasses.replace(
            rows[0].args, vocab_size=shape.args.vocab_size or build_tokenizer("").vocab_size
        )
        if max(_reserved_gib(row.config(), args, ()) for row in rows) <= device.memory_gib:
            return layers
    return 0


def plan_rows(device: Device, *, quick: bool, only: str = "") -> tuple[list[Row], dict[str, str]]:
    """The rows to run on `device`, the most important first, and why others cannot, by what they
    are. Of those whose names hold every word of `only`. Raises ConfigError if there are none."""
    if device.on_cpu:
        groups, steps = (QUICK_CPU_GROUPS, (2, 20)) if quick else (CPU_GROUPS, (2, 10))
    else:
        groups, steps = (QUICK_GPU_GROUPS, (2, 6)) if quick else (GPU_GROUPS, (2, 8))
    modes: dict[tuple[str, str, int], set[bool]] = {}
    for group in groups:
        modes.setdefault(group.settings, set()).add(group.compiled)
    rows: dict[str, Row] = {}
    skipped: dict[str, str] = {}
    for group in groups:
        layers = fitting_layers(
            group.shape, group.checkpoint, group.batch, modes[group.settings], device
        )
        for recipe in group.recipes:
            row = Row(
                group.shape, layers, group.checkpoint, group.batch, group.compiled, recipe, *steps
            )
            if recipe != BF16 and not (device.float8 or device.on_cpu):
                skipped[row.name] = f"the {device.name} has no float8 matrix units"
            elif layers == 0:
                skipped[row.name] = (
                    f"not one layer fits the {device.memory_gib:.0f} GiB of the {device.name}"
                )
            else:
                rows[row.name] = row
    words = only.split()
    chosen = [row for row in rows.values() if set(words) <= set(row.name.split())]
    if not chosen:
        raise ConfigError(
            f'--only "{only}" leaves no row: no name has all these words; the names are\n'
            + "\n".join(rows or skipped)
        )
    return chosen, {name: why for name, why in skipped.items() if set(words) <= set(name.split())}


def profiled_rows(rows: Iterable[Row]) -> list[Row]:
    """Those to take apart by a profiler: the most important float8 row, after the bf16 row of its
    comparison."""
    rows = list(rows)
    best = next((row for row in rows if row.recipe != BF16), None)
    if best is None:
        return rows[:1]
    return [*(row for row in rows if row == dataclasses.replace(best, recipe=BF16)), best]
