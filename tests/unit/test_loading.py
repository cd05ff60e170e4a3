import datetime
import math
import re
from pathlib import Path

import pytest
import tomli_w
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from torchtitan_lite.config import Config, dump_config, load_config, shared_settings
from torchtitan_lite.config.keys import KEYS
from torchtitan_lite.config.sections import (
    CheckpointConfig,
    CommConfig,
    CompileConfig,
    DatasetConfig,
    DebugConfig,
    Float8Config,
    JobConfig,
    LRSchedulerConfig,
    OptimizerConfig,
    TrainingConfig,
)
from torchtitan_lite.errors import ConfigError


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


def test_an_empty_file_is_all_defaults(run_toml: Path) -> None:
    assert load() == Config()


def test_command_line_over_file_over_base(run_toml: Path) -> None:
    Path("base.toml").write_text(
        "[training]\nsteps = 1\nseq_len = 16\nlocal_batch_size = 2\n[debug]\nseed = 4"
    )
    run_toml.write_text('base = "base.toml"\n[training]\nsteps = 2\nseq_len = 32\n')
    config = load("--training.steps", "3", "--compile.enable")
    assert (config.training.steps, config.training.seq_len, config.training.local_batch_size) == (
        3,
        32,
        2,
    )
    assert (config.debug.seed, config.compile.enable) == (4, True)


def test_aliases_load_from_file_and_command_line(run_toml: Path) -> None:
    run_toml.write_text(
        '[model]\nconverters = ["quantize.linear.float8"]\n[quantize.linear.float8]\nrecipe_name '
        '= "rowwise"\n'
        "[training]\ncompile = true\n"
    )
    config = load("--training.batch_size", "3", "--model.hf_assets_path", "my.model")
    assert (config.float8.enable_float8_linear, config.float8.recipe_name) == (True, "rowwise")
    assert (config.compile.enable, config.training.local_batch_size) == (True, 3)
    assert config.model.tokenizer_path == "my.model"
    config = load("--float8.enable_float8_linear=false", "--model.converters=")
    assert not config.float8.enable_float8_linear


def test_a_later_source_overrides_an_alias(run_toml: Path) -> None:
    run_toml.write_text("[training]\ncompile = true\n")
    assert not load("--compile.enable=false").compile.enable


def test_datasets_load_from_file_and_command_line(run_toml: Path) -> None:
    run_toml.write_text(
        '[[training.datasets]]\npath = "a"\nweight = 2\n[[training.datasets]]\npath = "b"\n'
    )
    assert load().training.datasets == (
        DatasetConfig(path="a", weight=2.0),
        DatasetConfig(path="b"),
    )
    assert load('--training.datasets=[{path="c"}]').training.datasets == (DatasetConfig(path="c"),)
    assert load("--training.datasets=", "--training.dataset_path=d").training.datasets == ()


