"""Rules that hold between keys. A config is judged here before any process starts.

A message names every table that its rule reads, as `[table]`.
"""

import math
import re
from collections.abc import Callable, Collection, Iterator
from importlib.metadata import version
from itertools import chain
from pathlib import PurePosixPath

from torchtitan_lite.base.errors import ConfigError
from torchtitan_lite.base.logger import logger
from torchtitan_lite.catalog.recipes import RECIPES, Recipe
from torchtitan_lite.catalog.run_files import RUN_FILES

from .arithmetic import (
    multiples_near,
    resolve_batch,
    resolve_degrees,
    resolve_model,
    resolve_shares,
    sequence_parts,
)
from .keys import show
from .sections import Config, LRSchedulerConfig
from .stages import check_pipeline, check_stages


def check_config(config: Config, *, world_size: int, unsound: Collection[str] = ()) -> list[str]:
    """Return a message for each rule that the config breaks.

    Rules that read a table in `unsound`, one with invalid values, are skipped.
    """
    messages: list[str] = []
    if not {"parallelism", "training"} & set(unsound):
        messages += _check_layout(config, world_size)
    if not {"lr_scheduler", "training"} & set(unsound):
        messages += check_decay(config.lr_scheduler, steps=config.training.steps)

    rules = (
        _check_model,
        _check_compiled,
        _check_float8,
        _check_training,
        _check_checkpoint,
        _check_run_folder,
    )
    for message in chain.from_iterable(rule(config) for rule in rules):
        if not set(re.findall(r"\[(\w+)\]", message)) & set(unsound):
            messages.append(message)
    return messages


def _check_layout(config: Config, world_size: int) -> Iterator[str]:
    try:
        degrees = resolve_degrees(config.parallelism, world_size=world_size)
        batch = resolve_batch(config.training, config.parallelism, dp_degree=degrees.dp)
        yield from check_pipeline(config, batch=batch)
    except ConfigError as error:
        yield str(error)

    seq_len, tp = config.training.seq_len, config.parallelism.tensor_parallel_degree
    cp = config.parallelism.context_parallel_degree
    if seq_len % (parts := sequence_parts(cp=cp, tp=tp)):
        rule = f"tensor_parallel_degree = {tp}"
        if cp > 1:
            rule = (
                f"2 * context_parallel_degree * tensor_parallel_degree = 2 * {cp} * {tp} = {parts}"
            )
        yield (
            f"[training] seq_len = {seq_len} is not a multiple of [parallelism] {rule}, into which "
            f"sequences are split; use {multiples_near(seq_len, parts)}"
        )


def check_decay(schedule: LRSchedulerConfig, *, steps: int) -> Iterator[str]:
    """Yield a message if the decay of a run of `steps` begins before its warm-up ends.

    A run shorter than its warm-up only warms up, so that a short trial needs no other schedule.
    """
    total, warmup = schedule.total_steps or steps, schedule.warmup_steps
    decay = round(total * (schedule.decay_ratio or 0.0))
    if warmup < total < warmup + decay:
        most = math.floor((total - warmup) / total * 1000) / 1000
        yield (
            f"[lr_scheduler] decay_ratio = {schedule.decay_ratio} of {total} steps = {decay} "
            f"steps, but warmup_steps = {warmup} leaves {total - warmup}; "
            f"use decay_ratio <= {most} or warmup_steps <= {total - decay}"
        )


def log_odd_schedule(schedule: LRSchedulerConfig, *, steps: int) -> None:
    """Log it if the schedule of a run of `steps` is shorter than its warm-up."""
    total = schedule.total_steps or steps
    if total < schedule.warmup_steps:
        logger.info(
            f"[lr_scheduler] warmup_steps = {schedule.warmup_steps} is longer than the schedule of "
            f"{total} steps: the warm-up is shortened to {total}, and nothing follows it; set "
            "warmup_steps to less, or total_steps to the whole run's steps"
        )


