"""torchtitan's TOML files, from before v0.1.0 to v0.2.2, load unchanged, and no key is dropped
silently."""

import json
import re
from pathlib import Path

import pytest

from torchtitan_lite.config import Config, load_config
from torchtitan_lite.config.keys import KEYS, show_key
from torchtitan_lite.config.layers import read_files
from torchtitan_lite.config.torchtitan import FOREIGN, current_name, find_foreign
from torchtitan_lite.errors import ConfigError

FOLDER = Path(__file__).parent / "torchtitan_configs"
FIELDS = """
job: dump_folder description use_for_integration_test print_args print_config save_config_file
  custom_config_module
profiling: enable_profiling save_traces_folder profile_freq enable_memory_snapshot
  save_memory_snapshot_folder profiler_active profiler_warmup
metrics: log_freq enable_tensorboard disable_color_printing save_tb_folder save_for_all_ranks
  enable_wandb
model: name flavor tokenizer_path converters print_after_conversion hf_assets_path
optimizer: name lr beta1 beta2 eps weight_decay implementation early_step_in_backward
lr_scheduler: warmup_steps decay_ratio decay_type lr_min total_steps min_lr_factor
training: dataset dataset_path local_batch_size global_batch_size seq_len max_norm steps
  enable_cpu_offload mixed_precision_param mixed_precision_reduce compile gc_freq gc_debug seed
  deterministic dtype
parallelism: data_parallel_replicate_degree enable_compiled_autograd data_parallel_shard_degree
  fsdp_reshard_after_forward tensor_parallel_degree disable_loss_parallel
  enable_async_tensor_parallel pipeline_parallel_degree pipeline_parallel_split_points
  pipeline_parallel_layers_per_stage pipeline_parallel_schedule pipeline_parallel_schedule_csv
  pipeline_parallel_microbatch_size context_parallel_degree context_parallel_rotate_method
  module_fqns_per_model_part pipeline_parallel_first_stage_less_layers
  pipeline_parallel_last_stage_less_layers pipeline_parallel_expert_parallel_overlap
  context_parallel_load_balancer expert_parallel_degree expert_tensor_parallel_degree
  expert_parallel_comm_backend
checkpoint: enable_checkpoint folder initial_load_path initial_load_model_weights_only interval
  last_save_model_weights_only export_dtype create_seed_checkpoint async_mode keep_latest_k
  load_step exclude_from_loading enable enable_ft_dataloader_checkpoints initial_load_model_only
  initial_load_in_hf initial_load_in_hf_quantized last_save_model_only last_save_in_hf
  enable_first_step_checkpoint load_only
activation_checkpoint: mode selective_ac_option per_op_sac_force_recompute_mm_shapes_by_fqns
  early_stop memory_budget visualize_memory_budget_pareto preserve_rng_state determinism_check
  debug
float8: enable_fsdp_float8_all_gather precompute_float8_dynamic_scale_for_fsdp
  force_recompute_fp8_weight_in_bwd recipe_name filter_fqns emulate
mx: use_fp8_dim1_cast_triton_kernel recipe_name filter_fqns
comm: init_timeout_seconds train_timeout_seconds trace_buf_size save_traces_folder
  save_traces_file_prefix mode
memory_estimation: enabled disable_fake_mode enable
fault_tolerance: enable replica_id group_size min_replica_size semi_sync_method sync_steps
  should_quantize fragment_sync_delay fragment_update_alpha process_group
  process_group_timeout_ms
experimental: custom_import custom_args_module
training.dataloader: num_workers persistent_workers pin_memory prefetch_factor
compile: enable components backend
quantize.linear.float8: enable_fsdp_float8_all_gather precompute_float8_dynamic_scale_for_fsdp
  recipe_name filter_fqns emulate
quantize.linear.mx: mxfp8_dim1_cast_kernel_choice recipe_name filter_fqns
quantize.grouped_mm.float8: fqns
quantize.grouped_mm.mx: recipe_name fqns
validation: enable dataset dataset_path local_batch_size seq_len freq steps
validation.dataloader: num_workers persistent_workers pin_memory prefetch_factor
debug: seed deterministic deterministic_warn_only moe_force_load_balance
"""
"""The fields of JobConfig in torchtitan v0.1.0 and v0.2.2, apart from job.config_file."""
NAMES = [
    f"{table}.{key}"
    for table, keys in re.findall(r"^([\w.]+): ((?:[\w ]|\n  )+)", FIELDS, re.M)
    for key in keys.split()
]


def load(file: str | Path, *overrides: str, world_size: int = 8) -> Config:
    words = ["--job.config_file", str(FOLDER / file), *overrides]
    return load_config(words, world_size=world_size)


