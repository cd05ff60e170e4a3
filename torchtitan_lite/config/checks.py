"""Rules that hold between keys. A config is judged here before any process starts."""

import math
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import PurePosixPath
from typing import Any

from torchtitan_lite.base.errors import ConfigError
from torchtitan_lite.catalog.flavors import BLOCK_LINEARS, OUTPUT, ModelArgs
from torchtitan_lite.catalog.recipes import RECIPES, Recipe
from torchtitan_lite.catalog.run_files import RUN_FILES
from torchtitan_lite.catalog.schedules import INTERLEAVED

from .arithmetic import (
    matches_parameter,
    multiples_near,
    resolve_batch,
    resolve_degrees,
    resolve_model,
    resolve_shares,
    unmatched_filters,
)
from .keys import Values, describe, flat_config, show
from .sections import Config
from .stages import FIRST, LAST, resolve_stages
from .types import CROSS_ENTROPY

SET = bool
OUTSIDE_DATA = {
    "[training] dataset": lambda name: ":" in name,
    "[training] dataset_path": None,
    "[training] datasets": (),
}
"""Values with which code from outside the package makes the batches."""
REFUSED: dict[str, dict[str, Any]] = {
    # The layout.
    "nothing overlaps; set the degree to 2 or more, or the other to false": {
        "[parallelism] enable_async_tensor_parallel": True,
        "[parallelism] tensor_parallel_degree": 1,
    },
    'a pipeline reduces gradients once a step; use "last" or "auto"': {
        "[parallelism] fsdp_reduce_gradients": "each",
        "[parallelism] pipeline_parallel_degree": lambda degree: degree > 1,
    },
    # Float8.
    "a weight comes to the GPU without its scale; set one of them to false": {
        "[float8] enable_float8_linear": True,
        "[float8] enable_fsdp_float8_all_gather": True,
        "[float8] precompute_float8_dynamic_scale_for_fsdp": True,
        "[training] enable_cpu_offload": True,
    },
    # Training and validation.
    "only one of them can be set; make the path one of the list": {
        "[training] dataset_path": SET,
        "[training] datasets": SET,
    },
    "only AdamW has such moments; use it, or unset state_dtype": {
        "[optimizer] state_dtype": "bfloat16",
        "[optimizer] name": lambda name: name in ("Adam", "Muon"),
    },
    'only "fused" has such moments; use it, or unset state_dtype': {
        "[optimizer] state_dtype": "bfloat16",
        "[optimizer] implementation": lambda name: name != "fused",
    },
    "moments are no wider than weights; unset one of them": {
        "[optimizer] state_dtype": "float32",
        "[training] dtype": "bfloat16",
    },
    "batches of your own have no epochs; set steps": OUTSIDE_DATA | {"[training] epochs": SET},
    "nothing can be held out of batches of your own; name data to validate on": OUTSIDE_DATA
    | {
        "[validation] enable": True,
        "[validation] dataset": None,
        "[validation] dataset_path": None,
    },
    "logits are whole only without it; set disable_loss_parallel to true": {
        "[training] loss": lambda name: name != CROSS_ENTROPY,
        "[parallelism] tensor_parallel_degree": lambda degree: degree > 1,
        "[parallelism] disable_loss_parallel": False,
    },
    "nothing is validated; use 1 or more, -1 for all data, or set enable to false": {
        "[validation] enable": True,
        "[validation] steps": 0,
    },
    "all data of its own is validated on; name some, or use 1 or more steps": {
        "[validation] enable": True,
        "[validation] steps": -1,
        "[validation] dataset": None,
        "[validation] dataset_path": None,
    },
    "a pipeline passes on sequences of one length; unset seq_len": {
        "[validation] seq_len": SET,
        "[parallelism] pipeline_parallel_degree": lambda degree: degree > 1,
    },
    "windows held out of training data have its length; name other data, or unset seq_len": {
        "[validation] seq_len": SET,
        "[validation] dataset": None,
        "[validation] dataset_path": None,
    },
    # Checkpoints.
    "a run writes its folder on a disk; only [checkpoint] folder may be a URL": {
        "[job] dump_folder": lambda folder: "://" in folder,
    },
    **{
        f"set enable, or unset {key}": {f"[checkpoint] {key}": SET, "[checkpoint] enable": False}
        for key in ("initial_load_path", "initial_load_in_hf", "last_save_in_hf")
    },
    "the one saves, the other does not; unset one of them": {
        "[checkpoint] last_save_in_hf": True,
        "[checkpoint] load_only": True,
    },
}
"""What keys may not say together, by the reason and the fix. A function is true of the value."""
COMPILED = {
    "[activation_checkpoint] mode": "memory_budget",
    "[parallelism] enable_async_tensor_parallel": True,
}
"""What only Inductor does here."""
LENGTHS = "[training] seq_len", "[validation] seq_len"
RECIPE_KEYS: dict[str, Callable[[Recipe], bool]] = {
    "pad_inner_dim": lambda recipe: recipe.pads_tokens,
    "enable_fsdp_float8_all_gather": lambda recipe: recipe.gathers_float8,
    "use_fast_accum_in_backward": lambda recipe: recipe.converter == Recipe.converter,
    "log_numerics_freq": lambda recipe: recipe.converter == Recipe.converter,
}
"""Keys of [float8] that are for some recipes only, and which."""