def _check_model(config: Config) -> Iterator[str]:
    flavor = show(config.model.flavor)
    try:
        args = resolve_model(config.model)
    except ConfigError as error:
        yield str(error)
        return

    yield from check_stages(config, args)

    # Its dimensions must allow the layout, the sequence length and the number of a layer.
    tp = config.parallelism.tensor_parallel_degree
    common = math.gcd(args.n_heads, args.n_kv_heads, args.dim, args.ffn_dim)
    if common % tp:
        fitting = [str(degree) for degree in range(1, common + 1) if common % degree == 0]
        yield (
            f"[parallelism] tensor_parallel_degree = {tp} must divide n_heads = {args.n_heads}, "
            f"n_kv_heads = {args.n_kv_heads}, dim = {args.dim} and ffn_dim = {args.ffn_dim} of "
            f"[model] flavor = {flavor}; use one of {', '.join(fitting)}"
        )
    if config.training.seq_len > args.max_seq_len:
        yield (
            f"[training] seq_len = {config.training.seq_len} is above max_seq_len = "
            f"{args.max_seq_len} of [model] flavor = {flavor}; use at most {args.max_seq_len}, or "
            "set rope_theta or rope_scaling for longer sequences"
        )
    mode, option = (
        config.activation_checkpoint.mode,
        config.activation_checkpoint.selective_ac_option,
    )
    if option not in ("op", *map(str, range(1, args.n_layers + 1))):
        yield (
            f'[activation_checkpoint] selective_ac_option = {show(option)} must be "op", or a '
            f'number from "1" to "{args.n_layers}", the n_layers of [model] flavor = {flavor}'
        )

    # torch 2.11 cannot count the FLOPs of grouped-query attention on a GPU, and torch 2.12 takes
    # DTensor's mesh for an activation of unknown size.
    torch = version("torch")
    crashes = (
        f'[activation_checkpoint] mode = "memory_budget" crashes the compiler of torch {torch}'
    )
    if mode == "memory_budget" and torch.startswith("2.11.") and args.n_kv_heads != args.n_heads:
        yield (
            f"{crashes} where n_kv_heads = {args.n_kv_heads} is not n_heads = {args.n_heads}, "
            f'as in [model] flavor = {flavor}; install torch 2.13, or set the mode to "selective"'
        )
    if mode == "memory_budget" and torch.startswith("2.12.") and tp > 1:
        yield (
            f"{crashes} under [parallelism] tensor_parallel_degree = {tp}; "
            'install torch 2.13, or set the degree to 1 or the mode to "selective"'
        )


def _check_compiled(config: Config) -> Iterator[str]:
    compiled = config.compile.covers("model")
    if config.compile.enable and not config.compile.components:
        yield (
            "[compile] components = [] leaves nothing to compile; "
            'use ["model", "loss"], or set enable to false'
        )
    if config.activation_checkpoint.mode == "memory_budget" and not compiled:
        yield (
            '[activation_checkpoint] mode = "memory_budget" is for the compiler; set [compile] '
            'enable = true, with "model" among its components, or the mode to "selective"'
        )

    parallelism = config.parallelism
    overlaps = "[parallelism] enable_async_tensor_parallel = true"
    if parallelism.enable_async_tensor_parallel and parallelism.tensor_parallel_degree == 1:
        yield (
            f"{overlaps} needs tensor_parallel_degree of 2 or more, not 1; "
            "set that, or set it to false"
        )
    if parallelism.enable_async_tensor_parallel and not compiled:
        yield (
            f"{overlaps} is done by the compiler; set [compile] enable = true, "
            'with "model" among its components, or set it to false'
        )


def _check_float8(config: Config) -> Iterator[str]:
    float8, training = config.float8, config.training
    if not float8.enable_float8_linear:
        return
    recipe, name = float8.recipe, show(float8.recipe_name)

    if float8.pad_inner_dim and not recipe.pads_tokens:
        why = "is not offered by torchao" if recipe.divides_tokens else "pads nothing"
        yield (
            f"[float8] pad_inner_dim = true {why} under recipe_name = {name}; set it to false, or "
            f"the recipe to {_recipes(lambda other: other.pads_tokens)}"
        )
    if float8.log_numerics_freq and recipe.kind == "mxfp8":
        yield (
            f"[float8] log_numerics_freq = {float8.log_numerics_freq} measures casts with a scale "
            f"for a tensor or a row, not those of recipe_name = {name}; "
            "set it to 0, or change the recipe"
        )
    if float8.scale_gradients_in_matmul and not recipe.scales_in_matmul:
        yield (
            "[float8] scale_gradients_in_matmul = true changes nothing under recipe_name = "
            f"{name}; set it to false, or the recipe to "
            f"{_recipes(lambda other: other.scales_in_matmul)}"
        )
    if float8.enable_fsdp_float8_all_gather and not recipe.gathers_float8:
        yield (
            "[float8] enable_fsdp_float8_all_gather = true needs recipe_name = "
            f"{_recipes(lambda other: other.gathers_float8)}, not {name}; "
            "set it to false, or change the recipe"
        )

    precomputes = "[float8] precompute_float8_dynamic_scale_for_fsdp = true"
    if float8.precompute_float8_dynamic_scale_for_fsdp and not float8.enable_fsdp_float8_all_gather:
        yield f"{precomputes} needs enable_fsdp_float8_all_gather = true; set both to the same"
    if float8.precompute_float8_dynamic_scale_for_fsdp and training.enable_cpu_offload:
        yield (
            f"{precomputes} has no effect with [training] enable_cpu_offload = true: a weight "
            "comes to the GPU without its scale; set one of them to false"
        )
    if recipe.compute_dtype not in (None, training.mixed_precision_param):
        yield (
            f"[training] mixed_precision_param = {show(training.mixed_precision_param)} cannot be "
            f"cast by the kernels of [float8] recipe_name = {name}; "
            f"use {show(recipe.compute_dtype)}, or another recipe"
        )


