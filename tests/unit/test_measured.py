"""Plans by measured rates: what replaces a constant, what the plan says, and what is refused."""

import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from sample_plans import H100

from torchtitan_lite.base.errors import ConfigError
from torchtitan_lite.catalog.devices import DeviceSpec
from torchtitan_lite.config import Config
from torchtitan_lite.planner.constants import rates_of
from torchtitan_lite.planner.measured import add_measured
from torchtitan_lite.planner.plan import find_device, make_plan
from torchtitan_lite.planner.report import format_plan
from torchtitan_lite.planner.search import Space, make_search

SHEET = {"bf16_tflops": 989, "fp8_tflops": 1979, "bandwidth_tb_s": 3.35}
RESULTS: dict[str, Any] = {
    "version": 2,
    "date": "2026-11-23T12:00:00+00:00",
    "device": "NVIDIA H100 80GB HBM3",
    "data_sheet": SHEET,
    "rates": {"bf16_matmul": 0.7, "fp8_matmul": 0.75, "kernel_seconds": 1e-6},
    "parts": {"kernels": {"status": "done"}},
}
EIGHT_B = {
    "model": {"flavor": "8B"},
    "training": {"seq_len": 8192, "local_batch_size": 1},
    "compile": {"enable": True},
    "float8": {"enable_float8_linear": True},
}


def write(folder: Path, **changes: Any) -> Path:
    path = folder / "results.json"
    path.write_text(json.dumps(RESULTS | changes))
    return path


@pytest.fixture
def measured(tmp_path: Path) -> DeviceSpec:
    return add_measured(H100, write(tmp_path))


# ----- add_measured -----


def test_measured_rates_replace_published_ones(measured: DeviceSpec) -> None:
    expected = asdict(rates_of(H100)) | RESULTS["rates"]
    assert asdict(rates_of(measured)) == expected
    assert rates_of(H100).bf16_matmul == 0.75
    assert replace(measured, measured=()) == H100


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"date": "2026\x1b[31m"}, "date: String should match pattern"),
        ({"version": 1}, "version: Input should be 2; name a"),
        ({"rates": {"bf16_matmul": "0.7"}}, "rates.bf16_matmul: .* valid number"),
        ({"rates": {"link": float("nan")}}, "rates.link: .* finite number"),
        ({"rates": {"link": 11}}, "rates.link: .* less than or equal to 10"),
        ({"rates": {"kernel_seconds": 0}}, "rates.kernel_seconds: .* greater than 0"),
        ({"rates": {"warp": 0.5, "bf16_matmul": 0.5}}, "has no constants warp; name a"),
        ({"rates": None}, "rates: .* valid dictionary"),
        ({"device": "NVIDIA H200"}, 'of device "NVIDIA H200", .* for "H100 SXM"; name a'),
        ({"device": "a toaster"}, 'is of device "a toaster"'),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    path = write(tmp_path, **changes)
    with pytest.raises(ConfigError, match=f"--measured {re.escape(str(path))}.*{message}"):
        add_measured(H100, path)


def test_a_file_that_is_no_results_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    for content, reason in ((None, "No such file"), ("[]", "not a JSON object"), ("{", "not JSON")):
        if content is not None:
            path.write_text(content)
        with pytest.raises(ConfigError, match=f"{reason}.*; name a results.json that"):
            add_measured(H100, path)


def test_rates_that_are_relative_to_other_figures_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is relative to .*3\.35.*, and the plan to .*3\.0"):
        add_measured(find_device("H100 SXM", bandwidth_tb_s=3.0), write(tmp_path))


# ----- make_plan, make_search -----


def test_a_plan_uses_what_was_measured_and_says_so(measured: DeviceSpec) -> None:
    config = Config.model_validate(EIGHT_B)
    plans = [make_plan(config, world_size=8, device=each) for each in (H100, measured)]
    published, found = plans

    # Matmuls in float8 are faster, and those in bf16 slower.
    for kind, faster in (("float8", True), ("bf16", False)):
        times = [each["prediction"][kind]["compute_s"]["linears"] for each in plans]
        assert (times[1] < times[0]) is faster

    source = "measured on NVIDIA H100 80GB HBM3, 2026-11-23T12:00:00+00:00"
    assert found["device"]["measured"] == measured.measured
    assert published["device"]["measured"] == ()
    text = " ".join(format_plan(found).split())
    assert f"{source}: bf16_matmul 0.7, fp8_matmul 0.75, kernel_seconds 1e-06." in text
    assert "2026-11-23" not in format_plan(published)


def test_a_search_uses_what_was_measured(measured: DeviceSpec) -> None:
    kept = {"activation_checkpoint": {"mode": "none"}, "parallelism": {"tensor_parallel_degree": 1}}
    config = Config.model_validate(EIGHT_B | kept)
    given = "activation_checkpoint.mode", "parallelism.tensor_parallel_degree"
    before, after = (
        make_search(Space(config, 8, each, given=given))["layouts"][0]["tps"]
        for each in (H100, measured)
    )
    assert after > before
