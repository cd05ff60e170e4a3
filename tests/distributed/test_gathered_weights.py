"""Weights that stay gathered over the microbatches of a step train, validate and are saved as those
that are gathered for each."""

import re
from pathlib import Path

import pytest
from launching import finish, read_records, train_arguments

pytestmark = pytest.mark.timeout(400)
SETTINGS = {
    "FSDP": [],
    "TP, compiled, gathered in float8": [
        "--parallelism.tensor_parallel_degree=2",
        "--compile.enable",
        "--float8.enable_float8_linear",
        "--float8.enable_fsdp_float8_all_gather",
        "--float8.precompute_float8_dynamic_scale_for_fsdp",
    ],
}
FOUR_MICROBATCHES = "--training.global_batch_size=16"
GATHERS = {
    # A step's gathers on two shards. The ends of the model are gathered for each forward, and its
    # two blocks too; the first block, or "always" both and the output, also for each backward.
    ("FSDP", "never"): "4 in bfloat16",
    ("FSDP", "default"): "20 in bfloat16",
    ("FSDP", "always"): "28 in bfloat16",
    ("TP, compiled, gathered in float8", "never"): "2 in bfloat16, 2 in float8",
    ("TP, compiled, gathered in float8", "default"): "8 in bfloat16, 12 in float8",
}


@pytest.mark.parametrize("layout", SETTINGS)
def test_weights_that_stay_gathered_change_no_bit(layout: str, tmp_path: Path) -> None:
    settings = [
        *(SETTINGS[layout]),
        *("--model.n_layers=2", "--training.steps=4", FOUR_MICROBATCHES),
        *("--debug.deterministic", "--checkpoint.enable", "--checkpoint.interval=2"),
        *("--validation.enable", "--validation.freq=1", "--validation.steps=4"),
    ]
    found = {}
    for (of, value), gathers in GATHERS.items():
        if of != layout:
            continue
        folder, again = tmp_path / value, f"--parallelism.fsdp_reshard_after_forward={value}"
        processes = 4 if "TP" in layout else 2
        output = finish(*train_arguments(folder, *settings, again), processes=processes)
        assert re.findall(r"ran: gathers of weights by FSDP: (.*)", output) == [gathers]
        records = [
            {name: record.get(name) for name in ("loss", "grad_norm", "validation_loss")}
            for record in read_records(folder)
        ]
        saved = {
            str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.distcp")
        }
        assert len(saved) == 2 * processes
        found[value] = records, saved
    assert all(each == found["never"] for each in found.values())
