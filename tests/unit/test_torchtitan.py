"""torchtitan's TOML files, from before v0.1.0 to v0.2.2, load unchanged, and no key is dropped
silently."""

import json
import re
from pathlib import Path

import pytest

from torchtitan_lite.base.errors import ConfigError
from torchtitan_lite.config import Config, load_config
from torchtitan_lite.config.keys import KEYS, show_key
from torchtitan_lite.config.layers import Layer, Setting, read_files, resolve_aliases
from torchtitan_lite.config.torchtitan import ALIASES, FOREIGN, current_name, find_foreign

FOLDER = Path(__file__).parent / "torchtitan_configs"
PAGE = (Path(__file__).parents[2] / "docs/torchtitan.md").read_text()


def fields(file: str) -> list[str]:
    """Fields of JobConfig in torchtitan, apart from job.config_file."""
    rows = re.findall(r"(.+): (.+)\n", (FOLDER / file).read_text())
    return [f"{table}.{key}" for table, keys in rows for key in keys.split()]


NEW = fields("new_fields.txt")
"""Of v0.2.2."""
NAMES = [*NEW, *fields("old_fields.txt")]
"""Of v0.2.2, and those of v0.1.0 that it lacks."""


def load(file: str | Path, *overrides: str, world_size: int = 8) -> Config:
    words = ["--job.config_file", str(FOLDER / file), *overrides]
    return load_config(words, world_size=world_size)


