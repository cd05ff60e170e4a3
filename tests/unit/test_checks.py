"""Rules between keys of the config."""

import re

import pytest
import tomli

from torchtitan_lite.config import Config, check_config, checks


def check(toml: str, *, world_size: int = 1) -> list[str]:
    """Return the messages about a config, which `toml` sets as within an inline table."""
    tables = tomli.loads(f"config = {{{toml}}}")["config"]
    return check_config(Config.model_validate(tables), world_size=world_size)


def check_refused(toml: str, pattern: str, *, world_size: int = 1) -> None:
    """Assert that a config breaks one rule. `pattern` follows the first bracket of its message."""
    (message,) = check(toml, world_size=world_size)
    assert re.match(pattern, message[1:]), message


# ----- check_config -----


@pytest.mark.parametrize("toml", [
    "",
    'model.flavor = "405B", training.seq_len = 131072',
    "training.steps = 250, lr_scheduler.warmup_steps = 200, lr_scheduler.decay_ratio = 0.5",
    'activation_checkpoint.selective_ac_option = "6"',
    'training.dtype = "bfloat16", optimizer.implementation = "foreach"',
    'training.dtype = "bfloat16", optimizer.state_dtype = "bfloat16"',
    "compile.components = []",
    "profiling.profiler_active = 10",
    'validation.dataset = "c4_validation", validation.dataset_path = "c4"',
    'validation.prompts = ["a"], validation.steps = 0, validation.seq_len = 200000',
    "validation.enable = true, validation.seq_len = 2048, validation.local_batch_size = 3",
    'training.dataset = "pystdlib", training.dataset_path = "x.txt", validation.steps = -1',
    'profiling.save_traces_folder = "p/traces", profiling.save_memory_snapshot_folder = "p/m"',
])  # fmt: skip
def test_sound_configs(toml):
    assert check(toml) == []


def test_all_broken_rules_are_named():
    validation = "validation.enable = true, validation.steps = 0"
    messages = check(f'training.global_batch_size = 25, model.flavor = "7B", {validation}')
    named = ["training", "model", "validation"]
    assert [message[1:].partition("]")[0] for message in messages] == named


# ----- REFUSED, COMPILED -----
@pytest.mark.parametrize(("toml", "fix"), [
    ('activation_checkpoint.mode = "memory_budget", compile.enable = false', '"model"'),
    ('activation_checkpoint.mode = "memory_budget", compile.components = ["loss"], '
     "compile.enable = true", '"model"'),
    ('activation_checkpoint.mode = "memory_budget", compile.enable = true, '
     'compile.backend = "eager"', '"inductor"'),
    ("parallelism.enable_async_tensor_parallel = true, compile.enable = false, "
     "parallelism.tensor_parallel_degree = 2", '"model"'),
    ('parallelism.enable_async_tensor_parallel = true, compile.components = ["loss"], '
     "compile.enable = true, parallelism.tensor_parallel_degree = 2", '"model"'),
    ("parallelism.enable_async_tensor_parallel = true, parallelism.tensor_parallel_degree = 1, "
     "compile.enable = true", "degree"),
    ("float8.enable_float8_linear = true, float8.precompute_float8_dynamic_scale_for_fsdp = true, "
     "training.enable_cpu_offload = true, float8.enable_fsdp_float8_all_gather = true", "false"),
    ('training.dataset_path = "a", training.datasets = [{path = "b", weight = 1.0}]', "one of"),
    ('optimizer.state_dtype = "bfloat16", optimizer.implementation = "foreach"', '"fused"'),
    ('optimizer.state_dtype = "float32", training.dtype = "bfloat16"', "unset"),
    ('optimizer.state_dtype = "bfloat16", optimizer.name = "Adam"', "AdamW"),
    ('optimizer.state_dtype = "bfloat16", optimizer.name = "Muon"', "AdamW"),
    ("validation.enable = true, validation.steps = 0", "-1 for all"),
    ("validation.enable = true, validation.seq_len = 64", "held out"),
    ('validation.enable = true, validation.seq_len = 64, validation.dataset = "c4", '
     "parallelism.pipeline_parallel_degree = 2", "one length"),
    ("validation.enable = true, validation.steps = -1", "name some"),
    ('job.dump_folder = "s3://bucket/run"', r"only \[checkpoint\] folder may be a URL"),
    ('checkpoint.initial_load_path = "/base", checkpoint.enable = false', "unset"),
    ("checkpoint.last_save_in_hf = true, checkpoint.enable = false", "unset"),
    ("checkpoint.last_save_in_hf = true, checkpoint.load_only = true, checkpoint.enable = true",
     "unset"),
])  # fmt: skip
def test_refused_keys_are_named_with_their_values_and_a_fix(toml, fix):
    (message,) = check(toml, world_size=2 if "degree = 2" in toml else 1)
    subject, _, said = message.partition(": ")
    assert re.search(fix, said), message
    named = [".".join(name) for name in re.findall(r"\[(\w+)] (\w+) = ", subject)]
    unset = "checkpoint.initial_load_path validation.dataset validation.dataset_path "
    unset += "compile.enable compile.components compile.backend"
    assert named and all(name in f"{toml} {unset}" for name in named)


