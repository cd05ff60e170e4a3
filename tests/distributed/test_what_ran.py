"""A run logs what its first step ran; a mismatch with the config is a warning or an error."""

import re
from pathlib import Path

import pytest
from faults import fail, fault, finish
from matrix import PRECOMPUTE, TP

from torchtitan_lite.base.errors import NumericError

pytestmark = pytest.mark.timeout(300)
FLOAT8 = ["--model.flavor=wider", "--float8.enable_float8_linear"]
FLOAT8 += ["--training.steps=1", "--checkpoint.enable=false"]
SPLIT = [*FLOAT8, f"{TP}=2", "--training.global_batch_size=1"]


def said(output: str) -> list[str]:
    return re.findall(r"step 1 ran: (.*)", output)


# ----- observe: what the first step ran -----


def test_under_tensorwise_the_run_says_what_it_multiplied_and_gathered(tmp_path: Path) -> None:
    gather = "--float8.enable_fsdp_float8_all_gather"
    settings = [*SPLIT, gather, PRECOMPUTE, "--training.global_batch_size=2"]
    output = finish(tmp_path, *settings, processes=4)
    assert said(output) == [
        # Two blocks of seven linears, and one of the vocabulary, multiply three times.
        "14 of 15 linears are of float8; matmuls: 42 in float32, 3 in bfloat16 "
        "(float8 is emulated in float32)",
        # The blocks are gathered forward and backward; the output stays, and the embedding is not
        # needed again.
        "gathers of weights by FSDP: 2 in bfloat16, 4 in float8",
        "gathers of activations: 8 in float8, 2 in bfloat16",
    ]
    assert "otherwise" not in output


def test_under_rowwise_it_says_that_activations_are_gathered_in_high_precision(
    tmp_path: Path,
) -> None:
    output = finish(tmp_path, *SPLIT, "--float8.recipe_name=rowwise")
    assert said(output)[-1] == "gathers of activations: 10 in bfloat16"


def test_activations_that_are_not_gathered_in_float8_are_a_warning_and_an_error_if_deterministic(
    tmp_path: Path,
) -> None:
    faults = [fault("gather_in_high_precision", "start")]
    found = r"on 2 of 2 ranks, on rank 0: 0 gathers of activations in float8, and at least 8"
    assert re.search(found, finish(tmp_path / "warned", *SPLIT, faults=faults))
    settings = [*SPLIT, "--debug.deterministic"]
    exit_code, cause = fail(tmp_path / "failed", *settings, faults=faults)
    assert exit_code == NumericError.exit_code
    assert re.search(rf"{found}.*\[debug\] deterministic = false", cause)


def test_linears_that_silently_train_in_high_precision_are_an_error_if_deterministic(
    tmp_path: Path,
) -> None:
    lost = [fault("lose_float8", "start")]
    # On one process a linear in high precision could not take the weight that was cast before.
    exit_code, cause = fail(tmp_path, *FLOAT8, "--debug.deterministic", faults=lost, processes=2)
    assert exit_code == NumericError.exit_code
    assert "0 matmuls in float8, and at least 84 were asked for" in cause  # in two microbatches