def refusal(tmp_path: Path, text: str) -> str:
    (tmp_path / "run.toml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load(tmp_path / "run.toml")
    return str(caught.value).replace(f"{tmp_path}/", "")


def test_every_key_of_torchtitan_is_known() -> None:
    assert len(NAMES) == 173
    current = [current_name(name) for name in NAMES]
    assert [name for name in current if name not in KEYS and not find_foreign(name)] == []


def test_no_key_of_ours_is_foreign() -> None:
    assert [name for name in KEYS if find_foreign(name)] == []
    assert [name for name in NAMES if find_foreign(name) and current_name(name) != name] == []
    assert {each.values for each in FOREIGN.values() if isinstance(each.values, str)} <= {*KEYS}


@pytest.mark.parametrize("name", ["old_debug", "old_405b", "new_debug", "new_8b"])
def test_a_key_of_their_file_has_its_value_here_or_a_notice(
    name: str, notices: pytest.LogCaptureFixture
) -> None:
    config = load(f"{name}.toml", world_size=2 if "debug" in name else 8)
    said = "\n".join(notices.messages)
    (layer,) = read_files(FOLDER / f"{name}.toml")
    for old, setting in layer.items():
        table, _, key = current_name(old).partition(".")
        shown = {re.escape(show_key(each)) for each in (old, current_name(old))}
        if re.search(rf"^(no effect here: .*)?({'|'.join(shown)})\b", said, re.M):
            continue
        value = getattr(getattr(config, table), key)
        if isinstance(value, tuple):
            is_list = isinstance(setting.value, list)
            value = json.loads(json.dumps(value)) if is_list else ",".join(value)
        assert value == setting.value, old


def test_the_old_spelling_says_what_it_means(notices: pytest.LogCaptureFixture) -> None:
    config = load("old_405b.toml")
    assert (config.float8.enable_float8_linear, config.float8.filter_fqns) == (True, ("output",))
    assert (config.lr_scheduler.warmup_steps, config.compile.enable) == (600, True)
    assert config.parallelism.enable_async_tensor_parallel
    assert notices.messages == [
        "[model] converters is now [float8] enable_float8_linear",
        "[lr_scheduler] lr_min is now [lr_scheduler] min_lr_factor",
        "[training] warmup_steps is now [lr_scheduler] warmup_steps",
        "[training] compile is now [compile] enable",
        "[checkpoint] enable_checkpoint is now [checkpoint] enable",
        "[checkpoint] initial_load_model_weights_only is now [checkpoint] initial_load_model_only",
        "[checkpoint] last_save_model_weights_only is now [checkpoint] last_save_model_only",
        "no effect here: [parallelism] enable_compiled_autograd: [compile] does not need it",
    ]


def test_their_table_for_mxfp8_is_used_and_the_one_for_float8_is_not(
    notices: pytest.LogCaptureFixture,
) -> None:
    float8 = load("new_8b.toml").float8
    assert (float8.enable_float8_linear, float8.recipe_name) == (True, "mxfp8")
    assert float8.filter_fqns == ("output", "attention.wk")
    assert not float8.enable_fsdp_float8_all_gather
    assert [message for message in notices.messages if message.startswith("no effect")] == [
        "no effect here: [float8] recipe_name, [float8] filter_fqns, [float8] "
        "enable_fsdp_float8_all_gather, [float8] precompute_float8_dynamic_scale_for_fsdp: "
        "[model] converters selects [mx]",
        "no effect here: [mx] mxfp8_dim1_cast_kernel_choice: torchao chooses the kernels of the "
        "casts",
        "no effect here: [mx] recipe_name: the recipe is mxfp8, with scales rounded up; [float8] "
        "emulate emulates it",
    ]


@pytest.mark.parametrize(
    ("words", "enabled", "recipe", "filters"),
    [
        (["--model.converters", "float8"], True, "rowwise", ("output",)),
        (["--model.converters="], False, "rowwise", ("output",)),
        (["--float8.enable_float8_linear=false"], False, "mxfp8", ("output", "attention.wk")),
        (["--mx.filter-fqns", "wo,w2"], True, "mxfp8", ("wo", "w2")),
        (["--quantize.linear.mx.filter_fqns="], True, "mxfp8", ()),
    ],
)
def test_the_last_converter_decides(
    words: list[str], enabled: bool, recipe: str, filters: tuple[str, ...]
) -> None:
    gather = "--quantize.linear.float8.no-enable-fsdp-float8-all-gather"
    precompute = "--float8.no_precompute_float8_dynamic_scale_for_fsdp"
    float8 = load("new_8b.toml", gather, precompute, *words).float8
    assert float8.enable_float8_linear is enabled
    assert (float8.recipe_name, float8.filter_fqns) == (recipe, filters)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            'model.norm_type = "layernorm"',
            '[model] norm_type = "layernorm" (from run.toml): Llama\'s layers use RMSNorm; remove '
            'the key, or set it to "rmsnorm" or "fused_rmsnorm"',
        ),
        (
            "optimizer.early_step_in_backward = true",
            "[optimizer] early_step_in_backward = true (from run.toml): all gradients are clipped "
            "before the update; remove the key, or set it to false",
        ),
        (
            'checkpoint.interval_type = "seconds"',
            '[checkpoint] interval_type = "seconds" (from run.toml): [checkpoint] interval counts '
            'steps; remove the key, or set it to "steps"',
        ),
        (
            "[memory_estimation]\nenabled = true",
            "[memory_estimation] enabled = true (from run.toml): torchtitan-lite plan predicts the "
            "memory without a run; remove the key, or set it to false",
        ),
        (
            "[fault_tolerance]\nenable = true\ngroup_size = 2",
            "[fault_tolerance] enable = true (from run.toml): torchft is not used; MAX_RESTARTS "
            "restarts a run from its last checkpoint; remove the key, or set it to false",
        ),
        (
            '[experimental]\ncustom_import = "my.module"',
            '[experimental] custom_import = "my.module" (from run.toml): no code from outside is '
            'loaded; remove the key, or set it to ""',
        ),
        (
            "[training]\nlocal_batch_size = 4\n[validation]\nlocal_batch_size = 2\nseq_len = 9",
            "[validation] local_batch_size = 2 (from run.toml): validation uses [training]'s; "
            "remove the key, or set it to 4\n[validation] seq_len = 9 (from run.toml): validation "
            "uses [training]'s; remove the key, or set it to 2048",
        ),
        (
            "[quantize.linear.mx]\nrecipe_name = 'mxfp4_cutlass'",
            '[mx] recipe_name = "mxfp4_cutlass" (from run.toml, as [quantize.linear.mx] '
            "recipe_name): the recipe is mxfp8, with scales rounded up; [float8] emulate emulates "
            'it; remove the key, or set it to "mxfp8" or "mxfp8_cublas" or "mxfp8_cublas_rceil" '
            'or "mxfp8_emulated"',
        ),
        (
            "[quantize.linear.float8]\nrecipe_nam = 'rowwise'",
            '[float8] recipe_nam = "rowwise" (from run.toml, as [quantize.linear.float8] '
            "recipe_nam): unknown key; did you mean [float8] recipe_name?",
        ),
        (
            "[experimental]\ncostum_import = 1",
            "[parallelism] costum_import = 1 (from run.toml, as [experimental] costum_import): "
            "unknown key; --help lists every key",
        ),
        ("[quantize]\nlinear = 3", "[quantize] (from run.toml): unknown table"),
    ],
)
def test_what_would_train_otherwise_is_refused(tmp_path: Path, text: str, message: str) -> None:
    assert refusal(tmp_path, text) == message