def test_an_optional_key_is_unset_by_nothing(run_toml: Path) -> None:
    run_toml.write_text('[training]\ndataset_path = "my.txt"\n')
    assert load().training.dataset_path == "my.txt"
    assert load("--training.dataset_path=").training.dataset_path is None


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        (
            'training.steps = "ten"',
            '[training] steps = "ten" (from run.toml): must be a whole number',
        ),
        (
            "training.steps = 10.5",
            "[training] steps = 10.5 (from run.toml): must be a whole number",
        ),
        (
            "training.steps = true",
            "[training] steps = true (from run.toml): must be a whole number",
        ),
        ("training.steps = {}", "[training] steps = {} (from run.toml): must be a whole number"),
        (
            "training.steps = 2026-01-01",
            '[training] steps = "2026-01-01" (from run.toml): must be a whole number',
        ),
        ("training.steps = 0", "[training] steps = 0 (from run.toml): must be at least 1"),
        (
            "training.global_batch_size = -2",
            "[training] global_batch_size = -2 (from run.toml): must be at least -1",
        ),
        (
            "training.max_norm = true",
            "[training] max_norm = true (from run.toml): must be a number",
        ),
        ("optimizer.lr = 0", "[optimizer] lr = 0 (from run.toml): must be above 0"),
        (
            "optimizer.lr = inf",
            "[optimizer] lr = Infinity (from run.toml): must be a finite number",
        ),
        ("optimizer.beta1 = 1.0", "[optimizer] beta1 = 1.0 (from run.toml): must be below 1"),
        (
            "optimizer.beta1 = nan",
            "[optimizer] beta1 = NaN (from run.toml): must be a finite number",
        ),
        (
            "lr_scheduler.decay_ratio = 1.5",
            "[lr_scheduler] decay_ratio = 1.5 (from run.toml): must be at most 1",
        ),
        ("compile.enable = 1", "[compile] enable = 1 (from run.toml): must be true or false"),
        (
            'compile.enable = "true"',
            '[compile] enable = "true" (from run.toml): must be true or false',
        ),
        (
            "job.dump_folder = 3",
            "[job] dump_folder = 3 (from run.toml): must be a string, in quotes",
        ),
        ('job.dump_folder = ""', '[job] dump_folder = "" (from run.toml): must not be empty'),
        (
            "activation_checkpoint.selective_ac_option = 2",
            "[activation_checkpoint] selective_ac_option = 2 (from run.toml): must be a string, "
            "in quotes",
        ),
        (
            "float8.filter_fqns = true",
            "[float8] filter_fqns = true (from run.toml): must be a list, in brackets",
        ),
        (
            'float8.filter_fqns = ["output", 3]',
            '[float8] filter_fqns = ["output", 3] (from run.toml): must be a string, in quotes',
        ),
        (
            'float8.filter_fqns = [""]',
            '[float8] filter_fqns = [""] (from run.toml): must not be empty',
        ),
        (
            'float8.recipe_name = "tensorwize"',
            '[float8] recipe_name = "tensorwize" (from run.toml): must be "tensorwise" or '
            '"rowwise" or '
            '"rowwise_with_gw_hp" or "mxfp8"; did you mean "tensorwise"?',
        ),
        (
            "float8.recipe_name = 3",
            '[float8] recipe_name = 3 (from run.toml): must be "tensorwise" or "rowwise" or '
            '"rowwise_with_gw_hp" '
            'or "mxfp8"',
        ),
        (
            'compile.components = ["modle"]',
            '[compile] components = ["modle"] (from run.toml): must be "model" or "loss"; did you '
            'mean "model"?',
        ),
        (
            "training.stepz = 3",
            "[training] stepz = 3 (from run.toml): unknown key; did you mean [training] steps?",
        ),
        (
            "optimizer.local_batch_size = 3",
            "[optimizer] local_batch_size = 3 (from run.toml): unknown key; did you mean "
            "[training] local_batch_size?",
        ),
        ("job.xyz = 3", "[job] xyz = 3 (from run.toml): unknown key; --help lists every key"),
        (
            'job.config_file = "x"',
            '[job] config_file = "x" (from run.toml): unknown key; did you mean --job.config_file?',
        ),
        (
            "trainng = {steps = 3, seq_len = 4}",
            "[trainng] (from run.toml): unknown table; did you mean [training]?",
        ),
        ("wandb = {steps = 3}", "[wandb] (from run.toml): unknown table"),
        (
            "quantize.embedding.float8 = {fqns = []}",
            "[quantize.embedding.float8] (from run.toml): unknown table",
        ),
        ("training = 3", "training = 3 (from run.toml): is a table, not a key"),
        (
            "training = [{steps = 3}]",
            'training = [{"steps": 3}] (from run.toml): is a table, not a key',
        ),
        (
            "seq_len = 3",
            "seq_len = 3 (from run.toml): unknown key; did you mean [training] seq_len?",
        ),
        (
            "enable = true",
            "enable = true (from run.toml): unknown key; did you mean [compile] enable or "
            "[checkpoint] enable or "
            "[validation] enable?",
        ),
        (
            "training = {batch_size = 0}",
            "[training] local_batch_size = 0 (from run.toml, as [training] batch_size): must be "
            "at least 1",
        ),
        (
            'model.converters = ["lora"]',
            '[model] converters = ["lora"] (from run.toml): must be ["quantize.linear.float8"], '
            '["quantize.linear.mx"] or []',
        ),
        (
            'training.datasets = [{path = "a"}, {path = "b", weight = -1}]',
            "[[training.datasets]] 2: weight = -1 (from run.toml): must be above 0",
        ),
        (
            '[[training.datasets]]\npath = "a"\nwieght = 2',
            "[[training.datasets]] 1: wieght = 2 (from run.toml): unknown key; did you mean "
            '"weight"?',
        ),
        (
            "training.datasets = [{weight = 2}]",
            "[[training.datasets]] 1: path = unset (from run.toml): must be set",
        ),
        (
            "[model.rope_scaling]\nfactor = 8.0\nfactr = 8.0",
            "[model.rope_scaling]: factr = 8.0 (from run.toml): unknown key; did you mean "
            '"factor"?',
        ),
        (
            "model.rope_scaling = {factor = 0.5}",
            "[model.rope_scaling]: factor = 0.5 (from run.toml): must be at least 1",
        ),
        (
            "model.rope_scaling = 8",
            "[model] rope_scaling = 8 (from run.toml): must be a {factor, low_freq_factor, "
            "high_freq_factor, original_max_position_embeddings}",
        ),
        (
            "training.datasets = [{path = 3}]",
            "[[training.datasets]] 1: path = 3 (from run.toml): must be a string, in quotes",
        ),
        (
            'training.datasets = ["a", "b"]',
            '[training] datasets = ["a", "b"] (from run.toml): must be a list of {path, weight}',
        ),
        (
            '[training.datasets]\npath = "a"',
            "[training.datasets] (from run.toml): unknown table; did you mean "
            "[[training.datasets]]?",
        ),
        (
            'training = {dataset_path = "a", datasets = [{path = "b"}]}',
            '[training] dataset_path = "a" is set, and so is datasets, a list of 1; unset it, or '
            "make it one of the "
            "list (dataset_path from run.toml, datasets from run.toml)",
        ),
        (
            'training.datasets = [{path = "a", weight = 100000}, {path = "b"}]',
            "[training] datasets: the weights 100000.0, 1.0 must be in the proportion of whole "
            "numbers with a sum of "
            "at most 100,000; use 99995, 1, which is near (datasets from run.toml)",
        ),
        (
            "training.global_batch_size = 12",
            "[training] global_batch_size = 12 is not a multiple of local_batch_size * dp_degree "
            "= 8 * 1 = 8; "
            "use 8 or 16 (global_batch_size from run.toml)",
        ),
    ],
)
def test_what_a_file_gets_wrong(toml: str, message: str, run_toml: Path) -> None:
    run_toml.write_text(toml)
    assert problems() == [message]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--training.steps", "ten"],
            '[training] steps = "ten" (from the command line): must be a whole number',
        ),
        (
            ["--training.steps="],
            '[training] steps = "" (from the command line): must be a whole number',
        ),
        (
            ["--training.steps", "-1"],
            "[training] steps = -1 (from the command line): must be at least 1",
        ),
        (
            ["--training.steps"],
            "--training.steps (from the command line): needs a value of type int",
        ),
        (
            ["--compile.enable", "True"],
            '[compile] enable = "True" (from the command line): must be true or false',
        ),
        (
            ["--steps", "3"],
            "steps = 3 (from the command line): unknown key; did you mean [training] steps or "
            "[validation] steps?",
        ),
        (
            ["--trainng.steps", "3"],
            "[trainng] (from the command line): unknown table; did you mean [training]?",
        ),
        (
            ["--model.rope-scaling.factor", "1"],
            "[model.rope_scaling] factor = 1 (from the command line): write "
            "--model.rope_scaling='{ factor = 1 }', as one value",
        ),
        (
            ["junk"],
            'unexpected "junk" on the command line; write options as --table.key value, lists as '
            "a,b",
        ),
        (
            ["--training.seq_len", "2049", "--parallelism.tensor_parallel_degree=2"],
            "[training] seq_len = 2049 is not a multiple of [parallelism] tensor_parallel_degree "
            "= 2, into which sequences are split; use 2048 or 2050 "
            "(seq_len from the command line, tensor_parallel_degree from the command line)",
        ),
    ],
)
def test_what_a_command_line_gets_wrong(words: list[str], message: str, run_toml: Path) -> None:
    assert problems(*words, world_size=2) == [message]


