"""Ranks that share sequences or the vocabulary, and the stages of a pipeline, have the gradients of
one process."""

import json
from itertools import product

import pytest
from launching import FOLDER, finish, told
from matrix import CP, EVENLY, MICROBATCH, MODES, PP, SCHEDULES, TP, TWO

DOCUMENTS = {"": (), "masked": ("--training.document_mask",)}
TWO_SEQUENCES = (TWO, f"{MICROBATCH}=2", "--training.global_batch_size=8")
LAYOUTS = {
    "CP 2": (2, (f"{CP}=2",)),
    "CP 4": (2, (f"{CP}=4",)),
    # A vocabulary that is split unevenly.
    "TP 2": (2, (f"{TP}=2", "--model.flavor=vocab-50257")),
    # Microbatches of two sequences, and of one.
    "PP 2": (4, (f"{PP}=2", *EVENLY, *SCHEDULES["Interleaved1F1B"], *TWO_SEQUENCES)),
    "PP 4": (4, (f"{PP}=4", *EVENLY)),
}
"""Blocks of the model, and overrides, of four processes."""


# ----- context_parallel, pipeline, CrossEntropy: gradients -----
@pytest.mark.timeout(300)
def test_gradients_are_those_of_one_process_within_rounding() -> None:
    """In float32, by parameter. Few are compiled, which takes long."""
    cases = [*product(LAYOUTS, DOCUMENTS, ["eager"])]
    cases += [("CP 2", "masked", "compile"), ("PP 2", "", "compile")]
    runs, blocks = {}, {}
    for layout, documents, mode in cases:
        name = f"{layout} {documents} {mode}"
        blocks[name], degrees = LAYOUTS[layout]
        model = f"--model.n_layers={blocks[name]}"
        runs[name] = [model, *degrees, *DOCUMENTS[documents], *MODES[mode]]
    found = told(finish(str(FOLDER / "gradients_worker.py"), json.dumps(runs), processes=4))
    counts = {name: len(parameters) for name, parameters in found.items()}
    assert counts == {name: number * 9 + 3 for name, number in blocks.items()}
    worst = {name: max(parameters.values()) for name, parameters in found.items()}
    assert worst == dict.fromkeys(runs, pytest.approx(0, abs=1e-5))
