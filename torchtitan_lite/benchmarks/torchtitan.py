"""This framework against torchtitan 0.2.2, as a user meets both: each run under torchrun in turn,
and timed from outside, by the moments at which its lines of the log arrive. A hub."""

import json
import re
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path

from torchtitan_lite.benchmarks.comparable import FSDP_ALONE, check_only
from torchtitan_lite.benchmarks.estimates import Ratios, measure_pairs
from torchtitan_lite.benchmarks.processes import Watched, environment, torchrun, watch
from torchtitan_lite.config import Config, dump_config
from torchtitan_lite.data.tokenizer import build_tokenizer
from torchtitan_lite.errors import ConfigError, RunError
from torchtitan_lite.models.flavors import FLAVORS

STEP_LINE = re.compile(r"\bstep:?\s+(\d+)(?:/\d+)?\s+loss:?\s")
"""A line that tells of a step, of either framework."""
PARAMETERS = r"([\d,]+) (?:total )?parameters"
"""The number of parameters, as either framework tells it."""
WARM_UP_STEPS = 5
"""That are in no rate."""
LEAST_STEPS = 2 * WARM_UP_STEPS
"""Of a run."""
TIMEOUT_S = 900.0
"""For one run."""
THEIRS = {"float8.enable_float8_linear": (False,), "training.document_mask": (False,)}
"""The values, by key, that torchtitan has on CPU besides those of FSDP_ALONE."""


@dataclass(frozen=True)
class Figures:
    """What a run is measured by."""

    tps: float
    """Tokens per second per process, from the end of step WARM_UP_STEPS to that of the last."""
    first_step_s: float
    """From torchrun's launch to the end of the first step."""
    peak_mib: float
    """Resident memory of the largest process at its peak."""

    def __str__(self) -> str:
        """In a line."""
        return f"{self.tps:,.0f} tokens/s a process, step 1 after {self.first_step_s:.1f} s, {self.peak_mib:,.0f} MiB"


TITLES = {
    "tps": "tokens/s a process",
    "first_step_s": "launch to end of step 1, s",
    "peak_mib": "peak memory, MiB",
}


def figures(run: Watched, *, tokens: int) -> Figures:
    """Those of a run whose steps have `tokens` tokens a process. Raises RunError where its log does
    not show them."""
    ends: dict[int, float] = {}
    for seconds, line in run.lines:
        if match := STEP_LINE.search(line):
            ends.setdefault(
                int(match[1]), seconds
            )  # torchtitan's other ranks tell of the same step
    if sorted(ends) != list(range(1, len(ends) + 1)) or len(ends) < LEAST_STEPS:
        raise RunError(
            f"the log tells of steps {sorted(ends)}; expected 1, 2, ... up to {LEAST_STEPS} at least"
        )
    last = max(ends)
    return Figures(
        tokens * (last - WARM_UP_STEPS) / (ends[last] - ends[WARM_UP_STEPS]), ends[1], run.peak_mib
    )


def check_comparable(config: Config) -> None:
    """Raise ConfigError for what would not be the same in both frameworks."""
    if config.training.steps < LEAST_STEPS:
        raise ConfigError(
            f"[training] steps = {config.training.steps}: a rate is of the steps after the first {WARM_UP_STEPS}; "
            f"train {LEAST_STEPS} at least."
        )
    check_only(config, {**FSDP_ALONE, **THEIRS}, other="torchtitan on CPU")


def torchtitan_dimensions(config: Config) -> dict[str, float | int]:
    """torchtitan's model arguments for the model of `config`. It derives the width of the
    feed-forward from a multiple that it is rounded up to."""
    flavor = FLAVORS[config.model.flavor]
    return {
        "dim": flavor.dim,
        "n_layers": flavor.n_layers,
        "n_heads": flavor.n_heads,
        "n_kv_heads": flavor.n_kv_heads,
        "multiple_of": flavor.ffn_dim,
        "vocab_size": flavor.vocab_size or build_tokenizer(config.model.tokenizer_path).vocab_size,
        "norm_eps": flavor.norm_eps,
        "rope_theta": flavor.rope_theta,
    }


def torchtitan_options(config: Config) -> list[str]:
    """torchtitan's command line for what `config` asks for, with a line of the log and points of
    curves every step."""
    same = {
        "training": (
            *("local_batch_size", "global_batch_size", "seq_len", "max_norm", "steps", "gc_freq"),
            *("mixed_precision_param", "mixed_precision_reduce"),
        ),
        "optimizer": ("name", "lr", "beta1", "beta2", "eps", "weight_decay", "implementation"),
        "lr_scheduler": (
            "warmup_steps",
            "total_steps",
            "decay_ratio",
            "decay_type",
            "min_lr_factor",
        ),
        "parallelism": ("fsdp_reshard_after_forward",),
        "activation_checkpoint": ("mode", "selective_ac_option"),
    }
    values = {
        f"{table}.{key}": getattr(getattr(config, table), key)
        for table, keys in same.items()
        for key in keys
    }
    options = [f"--{name}={value}" for name, value in values.items() if value is not None]
    if config.compile.enable:
        options += [
            "--compile.enable",
            f"--compile.components={','.join(config.compile.components)}",
        ]
    return [
        *options,
        "--metrics.log_freq=1",
        "--metrics.enable_tensorboard",
        "--metrics.disable_color_printing",
    ]


