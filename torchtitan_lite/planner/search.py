"""Search for the fastest config of a model on a number of devices, among those that fit.

Every candidate is a config that training accepts, with the same global batch. Memory is estimated
before time, and a band only for what is shown.
"""

import math
from collections.abc import Collection, Hashable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any

from torchtitan_lite.base.errors import ConfigError
from torchtitan_lite.catalog.devices import DeviceSpec
from torchtitan_lite.catalog.flavors import OUTPUT
from torchtitan_lite.catalog.recipes import RECIPES
from torchtitan_lite.catalog.schedules import SCHEDULES
from torchtitan_lite.config import Config, check_config, resolve_batch, resolve_degrees
from torchtitan_lite.config.job import Job, TokenizerValues, build_job
from torchtitan_lite.float8.selection import AUTO

from .auto import find_fitting, kept_options, name_kept
from .refusals import check_planned
from .workload import Workload, build_workload, tokenizer_values

SHOWN = 5  # layouts in the answer
REPLICATE = "parallelism.data_parallel_replicate_degree"
SHARD = "parallelism.data_parallel_shard_degree"
CP = "parallelism.context_parallel_degree"  # not searched: the config's
TP = "parallelism.tensor_parallel_degree"
PP = "parallelism.pipeline_parallel_degree"
SCHEDULE = "parallelism.pipeline_parallel_schedule"
MICROBATCH = "parallelism.pipeline_parallel_microbatch_size"  # local_batch_size, where it is used
ASYNC_TP = "parallelism.enable_async_tensor_parallel"
LOCAL = "training.local_batch_size"
GLOBAL = "training.global_batch_size"
MODE = "activation_checkpoint.mode"
OPTION = "activation_checkpoint.selective_ac_option"
RESHARD = "parallelism.fsdp_reshard_after_forward"
FLOAT8 = "float8.enable_float8_linear"
RECIPE = "float8.recipe_name"
GATHER = "float8.enable_fsdp_float8_all_gather"
PRECOMPUTE = "float8.precompute_float8_dynamic_scale_for_fsdp"
FILTERS = "float8.filter_fqns"
SCALED = "float8.scale_gradients_in_matmul"  # not searched, but off where it has no effect
SEARCHED = (
    *(REPLICATE, SHARD, TP, ASYNC_TP, PP, SCHEDULE, LOCAL, MICROBATCH),
    *(MODE, OPTION, RESHARD, FLOAT8, RECIPE, GATHER, PRECOMPUTE, FILTERS),
)

Settings = dict[str, Any]
"""Values of keys of a config, by dotted name."""


