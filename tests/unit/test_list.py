"""What `torchtitan-lite list` prints."""

import json

import pytest
import torch

from torchtitan_lite.cli import run_command
from torchtitan_lite.config import shipped_configs
from torchtitan_lite.data.datasets import DATASETS
from torchtitan_lite.float8.recipes import RECIPES
from torchtitan_lite.metrics.devices import DEVICES
from torchtitan_lite.models.flavors import FLAVORS, count_parameters
from torchtitan_lite.models.llama3 import Transformer


@pytest.mark.parametrize("name", [name for name, args in FLAVORS.items() if args.vocab_size])
def test_parameters_are_the_models(name: str) -> None:
    args = FLAVORS[name]
    with torch.device("meta"):
        model = Transformer(args)
    counted = sum(parameter.numel() for parameter in model.parameters())
    assert count_parameters(args, vocab_size=args.vocab_size) == counted


def test_every_row_of_every_table_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    run_command(["list", "--json"])
    tables = json.loads(capsys.readouterr().out)
    expected = {
        "flavors": list(FLAVORS),
        "recipes": list(RECIPES),
        "devices": [device.name for device in DEVICES],
        "datasets": list(DATASETS),
        "configs": shipped_configs(),
    }
    names = {kind: [next(iter(row.values())) for row in rows] for kind, rows in tables.items()}
    assert names == expected
    flavors = {row["flavor"]: row["parameters"] for row in tables["flavors"]}
    assert (flavors["8B"], flavors["405B"]) == (8_030_261_248, 405_853_388_800)


def test_a_table_fits_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    run_command(["list"])
    lines = capsys.readouterr().out.splitlines()
    assert {"flavors", "recipes", "devices", "datasets", "configs"} <= set(lines)
    assert [line for line in lines if len(line) > 100] == []
    run_command(["list", "recipes"])
    assert "tensorwise" in capsys.readouterr().out
