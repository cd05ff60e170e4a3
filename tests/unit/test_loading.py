"""Loading a config from layers, messages about what is wrong in them, and dumping it."""

import datetime
import math
import re
from itertools import product
from pathlib import Path

import pytest
import tomli_w
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from torchtitan_lite.base.errors import ConfigError
from torchtitan_lite.config import Config, load_config, shared_settings
from torchtitan_lite.config.keys import KEYS, TABLES
from torchtitan_lite.config.sections import (
    DatasetConfig,
    OptimizerConfig,
    TrainingConfig,
)


@pytest.fixture
def run_toml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """run.toml in the working directory, so that messages name it as that."""
    monkeypatch.chdir(tmp_path)
    path = Path("run.toml")
    path.touch()
    return path


def load(*words: str, world_size: int = 1) -> Config:
    return load_config(["--job.config_file", "run.toml", *words], world_size=world_size)


def problems(*words: str, world_size: int = 1) -> list[str]:
    with pytest.raises(ConfigError, match=r"\w") as caught:
        load(*words, world_size=world_size)
    return str(caught.value).splitlines()


# ----- load_config -----


def test_load_config_of_an_empty_file_is_all_defaults(run_toml):
    assert load() == Config()


def test_command_line_over_file_over_base(run_toml):
    Path("base.toml").write_text(
        "[training]\nsteps = 1\nseq_len = 16\nlocal_batch_size = 2\n[debug]\nseed = 4"
    )
    run_toml.write_text('base = "base.toml"\n[training]\nsteps = 2\nseq_len = 32\n')
    config = load("--training.steps", "3", "--compile.enable")
    training = config.training
    assert (training.steps, training.seq_len, training.local_batch_size) == (3, 32, 2)
    assert (config.debug.seed, config.compile.enable) == (4, True)


def test_empty_text_in_a_file_unsets_a_key_of_its_base(run_toml):
    Path("base.toml").write_text('training.dataset_path = "x"\nlr_scheduler.decay_ratio = 0.5')
    datasets = 'training = {dataset_path = "", datasets = [{path = "a"}]}'
    run_toml.write_text(f'base = "base.toml"\n{datasets}\nlr_scheduler.decay_ratio = ""')
    config = load()
    assert config.training.datasets == (DatasetConfig(path="a"),)
    assert (config.training.dataset_path, config.lr_scheduler.decay_ratio) == (None, None)


def test_datasets_load_from_file_and_command_line(run_toml):
    run_toml.write_text('training.datasets = [{path = "a", weight = 2}, {path = "b"}]')
    a, b = DatasetConfig(path="a", weight=2.0), DatasetConfig(path="b")
    assert load().training.datasets == (a, b)
    assert load('--training.datasets=[{path="c"}]').training.datasets == (DatasetConfig(path="c"),)
    assert load("--training.datasets=", "--training.dataset_path=d").training.datasets == ()


# ----- load_config -----