@pytest.mark.parametrize(
    "name", ["checkpoint.interval_type", "model.norm_type", *filter(find_foreign, NAMES)]
)
def test_a_value_that_is_not_offered_is_refused_with_the_reason(name: str, tmp_path: Path) -> None:
    row = find_foreign(name)
    assert row is not None
    (empty := tmp_path / "empty.toml").touch()
    table, _, key = name.rpartition(".")
    for value in ('"other"', "[[1]]", "2"):
        text = f"[{table}]\n{key} = {value}\n"
        if row.values is None:
            (tmp_path / "run.toml").write_text(text)
            assert load(tmp_path / "run.toml") == load(empty)
            continue
        start = f"{show_key(name)} = {value} (from run.toml): {row.reason}; remove the key, or set "
        assert refusal(tmp_path, text).startswith(start)


def test_empty_tables_of_theirs_load(tmp_path: Path) -> None:
    tables = ["experimental", "fault_tolerance", "mx", "quantize.linear.mx", "training.dataloader"]
    (tmp_path / "run.toml").write_text("".join(f"[{table}]\n" for table in tables))
    assert load(tmp_path / "run.toml") == load_config(
        ["--job.config_file", str(tmp_path / "run.toml")], world_size=8
    )


def test_a_later_layer_can_replace_a_refused_value(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("fault_tolerance.enable = true\njob.print_args = false")
    words = ["--fault-tolerance.no-enable", "--job.no_use_for_integration_test"]
    assert load(tmp_path / "run.toml", *words, "--job.print-args").job.print_config
