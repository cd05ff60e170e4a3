"""The configs that the project ships."""

from pathlib import Path

import pytest

from torchtitan_lite.config import load_config
from torchtitan_lite.errors import ConfigError

FOLDER = Path(__file__).parents[2] / "train_configs"
SHIPPED = {  # processes to start, flavor, tensor_parallel_degree
    "debug_model": (2, "debugmodel_gqa", 1),
    "float8_parity": (1, "debugmodel_gqa_4layers", 1),
    "llama3_8b": (8, "8B", 1),
    "llama3_8b_float8": (8, "8B", 1),
    "llama3_70b": (256, "70B", 8),
    "llama3_405b": (512, "405B", 8),
}


def test_every_shipped_config_is_listed() -> None:
    assert {path.stem for path in FOLDER.glob("*.toml")} == SHIPPED.keys()


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_config_loads_and_has_a_run_folder_of_its_own(name: str) -> None:
    world_size, flavor, tp = SHIPPED[name]
    config = load_config(["--job.config_file", f"{FOLDER}/{name}.toml"], world_size=world_size)
    assert (config.model.flavor, config.parallelism.tensor_parallel_degree) == (flavor, tp)
    assert config.job.dump_folder == f"./outputs/{name}"


def test_the_wrong_number_of_processes_is_refused() -> None:
    with pytest.raises(ConfigError, match="world size, 1; run 8 or 16 processes"):
        load_config(["--job.config_file", f"{FOLDER}/llama3_70b.toml"], world_size=1)
