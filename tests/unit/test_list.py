"""What `torchtitan-lite list` prints."""

import json

import pytest
import torch

from torchtitan_lite.catalog.datasets import DATASETS
from torchtitan_lite.catalog.devices import DEVICES
from torchtitan_lite.catalog.flavors import FLAVORS, count_parameters
from torchtitan_lite.catalog.recipes import RECIPES
from torchtitan_lite.cli import run_command
from torchtitan_lite.config import shipped_configs
from torchtitan_lite.models.llama3 import Transformer


# ----- count_parameters -----
@pytest.mark.parametrize("name", [name for name, args in FLAVORS.items() if args.vocab_size])
def test_count_parameters_is_the_models(name: str) -> None:
    args = FLAVORS[name]
    with torch.device("meta"):
        model = Transformer(args)
    counted = sum(parameter.numel() for parameter in model.parameters())
    assert count_parameters(args, vocab_size=args.vocab_size) == counted


# ----- list -----


def test_every_row_of_every_table_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    run_command(["list", "--json"])
    tables = json.loads(capsys.readouterr().out)
    names = [[next(iter(row.values())) for row in rows] for rows in tables.values()]
    assert list(tables) == ["flavors", "recipes", "devices", "datasets", "configs"]
    devices = [device.name for device in DEVICES]
    assert names == [list(FLAVORS), list(RECIPES), devices, list(DATASETS), shipped_configs()]
    flavors = {row["flavor"]: row["parameters"] for row in tables["flavors"]}
    assert (flavors["8B"], flavors["405B"]) == (8_030_261_248, 405_853_388_800)


def test_a_table_fits_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    run_command(["list"])
    lines = capsys.readouterr().out.splitlines()
    assert {"flavors", "recipes", "devices", "datasets", "configs"} <= set(lines)
    assert [line for line in lines if len(line) > 100] == []
    run_command(["list", "recipes"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "recipes" and "flavors" not in lines
