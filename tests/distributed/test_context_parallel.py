"""Ranks that share sequences have the gradients of one process."""

import json
from itertools import product

import pytest
from launching import FOLDER, finish, told
from matrix import CP, MODES

DOCUMENTS = {"": (), "masked": ("--training.document_mask",)}


@pytest.mark.timeout(300)
def test_gradients_are_those_of_one_process_within_rounding() -> None:
    """In float32, by parameter: of two ranks a sequence, and of four. Compiled, which takes long,
    one of them with masked documents and one without."""
    cases = [*product((2, 4), DOCUMENTS, ["eager"]), (2, "masked", "compile"), (4, "", "compile")]
    runs = {
        f"{degree} {documents} {mode}": [f"{CP}={degree}", *DOCUMENTS[documents], *MODES[mode]]
        for degree, documents, mode in cases
    }
    found = told(finish(str(FOLDER / "gradients_worker.py"), json.dumps(runs), processes=4))
    assert {name: len(parameters) for name, parameters in found.items()} == dict.fromkeys(
        runs, 2 * 9 + 3
    )
    worst = {name: max(parameters.values()) for name, parameters in found.items()}
    assert worst == dict.fromkeys(runs, pytest.approx(0, abs=1e-5))