def own_names(config: Config) -> dict[str, str]:
    """Return the folders within the run folder that the config names, by key."""
    checkpoints = config.checkpoint.folder
    return {
        **({} if "://" in checkpoints else {"[checkpoint] folder": checkpoints}),
        "[metrics] save_tb_folder": config.metrics.save_tb_folder,
        "[profiling] save_traces_folder": config.profiling.save_traces_folder,
        "[profiling] save_memory_snapshot_folder": config.profiling.save_memory_snapshot_folder,
        "[comm] save_traces_folder": config.comm.save_traces_folder,
    }


def check_config(config: Config, *, world_size: int) -> list[str]:
    """Return a message for each rule that the config breaks."""
    values = flat_config(config.model_dump())
    if not config.validation.enable or config.validation.seq_len == config.training.seq_len:
        values["[validation] seq_len"] = None  # no rule is about it
    return [
        *_check_layout(config, values, world_size),
        *_check_model(config, values),
        *_check_refused(config, values),
        *_check_recipe(config, values),
        *_check_run(config, values),
    ]


def _check_refused(config: Config, values: Values) -> Iterator[str]:
    for fix, refused in REFUSED.items():
        matches = (
            wanted(values[name]) if callable(wanted) else values[name] == wanted
            for name, wanted in refused.items()
        )
        if all(matches):
            yield describe(values, *refused, fix=fix)
    for name, wanted in COMPILED.items():
        inductor = config.compile.covers("model") and config.compile.backend == "inductor"
        if values[name] == wanted and not inductor:
            compiled = (f"[compile] {key}" for key in ("enable", "components", "backend"))
            fix = 'set enable to true with "model" and "inductor", or change the first'
            yield describe(values, name, *compiled, fix=fix)


def _check_layout(config: Config, values: Values, world_size: int) -> Iterator[str]:
    parallelism = config.parallelism
    try:
        degrees = resolve_degrees(parallelism, world_size=world_size)
        batch = resolve_batch(config.training, parallelism, dp_degree=degrees.dp)
        yield from _check_microbatches(values, batch.grad_accum_steps)
    except ConfigError as error:
        yield str(error)

    cp, tp = parallelism.context_parallel_degree, parallelism.tensor_parallel_degree
    parts = tp if cp == 1 else 2 * cp * tp  # context parallelism gives a rank two chunks
    splits = "[parallelism] context_parallel_degree", "[parallelism] tensor_parallel_degree"
    for key in LENGTHS:
        if (seq_len := values[key] or 0) % parts:
            fix = f"sequences are split into {parts} parts; use {multiples_near(seq_len, parts)}"
            yield describe(values, key, *splits, fix=fix)


