"""Search for the fastest config that fits a number of devices.

Every candidate is a config that training accepts. Memory is estimated before time.
"""

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

from torchtitan_lite.base.errors import ConfigError
from torchtitan_lite.base.progress import progress
from torchtitan_lite.catalog.devices import DeviceSpec
from torchtitan_lite.catalog.recipes import RECIPES
from torchtitan_lite.config import AUTO, Config, check_config
from torchtitan_lite.config.job import TokenizerValues, build_job

from .auto import choose_work, name_kept
from .plan import check_planned, find_fewest_gpus, plan_request, plan_schedule, tokenizer_values
from .workload import Workload, build_workload

SHOWN = 5  # layouts in the answer
CP_DEGREES = (1, 2, 4, 8, 16)
LEAST_TOKENS = 4096  # of a sequence on a rank, where context parallelism is searched
REPLICATE = "parallelism.data_parallel_replicate_degree"
SHARD = "parallelism.data_parallel_shard_degree"
CP = "parallelism.context_parallel_degree"
TP = "parallelism.tensor_parallel_degree"
PP = "parallelism.pipeline_parallel_degree"
MICROBATCH = "parallelism.pipeline_parallel_microbatch_size"  # local_batch_size, where it is used
ASYNC_TP = "parallelism.enable_async_tensor_parallel"
LOCAL = "training.local_batch_size"
GLOBAL = "training.global_batch_size"
MODE = "activation_checkpoint.mode"
RESHARD = "parallelism.fsdp_reshard_after_forward"
FLOAT8 = "float8.enable_float8_linear"
RECIPE = "float8.recipe_name"
GATHER = "float8.enable_fsdp_float8_all_gather"
PRECOMPUTE = "float8.precompute_float8_dynamic_scale_for_fsdp"
FILTERS = "float8.filter_fqns"
SEARCHED = (
    *(REPLICATE, SHARD, CP, TP, ASYNC_TP, PP, LOCAL, MICROBATCH),
    *(MODE, RESHARD, FLOAT8, RECIPE, GATHER, PRECOMPUTE, FILTERS),
)

