"""Rules between keys of the config."""

import re

import pytest
import tomli

from torchtitan_lite.config import Config, check_config, checks


def check(toml: str, *, world_size: int = 1, unsound: tuple[str, ...] = ()) -> list[str]:
    """Return the messages about a config, which `toml` sets as within an inline table."""
    tables = tomli.loads(f"config = {{{toml}}}")["config"]
    return check_config(Config.model_validate(tables), world_size=world_size, unsound=unsound)


def check_refused(toml: str, pattern: str, *, world_size: int = 1) -> None:
    """Assert that a config breaks one rule. `pattern` follows the first bracket of its message."""
    (message,) = check(toml, world_size=world_size)
    assert re.match(pattern, message[1:]), message


# ----- check_config -----


@pytest.mark.parametrize("toml", [
    "",
    'model.flavor = "405B", training.seq_len = 131072',
    "training.steps = 200, lr_scheduler.warmup_steps = 200, lr_scheduler.decay_ratio = 0.1",
    "training.steps = 250, lr_scheduler.warmup_steps = 200, lr_scheduler.decay_ratio = 0.2",
    'activation_checkpoint.selective_ac_option = "6"',
    'training.dtype = "bfloat16", optimizer.implementation = "foreach"',
    'training.dtype = "bfloat16", optimizer.state_dtype = "bfloat16"',
    "compile.components = []",
    "profiling.profiler_active = 10",
    'validation.dataset = "c4_validation", validation.dataset_path = "c4"',
    'training.dataset = "pystdlib", training.dataset_path = "x.txt", validation.steps = -1',
    'profiling.save_traces_folder = "p/traces", profiling.save_memory_snapshot_folder = "p/m"',
])  # fmt: skip
def test_sound_configs(toml):
    assert check(toml) == []


BROKEN = (
    'training.global_batch_size = 25, model.flavor = "7B", compile.components = [], '
    "compile.enable = true, lr_scheduler.total_steps = 3, lr_scheduler.warmup_steps = 1, "
    "lr_scheduler.decay_ratio = 1.0"
)


@pytest.mark.parametrize(("unsound", "named"), [
    ((), ["training", "lr_scheduler", "model", "compile"]),
    (("training",), ["model", "compile"]),
    (("parallelism", "model"), ["lr_scheduler", "compile"]),
    (("lr_scheduler", "compile"), ["training", "model"]),
])  # fmt: skip
def test_all_broken_rules_are_named_but_those_on_unsound_tables(unsound, named):
    messages = check(BROKEN, unsound=unsound)
    assert [message[1:].partition("]")[0] for message in messages] == named


# ----- _check_layout, _check_model, _check_compiled -----
@pytest.mark.parametrize(("world_size", "toml", "pattern"), [
    (6, "parallelism.context_parallel_degree = 4",
     r"parallelism] data_parallel_rep.* = 1 . 1 . 4 . 1 = 4 .* world size, 6; run 4 or 8 pro"),
    (2, "parallelism.context_parallel_degree = 2, parallelism.data_parallel_shard_degree = 2",
     r"parallelism] .* = 2 . 1 . 1 . 2 . 1 = 4, .* 2 processes; .*shard_degree to 1 or -1"),
    (4, "training.seq_len = 2050, "
        "parallelism.context_parallel_degree = 2, parallelism.tensor_parallel_degree = 2",
     r"training] seq_len = 2050 .*\[parallelism] 2 . context_p\w+ . tensor_p\w+ = 2 . 2 . 2 = 8, "
     r".*use 2048 or 2056"),
    (4, "training.seq_len = 4, parallelism.context_parallel_degree = 4",
     r"training] seq_len = 4 .*\[parallelism] .* = 2 . 4 . 1 = 8, .*use 8 or 16"),
    (2, "training.seq_len = 2047, parallelism.tensor_parallel_degree = 2",
     r"training] seq_len = 2047 .*\[parallelism] tensor_parallel_degree = 2, .*use 2046 or 2048"),
    (2, "training.global_batch_size = 24",
     r"training] global_batch_size = 24 .* = 8 . 2 = 16; use 16 or 32"),
    (16, 'model.flavor = "8B", parallelism.tensor_parallel_degree = 16',
     r"parallelism] tensor_parallel_degree = 16 .*n_heads = 32, n_kv_heads = 8, dim = 4096 and "
     r'ffn_dim = 14336 of \[model] flavor = "8B"; use one of 1, 2, 4, 8$'),
    (2, "parallelism = {tensor_parallel_degree = 2, enable_async_tensor_parallel = true}",
     r"parallelism] enable_async_tensor_parallel = true .*set \[compile] enable = true"),
    (2, "parallelism = {tensor_parallel_degree = 2, enable_async_tensor_parallel = true}, "
        'compile = {enable = true, components = ["loss"]}',
     r"parallelism] enable_async_tensor_parallel = true .*set \[compile] enable = true"),
])  # fmt: skip
def test_rules_of_the_layout(world_size, toml, pattern):
    check_refused(toml, pattern, world_size=world_size)


