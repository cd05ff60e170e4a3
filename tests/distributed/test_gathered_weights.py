"""Weights that stay gathered over the microbatches of a step train, validate and are saved as those
that are gathered for each, and gradients that each microbatch reduces sum up to the same."""

import re
from pathlib import Path

import pytest
from launching import finish, read_records, train_arguments

pytestmark = pytest.mark.timeout(400)
SETTINGS = {
    "FSDP": [],
    "HSDP": ["--parallelism.data_parallel_replicate_degree=2"],
    "TP, gathered in float8": [
        "--parallelism.tensor_parallel_degree=2",
        "--float8.enable_float8_linear",
        "--float8.enable_fsdp_float8_all_gather",
        "--float8.precompute_float8_dynamic_scale_for_fsdp",
    ],
}
FOUR_MICROBATCHES = "--training.global_batch_size=16"
GATHERS = {
    # A step's gathers on two shards. The ends of the model are gathered for each forward, and its
    # two blocks too; the blocks, or "always" the output too, also for each backward.
    ("FSDP", "never"): "4 in bfloat16",
    ("FSDP", "default"): "24 in bfloat16",
    ("FSDP", "always"): "28 in bfloat16",
    ("HSDP", "default"): "12 in bfloat16",  # in half as many microbatches
    ("TP, gathered in float8", "never"): "2 in bfloat16, 2 in float8",
    ("TP, gathered in float8", "default"): "8 in bfloat16, 16 in float8",
}


@pytest.mark.parametrize("layout", SETTINGS)
def test_gathers_change_no_bit_and_reductions_only_the_order_of_sums(
    layout: str, tmp_path: Path
) -> None:
    settings = [
        *(SETTINGS[layout]),
        *("--model.n_layers=2", "--training.steps=4", FOUR_MICROBATCHES),
        *("--debug.deterministic", "--checkpoint.enable", "--checkpoint.interval=2"),
        *("--validation.enable", "--validation.freq=1", "--validation.steps=4"),
    ]
    processes = 2 if layout == "FSDP" else 4
    found = {}
    cases = [(value, "each", gathers) for (of, value), gathers in GATHERS.items() if of == layout]
    for value, reduced, gathers in [*cases, ("default", "last", GATHERS[layout, "default"])]:
        folder, again = (
            tmp_path / value / reduced,
            f"--parallelism.fsdp_reshard_after_forward={value}",
        )
        reducing = f"--parallelism.fsdp_reduce_gradients={reduced}"
        output = finish(*train_arguments(folder, *settings, again, reducing), processes=processes)
        assert re.findall(r"ran: gathers of weights by FSDP: (.*)", output) == [gathers]
        records = [
            {name: record.get(name) for name in ("loss", "grad_norm", "validation_loss")}
            for record in read_records(folder)
        ]
        saved = {
            str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.distcp")
        }
        assert len(saved) == 2 * processes
        found[value, reduced] = records, saved

    (last, _), (each, _) = found.pop(("default", "last")), found["default", "each"]
    assert all(of_value == found["default", "each"] for of_value in found.values())
    for name, rel in {"loss": 5e-4, "validation_loss": 5e-4, "grad_norm": 1e-3}.items():
        values = [[record[name] for record in of if record[name]] for of in (each, last)]
        assert values[0] == pytest.approx(values[1], rel=rel)
