"""Search for the fastest config that fits a number of devices, and for the longest sequence.

Every candidate is a config that training accepts, with the same global batch. Memory is estimated
before time.
"""

import math
from bisect import bisect_left
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

from torchtitan_lite.base.errors import ConfigError
from torchtitan_lite.catalog.devices import DeviceSpec
from torchtitan_lite.catalog.recipes import RECIPES
from torchtitan_lite.catalog.schedules import SCHEDULES
from torchtitan_lite.config import (
    Config,
    check_config,
    resolve_batch,
    resolve_degrees,
    resolve_model,
    sequence_parts,
)
from torchtitan_lite.config.job import Job, TokenizerValues, build_job
from torchtitan_lite.float8.selection import AUTO

from .auto import choose_work, name_kept
from .plan import check_planned, find_fewest_gpus
from .workload import Workload, build_workload, tokenizer_values

SHOWN = 5  # layouts in the answer
MOST_CP, LEAST_TOKENS = 16, 4096  # of a sequence on a rank, where context parallelism is searched
LENGTHS = 1024  # the longest sequence is a multiple of it
LONGEST = 2**20  # where the model has no limit
REPLICATE = "parallelism.data_parallel_replicate_degree"
SHARD = "parallelism.data_parallel_shard_degree"
CP = "parallelism.context_parallel_degree"
TP = "parallelism.tensor_parallel_degree"
PP = "parallelism.pipeline_parallel_degree"
SCHEDULE = "parallelism.pipeline_parallel_schedule"
MICROBATCH = "parallelism.pipeline_parallel_microbatch_size"  # local_batch_size, where it is used
ASYNC_TP = "parallelism.enable_async_tensor_parallel"
SEQ_LEN = "training.seq_len"
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
CONVERT_OUTPUT = "float8.convert_output"  # off where "auto" keeps the output
SCALED = "float8.scale_gradients_in_matmul"  # not searched, but off where it has no effect
SEARCHED = (
    *(REPLICATE, SHARD, CP, TP, ASYNC_TP, PP, SCHEDULE, LOCAL, MICROBATCH),
    *(MODE, OPTION, RESHARD, FLOAT8, RECIPE, GATHER, PRECOMPUTE, FILTERS),
)
CHOSEN = (MODE, OPTION, RESHARD, FLOAT8, FILTERS, CONVERT_OUTPUT)  # what "auto" becomes

REPLACED: dict[str, Any] = {SHARD: -1, LOCAL: 1, GLOBAL: -1}
"""Values of keys whose own --longest ignores."""
START = tuple(f"--{key}={value}" for key, value in ({CP: 1, SEQ_LEN: LENGTHS} | REPLACED).items())
"""Overrides for a config that is loaded for --longest, so that no value it ignores is refused."""

Settings = dict[str, Any]
"""Values of keys of a config, by dotted name."""


@dataclass(frozen=True)
class Candidate:
    """The settings of a config, and what follows from them."""

    settings: Settings
    work: Workload
    reserved_gib: float
    step_s: float  # infinite if the memory does not fit


