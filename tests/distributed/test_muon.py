"""Muon updates weights in every layout as torch's Muon and AdamW do in one process, shares the
orthogonalization out over ranks, and resumes in another layout."""

import json
import shutil
from pathlib import Path

import pytest
from launching import FOLDER, finish, read_losses, told, train_together
from matrix import CP, EVENLY, FLOAT8_GATHER, HSDP, PP, STEPS, TP, whole_and_in_parts

MUON = "--optimizer.name=Muon"
UNEVEN = "--model.ffn_dim=206"  # of 2 * 2 or 4 shards some are smaller
FEW = {
    2: {"FSDP, uneven": ([UNEVEN], [7, 7])},
    4: {
        "FSDP x TP, uneven": ([UNEVEN, f"{TP}=2"], [4, 4, 3, 3]),
        "HSDP x TP, all_gather": ([HSDP, f"{TP}=2", *FLOAT8_GATHER], [7] * 4),
        "PP x CP": ([f"{PP}=2", f"{CP}=2", *EVENLY], [4, 3] * 2),
    },
}
MORE = {
    1: {"one": ([], [14])},
    2: {
        "TP": ([f"{TP}=2"], [7, 7]),
        "FSDP, all_gather": (FLOAT8_GATHER, [7, 7]),
        "offload": (["--training.enable_cpu_offload"], [7, 7]),
        "PP": ([f"{PP}=2", *EVENLY], [7, 7]),
    },
    4: {
        "FSDP, uneven": ([UNEVEN], [4, 4, 3, 3]),
        "HSDP": ([HSDP], [7] * 4),
        "FSDP x CP": ([f"{CP}=2"], [4, 4, 3, 3]),
        "FSDP x TP, all_gather": ([f"{TP}=2", *FLOAT8_GATHER], [4, 4, 3, 3]),
    },
}
"""By the number of processes: overrides, and the matrices of a step that each rank takes of the 14
of two blocks, 7 of each stage of a pipeline. Replicas take the same ones."""

pytestmark = pytest.mark.timeout(300)


# ----- Muon, orthogonalize, find_shard -----


@pytest.mark.parametrize(
    ("layouts", "processes"),
    [
        *(pytest.param(FEW, processes, marks=pytest.mark.quick) for processes in FEW),
        *((MORE, processes) for processes in MORE),
    ],
)
def test_updates_are_those_of_one_process(layouts: dict, processes: int) -> None:
    runs = {name: [*overrides] for name, (overrides, _) in layouts[processes].items()}
    output = finish(str(FOLDER / "muon_worker.py"), json.dumps(runs), processes=processes)
    found = told(output)
    assert {name: each["counts"] for name, each in found.items()} == {
        name: counts for name, (_, counts) in layouts[processes].items()
    }
    for name, each in found.items():
        assert each["matrices"] == 0, name
        assert each["others"] < 2e-5, name  # fused AdamW rounds otherwise than torch's loop


# ----- Muon: checkpoints -----
def test_muon_resumes_to_the_bit_and_in_another_layout(tmp_path: Path) -> None:
    common = [MUON, "--lr_scheduler.total_steps=8", "--checkpoint.enable", "--optimizer.lr=1e-3"]
    common += ["--optimizer.no_decay=attention_norm,ffn_norm", "--optimizer.lr_factors={wq=0.5}"]
    variants = {"plain": [f"{TP}=2"], "gathered": FLOAT8_GATHER}
    runs = {}
    for name, settings in variants.items():
        runs |= whole_and_in_parts(name, [*common, *settings], folder=tmp_path)
    train_together(tmp_path, runs, processes=4)
    for name in variants:
        whole = read_losses(tmp_path / f"{name} whole")
        assert read_losses(tmp_path / f"{name} in parts") == whole

    # On one rank, from what four had saved.
    alone = tmp_path / "on one rank"
    shutil.copytree(tmp_path / "plain in parts", alone)
    shutil.rmtree(alone / "checkpoint" / "step-00000008")
    train_together(tmp_path, {alone.name: [*common, f"{STEPS}=8"]}, processes=1)
    assert read_losses(alone) == pytest.approx(read_losses(tmp_path / "plain whole"), rel=5e-4)