def _recipes(having: Callable[[Recipe], bool]) -> str:
    """List the recipes with a property: `"tensorwise" or "rowwise"`."""
    return " or ".join(show(name) for name, recipe in RECIPES.items() if having(recipe))


def _check_training(config: Config) -> Iterator[str]:
    training, optimizer = config.training, config.optimizer
    if training.datasets and training.dataset_path:
        yield (
            f"[training] dataset_path = {show(training.dataset_path)} is set, and so is datasets, "
            f"a list of {len(training.datasets)}; unset it, or make it one of the list"
        )
    try:
        resolve_shares(training.datasets)
    except ConfigError as error:
        yield str(error)

    if config.validation.prompts and not config.validation.enable:
        prompts = show(config.validation.prompts)
        yield f"[validation] prompts = {prompts} needs enable = true; set that, or remove them"
    if config.validation.steps == 0:
        yield "[validation] steps = 0 validates nothing; use 1 or more, -1 for all data, or disable"
    if 0 < training.loss_spike_factor <= 1:
        yield (
            f"[training] loss_spike_factor = {training.loss_spike_factor} makes each loss near the "
            "mean of the others a spike; use a factor above 1, like 3, or 0 for none"
        )
    if optimizer.state_dtype == "bfloat16" and optimizer.implementation != "fused":
        yield (
            f"[optimizer] implementation = {show(optimizer.implementation)} keeps its moments in "
            'the data type of the weights, and state_dtype = "bfloat16"; '
            'set implementation to "fused", or unset state_dtype'
        )
    if optimizer.state_dtype == "float32" and training.dtype != "float32":
        yield (
            '[optimizer] state_dtype = "float32" needs [training] dtype = "float32" too, not '
            f"{show(training.dtype)}: moments are no wider than weights; unset one of them"
        )


def _check_checkpoint(config: Config) -> Iterator[str]:
    checkpoint = config.checkpoint
    for key in ("initial_load_path", "initial_load_in_hf", "last_save_in_hf"):
        if (value := getattr(checkpoint, key)) and not checkpoint.enable:
            yield f"[checkpoint] {key} = {show(value)} needs enable = true; set that, or unset it"
    if checkpoint.last_save_in_hf and checkpoint.load_only:
        yield "[checkpoint] last_save_in_hf = true saves, and load_only = true does not; unset one"

    # What is loaded, and what is saved at the end.
    no_folder = checkpoint.initial_load_path is None and not config.model.tokenizer_path
    if checkpoint.initial_load_in_hf and no_folder:
        yield (
            "[checkpoint] initial_load_in_hf = true has no folder to load; set initial_load_path, "
            "or [model] tokenizer_path to the folder of the Hugging Face model"
        )
    if checkpoint.initial_load_in_hf and not checkpoint.initial_load_model_only:
        yield (
            "[checkpoint] initial_load_model_only = false, but with initial_load_in_hf = true "
            "there are only weights to load; set it to true"
        )


def _check_run_folder(config: Config) -> Iterator[str]:
    profiling = config.profiling
    if profiling.profiler_active > profiling.profile_freq:
        yield (
            f"[profiling] profiler_active = {profiling.profiler_active} is above profile_freq = "
            f"{profiling.profile_freq}, the steps of a period; use at most that"
        )

    # Each part of a run needs a name of its own in the run folder.
    owners: dict[PurePosixPath, str] = {}
    for name, value in (
        ("[checkpoint] folder", config.checkpoint.folder),
        ("[checkpoint] save_request_file", config.checkpoint.save_request_file),
        ("[metrics] save_tb_folder", config.metrics.save_tb_folder),
        ("[profiling] save_traces_folder", profiling.save_traces_folder),
        ("[profiling] save_memory_snapshot_folder", profiling.save_memory_snapshot_folder),
        ("[comm] save_traces_folder", config.comm.save_traces_folder),
    ):
        folder = PurePosixPath(value)
        owner = owners.setdefault(folder, name)
        if folder.is_absolute() or ".." in folder.parts or not folder.parts:
            yield f'{name} = {show(value)} must be a name within [job] dump_folder, like "traces"'
        elif folder.parts[0] in RUN_FILES:
            yield f"{name} = {show(value)} is a name that every run uses itself; choose another"
        elif owner != name:
            yield f"{name} = {show(value)} is also the name of {owner}; choose another"
    # A new run moves each of them to previous/ by itself.
    for folder, name in owners.items():
        for outer in owners.keys() & {*folder.parents[:-1]}:
            yield f'{name} = "{folder}" is within {owners[outer]} = "{outer}"; choose another'
    if "/" in (prefix := config.comm.save_traces_file_prefix):
        yield (
            f"[comm] save_traces_file_prefix = {show(prefix)} must not hold /; "
            "the folder is [comm] save_traces_folder"
        )
