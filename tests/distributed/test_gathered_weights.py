"""Weights that stay gathered over the microbatches of a step train, validate and are saved as those
that are gathered for each, and gradients that each microbatch reduces sum up to the same."""

import re
from pathlib import Path

import pytest
from launching import read_records, train_together
from matrix import HSDP, RECIPES, TP

IN_FLOAT8 = "TP, gathered in float8"
pytestmark = pytest.mark.timeout(400)
ROWWISE = "cast once by rows and columns"
SETTINGS = {"FSDP": [], "HSDP": [HSDP], ROWWISE: RECIPES["rowwise"]}
SETTINGS |= {IN_FLOAT8: [f"{TP}=2", *RECIPES["all_gather"]]}
FOUR_MICROBATCHES = "--training.global_batch_size=8"
GATHERS = {
    # A step's gathers on two shards. The ends of the model are gathered for each forward, and its
    # two blocks too; the blocks, or "always" the output too, also for each backward.
    ("FSDP", "never"): "4 in bfloat16",
    ("FSDP", "default"): "24 in bfloat16",
    ("FSDP", "always"): "28 in bfloat16",
    (ROWWISE, "never"): "4 in bfloat16",
    (ROWWISE, "default"): "24 in bfloat16",
    ("HSDP", "default"): "12 in bfloat16",  # in half as many microbatches
    (IN_FLOAT8, "never"): "2 in bfloat16, 2 in float8",
    (IN_FLOAT8, "default"): "8 in bfloat16, 16 in float8",
}


# ----- fsdp_reshard_after_forward, fsdp_reduce_gradients -----
@pytest.mark.parametrize("layout", SETTINGS)
def test_gathers_change_no_bit_and_reductions_only_the_order_of_sums(
    layout: str, tmp_path: Path
) -> None:
    settings = [
        *(SETTINGS[layout]),
        *("--training.steps=4", FOUR_MICROBATCHES),
        *("--checkpoint.enable", "--checkpoint.interval=2"),
        *("--validation.enable", "--validation.freq=1", "--validation.steps=4"),
    ]
    processes = 2 if layout in ("FSDP", ROWWISE) else 4
    cases = [(value, "each") for of, value in GATHERS if of == layout] + [("default", "last")]
    reshard = "--parallelism.fsdp_reshard_after_forward"
    reduce = "--parallelism.fsdp_reduce_gradients"
    runs = {
        f"{value}, {reduced}": [*settings, f"{reshard}={value}", f"{reduce}={reduced}"]
        for value, reduced in cases
    }
    output = train_together(tmp_path, runs, processes=processes)
    said = re.findall(r"ran: gathers of weights by FSDP: (.*)", output)
    assert said == [GATHERS[layout, value] for value, _ in cases]

    found = {}
    for name in runs:
        keys = ("loss", "grad_norm", "validation_loss")
        records = [{key: line.get(key) for key in keys} for line in read_records(tmp_path / name)]
        files = (tmp_path / name).rglob("*.distcp")
        saved = {str(path.relative_to(tmp_path / name)): path.read_bytes() for path in files}
        assert len(saved) == 2 * processes
        found[name] = records, saved

    (last, _), (each, _) = found.pop("default, last"), found["default, each"]
    assert all(of_value == found["default, each"] for of_value in found.values())
    for name, rel in {"loss": 5e-4, "validation_loss": 5e-4, "grad_norm": 1e-3}.items():
        values = [[record[name] for record in of if record[name]] for of in (each, last)]
        assert values[0] == pytest.approx(values[1], rel=rel)