# ----- check_decay, _check_model, _check_compiled, _check_training -----


@pytest.mark.parametrize(("toml", "pattern"), [
    ("training.steps = 250, lr_scheduler.warmup_steps = 200, lr_scheduler.decay_ratio = 0.5",
     r"lr_scheduler] decay_ratio = 0.5 of 250 steps = 125 .* warmup_steps = 200 leaves 50; "
     r"use decay_ratio <= 0.2 or warmup_steps <= 125"),
    ("lr_scheduler = {total_steps = 3, warmup_steps = 1, decay_ratio = 1.0}",
     r"lr_scheduler] .* 3 steps, .* leaves 2; use decay_ratio <= 0.666 or warmup_steps <= 0"),
    ('model.flavor = "8b"', r'model] flavor = "8b" must .* "405B", .* did you mean "8B"\?'),
    ('model.flavor = "3-8B", training.seq_len = 16384',
     r'training] seq_len = 16384 .* max_seq_len = 8192 .*\[model] flavor = "3-8B"; use .* 8192'),
    ('activation_checkpoint = {mode = "none", selective_ac_option = "x"}',
     r'activation_checkpoint] selective_ac_option = "x" .*"op", .* "1" to "6", .*\[model] flavor'),
    *((f'activation_checkpoint.selective_ac_option = "{option}"', "activation_checkpoint] sel")
      for option in ("0", "7", "-1", "2.0", "ops", "٣")),
    ("compile.enable = true, compile.components = []",
     r'compile] components = \[] .*use \["model", "loss"], or set enable to false'),
    ('activation_checkpoint.mode = "memory_budget"',
     r'activation_checkpoint] mode = "memory_budget" .* set \[compile] enable = true, .*"selec'),
    ("parallelism.enable_async_tensor_parallel = true, compile.enable = true",
     r"parallelism] enable_async_tensor_parallel = true .*tensor_parallel_degree of 2 .* not 1; "),
    ('training.dataset_path = "a", training.datasets = [{path = "b"}]',
     r'training] dataset_path = "a" .* datasets, a list of 1; unset it'),
    ('training.datasets = [{path = "a", weight = 100000}, {path = "b"}]',
     r"training] datasets: .* 100000.0, 1.0 .* at most 100,000; use 99995, 1, which is near"),
    ('validation.prompts = ["a"]', r'validation] prompts = \["a"] needs enable = true; set that'),
    ("validation.steps = 0", r"validation] steps = 0 .*use 1 or more, -1 for all data"),
    ("training.loss_spike_factor = 1.0", "training] loss_spike_factor = 1.0 .* above 1, .*or 0 "),
    ('optimizer.state_dtype = "bfloat16", optimizer.implementation = "foreach"',
     r'optimizer] implementation = "foreach" .* state_dtype = "bfloat16"; .* "fused"'),
    ('optimizer.state_dtype = "float32", training.dtype = "bfloat16"',
     r'optimizer] state_dtype = "float32" .*\[training] dtype = "float32" .*"bfloat16": .*unset'),
])  # fmt: skip
def test_rules_of_the_model_and_its_training(toml, pattern):
    check_refused(toml, pattern)


# torch 2.11 crashes with grouped-query attention, 2.12 with tensor parallelism.
@pytest.mark.parametrize(("torch_version", "flavor", "tp", "pattern"), [
    ("2.11.0+cu130", "debugmodel_gqa", 1,
     r"torch 2.11.0\+cu130 where n_kv_heads = 8 is not n_heads = 16, .*\[model] flavor = .*2.13, "),
    ("2.11.0", "debugmodel", 2, None),
    ("2.12.1", "debugmodel_gqa", 1, None),
    ("2.12.1", "debugmodel", 2,
     r"torch 2.12.1 under \[parallelism] tensor_parallel_degree = 2; install torch 2.13, or set "),
    ("2.13.0a0+git1234", "debugmodel_gqa", 2, None),
])  # fmt: skip
def test_check_model_with_a_memory_budget(torch_version, flavor, tp, pattern, monkeypatch):
    monkeypatch.setattr(checks, "version", lambda package: torch_version)
    toml = (
        f'activation_checkpoint.mode = "memory_budget", compile.enable = true, '
        f'model.flavor = "{flavor}", parallelism.tensor_parallel_degree = {tp}'
    )
    if pattern is None:
        assert check(toml, world_size=2) == []
    else:
        start = 'activation_checkpoint] mode = "memory_budget" crashes .* of '
        check_refused(toml, start + pattern, world_size=2)


