"""Tensorwise scales are those of the whole tensor on any layout; and those computed ahead of a step
are the same."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from launching import read_records, train_together
from matrix import FLOAT8, FLOAT8_GATHER, PRECOMPUTE, STEPS, TP

pytestmark = pytest.mark.timeout(600)
SPLIT = [f"{TP}=2"]
LAYOUTS = {"one process": (1, []), "FSDP": (2, []), "TP": (2, SPLIT), "FSDP x TP": (4, SPLIT)}
RECIPES = {"tensorwise": [FLOAT8], "dynamic": [*FLOAT8_GATHER]}
RECIPES["precomputed"] = [*FLOAT8_GATHER, PRECOMPUTE]
Scales = dict[str, list[float]]
Runs = Callable[[str], Path]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Gives the folder of the runs of a layout: of each recipe, and in two parts of that with
    precomputed scales."""

    @cache
    def start(layout: str) -> Path:
        processes, degrees = LAYOUTS[layout]
        folder = tmp_path_factory.mktemp("runs")
        steps = [f"{STEPS}=6", "--lr_scheduler.total_steps=6"]
        runs = {name: [*recipe, *degrees, *steps] for name, recipe in RECIPES.items()}
        saved = [f"--job.dump_folder={folder}/resumed", "--checkpoint.enable"]
        resumed = [*runs["precomputed"], *saved]
        runs |= {"resumed": [*resumed, f"{STEPS}=4"], "resumed again": resumed}
        train_together(folder, runs, processes=processes, worker="scales_worker.py")
        return folder

    return start


def curve(run: Path) -> list[tuple[Any, ...]]:
    keys = ("loss", "grad_norm", "skipped_steps")
    return [tuple(record[key] for key in keys) for record in read_records(run)]


def scales(run: Path) -> list[Scales]:
    """Of the casts of the first step, by role, of each rank."""
    return [json.loads(path.read_text()) for path in sorted(run.glob("scales-*.json"))]


# ----- precompute_float8_dynamic_scale_for_fsdp -----
@pytest.mark.parametrize("layout", ["FSDP", "FSDP x TP"])
def test_precomputed_scales_train_as_dynamic_ones_do_by_the_bit(layout: str, runs: Runs) -> None:
    """Also over several microbatches, over a step without an update, and over a resume."""
    dynamic = curve(runs(layout) / "dynamic")
    assert [skipped for _, _, skipped in dynamic] == [0, 0, 1, 1, 1, 1]
    assert [loss is None for loss, _, _ in dynamic] == [False, False, True, *[False] * 3]
    assert curve(runs(layout) / "precomputed") == dynamic
    assert curve(runs(layout) / "resumed") == dynamic


# ----- scale_gathered_weights_over -----


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("layout", ["FSDP", "TP", "FSDP x TP"])
def test_all_ranks_scale_a_weight_as_one_process_does(layout: str, recipe: str, runs: Runs) -> None:
    (expected,) = scales(runs("one process") / recipe)
    for rank_scales in scales(runs(layout) / recipe):
        # The first 14 are those of the first forward pass, or all of a step, in another order.
        found = rank_scales["WEIGHT"]
        assert len(set(found)) > 7 and set(found) == set(expected["WEIGHT"])
        assert sorted(found[:14]) == sorted(expected["WEIGHT"][:14])