@dataclass(frozen=True)
class Versus:
    """Runs of both frameworks, pair by pair."""

    ours: tuple[Figures, ...]
    theirs: tuple[Figures, ...]
    parameters: int
    """Of either's model."""

    def ratios(self, name: str) -> Ratios:
        """Our figures over theirs, pair by pair."""
        return Ratios.of(
            *([getattr(run, name) for run in runs] for runs in (self.ours, self.theirs))
        )

    def _median(self, whose: str, name: str) -> float:
        return statistics.median(getattr(run, name) for run in getattr(self, whose))

    def as_json(self) -> dict[str, object]:
        """Every figure, the ratios of the medians, and the medians of the ratios pair by pair."""
        return {
            **asdict(self),
            "ratio_of_medians": {
                name: self._median("ours", name) / self._median("theirs", name) for name in TITLES
            },
            "median_of_ratios": {name: self.ratios(name).median for name in TITLES},
        }

    def __str__(self) -> str:
        """A table."""
        head = f"{'':28}{'torchtitan_lite':>17}{'torchtitan':>12}{'ratio':>8}   pair by pair"
        rows = []
        for name, title in TITLES.items():
            ours, theirs = self._median("ours", name), self._median("theirs", name)
            rows.append(
                f"{title:28}{ours:>17,.1f}{theirs:>12,.1f}{ours / theirs:>8.2f}   {self.ratios(name)}"
            )
        return "\n".join([head, *rows])


class Rival:
    """Starts runs of both frameworks that do the same."""

    def __init__(
        self, config: Config, *, python: str, adapter: Path, processes: int, shard_one: bool
    ) -> None:
        """`python` has torchtitan, and `adapter` is scripts/torchtitan_cpu.py. With `shard_one`
        torchtitan shards its model on one process too, where by itself it trains under autocast."""
        check_comparable(config)
        self.config, self.processes = config, processes
        self.tokens = config.training.local_batch_size * config.training.seq_len
        if config.training.global_batch_size > 0:
            self.tokens = config.training.global_batch_size * config.training.seq_len // processes
        self._theirs = [
            str(adapter),
            json.dumps(torchtitan_dimensions(config)),
            *["--shard-one"] * shard_one,
        ]
        self._python = python

    def run_ours(self) -> Watched:
        """A run of this framework, by its own command."""
        with tempfile.TemporaryDirectory(prefix="versus-") as folder:
            path = Path(folder)
            (path / "config.toml").write_text(dump_config(self.config))
            words = ["-m", "torchtitan_lite.train", "--job.config_file", str(path / "config.toml")]
            words += ["--job.dump_folder", str(path / "run")]
            return self._watch(
                torchrun(sys.executable, *words, processes=self.processes), path, environment()
            )

    def run_theirs(self) -> Watched:
        """A run of torchtitan, through the adapter."""
        with tempfile.TemporaryDirectory(prefix="versus-") as folder:
            path = Path(folder)
            words = [
                *self._theirs,
                *torchtitan_options(self.config),
                f"--job.dump_folder={path / 'run'}",
            ]
            env = environment()
            env.pop("PYTHONPATH", None)  # it leads to what this Python has
            return self._watch(torchrun(self._python, *words, processes=self.processes), path, env)

    def _watch(self, command: list[str], path: Path, env: Mapping[str, str]) -> Watched:
        # Each compiles anew: what one had compiled before would else decide how soon its first step
        # ends.
        env = {**env, "TORCHINDUCTOR_CACHE_DIR": str(path / "compiled"), "NO_COLOR": "1"}
        return watch(command, env=env, timeout_s=TIMEOUT_S)

    def compare(self, *, pairs: int, tell: Callable[[str], None]) -> Versus:
        """`pairs` runs of each in alternating order, after one of each that is not counted: it
        finds files not yet read, and bytecode and token stores not yet made. Each run that ends is
        told of. Raises RunError where the models differ in size."""
        counts = [
            int(run().find(PARAMETERS).replace(",", "")) for run in (self.run_ours, self.run_theirs)
        ]
        if counts[0] != counts[1]:
            raise RunError(
                f"the models differ: {counts[0]:,} parameters here, {counts[1]:,} in torchtitan"
            )

        def measured(name: str, run: Callable[[], Watched]) -> Figures:
            result = figures(run(), tokens=self.tokens)
            tell(f"{name}: {result}")
            return result

        ours, theirs = measure_pairs(
            partial(measured, "torchtitan_lite", self.run_ours),
            partial(measured, "torchtitan", self.run_theirs),
            pairs=pairs,
        )
        return Versus(tuple(ours), tuple(theirs), counts[0])


assert TITLES.keys() == {field.name for field in fields(Figures)}, "each figure has a title"