# ----- _check_float8 -----
@pytest.mark.parametrize(("toml", "pattern"), [
    ('float8.recipe_name = "rowwise", float8.enable_fsdp_float8_all_gather = true',
     r'float8] enable_fsdp_float8_all_gather = true .* "tensorwise", not "rowwise"; set it to fal'),
    ("float8.scale_gradients_in_matmul = true",
     r'float8] scale_gradients_in_matmul = true .* recipe_name = "tensorwise"; set it to false, '
     r'or the recipe to "rowwise" or "rowwise_with_gw_hp"$'),
    ('float8.recipe_name = "rowwise_with_gw_hp", float8.pad_inner_dim = true',
     r'float8] pad_inner_dim = true pads nothing .* recipe_name = "rowwise_with_gw_hp"; set it to '
     r'false, or the recipe to "tensorwise" or "rowwise"$'),
    ('float8.recipe_name = "mxfp8", float8.pad_inner_dim = true',
     r'float8] pad_inner_dim = true is not offered by torchao .* recipe_name = "mxfp8"; '),
    ('float8.recipe_name = "mxfp8", float8.log_numerics_freq = 5',
     r'float8] log_numerics_freq = 5 .* recipe_name = "mxfp8"; set it to 0, or change the recipe'),
    ('float8.recipe_name = "mxfp8", training.mixed_precision_param = "float32"',
     r'training] mixed_precision_param = "float32" .*\[float8] recipe_name = "mxfp8"; use "bfloa'),
    ("float8.precompute_float8_dynamic_scale_for_fsdp = true",
     r"float8] precompute_float8_dynamic_scale_for_fsdp = true needs enable_fsdp_float8_all_gat"),
    ("float8.precompute_float8_dynamic_scale_for_fsdp = true, "
     "float8.enable_fsdp_float8_all_gather = true, training.enable_cpu_offload = true",
     r"float8] precompute_\w+ = true has no effect .*\[training] enable_cpu_offload = true"),
])  # fmt: skip
def test_rules_of_float8_hold_where_it_is_enabled(toml, pattern):
    assert check(toml) == []
    check_refused(f"float8.enable_float8_linear = true, {toml}", pattern)


# ----- _check_checkpoint -----


@pytest.mark.parametrize(("toml", "pattern"), [
    ('initial_load_path = "/base"', 'initial_load_path = "/base" needs enable = true; set that'),
    ("last_save_in_hf = true", "last_save_in_hf = true needs enable = true; set that"),
    ("enable = true, last_save_in_hf = true, load_only = true",
     "last_save_in_hf = true .* load_only = true .*; unset one"),
    ("enable = true, initial_load_in_hf = true",
     r"initial_load_in_hf = true has no folder .*; set initial_load_path, or \[model] tokenizer_p"),
    ('enable = true, initial_load_path = "/b", initial_load_in_hf = true, '
     "initial_load_model_only = false",
     "initial_load_model_only = false, .* initial_load_in_hf = true .*; set it to true"),
])  # fmt: skip
def test_rules_of_checkpoints(toml, pattern):
    check_refused(f"checkpoint = {{{toml}}}", f"checkpoint] {pattern}")


# ----- _check_run_folder, RUN_FILES -----
@pytest.mark.parametrize(("toml", "pattern"), [
    *((f'checkpoint.folder = "{folder}"',
       f'checkpoint] folder = "{folder}" must be a name within .job] dump_folder')
      for folder in ("/tmp/x", "../x", "a/../../x", ".")),
    ('checkpoint.save_request_file = "checkpoint"',
     r'checkpoint] save_request_file = "checkpoint" .* \[checkpoint] folder; choose another'),
    ('comm.save_traces_folder = "profile_traces"',
     r'comm] save_traces_folder = "profile_traces" .* \[profiling] save_traces_folder; choose'),
    ('profiling.save_traces_folder = "./tb/"',
     r'profiling] save_traces_folder = "./tb/" .* \[metrics] save_tb_folder; choose'),
    ('profiling.save_memory_snapshot_folder = "tb"',
     r'profiling] save_memory_snapshot_folder = "tb" .* \[metrics] save_tb_folder; choose'),
    ('metrics.save_tb_folder = "logs/tb"',
     'metrics] save_tb_folder = "logs/tb" is a name that every run uses itself; choose another'),
    ('checkpoint.folder = "tb/checkpoint"',
     r'checkpoint] folder = "tb/checkpoint" is within \[metrics] save_tb_folder = "tb"; choose'),
    ('comm.save_traces_file_prefix = "../x"',
     r'comm] save_traces_file_prefix = "../x" must not hold /; .*\[comm] save_traces_folder'),
    ("profiling.profiler_active = 11",
     r"profiling] profiler_active = 11 is above profile_freq = 10, .*use at most that"),
])  # fmt: skip
def test_names_in_the_run_folder_and_the_profilers_period(toml, pattern):
    check_refused(toml, pattern)
