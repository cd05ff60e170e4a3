"""The JSON schema of the TOML files."""

import json
from pathlib import Path

import pytest
import tomli
from jsonschema import Draft7Validator

from torchtitan_lite.config import config_schema, load_config

FOLDER = Path(__file__).parents[2] / "train_configs"
CONFIGS = sorted(FOLDER.glob("*.toml"))


# ----- config_schema -----


def errors(text: str) -> list[str]:
    found = Draft7Validator(config_schema()).iter_errors(tomli.loads(text))
    return [f"{error.json_path}: {error.message}" for error in found]


def test_the_file_beside_the_configs_is_the_schema():
    Draft7Validator.check_schema(config_schema())
    assert json.loads((FOLDER / "schema.json").read_text()) == config_schema()


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_shipped_config_and_its_dump_fit_the_schema(path):
    text = path.read_text()
    world_size = {"llama3_70b": 256, "llama3_405b": 512}.get(path.stem, 8)
    config = load_config(["--job.config_file", str(path)], world_size=world_size)
    assert text.startswith("#:schema ./schema.json\n")
    assert errors(text) == errors(config.to_toml()) == []


def test_empty_text_unsets_a_key_whose_default_is_unset():
    assert errors('training.dataset_path = ""\nmodel.dim = ""\nmodel.rope_scaling = ""') == []
    assert len(errors('training.steps = ""\nvalidation.dataset = "c5"')) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[training]\nstps = 3", "$.training: Additional properties are not allowed ('stps'"),
        ("[training]\nsteps = 0", "$.training.steps: 0 is less than the minimum of 1"),
        ('[float8]\nrecipe_name = "int4"', "$.float8.recipe_name: 'int4' is not valid under"),
        ("[model]\ndim = true", "$.model.dim: True is not valid under any"),
        ("[nothing]\na = 1", "$: Additional properties are not allowed ('nothing'"),
        ("base = 3", "$.base: 3 is not of type 'string'"),
        ("[[training.datasets]]\nweight = 2.0", "'path' is a required property"),
    ],
)
def test_a_wrong_file_is_marked(text, message):
    (found,) = errors(text)
    assert message in found