def refusal(tmp_path: Path, text: str) -> str:
    (tmp_path / "run.toml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load(tmp_path / "run.toml")
    return str(caught.value).replace(f"{tmp_path}/", "")


# ----- KEYS, FOREIGN, ALIASES -----
def test_every_key_of_torchtitan_is_known_and_no_key_of_ours_is_foreign():
    assert (len(NEW), len({*NAMES})) == (148, 173)
    current = [current_name(name) for name in NAMES]
    assert [name for name in current if name not in KEYS and not find_foreign(name)] == []
    assert [name for name in KEYS if find_foreign(name)] == []
    assert set(ALIASES.values()) <= KEYS.keys() and ALIASES.keys().isdisjoint(KEYS)
    assert [name for name in NAMES if find_foreign(name) and current_name(name) != name] == []


# ----- resolve_aliases, ALIASES, MOVED -----


def resolve(**settings: object) -> tuple[Layer, list[str]]:
    return resolve_aliases({name: Setting(value, "run.toml") for name, value in settings.items()})


@pytest.mark.parametrize(("old", "new"), [
    ("training.compile", "compile.enable"),
    ("training.batch_size", "training.local_batch_size"),
    ("training.seed", "debug.seed"),
    ("training.deterministic", "debug.deterministic"),
    ("training.warmup_steps", "lr_scheduler.warmup_steps"),
    ("training.tensor_parallel_degree", "parallelism.tensor_parallel_degree"),
    ("training.disable_loss_parallel", "parallelism.disable_loss_parallel"),
    ("checkpoint.enable_checkpoint", "checkpoint.enable"),
    ("checkpoint.model_weights_only", "checkpoint.last_save_model_only"),
    ("checkpoint.last_save_model_weights_only", "checkpoint.last_save_model_only"),
    ("checkpoint.initial_load_model_weights_only", "checkpoint.initial_load_model_only"),
    ("validation.enabled", "validation.enable"),
    ("scheduler.lr_min", "lr_scheduler.min_lr_factor"),
    ("lr_scheduler.lr_min", "lr_scheduler.min_lr_factor"),
    ("model.hf_assets_path", "model.tokenizer_path"),
    ("job.print_args", "job.print_config"),
    ("quantize.linear.float8.recipe_name", "float8.recipe_name"),
    ("experimental.context_parallel_degree", "parallelism.context_parallel_degree"),
])  # fmt: skip
def test_an_old_name_moves_its_value_and_is_logged(old, new, notices):
    shown = show_key(old)
    assert resolve(**{old: 7}) == ({new: Setting(7, f"run.toml, as {shown}")}, [])
    assert notices.messages == [f"{shown} is now {show_key(new)}"]


def test_current_names_stay(notices):
    layer = {"training.steps": Setting(3, "run.toml"), "no.such": Setting(4, "run.toml")}
    assert resolve_aliases(layer) == (layer, [])
    assert notices.messages == []
    assert current_name("quantize.linear.float8") == "float8"
    assert current_name("quantize.linear.float80.emulate") == "quantize.linear.float80.emulate"


@pytest.mark.parametrize(("converters", "enabled"), [
    (["float8"], True),
    (["quantize.linear.float8"], True),
    (["mx"], True),
    ([], False),
    ("float8", True),  # the others as the command line writes them
    ("quantize.linear.mx", True),
    ("", False),
])  # fmt: skip
def test_converters_become_the_float8_switch(converters, enabled):
    resolved, problems = resolve(**{"model.converters": converters})
    assert (resolved["float8.enable_float8_linear"].value, problems) == (enabled, [])


@pytest.mark.parametrize("converters", [["lora"], ["float8", "mx"], True, {}, [["float8"]]])
def test_other_converters_are_refused(converters):
    resolved, (problem,) = resolve(**{"model.converters": converters})
    assert (
        resolved == {} and 'must be ["quantize.linear.float8"], ["quantize.linear.mx"]' in problem
    )


@pytest.mark.parametrize("old_first", [True, False])
def test_old_and_new_name_must_agree(old_first):
    names = ["training.compile", "compile.enable"][:: 1 if old_first else -1]
    by_name = {"training.compile": True, "compile.enable": False}
    _, problems = resolve(**{name: by_name[name] for name in names})
    message = r"\[training] compile = true .*: contradicts \[compile] enable = false .*; keep"
    assert re.match(message, "\n".join(problems))
    same = {"compile.enable": Setting(True, "run.toml")}
    assert resolve(**dict.fromkeys(names, True)) == (same, [])


# ----- load_config, resolve_foreign -----


@pytest.mark.parametrize("name", ["old_debug", "old_405b", "new_debug", "new_8b"])
def test_a_key_of_their_file_has_its_value_here_or_a_notice(name, notices):
    config = load(f"{name}.toml", world_size=2 if "debug" in name else 8)
    said = "\n".join(notices.messages)
    (layer,) = read_files(FOLDER / f"{name}.toml")
    for old, setting in layer.items():
        table, _, key = current_name(old).partition(".")
        shown = {re.escape(show_key(each)) for each in (old, current_name(old))}
        if re.search(rf"^(no effect here .*)?({'|'.join(shown)})\b", said, re.M):
            continue
        value = getattr(getattr(config, table), key)
        if isinstance(value, tuple):
            is_list = isinstance(setting.value, list)
            value = json.loads(json.dumps(value)) if is_list else ",".join(value)
        assert value == setting.value, old


def test_the_old_spelling_says_what_it_means(notices):
    config = load("old_405b.toml")
    assert (config.float8.enable_float8_linear, config.float8.filter_fqns) == (True, ("output",))
    assert (config.lr_scheduler.warmup_steps, config.compile.enable) == (600, True)
    assert config.parallelism.enable_async_tensor_parallel
    *moved, ignored = notices.messages
    no_effect = "no effect here (docs/torchtitan.md): [parallelism] enable_compiled_autograd"
    assert ignored == no_effect
    assert moved == [
        "[model] converters is now [float8] enable_float8_linear",
        "[lr_scheduler] lr_min is now [lr_scheduler] min_lr_factor",
        "[training] warmup_steps is now [lr_scheduler] warmup_steps",
        "[training] compile is now [compile] enable",
        "[checkpoint] enable_checkpoint is now [checkpoint] enable",
        "[checkpoint] initial_load_model_weights_only is now [checkpoint] initial_load_model_only",
        "[checkpoint] last_save_model_weights_only is now [checkpoint] last_save_model_only",
    ]


def test_their_table_for_mxfp8_is_used_and_the_one_for_float8_is_not(notices):
    float8 = load("new_8b.toml").float8
    assert (float8.enable_float8_linear, float8.recipe_name) == (True, "mxfp8")
    assert float8.filter_fqns == ("output", "attention.wk")
    assert not float8.enable_fsdp_float8_all_gather
    (message,) = [message for message in notices.messages if message.startswith("no effect")]
    pattern = (
        r"\): \[float8] recipe_name, \[float8] filter_fqns, \[float8] enable_fsdp_\w+, "
        r"\[float8] precompute_\w+, \[mx] mxfp8_dim1_cast_kernel_choice, \[mx] recipe_name$"
    )
    assert re.search(pattern, message), message


@pytest.mark.parametrize(("word", "enabled", "recipe", "filters"), [
    ("--model.converters=float8", True, "rowwise", ("output",)),
    ("--model.converters=", False, "rowwise", ("output",)),
    ("--float8.enable_float8_linear=false", False, "mxfp8", ("output", "attention.wk")),
    ("--mx.filter-fqns=wo,w2", True, "mxfp8", ("wo", "w2")),
    ("--quantize.linear.mx.filter_fqns=", True, "mxfp8", ()),
])  # fmt: skip
def test_the_last_converter_decides(word, enabled, recipe, filters):
    gather = "--quantize.linear.float8.no-enable-fsdp-float8-all-gather"
    precompute = "--float8.no_precompute_float8_dynamic_scale_for_fsdp"
    float8 = load("new_8b.toml", gather, precompute, word).float8
    assert float8.enable_float8_linear is enabled
    assert (float8.recipe_name, float8.filter_fqns) == (recipe, filters)


@pytest.mark.parametrize(("text", "pattern"), [
    ('model.norm_type = "layernorm"',
     r'\[model] norm_type = "layernorm" .*remove .*, or set it to "rmsnorm" or "fused_rmsnorm"$'),
    ("optimizer.early_step_in_backward = true",
     r"\[optimizer] early_step_in_backward = true .*remove the key, or set it to false$"),
    ('checkpoint.interval_type = "seconds"',
     r'\[checkpoint] interval_type = "seconds" .*, or set it to "steps"$'),
    ("memory_estimation.enabled = true", r"\[memory_estimation] enabled = true .* it to false$"),
    ("fault_tolerance = {enable = true, group_size = 2}",
     r"\[fault_tolerance] enable = true .*; remove the key, or set it to false$"),
    ('experimental.custom_args_module = "my.module"',
     r'\[experimental] custom_args_module = "my.module" \(from run.toml\): .*, or set it to ""$'),
    ("quantize.linear.mx.recipe_name = 'mxfp4_cutlass'",
     r'\[mx] recipe_name = "mxfp4_cutlass" .*, as \[quantize.linear.mx] recipe_name\): .*, or set '
     'it to "mxfp8" or "mxfp8_cublas" or "mxfp8_cublas_rceil" or "mxfp8_emulated"$'),
    ("quantize.linear.float8.recipe_nam = 'rowwise'",
     r'\[float8] recipe_nam = "rowwise" \(from run.toml, as \[quantize.linear.float8] '
     r"recipe_nam\): unknown key; did you mean \[float8] recipe_name\?$"),
    ("experimental.costum_import = 1",
     r"\[parallelism] costum_import = 1 .*, as \[experimental] costum_import\): unknown key; "),
    ("quantize.linear = 3", r"\[quantize] \(from run.toml\): unknown table$"),
])  # fmt: skip
def test_a_key_that_asks_for_something_else_is_refused(tmp_path, text, pattern):
    message = refusal(tmp_path, text)
    assert re.match(pattern, message), message


def test_values_that_are_not_offered_are_refused(tmp_path):
    (path := tmp_path / "run.toml").touch()
    defaults = load(path)
    for name in ("checkpoint.interval_type", "model.norm_type", *filter(find_foreign, NAMES)):
        values = FOREIGN[find_foreign(name)]
        for value in ('"other"', "[[1]]", "2"):
            path.write_text(text := f"{name} = {value}")
            if values is None:
                assert load(path) == defaults, text
                continue
            start = f"{show_key(name)} = {value} (from run.toml): is not offered ("
            assert (message := refusal(tmp_path, text)).startswith(start), message
            assert ("; remove the key, or set it to " in message) == bool(values), message


def test_empty_tables_of_theirs_load(tmp_path):
    (path := tmp_path / "run.toml").touch()
    defaults = load(path)
    tables = ["experimental", "fault_tolerance", "mx", "quantize.linear.mx", "training.dataloader"]
    path.write_text("".join(f"[{table}]\n" for table in tables))
    assert load(path) == defaults


def test_a_later_layer_can_replace_a_refused_value(tmp_path):
    (tmp_path / "run.toml").write_text("fault_tolerance.enable = true\njob.print_args = false")
    words = ["--fault-tolerance.no-enable", "--job.no_use_for_integration_test"]
    assert load(tmp_path / "run.toml", *words, "--job.print-args").job.print_config


# ----- torchtitan.md -----


def test_the_page_counts_the_keys_that_load():
    here = sum(current_name(name) in KEYS for name in NEW)
    head = " ".join(PAGE.partition("\n## ")[0].split())
    assert f"{len(NEW)} keys. {here} of them are" in head
    assert f"The other {len(NEW) - here} load" in head


def test_the_values_that_the_page_calls_refused_are(tmp_path):
    table = PAGE.partition("\n## Refused values\n")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| (`.*?) \| ", table, re.M)
    settings = [setting for cell in cells for setting in re.findall("`([^`]+)`", cell)]
    assert len(settings) > 25
    for setting in settings:
        assert setting.partition(" = ")[0].rpartition(".")[2] in refusal(tmp_path, setting)