# ----- _check_layout, _check_model, _check_run, own_names -----


@pytest.mark.parametrize(("world_size", "toml", "pattern"), [
    (6, "parallelism.context_parallel_degree = 4",
     r"parallelism] data_parallel_rep.* = 1 . 1 . 4 . 1 = 4 .* world size, 6; run 4 or 8 pro"),
    (2, "parallelism.context_parallel_degree = 2, parallelism.data_parallel_shard_degree = 2",
     r"parallelism] .* = 1 . 1 . 2 . 1 = 2 leaves 1 of 2 processes, .*_degree = 2; .* 1 or -1"),
    (4, "training.seq_len = 2050, "
        "parallelism.context_parallel_degree = 2, parallelism.tensor_parallel_degree = 2",
     r"training] seq_len = 2050, \[parallelism] context_p\w+ = 2, \[parallelism] tensor_p\w+ = 2: "
     r".* 8 .*use 2048 or 2056"),
    (4, "training.seq_len = 4, parallelism.context_parallel_degree = 4",
     r"training] seq_len = 4, \[parallelism] context_parallel_degree = 4, .* 8 .*use 8 or 16"),
    (2, "training.seq_len = 2047, parallelism.tensor_parallel_degree = 2",
     r"training] seq_len = 2047, .* tensor_parallel_degree = 2: .* 2 parts; use 2046 or 2048"),
    (2, 'parallelism.tensor_parallel_degree = 2, validation.enable = true, '
        'validation.seq_len = 63, validation.dataset_path = "a"',
     r"validation] seq_len = 63, .* tensor_parallel_degree = 2: .* 2 parts; use 62 or 64"),
    (2, "training.global_batch_size = 24",
     r"training] global_batch_size = 24 .* = 8 . 2 = 16; use 16 or 32"),
    (16, 'model.flavor = "8B", parallelism.tensor_parallel_degree = 16',
     r'parallelism] tensor_parallel_degree = 16, \[model] flavor = "8B": .*n_heads = 32, '
     "n_kv_heads = 8, dim = 4096 and ffn_dim = 14336; use one of 1, 2, 4, 8$"),
    (1, 'model.flavor = "8b"', r'model] flavor = "8b" must .* "405B", .* did you mean "8B"\?'),
    (1, 'model.flavor = "3-8B", training.seq_len = 16384',
     r'training] seq_len = 16384, \[model] flavor = "3-8B": use at most 8192, or'),
    (1, 'model.flavor = "3-8B", validation.enable = true, validation.seq_len = 16384, '
        'validation.dataset_path = "a"',
     r'validation] seq_len = 16384, \[model] flavor = "3-8B": use at most 8192, or'),
    *((1, f'activation_checkpoint.selective_ac_option = "{option}"',
       rf'activation_checkpoint] selective_ac_option = "{option}", .*"op", .* "1" to "6"')
      for option in ("0", "7", "-1", "2.0", "ops", "٣")),
    (1, 'training.datasets = [{path = "a", weight = 100000}, {path = "b"}]',
     r"training] datasets: .* 100000.0, 1.0 .* 100000 : 1 .* at most 100,000; round"),
    (1, "profiling.profiler_active = 11",
     r"profiling] profiler_active = 11, \[profiling] profile_freq = 10: "),
])  # fmt: skip
def test_rules_with_numbers(world_size, toml, pattern):
    check_refused(toml, pattern, world_size=world_size)


