"""The table of constants: complete, unambiguous, and each value with a source."""

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from typing import get_args

import pytest
from sample_plans import DEVICE

from torchtitan_lite.catalog.devices import DEVICES, Architecture
from torchtitan_lite.planner import constants
from torchtitan_lite.planner.constants import CONSTANTS, Constant, Rates, constants_of, rates_of

NAMES = {field.name for field in fields(Rates)}
SLOWDOWNS = {"slow_accumulation", "row_scales", "in_training", "slowest_device"}
ARCHITECTURES = get_args(Architecture)

# ----- CONSTANTS -----


def offenders(holds: Callable[[Constant], bool]) -> list[tuple[str, ...]]:
    return [(each.name, *each.of) for each in CONSTANTS if not holds(each)]


def test_every_row_is_a_plausible_rate_of_known_devices_with_a_source() -> None:
    known = {*ARCHITECTURES, *(device.name for device in DEVICES)}

    def plausible(row: Constant) -> bool:
        least, most = (1, 2) if row.name in SLOWDOWNS else (0, 1)
        return least <= row.value <= (0.01 if "seconds" in row.name else most)

    assert offenders(lambda row: row.name in NAMES and row.source.strip() != "") == []
    assert offenders(lambda row: {*row.of} <= known and plausible(row)) == []
    rows = Counter((each.name, of) for each in CONSTANTS for of in each.of or ("every other",))
    assert [row for row, times in rows.items() if times > 1] == []


# ----- constants_of, rates_of -----


def test_every_device_has_every_rate() -> None:
    unlisted = [replace(DEVICE, name="new", architecture=each) for each in ARCHITECTURES]
    for device in (*DEVICES, *unlisted):
        assert constants_of(device).keys() == NAMES
        assert min(asdict(rates_of(device)).values()) > 0


def test_a_device_goes_before_its_architecture_and_that_before_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The order of the rows does not matter.
    rows = (
        Constant("link", 0.3, "device", ("special",)),
        Constant("link", 0.2, "architecture", ("Hopper", "Ada")),
        Constant("link", 0.1, "all"),
    )
    monkeypatch.setattr(constants, "CONSTANTS", rows)
    for architecture, name, value in (
        *((each, "special", 0.3) for each in ("Hopper", "Ada", "CDNA3")),
        *((each, "other", 0.2) for each in ("Hopper", "Ada")),
        ("CDNA3", "other", 0.1),
    ):
        device = replace(DEVICE, architecture=architecture, name=name)
        assert constants_of(device)["link"].value == value