@dataclass(frozen=True)
class Space:
    """The configs to try: `config` with other values of the keys in SEARCHED that are not `given`.

    The config must be possible for `world_size` itself: its layout decides the global batch, unless
    that is set."""

    config: Config
    world_size: int
    device: DeviceSpec
    given: Collection[str] = ()

    @cached_property
    def tokenizer(self) -> TokenizerValues:
        """Properties of the tokenizer, the same for all configs."""
        return tokenizer_values(self.config.model)

    @cached_property
    def unchanged(self) -> Settings:
        """The config's own values of all keys that a search can change."""
        return {name: get_setting(self.config, name) for name in (*SEARCHED, GLOBAL, SEQ_LEN)}

    @cached_property
    def kept(self) -> Settings:
        """Settings that are the same in all configs because they are given."""
        return {name: self.unchanged[name] for name in SEARCHED if name in self.given}

    def settings(self) -> Iterator[Settings]:
        """Yield all settings. Tensor parallelism stays within a node. The microbatch is a divisor
        of a rank's part of the global batch."""
        parallelism, training = self.config.parallelism, self.config.training
        degrees = resolve_degrees(parallelism, world_size=self.world_size)
        total = resolve_batch(training, parallelism, dp_degree=degrees.dp).global_batch_size
        most_cp = max(1, min(MOST_CP, training.seq_len // LEAST_TOKENS))
        tensor = self._divisors(TP, math.gcd(self.world_size, self.device.node_devices))
        for pipeline, tp, cp in product(
            self._pipelines(), tensor, self._divisors(CP, self.world_size)
        ):
            dp, left = divmod(self.world_size, pipeline[PP] * tp * cp)
            if left or (cp > most_cp and CP not in self.kept):
                continue
            overlap = parallelism.enable_async_tensor_parallel and tp > 1
            layout = self.unchanged | pipeline | {SHARD: -1, TP: tp, CP: cp, ASYNC_TP: overlap}
            sizes = self._divisors(REPLICATE, dp), self._divisors(LOCAL, max(1, total // dp))
            for replicate, local, recipe in product(*sizes, self._recipes()):
                open_batch = training.global_batch_size == -1 and local * dp == total
                batch = {LOCAL: local, GLOBAL: -1 if open_batch else total}
                batch |= {MICROBATCH: local} if pipeline[PP] > 1 else {}
                yield layout | {REPLICATE: replicate} | batch | recipe | self.kept

    def _pipelines(self) -> Iterator[Settings]:
        """Yield the given degree of pipeline parallelism, else none, with each schedule."""
        default = self.config.parallelism.pipeline_parallel_schedule
        for degree in self._divisors(PP, 1):
            names = [name for name in SCHEDULES if name != "GPipe"]  # never faster than 1F1B
            if SCHEDULE in self.kept or degree == 1:
                names = [default]
            for name in names:
                yield {PP: degree, SCHEDULE: name, MODE: AUTO, RESHARD: AUTO}

    def _divisors(self, name: str, number: int) -> list[int]:
        """Return the divisors of `number`, or the given value of the key."""
        if name in self.kept:
            return [self.kept[name]]
        return [each for each in range(1, number + 1) if number % each == 0]

    def _recipes(self) -> list[Settings]:
        """Return bf16, and each recipe for the linears that it makes faster."""
        float8, offload = self.config.float8, self.config.training.enable_cpu_offload
        filters = tuple(each for each in float8.filter_fqns if each != AUTO)
        return [{FLOAT8: False, SCALED: False}] + [
            {
                FLOAT8: True,
                RECIPE: name,
                GATHER: recipe.gathers_float8,
                PRECOMPUTE: recipe.gathers_float8 and not offload,
                FILTERS: (*filters, AUTO),
                SCALED: float8.scale_gradients_in_matmul and recipe.scales_in_matmul,
            }
            for name, recipe in RECIPES.items()
        ]

    def candidate(self, settings: Settings) -> Candidate:
        """Return the config with `settings`, and with the best values in place of "auto". Raises
        ConfigError if training does not accept it."""
        device, job = self.device, self._accept(settings)
        work = choose_work(job, device=device, memory_gib=device.memory_gib)
        if settings[FLOAT8] and AUTO in settings[FILTERS]:
            work = build_workload(name_kept(work.job, work.choices))
        chosen = {name: get_setting(work.job.config, name) for name in CHOSEN}
        reserved_gib, step_s = work.reserved_gib, math.inf
        if reserved_gib <= device.memory_gib:
            step_s = work.time(device).step_s
        return Candidate(settings | chosen, work, reserved_gib, step_s)

    def _accept(self, settings: Settings) -> Job:
        """Return the job of a config with `settings`, or raise ConfigError, as training would."""
        tables: dict[str, Settings] = {}
        for name, value in settings.items():
            table, key = name.split(".")
            tables.setdefault(table, {})[key] = value
        sections = {
            name: getattr(self.config, name).model_copy(update=values)
            for name, values in tables.items()
        }
        config = self.config.model_copy(update=sections)
        if problems := check_config(config, world_size=self.world_size):
            raise ConfigError("\n".join(problems))
        check_planned(config, self.device)
        return build_job(config, world_size=self.world_size, tokenizer=self.tokenizer)


def get_setting(config: Config, name: str) -> Any:
    """Return the value of a key by its dotted name."""
    table, key = name.split(".")
    return getattr(getattr(config, table), key)


def find_candidates(space: Space) -> list[Candidate]:
    """Return the configs of `space` that training accepts, the fastest first. Raises ConfigError if
    it accepts none, with the reason for the first."""
    found: list[Candidate] = []
    refused: list[ConfigError] = []
    for settings in space.settings():
        try:
            found.append(space.candidate(settings))
        except ConfigError as error:
            refused.append(error)
    # Float8 that is slower for every linear is bf16, which is a candidate too, or not wanted.
    found = [each for each in found if each.work.converted or not each.settings.get(FLOAT8)]
    if not found:
        raise refused[0]
    return sorted(found, key=lambda each: (each.step_s, each.reserved_gib))


def make_search(space: Space, *, gpu_hour: float | None = None) -> dict[str, Any]:
    """Return the fastest layouts as plain values for JSON, and the fastest in bf16 if it is none of
    them. `gpu_hour` is the price of a GPU-hour.

    Raises ConfigError if training accepts no config of `space`, or the memory of none fits."""
    candidates = find_candidates(space)
    fitting = [each for each in candidates if each.step_s < math.inf]
    if not fitting:
        closest = min(candidates, key=lambda each: each.reserved_gib)
        gpus = find_fewest_gpus(closest.work, space.device.memory_gib)
        raise ConfigError(
            f"nothing fits: {closest.work.job.model_name} on --world-size {space.world_size} "
            f"reserves at least {closest.reserved_gib:,.1f} GiB of the "
            f"{space.device.memory_gib:g} of the {space.device.name}; it would fit "
            f"{f'{gpus} GPUs' if gpus else 'no number of GPUs'}; lower [training] seq_len, or use "
            "more."
        )

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
            "global_batch_size": job.batch.global_batch_size,
            "kept": list(space.kept),
            "fitting": len(fitting),
        },
        "layouts": [{"rank": rank} | figures_of(each, space, gpu_hour) for rank, each in shown],
    }


def make_longest(space: Space) -> dict[str, Any]:
    """Return for degrees of context parallelism the config with the longest `seq_len` that fits, as
    plain values for JSON, or the reason for none. Each group of ranks trains one sequence at a
    time; the other keys are the config's. Raises ConfigError if there is no length for any."""
    limit = min(resolve_model(space.config.model).max_seq_len, LONGEST)
    lengths: list[dict[str, Any]] = []
    for cp in (2**k for k in range(MOST_CP.bit_length())):
        try:
            longest = _find_longest(space, cp, limit)
        except ConfigError as error:
            lengths.append({"cp": cp, "left_out": str(error)})
            continue
        lengths.append({"left_out": None} | figures_of(longest, space, None))
    if all(each["left_out"] for each in lengths):
        raise ConfigError("\n".join(f"cp {each['cp']}: {each['left_out']}" for each in lengths))
    request: Settings = {"model": space.config.model.flavor, "device": space.device.name}
    request |= {"world_size": space.world_size, "memory_gib": space.device.memory_gib}
    return {"request": request | {"limit": limit}, "lengths": lengths}


def _find_longest(space: Space, cp: int, limit: int) -> Candidate:
    """Return the longest config with `cp` that fits. Raises ConfigError if none does."""
    settings = space.unchanged | {CP: cp} | REPLACED
    tp = space.config.parallelism.tensor_parallel_degree
    step = math.lcm(LENGTHS, sequence_parts(cp=cp, tp=tp))
    lengths = range(step, max(limit, step) + 1, step)

    # Memory grows with the length: from some length on, none fits.
    def plan(seq_len: int) -> Candidate:
        return space.candidate(settings | {SEQ_LEN: seq_len})

    fitting = bisect_left(lengths, True, key=lambda seq_len: plan(seq_len).step_s == math.inf)
    if not fitting:
        needs = f"{plan(step).reserved_gib:,.1f} of {space.device.memory_gib:g} GiB"
        raise ConfigError(f"even {step:,} tokens do not fit: {needs}")
    return plan(lengths[fitting - 1])


def figures_of(candidate: Candidate, space: Space, gpu_hour: float | None) -> Settings:
    """Return the layout, rates and memory of `candidate`, and how it differs from the config."""
    work, config, settings = candidate.work, candidate.work.job.config, candidate.settings
    degrees, batch = work.job.degrees, work.job.batch
    step = work.time(space.device)
    tokens = batch.global_batch_size * config.training.seq_len / degrees.world_size
    tps = tokens / step.step_s
    gpu_hours = 1e12 / tps / 3600
    return {
        "dp_replicate": degrees.dp_replicate,
        "dp_shard": degrees.dp_shard,
        "cp": degrees.cp,
        "tp": degrees.tp,
        "pp": degrees.pp,
        "pipeline_schedule": settings[SCHEDULE] if degrees.pp > 1 else None,
        "seq_len": config.training.seq_len,
        "local_batch_size": batch.local_batch_size,
        "grad_accum_steps": batch.grad_accum_steps,
        "activation_checkpoint": config.activation_checkpoint.label,
        "float8_recipe": config.float8.recipe_name if work.converted else None,
        "tps": tps,
        "tps_range": [tps * each for each in work.rate_range],
        "step_s": step.step_s,
        "waits_pct": 100 * sum(step.waits_s.values()) / step.step_s,
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
