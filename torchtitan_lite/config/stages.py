"""Pipeline parallelism: which modules of the model each stage has, and the rules for its keys."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain, pairwise

from torchtitan_lite.base.errors import ConfigError
from torchtitan_lite.catalog.flavors import ModelArgs
from torchtitan_lite.catalog.schedules import SCHEDULES

from .arithmetic import BatchSizes, multiples_near
from .keys import show
from .sections import Config, ParallelismConfig

FIRST, LAST = ("tok_embeddings",), ("norm", "output")
"""Modules of the first and of the last stage besides blocks."""
ZERO_BUBBLE_FAULTS = "pytorch/pytorch#161904, pytorch/pytorch#164756"
"""Upstream reports of wrong gradients and repeated matmuls under zero-bubble schedules."""

Stages = tuple[tuple[str, ...], ...]
"""The names of each stage's modules, such as ("tok_embeddings", "layers.0", "layers.1")."""


def zero_bubble(parallelism: ParallelismConfig) -> bool:
    """Return whether the run has a pipeline with a zero-bubble schedule."""
    schedule = SCHEDULES[parallelism.pipeline_parallel_schedule]
    return parallelism.pipeline_parallel_degree > 1 and schedule.zero_bubble


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
        if (named := tuple(chain.from_iterable(stages))) != modules:
            raise ConfigError(_describe_difference(named, modules))
    elif points := parallelism.pipeline_parallel_split_points:
        key = "pipeline_parallel_split_points"
        stages = _split_at(points, modules)
    else:
        key = "pipeline_parallel_layers_per_stage"
        stages = _divide(parallelism, modules)

    # The loss is computed from norm and output, so one stage has both.
    _check_number(len(stages), parallelism, key)
    if not all(stages) or stages[-1][-2:] != LAST:
        raise ConfigError(
            f"[parallelism] {key}: stages of {', '.join(str(len(stage)) for stage in stages)} "
            "modules; each stage needs one, and the last one needs both norm and output"
        )
    return stages


def _describe_difference(named: tuple[str, ...], modules: tuple[str, ...]) -> str:
    counts, known = Counter(named), set(modules)  # a file may name many
    differences = {
        "miss": [name for name in modules if name not in counts],
        "repeat": sorted(name for name, count in counts.items() if count > 1),
        "have unknown": [name for name in named if name not in known],
        "change the order of": [n for n, m in zip(named, modules, strict=False) if n != m],
    }
    what, names = next((what, names) for what, names in differences.items() if names)
    return (
        f"[parallelism] module_fqns_per_model_part: its stages {what} {', '.join(names)}; name "
        f"each of {modules[0]}, {modules[1]} to {modules[-3]}, norm and output once, in this order"
    )


def _split_at(points: tuple[str, ...], modules: tuple[str, ...]) -> Stages:
    """Return stages that begin with the modules `points`, after the first stage."""
    begins = [0, *(modules.index(point) for point in points if point in modules[1:])]
    if len(begins) <= len(points) or begins != sorted(set(begins)):
        raise ConfigError(
            f"[parallelism] pipeline_parallel_split_points = {show(points)} must be modules from "
            f"{modules[1]} to {modules[-1]}, each once, in the order of the model"
        )
    return _cut(modules, begins)