@pytest.mark.parametrize(("setting", "rule"), [
    ('training.steps = "ten"', "valid integer"),
    ("training.steps = 10.5", "valid integer"),
    ("training.steps = true", "valid integer"),
    ("training.steps = {}", "valid integer"),
    ("training.steps = 0", "greater than or equal to 1$"),
    ("training.steps = 100000000", "less than or equal to 99999999$"),
    ("training.global_batch_size = -2", "greater than or equal to -1$"),
    ("training.max_norm = true", "valid number"),
    ("optimizer.lr = 0", "greater than 0$"),
    ("optimizer.beta1 = 1.0", "less than 1$"),
    ("lr_scheduler.decay_ratio = 1.5", "less than or equal to 1$"),
    ("compile.enable = 1", "valid boolean"),
    ('compile.enable = "true"', "valid boolean"),
    ("job.dump_folder = 3", "valid string"),
    ('job.dump_folder = ""', "at least 1 character"),
    ('job.dump_folder = "\\u0000"', "match pattern"),
    ('comm.save_traces_file_prefix = "../x"', "match pattern"),
    ("float8.filter_fqns = true", "must be of type array$"),
    ('float8.filter_fqns = ["output", 3]', "1: must be a valid string"),
    ('float8.filter_fqns = [""]', "0: .* at least 1 character"),
    ("optimizer.lr_factors = 2.0", "must be a valid dictionary$"),
    ("optimizer.lr_factors = { wq = -1.0 }", "wq: must be greater than or equal to 0$"),
    ('float8.recipe_name = "tensorwize"',
     r"must be 'tensorwise', 'rowwise', .*'mxfp8'.* or module:name; .* \"tensorwise\"\?$"),
    ('parallelism.pipeline_parallel_schedule = "ZB"', "be '1F1B', 'GPipe' or .*1F1B'$"),
    ("float8.recipe_name = 3", "must be a valid string$"),
    ('compile.components = ["modle"]', r"0: must be 'model' or 'loss'; did you mean \"model\"\?$"),
    ('model.converters = ["lora"]', r'must be \["quantize.linear.float8"], .* or \[]$'),
    ('training.datasets = ["a"]', "0: must be of type array of {path, weight}$"),
    ("model.rope_scaling = 8", "must be of type {factor, .*, original_max_position_embeddings}$"),
    # Tables that are the value of a key.
    ('training.datasets = [{"path" = "a"}, {"path" = "b", "weight" = -1}]',
     "1.weight: must be greater than 0$"),
    ('training.datasets = [{"path" = "a", "wieght" = 2}]',
     r'0.wieght: unknown key; did you mean "weight"\?$'),
    ('training.datasets = [{"weight" = 2}]', "0.path: Field required$"),
    ('training.datasets = { path = "a" }', "must be of type array of {path, weight}$"),
    ("model.rope_scaling = { factor = 8.0, factr = 8.0 }",
     r'factr: unknown key; did you mean "factor"\?$'),
    ("model.rope_scaling = { factor = 0.5 }", "factor: must be greater than or equal to 1$"),
])  # fmt: skip
def test_an_invalid_value_is_named_with_its_rule(setting, rule, run_toml):
    run_toml.write_text(setting)
    (message,) = dict.fromkeys(problems())
    table, _, shown = setting.replace('" =', '":').partition(".")
    start = f"[{table}] {shown} (from run.toml): "
    assert message.startswith(start) and re.search(rule, message.removeprefix(start)), message


@pytest.mark.parametrize(("toml", "pattern"), [
    ("training.steps = 2026-01-01", r'\[training] steps = "2026-01-01" .*: must be a valid int'),
    ("optimizer.lr = inf", r"\[optimizer] lr = Infinity .*: must be a finite number"),
    ("optimizer.beta1 = nan", r"\[optimizer] beta1 = NaN .*: must be a finite number"),
    ("training = {batch_size = 0}",
     r"\[training] local_batch_size = 0 \(from run.toml, as \[training] batch_size\): .* to 1$"),
    # Unknown keys and tables.
    ("training.stepz = 3", r"\[training] stepz = 3 .*: unknown key; .* \[training] steps\?$"),
    ("compile.componets = []",
     r"\[compile] componets = \[] .*: unknown key; did you mean \[compile] components\?$"),
    ("optimizer.local_batch_size = 3",
     r"\[optimizer] local_batch_size = 3 .*: unknown key; .* \[training] local_batch_size\?$"),
    ("job.xyz = 3", r"\[job] xyz = 3 \(from run.toml\): unknown key; --help"),
    ("trainng = {steps = 3, seq_len = 4}", r'\[trainng] .*: unknown table; .* "training"\?$'),
    ("wandb.a = {steps = 3}", r"\[wandb.a] \(from run.toml\): unknown table$"),
    ("training = [{steps = 3}]", r'training = \[{"steps": 3}] .*: unknown key; '),
    ("seq_len = 3", r"seq_len = 3 .*: unknown key; --help lists every key$"),
    # Rules between keys.
    ("training.global_batch_size = 12", r"\[training] global_batch_size = 12 .*; use 8 or 16$"),
])  # fmt: skip
def test_a_wrong_file_is_refused(toml, pattern, run_toml):
    run_toml.write_text(toml)
    (message,) = problems()
    assert re.match(pattern, message), message


LINE = r"\(from the command line\)"


@pytest.mark.parametrize(("words", "pattern"), [
    ("--training.steps ten", rf'\[training] steps = "ten" {LINE}: must be a valid integer'),
    ("--training.steps=", rf'\[training] steps = "" {LINE}: must be a valid integer'),
    ("--training.steps -1", rf"\[training] steps = -1 {LINE}: must be .* to 1$"),
    ("--training.steps", "--training.steps on the command line needs a value of type integer$"),
    ("--compile.enable True", rf'\[compile] enable = "True" {LINE}: must be a valid boolean'),
    ("--steps 3", rf"steps = 3 {LINE}: unknown key; "),
    ("--trainng.steps 3", rf'\[trainng] {LINE}: unknown table; did you mean "training"\?$'),
    ("--model.rope-scaling.factor 1", rf"\[model.rope_scaling] {LINE}: unknown table"),
    ("junk", 'unexpected "junk" on the command line; write --table.key value'),
    ("--training.seq_len 2049 --parallelism.tensor_parallel_degree=2",
     r"\[training] seq_len = 2049, .* tensor_parallel_degree = 2: .* use 2048 or 2050$"),
])  # fmt: skip
def test_a_wrong_command_line_is_refused(words, pattern, run_toml):
    (message,) = problems(*words.split(), world_size=2)
    assert re.match(pattern, message), message


