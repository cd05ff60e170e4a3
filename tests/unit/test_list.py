"""What `torchtitan-lite list` prints."""

import re

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
    run_command(["list"])
    page = capsys.readouterr().out
    assert [line for line in page.splitlines() if len(line) > 100] == []
    tables = [table.splitlines() for table in page.strip().split("\n\n")]
    names = {
        lines[0].split()[0]: [re.split("  +", row)[0] for row in lines[1:]] for lines in tables
    }
    assert names == {
        "flavors": list(FLAVORS),
        "recipes": list(RECIPES),
        "devices": [device.name for device in DEVICES],
        "datasets": list(DATASETS),
        "configs": shipped_configs(),
    }
    assert re.search(r"\n405B +405,853,388,800 .* 128,256\n", page)
    assert re.search(r"\n150M +127,593,216 .* 2,256 \(tokenizer\)\n", page)
    run_command(["list", "recipes"])
    assert capsys.readouterr().out.splitlines() == [*tables[1], ""]
