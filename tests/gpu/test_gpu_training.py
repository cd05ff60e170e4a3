"""Real float8 matmuls on a GPU against their emulation. One command: pytest tests/gpu."""

from pathlib import Path

import pytest
from launching import ask, losses, train

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
FLOAT8 = "--float8.enable_float8_linear"


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_real_float8_trains_as_emulated_float8_does(recipe: str, tmp_path: Path) -> None:
    settings = [FLOAT8, "--float8.recipe_name", recipe, "--training.steps=10"]
    real = losses(tmp_path / "real", *settings, processes=1)
    emulated = losses(tmp_path / "emulated", *settings, "--float8.emulate", processes=1)
    assert real == pytest.approx(emulated, rel=5e-3)


def test_compiled_float8_with_its_all_gather_trains_as_eager_float8_does(tmp_path: Path) -> None:
    settings = [FLOAT8, "--float8.enable_fsdp_float8_all_gather", "--training.steps=10"]
    eager = losses(tmp_path / "eager", *settings, processes=1)
    compiled = losses(tmp_path / "compiled", *settings, "--compile.enable", processes=1)
    assert compiled == pytest.approx(eager, rel=5e-3)


def test_a_logged_step_waits_for_the_device_no_more_often_than_another(tmp_path: Path) -> None:
    settings = ["--job.dump_folder", str(tmp_path), "--training.steps=13", "--metrics.log_freq=2"]
    waits = ask(str(Path(__file__).with_name("syncs_worker.py")), *settings, processes=1)["waits"]
    unlogged, logged = waits[4:12:2], waits[5:12:2]  # steps 5, 7, 9, 11 and 6, 8, 10, 12
    assert sorted(logged) == sorted(unlogged)


def test_peaks_are_measured_below_the_data_sheets(tmp_path: Path) -> None:
    settings = [FLOAT8, "--training.steps=3", "--metrics.measure_peak"]
    record = train(tmp_path, *settings, processes=1)[-1]
    assert record["mfu_achievable"] > record["mfu"] > 0
    assert record["hfu"] >= record["mfu"]