@pytest.mark.parametrize("key", [
    'training.dataset_path = "P"', 'training.datasets = [{path = "P"}]',
    'validation.dataset_path = "P"', 'checkpoint = {folder = "P", enable = true}',
    'checkpoint = {initial_load_path = "P", enable = true}',
])  # fmt: skip
def test_check_url_is_called_for_every_path_that_may_be_a_url(key, run_toml):
    for url in ("s3://", "s3://bucket/a*"):
        run_toml.write_text(key.replace("P", url))
        (message,) = problems()
        assert f"(from {run_toml.name}): " in message
        assert f"{url} must name a bucket, and may not have" in message
    run_toml.write_text(key.replace("P", "s3://bucket/a"))
    assert '"s3://bucket/a"' in load().to_toml()


@pytest.mark.parametrize("key", [
    'job.dump_folder = "P"', 'model.tokenizer_path = "P"', 'training.dataset_path = "P"',
    'training.datasets = [{path = "P"}]', 'validation.dataset_path = "P"',
    'checkpoint = {initial_load_path = "P", enable = true}',
])  # fmt: skip
def test_expand_user_is_called_for_every_path(key, run_toml, monkeypatch):
    def setting(path: str) -> str:
        return key.replace("P", path)

    monkeypatch.setenv("HOME", "/home/me")
    run_toml.write_text(setting("~/x"))
    assert '"/home/me/x"' in load().to_toml() and "~" not in load().to_toml()
    run_toml.write_text(setting("x/~"))
    assert '"x/~"' in load().to_toml()

    # Another user's home that does not exist, and a process without a home.
    run_toml.write_text(setting("~nobody-here/x"))
    (message,) = problems()
    assert re.search('"~nobody-here/x".* [(]from .*~nobody-here is not known; write the', message)
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)  # a KeyError, as for an unknown uid
    run_toml.write_text(setting("~/x"))
    (message,) = problems()
    assert re.search('"~/x".* [(]from run.toml[)]: (0.path: )?the folder ~ is not known', message)


def test_load_config_names_all_that_is_wrong(run_toml):
    Path("base.toml").write_text("[training]\nsteps = 0\n[trainng]\nx = 1\ny = 2\n")
    run_toml.write_text('base = "base.toml"\nfloat8.recipe = "rowwise"\nvalidation.steps = 0')
    patterns = [
        'unexpected "junk" on the command line; ',
        r'\[trainng] \(from base.toml\): unknown table; did you mean "training"\?$',
        r'\[float8] recipe = "rowwise" \(from run.toml\): .* \[float8] recipe_name\?$',
        r"\[training] steps = 0 \(from base.toml\): must be .* to 1$",
        rf"\[debug] seed = -1 {LINE}: must be .* to 0$",
    ]
    messages = problems("junk", "--debug.seed", "-1")
    for pattern, message in zip(patterns, messages, strict=True):
        assert re.match(pattern, message), message

    # Then the rules between keys.
    validation = "[validation]\nenable = true\nsteps = 0\n"
    run_toml.write_text(f"{validation}[training]\nglobal_batch_size = 12")
    assert [message.split()[1] for message in problems()] == ["global_batch_size", "enable"]


def test_load_config_names_a_syntax_error_alone(run_toml):
    run_toml.write_text("[training]\nsteps = 1\nsteps = 2\n")
    (message,) = problems("junk")
    assert re.match(r"run.toml: not valid TOML: .* \(at line 3, column 10\)$", message)


JUNK = (
    *(-5, 10.5, math.inf, math.nan, 10**30, True, "", "x"),
    *([], [3], [""], {}, {"a": 1}, datetime.date(2026, 1, 1)),
)


@pytest.mark.parametrize("table", TABLES)
def test_load_config_takes_junk_or_names_its_key(table, run_toml):
    unnamed = []
    keys = [key.name for key in KEYS.values() if key.table == table]
    for key, value in product(keys, JUNK):
        run_toml.write_text(tomli_w.dumps({table: {key: value}}))
        try:
            load()
        except ConfigError as error:
            if not re.search(rf"\b{key}\b", str(error)):
                unnamed.append((key, value, str(error)))
    assert unnamed == []