def _divide(parallelism: ParallelismConfig, modules: tuple[str, ...]) -> Stages:
    """Divide the blocks evenly, see `resolve_stages`."""
    degree, n_layers = parallelism.pipeline_parallel_degree, len(modules) - len(FIRST + LAST)
    first = parallelism.pipeline_parallel_first_stage_less_layers
    last = parallelism.pipeline_parallel_last_stage_less_layers
    counted = n_layers + first + last
    if (per_stage := parallelism.pipeline_parallel_layers_per_stage) is not None:
        number = -(-counted // per_stage)
    else:
        looped = SCHEDULES[parallelism.pipeline_parallel_schedule].looped
        number = 2 * degree if looped else degree

    if number > len(modules):  # too many to list
        raise ConfigError(
            f"[parallelism] pipeline_parallel_degree = {degree} makes {number} stages from "
            f"{n_layers} blocks, and each needs one; use fewer stages"
        )
    each, left_over = divmod(counted, number)
    sizes = [each + 1 if stage < left_over else each for stage in range(number)]
    sizes[0] -= first
    sizes[-1] -= last
    if min(sizes) < 1:
        raise ConfigError(
            f"[parallelism] pipeline_parallel_degree = {degree} makes {number} stages of "
            f"{', '.join(map(str, sizes))} blocks from {n_layers}, and each needs one; use fewer "
            f"stages, or lower pipeline_parallel_first_stage_less_layers = {first} and "
            f"pipeline_parallel_last_stage_less_layers = {last}"
        )
    later = (len(FIRST) + sum(sizes[:stage]) for stage in range(1, number))
    return _cut(modules, [0, *later])


def _cut(modules: tuple[str, ...], begins: Sequence[int]) -> Stages:
    """Return stages that begin at the indices `begins` of `modules`."""
    return tuple(modules[begin:end] for begin, end in pairwise([*begins, len(modules)]))


def _check_number(number: int, parallelism: ParallelismConfig, key: str) -> None:
    """Raise ConfigError unless the ranks can share `number` stages, which come from `key`."""
    degree, schedule = parallelism.pipeline_parallel_degree, parallelism.pipeline_parallel_schedule
    if not SCHEDULES[schedule].looped:
        fits, needs = number == degree, f"{degree}, one for each rank"
    elif SCHEDULES[schedule].v_shaped:
        fits, needs = number == 2 * degree, f"{2 * degree}, two for each rank"
    else:
        fits = number % degree == 0 and number > degree
        needs = f"{multiples_near(max(number, 2 * degree), degree)}, two or more for each rank"
    if not fits:
        raise ConfigError(
            f"[parallelism] {key}: it makes {number} stages, but pipeline_parallel_schedule = "
            f"{show(schedule)} with pipeline_parallel_degree = {degree} needs {needs}"
        )


def check_stages(config: Config, args: ModelArgs) -> Iterator[str]:
    """Yield a message if the stages are not those of a model with the dimensions `args`."""
    degree = config.parallelism.pipeline_parallel_degree
    if args.tie_embeddings and degree > 1:
        yield (
            f"[parallelism] pipeline_parallel_degree = {degree} puts the embedding and the output "
            "on different ranks, and [model] tie_embeddings = true makes them one weight; set the "
            "degree to 1, or tie_embeddings to false"
        )
    try:
        resolve_stages(config.parallelism, n_layers=args.n_layers)
    except ConfigError as error:
        yield str(error)


def check_pipeline(config: Config, *, batch: BatchSizes) -> Iterator[str]:
    """Yield a message for each rule of pipeline parallelism that the config breaks."""
    parallelism = config.parallelism
    if (degree := parallelism.pipeline_parallel_degree) == 1:
        return
    name = parallelism.pipeline_parallel_schedule
    schedule, key = SCHEDULES[name], f"[parallelism] pipeline_parallel_schedule = {show(name)}"
    # Each rank needs a microbatch to work on, and interleaved ones come in equal rounds.
    microbatches, rounds = batch.grad_accum_steps, max(1, batch.grad_accum_steps // degree)
    if microbatches < degree:
        yield (
            f"[training] global_batch_size = {batch.global_batch_size} makes {microbatches} "
            "microbatches of [parallelism] pipeline_parallel_microbatch_size = "
            f"{batch.local_batch_size} on each data-parallel rank, fewer than "
            f"pipeline_parallel_degree = {degree}; increase local_batch_size or global_batch_size"
        )
    if schedule.looped and not schedule.v_shaped and microbatches % rounds:
        yield (
            f"{key} needs a number of microbatches that is a multiple of its {microbatches} // "
            f"{degree} = {rounds} rounds, not {microbatches}; "
            f"use {multiples_near(microbatches, degree)}"
        )
    if parallelism.fsdp_reduce_gradients == "each":
        yield (
            '[parallelism] fsdp_reduce_gradients = "each" cannot be with '
            f"pipeline_parallel_degree = {degree}: a pipeline reduces gradients once a step; "
            'use "last" or "auto"'
        )
    if schedule.zero_bubble:
        yield from _check_zero_bubble(config, key)


def _check_zero_bubble(config: Config, key: str) -> Iterator[str]:
    """Yield a message for each setting that a zero-bubble schedule, of `key`, does not train
    with."""
    recomputes, sharding = config.activation_checkpoint.mode, config.parallelism
    settings = (
        ("[compile] enable", config.compile.covers("model"), "true", "false"),
        ("[float8] enable_float8_linear", config.float8.enable_float8_linear, "true", "false"),
        ("[activation_checkpoint] mode", recomputes != "none", show(recomputes), '"none"'),
        (
            "[parallelism] fsdp_reshard_after_forward",
            sharding.fsdp_reshard_after_forward == "always",
            '"always"',
            '"never"',
        ),
    )
    for setting, wrong, value, instead in settings:
        if wrong:
            yield (
                f"{key} computes wrong gradients or repeats matmuls with {setting} = {value} "
                f"({ZERO_BUBBLE_FAULTS}); set that to {instead}, or use another schedule"
            )
