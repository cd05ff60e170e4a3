"""Search for the fastest config that fits a number of devices.

Every candidate is a config that training accepts. Memory is estimated before time.
"""

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from operator import attrgetter
from typing import Any

from torchtitan_lite.base.errors import ConfigError
from torchtitan_lite.base.progress import progress
from torchtitan_lite.catalog.devices import DeviceSpec
from torchtitan_lite.catalog.recipes import RECIPES
from torchtitan_lite.config import AUTO, Config, check_config
from torchtitan_lite.config.job import TokenizerValues, build_job
from torchtitan_lite.config.keys import KEYS

from .auto import choose_work, name_kept
from .plan import check_planned, plan_request, plan_schedule, tokenizer_values
from .workload import Workload, build_workload

SHOWN = 5  # layouts in the answer
MOST_CP = 16
LEAST_TOKENS = 4096  # of a sequence on a rank, where context parallelism is searched

Settings = dict[str, dict[str, Any]]  # values of keys of a config, by table


@dataclass(frozen=True)
class Space:
    """The configs to try: `config` with other values of keys that are not `given`.

    The config must be possible for `world_size` itself: its layout decides the global batch, unless
    that is set."""

    config: Config
    world_size: int
    device: DeviceSpec
    given: Collection[str] = ()  # dotted names

    @cached_property
    def tokenizer(self) -> TokenizerValues:
        """Properties of the tokenizer, the same for all configs."""
        return tokenizer_values(self.config.model)

    def settings(self) -> Iterator[Settings]:
        """Yield the settings of all configs, which train on the same global batch. Tensor
        parallelism stays within a node, and there is a pipeline only if one is given."""
        overlaps = self.config.parallelism.enable_async_tensor_parallel
        own = build_job(self.config, world_size=self.world_size, tokenizer=self.tokenizer)
        total, seq_len = own.batch.global_batch_size, self.config.training.seq_len
        (pp,) = self._divisors("parallelism.pipeline_parallel_degree", 1)
        most_tp = math.gcd(self.world_size, self.device.node_devices)
        most_cp = math.gcd(self.world_size, MOST_CP, max(1, seq_len // LEAST_TOKENS))

        tps = self._divisors("parallelism.tensor_parallel_degree", most_tp)
        cps = self._divisors("parallelism.context_parallel_degree", most_cp)
        for tp, cp in product(tps, cps):
            dp, left = divmod(self.world_size, pp * tp * cp)
            if left:
                continue
            replicas = self._divisors("parallelism.data_parallel_replicate_degree", dp)
            batches = self._divisors("training.local_batch_size", max(1, total // dp))
            for replicate, local, float8 in product(replicas, batches, self._recipes()):
                layout = {
                    "data_parallel_replicate_degree": replicate,
                    "data_parallel_shard_degree": -1,
                    "context_parallel_degree": cp,
                    "tensor_parallel_degree": tp,
                    "enable_async_tensor_parallel": overlaps and tp > 1,
                    "pipeline_parallel_degree": pp,
                    "fsdp_reshard_after_forward": AUTO,
                }
                if pp > 1:
                    layout["pipeline_parallel_microbatch_size"] = local
                yield {
                    "parallelism": layout,
                    "training": {"local_batch_size": local, "global_batch_size": total},
                    "activation_checkpoint": {"mode": AUTO},
                    "float8": float8,
                }

    def _divisors(self, name: str, number: int) -> list[int]:
        """Return the divisors of `number`, or the given value of the key."""
        if name in self.given:
            return [attrgetter(name)(self.config)]
        return [each for each in range(1, number + 1) if number % each == 0]

    def _recipes(self) -> list[dict[str, Any]]:
        """Return [float8] for bf16, and for each recipe and the linears that it makes faster, as
        far as they are not given."""
        own, given, bf16 = self.config.float8, self.given, {"enable_float8_linear": False}
        is_given = "float8.enable_float8_linear" in given
        if is_given and not own.enable_float8_linear:
            return [bf16]

        offload = self.config.training.enable_cpu_offload
        filters = (*(each for each in own.filter_fqns if each != AUTO), AUTO)
        found: list[dict[str, Any]] = [] if is_given else [bf16]
        recipes = {own.recipe_name: own.recipe} if "float8.recipe_name" in given else RECIPES
        for name, recipe in recipes.items():
            gathers = recipe.gathers_float8
            keys = {
                "enable_float8_linear": True,
                "recipe_name": name,
                "enable_fsdp_float8_all_gather": gathers,
                "precompute_float8_dynamic_scale_for_fsdp": gathers and not offload,
                "filter_fqns": filters,
            }
            found.append(keys)
        return found

    def candidate(self, settings: Settings) -> Workload:
        """Return the workload of the config with `settings`, and with the best values in place of
        "auto". Raises ConfigError if training does not accept it, or no linear gains by float8."""
        config = self.config
        for table, values in settings.items():
            tried = {key: values[key] for key in values if f"{table}.{key}" not in self.given}
            section = getattr(config, table).model_copy(update=tried)
            config = config.model_copy(update={table: section})
        if problems := check_config(config, world_size=self.world_size):
            raise ConfigError("\n".join(problems))
        check_planned(config, self.device)
        job = build_job(config, world_size=self.world_size, tokenizer=self.tokenizer)

        work = choose_work(job, device=self.device, memory_gib=self.device.memory_gib)
        if config.float8.enable_float8_linear and not work.converted:
            raise ConfigError(
                "[float8] enable_float8_linear = true makes no linear faster; unset it."
            )
        if config.float8.enable_float8_linear and AUTO in config.float8.filter_fqns:
            work = build_workload(name_kept(work.job, work.choices))
        return work


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
    return found


def make_search(space: Space) -> dict[str, Any]:
    """Return the fastest layouts as plain values for JSON, and the first in bf16 if it is none of
    them. Raises ConfigError if training accepts no config of `space`, or none fits the memory."""
    device, candidates = space.device, find_candidates(space)
    fitting = [each for each in candidates if each.reserved_gib <= device.memory_gib]
    if not fitting:
        closest = min(candidates, key=lambda each: each.reserved_gib)
        raise ConfigError(
            f"nothing fits: {closest.job.model_name} on --world-size {space.world_size} reserves "
            f"at least {closest.reserved_gib:,.1f} GiB of the {device.memory_gib:g} of the "
            f"{device.name}; lower [training] seq_len, or use more GPUs."
        )

    layouts = [_describe(each, space) for each in fitting]
    layouts.sort(key=lambda each: (-each["tps"], each["reserved_gib"]))
    ranked = [{"rank": rank} | each for rank, each in enumerate(layouts, 1)]
    best_bf16 = [each for each in ranked if each["float8_recipe"] is None][:1]
    return {
        "request": {
            "memory_gib": device.memory_gib,
            "kept": sorted(space.given),
            "fitting": len(fitting),
        },
        "layouts": ranked[:SHOWN] + [each for each in best_bf16 if each["rank"] > SHOWN],
    }


def _describe(work: Workload, space: Space) -> dict[str, Any]:
    """Return the layout, rates and memory of `work`, and how it differs from the config."""
    own, config = space.config, work.job.config
    values = {name: (attrgetter(name)(own), attrgetter(name)(config)) for name in KEYS}
    return {
        **plan_request(work, space.device),
        **plan_schedule(work, work.time(space.device).step_s),
        "reserved_gib": work.reserved_gib,
        "changes": {name: new for name, (old, new) in values.items() if new != old},
    }