# ----- Config.to_toml, load_config -----


# Without ~, which is expanded in paths.
TEXT = st.text(
    st.characters(codec="utf-8", exclude_categories=("Cc", "Cs"), exclude_characters="~")
)
NAME = TEXT.filter(bool)
WHOLE, COUNT = st.integers(0, 10**6), st.integers(1, 10**6)
SHARE, POSITIVE = st.floats(0, 1, exclude_max=True), st.floats(0, 1, exclude_min=True)
DATASET = st.fixed_dictionaries({"path": NAME, "weight": st.integers(1, 100).map(float)})
SETTINGS = {
    "job.dump_folder": NAME,
    "job.description": TEXT,
    "job.print_config": st.booleans(),
    "optimizer.lr": POSITIVE,
    "optimizer.beta1": SHARE,
    "optimizer.eps": st.floats(1e-20, 1),
    "optimizer.implementation": st.just("for-loop"),
    "optimizer.no_decay": st.lists(st.sampled_from(["norm", "attention.wo", "layers.0"])),
    "optimizer.lr_factors": st.dictionaries(st.sampled_from(["wq", "layers.0"]), POSITIVE),
    "lr_scheduler.total_steps": st.none() | COUNT,
    "lr_scheduler.warmup_steps": WHOLE,
    "lr_scheduler.min_lr_factor": st.just(1) | SHARE,
    "training.dataset_path": st.none() | NAME,
    "training.datasets": st.lists(DATASET),
    "training.steps": COUNT,
    "training.max_norm": POSITIVE,
    "training.epochs": st.none() | POSITIVE,
    "compile.components": st.lists(st.sampled_from(["model", "loss"])),
    "float8.filter_fqns": st.lists(st.sampled_from(["wk", "attention.wo", "layers.0", "auto"])),
    "float8.enable_float8_linear": st.booleans(),
    "checkpoint.load_step": st.integers(-1, 99),
    "checkpoint.keep_latest_k": WHOLE,
    "comm.trace_buf_size": WHOLE,
    "debug.seed": WHOLE,
}
"""Keys with values that break no rule between keys, unless both keys of datasets have one."""


def build_config(values: dict[str, object]) -> Config:
    if values.get("training.datasets"):
        values.pop("training.dataset_path", None)
    tables: dict[str, dict[str, object]] = {}
    for name, value in values.items():
        table, _, key = name.partition(".")
        tables.setdefault(table, {})[key] = value
    return Config.model_validate(tables)


def inline_toml(value: object) -> str:
    """Return the value as TOML writes it within a list, where tables are in braces."""
    listed = tomli_w.dumps({"list": [value]}).strip()
    return listed.removeprefix("list = [").removesuffix("]").strip().removesuffix(",")


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(config=st.fixed_dictionaries({}, optional=SETTINGS).map(build_config))
def test_a_dump_and_a_command_line_load_to_the_same_config(config, run_toml):
    run_toml.write_text(config.to_toml(), encoding="utf-8", newline="")
    assert load() == config
    words = []
    for table, values in config.model_dump(exclude_none=True).items():
        words += [f"--{table}.{key}={inline_toml(value)}" for key, value in values.items()]
    run_toml.write_text("")
    assert load(*words) == config


def test_a_dump_leaves_out_what_is_unset():
    text = Config().to_toml()
    assert "dataset_path" not in text
    assert text.startswith('[job]\ndump_folder = "./outputs"\n')
    assert '[compile]\nenable = false\ncomponents = [\n    "model",\n    "loss",\n]\n' in text


# ----- shared_settings -----
def test_all_keys_are_shared_but_paths_of_tokenizers_and_data():
    datasets = (DatasetConfig(path="a", weight=2.0), DatasetConfig(path="b"))
    config = Config(training=TrainingConfig(datasets=datasets), optimizer=OptimizerConfig(lr=0.5))
    shared = shared_settings(config)
    node_local = {"[model] tokenizer_path", "[training] dataset_path", "[validation] dataset_path"}
    assert shared.keys() == {f"[{key.table}] {key.name}" for key in KEYS.values()} - node_local
    assert shared["[training] datasets"] == '[{"weight": 2.0}, {"weight": 1.0}]'
    assert (shared["[optimizer] lr"], shared["[training] epochs"]) == ("0.5", "unset")
    assert shared["[job] dump_folder"] == '"./outputs"'