Settings = dict[str, Any]  # values of keys of a config, by dotted name


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
    def kept(self) -> Settings:
        """Settings that are the same in all configs because they are given."""
        own = flatten(self.config)
        return {name: own[name] for name in SEARCHED if name in self.given}

    def settings(self) -> Iterator[Settings]:
        """Yield the settings of all configs, which train on the same global batch. Tensor
        parallelism stays within a node, and there is a pipeline only if one is given."""
        sharding, training, kept = self.config.parallelism, self.config.training, self.kept
        own = build_job(self.config, world_size=self.world_size, tokenizer=self.tokenizer)
        total = own.batch.global_batch_size
        pp, recipes = kept.get(PP, 1), self._recipes()
        most_tp = math.gcd(self.world_size, self.device.node_devices)
        most_cp = kept.get(CP, max(1, min(CP_DEGREES[-1], training.seq_len // LEAST_TOKENS)))

        for tp, cp in product(self._divisors(TP, most_tp), self._divisors(CP, self.world_size)):
            dp, left = divmod(self.world_size, pp * tp * cp)
            if left or cp > most_cp:
                continue
            overlap = sharding.enable_async_tensor_parallel and tp > 1
            layout = {PP: pp, CP: cp, TP: tp, ASYNC_TP: overlap, SHARD: -1, GLOBAL: total}
            layout |= {MODE: AUTO, RESHARD: AUTO}
            sizes = self._divisors(REPLICATE, dp), self._divisors(LOCAL, max(1, total // dp))
            for replicate, local, recipe in product(*sizes, recipes):
                microbatch = {MICROBATCH: local} if pp > 1 else {}
                yield layout | {REPLICATE: replicate, LOCAL: local} | microbatch | recipe | kept

    def _divisors(self, name: str, number: int) -> list[int]:
        """Return the divisors of `number`, or the given value of the key."""
        if name in self.kept:
            return [self.kept[name]]
        return [each for each in range(1, number + 1) if number % each == 0]

    def _recipes(self) -> list[Settings]:
        """Return bf16, and each recipe for the linears that it makes faster."""
        float8, offload = self.config.float8, self.config.training.enable_cpu_offload
        filters = tuple(each for each in float8.filter_fqns if each != AUTO)
        choices: list[Settings] = [{FLOAT8: False}]
        for name, recipe in RECIPES.items():
            in_float8 = {
                FLOAT8: True,
                RECIPE: name,
                GATHER: recipe.gathers_float8,
                PRECOMPUTE: recipe.gathers_float8 and not offload,
                FILTERS: (*filters, AUTO),
            }
            choices.append(in_float8)

        # Those that agree with what is given.
        given = {name: self.kept[name] for name in (FLOAT8, RECIPE) if name in self.kept}
        return [each for each in choices if (given | each).items() >= given.items()]

    def candidate(self, settings: Settings) -> Workload:
        """Return the workload of the config with `settings`, and with the best values in place of
        "auto". Raises ConfigError if training does not accept it."""
        config = self.config
        for name, value in settings.items():
            table, key = name.split(".")
            section = getattr(config, table).model_copy(update={key: value})
            config = config.model_copy(update={table: section})
        if problems := check_config(config, world_size=self.world_size):
            raise ConfigError("\n".join(problems))
        check_planned(config, self.device)
        job = build_job(config, world_size=self.world_size, tokenizer=self.tokenizer)

        work = choose_work(job, device=self.device, memory_gib=self.device.memory_gib)
        if config.float8.enable_float8_linear and AUTO in config.float8.filter_fqns:
            work = build_workload(name_kept(work.job, work.choices))
        return work


def flatten(config: Config) -> Settings:
    """Return the values of all keys."""
    tables = config.model_dump()
    return {f"{table}.{key}": value for table in tables for key, value in tables[table].items()}


def find_candidates(space: Space) -> list[Workload]:
    """Return the workloads of `space` that training accepts. Raises ConfigError if it accepts none,
    with the reason for the first."""
    found: list[Workload] = []
    refused: list[ConfigError] = []
    choices = [*space.settings()]
    with progress("searching", len(choices), unit=" configs") as bar:
        for settings in choices:
            try:
                found.append(space.candidate(settings))
            except ConfigError as error:
                refused.append(error)
            bar.update()
    if not found:
        raise refused[0]

    # Float8 without a linear is bf16, which is a candidate too, unless float8 is given.
    distinct = [
        each for each in found if each.converted or not each.job.config.float8.enable_float8_linear
    ]
    return distinct or found


def make_search(space: Space) -> dict[str, Any]:
    """Return the fastest layouts as plain values for JSON, and the first in bf16 if it is none of
    them. Raises ConfigError if training accepts no config of `space`, or none fits the memory."""
    device, candidates = space.device, find_candidates(space)
    fitting = [each for each in candidates if each.reserved_gib <= device.memory_gib]
    if not fitting:
        closest = min(candidates, key=lambda each: each.reserved_gib)
        gpus = find_fewest_gpus(closest, device.memory_gib)
        raise ConfigError(
            f"nothing fits: {closest.job.model_name} on --world-size {space.world_size} reserves "
            f"at least {closest.reserved_gib:,.1f} GiB of the {device.memory_gib:g} of the "
            f"{device.name}; it would fit {gpus or 'no number of'} GPUs; lower [training] seq_len, "
            "or use more."
        )

    layouts = [_describe(each, space) for each in fitting]
    layouts.sort(key=lambda each: (-each["tps"], each["reserved_gib"]))
    ranked = [{"rank": rank} | each for rank, each in enumerate(layouts, 1)]
    best_bf16 = [each for each in ranked if each["float8_recipe"] is None][:1]
    return {
        "request": {
            "memory_gib": device.memory_gib,
            "kept": list(space.kept),
            "fitting": len(fitting),
        },
        "layouts": ranked[:SHOWN] + [each for each in best_bf16 if each["rank"] > SHOWN],
    }


def _describe(work: Workload, space: Space) -> dict[str, Any]:
    """Return the layout, rates and memory of `work`, and how it differs from the config."""
    own, settings = flatten(space.config), flatten(work.job.config)
    return {
        **plan_request(work, space.device),
        **plan_schedule(work, work.time(space.device).step_s),
        "reserved_gib": work.reserved_gib,
        "changes": {name: value for name, value in settings.items() if value != own[name]},
    }