@dataclass(frozen=True)
class Space:
    """The configs to try: `config` with other values of the keys in SEARCHED that are not `given`.

    The config must be possible for `world_size` itself: its layout decides the global batch, unless
    that is set."""

    config: Config
    world_size: int
    device: DeviceSpec
    given: Collection[str] = ()
    attention_kernel: str = ""

    @cached_property
    def tokenizer(self) -> TokenizerValues:
        """Properties of the tokenizer, the same for all configs."""
        return tokenizer_values(self.config.model)

    @cached_property
    def unchanged(self) -> Settings:
        """The config's own values of all keys that a search can change."""
        return {name: get_setting(self.config, name) for name in (*SEARCHED, GLOBAL)}

    @cached_property
    def kept(self) -> Settings:
        """Settings that are the same in all configs because they are given."""
        return {name: self.unchanged[name] for name in SEARCHED if name in self.given}

    def settings(self) -> Iterator[tuple[Settings, list[int]]]:
        """Yield all settings but the number of replicas, and the numbers to try with them.

        Tensor parallelism stays within a node. The microbatch is a divisor of a rank's part of the
        global batch."""
        parallelism, training = self.config.parallelism, self.config.training
        ranks = self.world_size // parallelism.context_parallel_degree
        degrees = resolve_degrees(parallelism, world_size=self.world_size)
        total = resolve_batch(training, parallelism, dp_degree=degrees.dp).global_batch_size
        tensor = self._values(TP, math.gcd(ranks, self.device.node_devices))
        for pipeline, tp in product(self._pipelines(), tensor):
            if ranks % (pipeline[PP] * tp):
                continue
            dp = ranks // pipeline[PP] // tp
            replicas = self._values(REPLICATE, dp)
            overlap = parallelism.enable_async_tensor_parallel and tp > 1
            layout = self.unchanged | pipeline | {SHARD: -1, TP: tp, ASYNC_TP: overlap}
            microbatches = self._values(LOCAL, max(1, total // dp))
            for local, recipe in product(microbatches, self._recipes()):
                open_batch = training.global_batch_size == -1 and local * dp == total
                batch = {LOCAL: local, GLOBAL: -1 if open_batch else total}
                batch |= {MICROBATCH: local} if pipeline[PP] > 1 else {}
                chosen = layout | batch | recipe | self.kept
                yield chosen, replicas

    def _pipelines(self) -> Iterator[Settings]:
        """Yield the given degree of pipeline parallelism, else none, with each schedule."""
        default = self.config.parallelism.pipeline_parallel_schedule
        for degree in self._values(PP, 1):
            names = [name for name in SCHEDULES if name != "GPipe"]  # never faster than 1F1B
            if SCHEDULE in self.kept or degree == 1:
                names = [default]
            for name in names:
                yield {PP: degree, SCHEDULE: name, MODE: AUTO, RESHARD: AUTO}

    def _values(self, name: str, number: int) -> list[int]:
        """Return the divisors of `number`, or the given value of the key."""
        if name in self.kept:
            return [self.kept[name]]
        return [each for each in range(1, number + 1) if number % each == 0]

    def _recipes(self) -> list[Settings]:
        """Return bf16, and each recipe with the filters of the config, and with "auto" too."""
        filters, offload = self.config.float8.filter_fqns, self.config.training.enable_cpu_offload
        scaled = self.config.float8.scale_gradients_in_matmul
        return [{FLOAT8: False, SCALED: False}] + [
            {
                FLOAT8: True,
                RECIPE: name,
                GATHER: recipe.gathers_float8,
                PRECOMPUTE: recipe.gathers_float8 and not offload,
                FILTERS: kept_in_bf16,
                SCALED: scaled and recipe.scales_in_matmul,
            }
            for name, recipe in RECIPES.items()
            for kept_in_bf16 in ([filters] if AUTO in filters else [filters, (*filters, AUTO)])
        ]


@dataclass(frozen=True)
class Candidate:
    """The settings of a config, and what follows from them."""

    settings: Settings
    work: Workload
    reserved_gib: float
    step_s: float  # infinite if the memory does not fit


def find_candidates(space: Space) -> list[Candidate]:
    """Return the configs of `space` that training accepts, the fastest first, without more replicas
    of those that do not fit: their shards are larger. Each recomputes and gathers again what is
    best for it.

    Raises ConfigError if it accepts none, with the reason for the first."""
    float8 = space.config.float8
    keeps_float8 = FLOAT8 in space.kept and float8.enable_float8_linear
    found: dict[Hashable, Candidate] = {}
    refused: list[ConfigError] = []
    for settings, replicas in space.settings():
        for replicate in replicas:
            chosen = settings | {REPLICATE: replicate}
            try:
                candidate = try_config(space, chosen)
            except ConfigError as error:
                refused.append(error)
                continue

            # "auto" can choose what another candidate has already, or bf16 where float8 is given.
            work = candidate.work
            if keeps_float8 and AUTO not in float8.filter_fqns and not work.converted:
                continue
            in_float8 = (chosen[RECIPE], chosen[GATHER], *work.converted) if work.converted else ()
            same = work.job.degrees, chosen[SCHEDULE], work.job.batch, in_float8
            if same in found:
                continue

            found[same] = candidate
            if candidate.step_s == math.inf:
                break
    if not found:
        raise refused[0]
    return sorted(found.values(), key=lambda each: (each.step_s, each.reserved_gib))


def try_config(space: Space, settings: Settings) -> Candidate:
    """Return the config of `space` with `settings`, and with the best values in place of "auto".
    Raises ConfigError if training does not accept it."""
    device, kernel = space.device, space.attention_kernel
    job = _accept(space, settings)
    (work, *_), *_ = kept_options(
        job, device=device, memory_gib=device.memory_gib, attention_kernel=kernel
    )
    if settings[FLOAT8] and AUTO in settings[FILTERS]:
        work = build_workload(work.job, device=device)
        work = replace(work, job=name_kept(work.job, work.choices))

    chosen = {name: get_setting(work.job.config, name) for name in (MODE, OPTION, RESHARD)}
    reserved_gib = work.reserved_gib()
    fits = reserved_gib <= device.memory_gib
    step_s = work.time(device, kernel).step_s if fits else math.inf
    return Candidate(settings | chosen, work, reserved_gib, step_s)


def _accept(space: Space, settings: Settings) -> Job:
    """Return the job of a config with `settings`, or raise ConfigError, as training would."""
    tables: dict[str, Settings] = {}
    for name, value in settings.items():
        table, key = name.split(".")
        tables.setdefault(table, {})[key] = value
    sections = {
        name: getattr(space.config, name).model_copy(update=values)
        for name, values in tables.items()
    }
    config = space.config.model_copy(update=sections)
    if problems := check_config(config, world_size=space.world_size):
        raise ConfigError("\n".join(problems))
    check_planned(config, space.device, space.attention_kernel)
    return build_job(config, world_size=space.world_size, tokenizer=space.tokenizer)


def make_search(space: Space, *, gpu_hour: float | None = None) -> dict[str, Any]:
    """Return the fastest layouts as plain values for JSON, and the fastest in bf16 if it is none of
    them. `gpu_hour` is the price of a GPU-hour.

    Raises ConfigError if training accepts no config of `space`, or the memory of none fits."""
    candidates = find_candidates(space)
    fitting = [each for each in candidates if each.step_s < math.inf]
    if not fitting:
        raise ConfigError(_nothing_fits(space, min(candidates, key=lambda each: each.reserved_gib)))

    ranked = list(enumerate(fitting, 1))
    best_bf16 = next(([each] for each in ranked if not each[1].work.converted), [])
    shown = ranked[:SHOWN] + [each for each in best_bf16 if each[0] > SHOWN]
    job, training = fitting[0].work.job, space.config.training
    return {
        "request": {
            "model": job.model_name,
            "device": space.device.name,
            "world_size": space.world_size,
            "memory_gib": space.device.memory_gib,
            "seq_len": training.seq_len,
            "cp": job.degrees.cp,
            "global_batch_size": job.batch.global_batch_size,
            "global_batch_size_given": training.global_batch_size != -1,
            "kept": list(space.kept),
            "fitting": len(fitting),
        },
        "layouts": [{"rank": rank} | figures_of(each, space, gpu_hour) for rank, each in shown],
    }


def _nothing_fits(space: Space, closest: Candidate) -> str:
    job, device = closest.work.job, space.device
    would_fit = [
        "{world_size} GPUs with tensor_parallel_degree {tensor_parallel_degree} and activation "
        "checkpointing {activation_checkpoint}".format_map(each)
        for each in find_fitting(closest.work, device.memory_gib)
    ]
    return (
        f"nothing fits: {job.model_name} on --world-size {space.world_size} reserves at least "
        f"{closest.reserved_gib:,.1f} GiB, with tensor_parallel_degree {job.degrees.tp} and "
        f"activation checkpointing {job.config.activation_checkpoint.label}, of the "
        f"{device.memory_gib:g} of the {device.name}; "
        f"would fit: {', or '.join(would_fit) or 'no number of GPUs'}, or a lower [training] "
        "seq_len"
    )


def figures_of(candidate: Candidate, space: Space, gpu_hour: float | None) -> dict[str, Any]:
    """Return the layout, rates and memory of `candidate`, and how it differs from the config."""
    work, config, settings = candidate.work, candidate.work.job.config, candidate.settings
    degrees, batch = work.job.degrees, work.job.batch
    prediction = work.predict(space.device, space.attention_kernel)
    tokens = batch.global_batch_size * config.training.seq_len / degrees.world_size
    step, (fast, slow) = prediction.float8, prediction.float8_s_band
    gpu_hours = 1e12 / tokens * step.step_s / 3600
    in_float8 = {OUTPUT, *prediction.converted}

    return {
        "dp_replicate": degrees.dp_replicate,
        "dp_shard": degrees.dp_shard,
        "tp": degrees.tp,
        "pp": degrees.pp,
        "pipeline_schedule": settings[SCHEDULE] if degrees.pp > 1 else None,
        "local_batch_size": batch.local_batch_size,
        "grad_accum_steps": batch.grad_accum_steps,
        "activation_checkpoint": config.activation_checkpoint.label,
        "fsdp_reshard_after_forward": settings[RESHARD],
        "float8_recipe": config.float8.recipe_name if work.converted else None,
        "filter_fqns": list(settings[FILTERS]) if work.converted else [],
        "kept_in_bf16": [each.kind for each in work.choices if each.kind not in in_float8],
        "tps": tokens / step.step_s,
        "tps_band": [tokens / slow, tokens / fast],
        "step_s": step.step_s,
        "exposed_pct": 100 * sum(step.exposed_s.values()) / step.step_s,
        "reserved_gib": candidate.reserved_gib,
        "days_per_trillion_tokens": gpu_hours / degrees.world_size / 24,
        "gpu_hours_per_trillion_tokens": gpu_hours,
        "cost_per_trillion_tokens": gpu_hour and gpu_hour * gpu_hours,
        "changes": {
            name: value
            for name, value in settings.items()
            if value != get_setting(space.config, name)
        },
    }


def get_setting(config: Config, name: str) -> Any:
    table, key = name.split(".")
    return getattr(getattr(config, table), key)
