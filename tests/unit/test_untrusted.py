"""TOML and command lines from anyone: what cannot be a config is a ConfigError, whatever it is."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import tomli_w
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_torchtitan import NAMES as THEIRS

from torchtitan_lite.base.errors import ConfigError
from torchtitan_lite.config import load_config
from torchtitan_lite.config.keys import KEYS

FUZZ = settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
NAMES = [*KEYS, *THEIRS, "job.config_file", "compile.no-enable", "no.such", "base"]
SCALARS = (
    st.booleans()
    | st.integers()
    | st.sampled_from([0, -1, 2**63, 10**26, 16**90 - 1])
    | st.floats()
    | st.text()
    | st.sampled_from(["", "\0", "op", "8B", "../x", "tensorwise", "a\nb"])
    | st.dates()
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8
)


@pytest.fixture
def toml(tmp_path):
    """An empty config file."""
    path = tmp_path / "run.toml"
    path.touch()
    return path


def refusal(*words: object) -> str:
    """The message of the ConfigError, which must be printable; "" for a config."""
    try:
        load_config(["--job.config_file", *map(str, words)], world_size=2)
    except ConfigError as error:
        str(error).encode()
        return str(error)
    return ""


# ----- load_config: any input -----


@FUZZ
@given(values=st.dictionaries(st.sampled_from(NAMES) | st.text(), VALUES, max_size=4))
def test_any_table_loads_or_is_a_config_error(values, toml):
    tables: dict[str, object] = {}
    for name, value in values.items():
        table, _, key = name.rpartition(".")
        section = tables.setdefault(table, {}) if table else tables
        if isinstance(section, dict):
            section[key] = value
    toml.write_text(tomli_w.dumps(tables), encoding="utf-8", newline="")
    refusal(toml)


@FUZZ
@given(content=st.binary() | st.text("[]{}=.,\"'#\n ab0-:").map(str.encode))
def test_any_bytes_load_or_are_a_config_error(content, toml):
    toml.write_bytes(content)
    refusal(toml)


WORDS = st.text(st.characters(codec=None, exclude_characters="\0")) | st.builds(
    "--{}{}{}".format, st.sampled_from(NAMES), st.sampled_from(["", "=", "=["]), st.text()
)


@FUZZ
@given(words=st.lists(WORDS, max_size=5))
def test_any_command_line_loads_or_is_a_config_error(words, toml):
    refusal(toml, *words)


# ----- load_config: hostile input -----


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("training.steps = " + "[" * 60 + "]" * 60, "nested more than 50 deep"),
        ("training.steps = " + "[" * 9000 + "]" * 9000, "not valid TOML: "),
        ("a." * 400 + "b = 1", "nested more than 50 deep"),
        ("debug.seed = " + "9" * 5000, "Exceeds the limit"),
        ("debug.seed = 0x" + "f" * 5000, "a number of more than 100 digits"),
        ("#" * (1 << 20) + "\n", "has 1048577 bytes, and the limit is 1048576"),
        ('base = "a\\u0000b"', "must be the path of a TOML file"),
        ('job.dump_folder = "a\\u0000b"', "match pattern"),
        ("[training]\n[[training.datasets.x]]", "must be of type array"),
    ],
)
def test_hostile_toml_is_refused_by_name(content, message, toml):
    toml.write_text(content)
    refused = refusal(toml)
    assert str(toml) in refused and message in refused


def test_a_pipe_is_no_config_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert refusal(tmp_path / "pipe") == f"{tmp_path}/pipe: is not a regular file"


@pytest.mark.parametrize("depth", [49, 400, 9000])
def test_nesting_on_the_command_line_is_refused_by_key(depth, toml):
    refused = refusal(toml, "--float8.filter_fqns=" + "[" * depth + "]" * depth)
    assert refused.startswith("[float8] filter_fqns = ") and len(refused) < 400


def test_a_command_line_that_is_not_utf8_is_refused(toml):
    refused = refusal(toml, "--job.dump_folder", "caf\udce9")
    assert refused == r"'caf\udce9' on the command line is not UTF-8"


def test_launch_takes_names_beyond_ascii_in_the_c_locale(tmp_path):
    (tmp_path / "café.toml").write_text("training.steps = 0", encoding="utf-8")
    variables = {"LC_ALL": "C", "NGPU": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-m", "torchtitan_lite", "train", "--job.config_file", "café.toml"]
    result = subprocess.run(command, cwd=tmp_path, env=os.environ | variables, capture_output=True)
    expected = "[training] steps = 0 (from café.toml): must be greater than or equal to 1\n"
    assert (result.returncode, result.stderr.decode()) == (2, expected)