def test_everything_wrong_is_said_at_once(run_toml: Path) -> None:
    Path("base.toml").write_text("[training]\nsteps = 0\n[trainng]\nx = 1\ny = 2\n")
    run_toml.write_text(
        'base = "base.toml"\n[compile]\nenable = true\ncomponents = []\n[float8]\nrecipe = '
        '"rowwise"\n'
    )
    assert problems("junk", "--debug.seed", "-1") == [
        'unexpected "junk" on the command line; write options as --table.key value, lists as a,b',
        "[trainng] (from base.toml): unknown table; did you mean [training]?",
        '[float8] recipe = "rowwise" (from run.toml): unknown key; did you mean [float8] '
        "recipe_name?",
        "[training] steps = 0 (from base.toml): must be at least 1",
        "[debug] seed = -1 (from the command line): must be at least 0",
        '[compile] components = [] leaves nothing to compile; use ["model", "loss"], or set '
        "enable to false "
        "(components from run.toml, enable from run.toml)",
    ]


def test_syntax_error_comes_alone(run_toml: Path) -> None:
    run_toml.write_text("[training]\nsteps = 1\nsteps = 2\n")
    assert problems("junk") == [
        "run.toml: not valid TOML: Cannot overwrite a value (at line 3, column 10)"
    ]


