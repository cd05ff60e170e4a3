"""Pipeline parallelism: which modules of the model each stage has."""

from collections.abc import Iterable
from itertools import chain, pairwise

from torchtitan_lite.base.errors import ConfigError
from torchtitan_lite.catalog.schedules import INTERLEAVED

from .keys import show
from .sections import ParallelismConfig

FIRST, LAST = ("tok_embeddings",), ("norm", "output")
"""Modules of the first and of the last stage besides blocks."""

Stages = tuple[tuple[str, ...], ...]
"""The names of each stage's modules, such as ("tok_embeddings", "layers.0", "layers.1")."""


def resolve_stages(parallelism: ParallelismConfig, *, n_layers: int) -> Stages:
    """Return the modules of each pipeline stage of a model with `n_layers` blocks; one stage with
    all of them without pipeline parallelism.

    Unless the config names modules, it divides the blocks evenly, as torchtitan does: the embedding
    counts as pipeline_parallel_first_stage_less_layers blocks, norm and output together as
    pipeline_parallel_last_stage_less_layers, and blocks left over go to the first stages.

    Raises ConfigError for stages that the ranks cannot share evenly or that are not the model."""
    modules = (*FIRST, *(f"layers.{i}" for i in range(n_layers)), *LAST)
    if parallelism.pipeline_parallel_degree == 1:
        return (modules,)

    # Named modules, else the first modules of stages, else a division of the blocks.
    if stages := parallelism.module_fqns_per_model_part:
        key = "module_fqns_per_model_part"
    elif points := parallelism.pipeline_parallel_split_points:
        key = "pipeline_parallel_split_points"
        # An unknown module begins a stage at 0, so that the first one is empty.
        begins = (modules.index(point) if point in modules else 0 for point in points)
        stages = _cut(modules, begins)
    else:
        key = "pipeline_parallel_layers_per_stage"
        stages = _divide(parallelism, modules)
    _check_number(len(stages), parallelism, key)

    # The loss is computed from norm and output, so one stage has both.
    whole = tuple(chain.from_iterable(stages)) == modules
    if not whole or not all(stages) or stages[-1][-2:] != LAST:
        raise ConfigError(
            f"[parallelism] {key} makes stages of {', '.join(str(len(stage)) for stage in stages)} "
            f"modules; they must be {modules[0]}, {modules[1]} to {modules[-3]}, norm and output, "
            "each once and in this order, at least one in a stage, and norm in that of output"
        )
    return stages


def _divide(parallelism: ParallelismConfig, modules: tuple[str, ...]) -> Stages:
    """Divide the blocks evenly, see `resolve_stages`."""
    degree, n_layers = parallelism.pipeline_parallel_degree, len(modules) - len(FIRST + LAST)
    first = parallelism.pipeline_parallel_first_stage_less_layers
    last = parallelism.pipeline_parallel_last_stage_less_layers
    counted = n_layers + first + last
    if (per_stage := parallelism.pipeline_parallel_layers_per_stage) is not None:
        number = -(-counted // per_stage)
    else:
        interleaved = parallelism.pipeline_parallel_schedule == INTERLEAVED
        number = 2 * degree if interleaved else degree

    sizes: list[int] = []
    if number <= n_layers:
        each, left_over = divmod(counted, number)
        sizes = [each + 1 if stage < left_over else each for stage in range(number)]
        sizes[0] -= first
        sizes[-1] -= last
    if min(sizes, default=0) < 1:
        raise ConfigError(
            f"[parallelism] pipeline_parallel_degree = {degree} makes {number} stages of "
            f"{n_layers} blocks, too few for one each; use fewer stages, or lower "
            f"pipeline_parallel_first_stage_less_layers = {first} and "
            f"pipeline_parallel_last_stage_less_layers = {last}"
        )
    later = (len(FIRST) + sum(sizes[:stage]) for stage in range(1, number))
    return _cut(modules, later)


def _cut(modules: tuple[str, ...], begins: Iterable[int]) -> Stages:
    """Return stages of which all but the first begin at the indices `begins` of `modules`."""
    return tuple(modules[begin:end] for begin, end in pairwise([0, *begins, len(modules)]))


def _check_number(number: int, parallelism: ParallelismConfig, key: str) -> None:
    """Raise ConfigError unless the ranks can share `number` stages, which come from `key`."""
    degree, schedule = parallelism.pipeline_parallel_degree, parallelism.pipeline_parallel_schedule
    if schedule == INTERLEAVED:
        fits, needs = number % degree == 0 and number > degree, f"a multiple above {degree}"
    else:
        fits, needs = number == degree, str(degree)
    if not fits:
        raise ConfigError(
            f"[parallelism] {key} makes {number} stages, but pipeline_parallel_schedule = "
            f"{show(schedule)} with pipeline_parallel_degree = {degree} needs {needs}"
        )
