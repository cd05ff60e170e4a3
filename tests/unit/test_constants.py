"""The rates that the planner assumes: plausible, and of known devices."""

from dataclasses import asdict, fields, replace
from typing import get_args

import pytest
from sample_plans import DEVICE

from torchtitan_lite.catalog.devices import DEVICES, Architecture
from torchtitan_lite.planner.constants import MEASURED, Rates, rates_of

NAMES = {field.name for field in fields(Rates)}
SLOWDOWNS = {"slow_accumulation", "row_scales", "in_training"}
ARCHITECTURES = get_args(Architecture)

# ----- MEASURED, rates_of -----


def test_rates_are_of_known_devices_and_plausible() -> None:
    assert MEASURED.keys() <= {*ARCHITECTURES, *(device.name for device in DEVICES)}
    unlisted = [replace(DEVICE, name="new", architecture=each) for each in ARCHITECTURES]
    for device in (*DEVICES, *unlisted):
        for name, value in asdict(rates_of(device)).items():
            least, most = (1, 2) if name in SLOWDOWNS else (0, 1)
            assert least <= value <= (0.01 if "seconds" in name else most) and value, name


def test_a_device_goes_before_its_architecture_and_that_before_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(MEASURED, "special", {"link": 0.3})
    monkeypatch.setitem(MEASURED, "Hopper", {"link": 0.2})
    for architecture, name, value in (
        *((each, "special", 0.3) for each in ("Hopper", "CDNA3")),
        ("Hopper", "other", 0.2),
        ("CDNA3", "other", Rates.link),
    ):
        assert rates_of(replace(DEVICE, architecture=architecture, name=name)).link == value