@pytest.mark.parametrize("toml", [
    *(f'checkpoint.folder = "{folder}"' for folder in ("/tmp/x", "../x", "a/../../x", "tb/c")),
    'comm.save_traces_folder = "profile_traces"',
    'metrics.save_tb_folder = "logs/tb"',
])  # fmt: skip
def test_what_a_run_keeps_has_names_of_its_own(toml):
    (message,) = check(toml)
    assert message.endswith("must be a name of its own within [job] dump_folder; choose another")


# torch 2.11 crashes with grouped-query attention, 2.12 with tensor parallelism.
@pytest.mark.parametrize(("torch_version", "flavor", "tp", "crashes"), [
    ("2.11.0+cu130", "debugmodel_gqa", 1, True),
    ("2.11.0", "debugmodel", 2, False),
    ("2.12.1", "debugmodel_gqa", 1, False),
    ("2.12.1", "debugmodel", 2, True),
    ("2.13.0a0+git1234", "debugmodel_gqa", 2, False),
])  # fmt: skip
def test_check_model_with_a_memory_budget(torch_version, flavor, tp, crashes, monkeypatch):
    monkeypatch.setattr(checks, "version", lambda package: torch_version)
    toml = (
        f'activation_checkpoint.mode = "memory_budget", compile.enable = true, '
        f'model.flavor = "{flavor}", parallelism.tensor_parallel_degree = {tp}'
    )
    if crashes:
        start = 'activation_checkpoint] mode = "memory_budget", .*crashes .* of torch '
        check_refused(toml, f"{start}{re.escape(torch_version)}; install", world_size=2)
    else:
        assert check(toml, world_size=2) == []


# ----- RECIPE_KEYS, _check_recipe -----
@pytest.mark.parametrize(("recipe", "toml", "fix"), [
    ("rowwise", "float8.enable_fsdp_float8_all_gather = true", '"tensorwise"; use'),
    ("rowwise_with_gw_hp", "float8.pad_inner_dim = true", '"tensorwise" or "rowwise"; use'),
    ("mxfp8", "float8.pad_inner_dim = true", '"tensorwise" or "rowwise"; use'),
    ("mxfp8", "float8.log_numerics_freq = 5", '"tensorwise" or "rowwise" or "rowwise_with_gw_hp"'),
    ("blockwise", "float8.log_numerics_freq = 5", '"rowwise_with_gw_hp"; use one of these'),
    ("mxfp8", 'training.mixed_precision_param = "float32"', '"bfloat16"'),
])  # fmt: skip
def test_recipes_refuse_keys_that_are_not_theirs(recipe, toml, fix):
    toml = f'float8.recipe_name = "{recipe}", {toml}'
    assert check(toml) == []
    check_refused(f"float8.enable_float8_linear = true, {toml}", rf'.* = "{recipe}": .*{fix}')


@pytest.mark.parametrize("tied", [True, False])
def test_parts_of_parameter_names_occur_in_one(tied):
    parts = ["norm", "ffn_norm", "layers.5", "attention.wq.weight", "output", "layers.6", "norms"]
    table = {"no_decay": parts, "lr_factors": dict.fromkeys(parts, 2.0)}
    model = {"flavor": "debugmodel", "tie_embeddings": tied}
    config = Config.model_validate({"model": model, "optimizer": table})
    problems = check_config(config, world_size=1)
    refused = [
        re.findall(r"(\w+) = .*no parameter has '(.*)' in its name", each) for each in problems
    ]
    wrong = ["output", "layers.6", "norms"] if tied else ["layers.6", "norms"]
    assert refused == [[(key, part)] for key in table for part in wrong]


@pytest.mark.parametrize("enabled", [True, False])
def test_filters_of_float8_match_a_linear(enabled):
    float8 = {"enable_float8_linear": enabled, "filter_fqns": ["wk", "layers.9", "lm_head"]}
    config = Config.model_validate({"model": {"flavor": "debugmodel"}, "float8": float8})
    problems = "\n".join(check_config(config, world_size=1))
    refused = re.findall("'(.*)', which matches no linear", problems)
    assert refused == (["layers.9", "lm_head"] if enabled else [])
