"""The configs that the project ships."""

from pathlib import Path

import pytest

from torchtitan_lite.base.errors import ConfigError
from torchtitan_lite.config import Config, load_config
from torchtitan_lite.planner.plan import find_device, plan

FOLDER = Path(__file__).parents[2] / "train_configs"
SHIPPED = {  # processes to start, flavor, tensor_parallel_degree
    "debug_model": (2, "debugmodel_gqa", 1),
    "float8_parity": (1, "debugmodel_gqa", 1),
    "llama3_8b": (8, "8B", 1),
    "llama3_8b_float8": (8, "8B", 1),
    "llama3_8b_long": (8, "8B", 1),
    "llama3_1b": (1, "1B", 1),
    "llama3_350m": (1, "350M", 1),
    "llama3_150m": (1, "150M", 1),
    "llama3_70b": (256, "70B", 1),
    "llama3_405b": (512, "405B", 2),
}


def load(name: str, world_size: int, *overrides: str) -> Config:
    words = ["--job.config_file", f"{FOLDER}/{name}.toml", *overrides]
    return load_config(words, world_size=world_size)


# ----- train_configs -----


def test_every_shipped_config_is_listed():
    assert {path.stem for path in FOLDER.glob("*.toml")} == SHIPPED.keys()


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_config_loads_and_has_a_run_folder_of_its_own(name):
    world_size, flavor, tp = SHIPPED[name]
    config = load(name, world_size)
    assert (config.model.flavor, config.parallelism.tensor_parallel_degree) == (flavor, tp)
    assert config.job.dump_folder == f"./outputs/{name}"


BATCH_8 = "--training.local_batch_size=8", "--activation_checkpoint.mode=none"


@pytest.mark.parametrize(
    ("name", "world_size", "device", "overrides"),
    [
        ("llama3_150m", 1, "L4", ["--model.vocab_size=32000"]),
        ("llama3_350m", 1, "L4", ["--model.vocab_size=32000"]),
        ("llama3_1b", 1, "L4", []),
        ("llama3_1b", 1, "H100 SXM", [*BATCH_8, "--optimizer.state_dtype=float32"]),
        ("llama3_8b", 8, "H100 SXM", []),
        ("llama3_8b_long", 8, "H100 SXM", []),
        ("llama3_8b_long", 8, "H200", ["--activation_checkpoint.mode=full"]),
        ("llama3_70b", 32, "H100 SXM", []),
        ("llama3_405b", 256, "H100 SXM", []),
    ],
)
def test_a_shipped_config_fits_the_devices_that_it_names(name, world_size, device, overrides):
    config = load(name, world_size, *overrides)
    assert plan(config, world_size=world_size, device=find_device(device))["memory"]["fits"]


@pytest.mark.parametrize("name", ["llama3_8b_long", "llama3_70b", "llama3_405b"])
def test_a_large_config_trains_in_float8_and_by_one_flag_in_bf16(name):
    float8 = load(name, SHIPPED[name][0]).float8
    assert float8.enable_float8_linear and float8.enable_fsdp_float8_all_gather
    bf16 = load(name, SHIPPED[name][0], "--float8.enable_float8_linear=false").float8
    assert not bf16.enable_float8_linear


def test_the_wrong_number_of_processes_is_refused():
    with pytest.raises(ConfigError, match="world size, 1; run 2 or 4"):
        load("llama3_405b", 1)