def _check_microbatches(values: Values, number: int) -> Iterator[str]:
    """Check the `number` of microbatches of a rank: each stage of a pipeline needs one to work on,
    and interleaved ones come in equal rounds."""
    degree = values["[parallelism] pipeline_parallel_degree"]
    schedule = values["[parallelism] pipeline_parallel_schedule"]
    rounds = max(1, number // degree)
    fix = ""
    if number < degree:
        fix = "fewer than ranks of the pipeline; increase local_batch_size or global_batch_size"
    elif degree > 1 and schedule == INTERLEAVED and number % rounds:
        fix = f"which are not {rounds} equal rounds; use {multiples_near(number, degree)}"
    if fix:
        yield describe(
            values,
            "[training] global_batch_size",
            "[parallelism] pipeline_parallel_microbatch_size",
            "[parallelism] pipeline_parallel_degree",
            "[parallelism] pipeline_parallel_schedule",
            fix=f"a rank has {number} microbatches, {fix}",
        )


def _check_model(config: Config, values: Values) -> Iterator[str]:
    parallelism = config.parallelism
    try:
        args = resolve_model(config.model)
    except ConfigError as error:
        yield str(error)
        return
    try:
        resolve_stages(parallelism, n_layers=args.n_layers)
    except ConfigError as error:
        yield str(error)

    # Its dimensions must allow the layout, the sequence length and the number of a layer.
    pp, tp = parallelism.pipeline_parallel_degree, parallelism.tensor_parallel_degree
    if args.tie_embeddings and pp > 1:
        names = "[parallelism] pipeline_parallel_degree", "[model] flavor", "[model] tie_embeddings"
        fix = "one weight would be on two ranks; set tie_embeddings to false, or the degree to 1"
        yield describe(values, *names, fix=fix)
    common = math.gcd(args.n_heads, args.n_kv_heads, args.dim, args.ffn_dim)
    if common % tp:
        fitting = [str(degree) for degree in range(1, common + 1) if common % degree == 0]
        fix = (
            f"the degree must divide n_heads = {args.n_heads}, n_kv_heads = {args.n_kv_heads}, dim "
            f"= {args.dim} and ffn_dim = {args.ffn_dim}; use one of {', '.join(fitting)}"
        )
        yield describe(values, "[parallelism] tensor_parallel_degree", "[model] flavor", fix=fix)
    for key in LENGTHS:
        if (values[key] or 0) > args.max_seq_len:
            fix = f"use at most {args.max_seq_len}, or set rope_theta or rope_scaling"
            yield describe(values, key, "[model] flavor", fix=fix)

    linears = [f"layers.{i}.{name}" for i in range(args.n_layers) for name in BLOCK_LINEARS]
    if config.float8.enable_float8_linear:
        yield from unmatched_filters(config.float8.filter_fqns, [*linears, OUTPUT])
    yield from _check_parts(values, args, linears)

    option, mode = "[activation_checkpoint] selective_ac_option", "[activation_checkpoint] mode"
    if values[option] not in ("op", *map(str, range(1, args.n_layers + 1))):
        fix = f'must be "op", or a number of blocks from "1" to "{args.n_layers}"'
        yield describe(values, option, "[model] flavor", fix=fix)

    # torch 2.11 cannot count the FLOPs of grouped-query attention on a GPU, and torch 2.12 takes
    # DTensor's mesh for an activation of unknown size.
    torch, grouped = version("torch"), args.n_kv_heads != args.n_heads
    crashes = grouped if torch.startswith("2.11.") else torch.startswith("2.12.") and tp > 1
    if values[mode] == "memory_budget" and crashes:
        names = mode, "[model] flavor", "[parallelism] tensor_parallel_degree"
        fix = f'crashes the compiler of torch {torch}; install torch 2.13, or use "selective"'
        yield describe(values, *names, fix=fix)


def _check_parts(values: Values, args: ModelArgs, linears: list[str]) -> Iterator[str]:
    """Check that parts of parameter names, which keys of [optimizer] hold, occur in one."""
    norms = ("attention_norm", "ffn_norm")
    names = [*linears, *(f"layers.{i}.{norm}" for i in range(args.n_layers) for norm in norms)]
    names += [*FIRST, *LAST[: 1 if args.tie_embeddings else 2]]
    last_parts = ", ".join(sorted({name.rpartition(".")[2] for name in names}))
    for key in ("[optimizer] no_decay", "[optimizer] lr_factors"):
        for part in values[key]:
            if not any(matches_parameter(part, f"{name}.weight") for name in names):
                fix = f"no parameter has {part!r} in its name; use {last_parts} or layers.0"
                yield describe(values, key, fix=fix)


def _check_recipe(config: Config, values: Values) -> Iterator[str]:
    float8, dtype = config.float8, config.training.mixed_precision_param
    if not float8.enable_float8_linear:
        return
    for key, has in RECIPE_KEYS.items():
        if getattr(float8, key) and not has(float8.recipe):
            fitting = " or ".join(show(name) for name, recipe in RECIPES.items() if has(recipe))
            fix = f"the first is for {fitting}; use one of these, or unset the first"
            yield describe(values, f"[float8] {key}", "[float8] recipe_name", fix=fix)
    if float8.recipe.compute_dtype not in (None, dtype):
        fix = f"its kernels cast {show(float8.recipe.compute_dtype)}; use that, or another recipe"
        yield describe(values, "[training] mixed_precision_param", "[float8] recipe_name", fix=fix)


def _check_run(config: Config, values: Values) -> Iterator[str]:
    try:
        resolve_shares(config.training.datasets)
    except ConfigError as error:
        yield str(error)
    if config.profiling.profiler_active > config.profiling.profile_freq:
        names = "[profiling] profiler_active", "[profiling] profile_freq"
        yield describe(values, *names, fix="a trace is longer than its period; use at most that")

    # Each part of a run needs a name of its own in the run folder, and moves to previous/ by it.
    taken = [PurePosixPath(name) for name in RUN_FILES]
    for key, name in own_names(config).items():
        path = PurePosixPath(name)
        clashes = any(path.is_relative_to(o) or o.is_relative_to(path) for o in taken)
        if clashes or path.is_absolute() or ".." in path.parts:
            fix = "must be a name of its own within [job] dump_folder; choose another"
            yield describe(values, key, fix=fix)
        taken.append(path)