JUNK = (
    -5,
    10.5,
    math.inf,
    math.nan,
    10**30,
    True,
    "",
    "x",
    [],
    [3],
    [""],
    {},
    {"a": 1},
    datetime.date(2026, 1, 1),
)


@pytest.mark.parametrize("name", KEYS)
def test_junk_loads_or_is_a_config_error_of_its_key(name: str, run_toml: Path) -> None:
    table, key = name.split(".")
    for value in JUNK:
        run_toml.write_text(tomli_w.dumps({table: {key: value}}))
        try:
            load()
        except ConfigError as error:
            assert re.search(rf"\b{key}\b", str(error)), value


def valid_configs() -> st.SearchStrategy[Config]:
    """Configs that break no rule between keys: the tables with such rules vary only in keys that
    take part in none."""
    text = st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs")))
    name = text.filter(bool)
    whole = st.integers(0, 10**6)
    count = st.integers(1, 10**6)
    share = st.floats(0, 1, exclude_max=True)
    positive = st.floats(0, 1, exclude_min=True)
    datasets = st.builds(DatasetConfig, path=name, weight=st.integers(1, 100).map(float))
    return st.builds(
        Config,
        job=st.builds(JobConfig, dump_folder=name, description=text, print_config=st.booleans()),
        optimizer=st.builds(
            OptimizerConfig,
            lr=positive,
            beta1=share,
            eps=st.floats(1e-20, 1),
            implementation=st.just("for-loop"),
        ),
        lr_scheduler=st.builds(
            LRSchedulerConfig,
            total_steps=st.none() | count,
            warmup_steps=whole,
            min_lr_factor=st.just(1) | share,
        ),
        training=st.builds(
            TrainingConfig, dataset_path=st.none() | name, steps=count, max_norm=positive
        )
        | st.builds(TrainingConfig, datasets=st.lists(datasets), epochs=st.none() | positive),
        compile=st.builds(CompileConfig, components=st.lists(st.sampled_from(["model", "loss"]))),
        float8=st.builds(
            Float8Config, filter_fqns=st.lists(name).map(tuple), enable_float8_linear=st.booleans()
        ),
        checkpoint=st.builds(CheckpointConfig, load_step=st.integers(-1, 99), keep_latest_k=whole),
        comm=st.builds(CommConfig, trace_buf_size=whole),
        debug=st.builds(DebugConfig, seed=whole),
    )


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(config=valid_configs())
def test_a_dump_loads_to_the_same_config(config: Config, run_toml: Path) -> None:
    run_toml.write_text(dump_config(config), encoding="utf-8", newline="")
    assert load() == config


def inline_toml(value: object) -> str:
    """The value as TOML writes it within a list, where tables are in braces."""
    listed = tomli_w.dumps({"list": [value]}).strip()
    return listed.removeprefix("list = [").removesuffix("]").strip().removesuffix(",")


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(config=valid_configs())
def test_a_command_line_loads_to_the_same_config(config: Config, run_toml: Path) -> None:
    words = []
    for table, values in config.model_dump(exclude_none=True).items():
        for key, value in values.items():
            words += [f"--{table}.{key}={inline_toml(value)}"]
    run_toml.write_text("")
    assert load(*words) == config


def test_a_dump_leaves_out_what_is_unset() -> None:
    text = dump_config(Config())
    assert "dataset_path" not in text
    assert text.startswith('[job]\ndump_folder = "./outputs"\n')
    assert '[compile]\nenable = false\ncomponents = [\n    "model",\n    "loss",\n]\n' in text


def test_all_keys_are_shared_but_paths_of_tokenizers_and_data() -> None:
    datasets = (DatasetConfig(path="a", weight=2.0), DatasetConfig(path="b"))
    config = Config(training=TrainingConfig(datasets=datasets), optimizer=OptimizerConfig(lr=0.5))
    shared = shared_settings(config)
    node_local = {"[model] tokenizer_path", "[training] dataset_path", "[validation] dataset_path"}
    assert shared.keys() == {f"[{key.table}] {key.name}" for key in KEYS.values()} - node_local
    assert shared["[training] datasets"] == '[{"weight": 2.0}, {"weight": 1.0}]'
    assert (shared["[optimizer] lr"], shared["[training] epochs"]) == ("0.5", "unset")
    assert shared["[job] dump_folder"] == '"./outputs"'
