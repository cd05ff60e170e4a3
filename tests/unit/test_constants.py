"""The table of constants: complete, unambiguous, and each value with a source."""

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from typing import get_args

import pytest
from sample_plans import DEVICE

from torchtitan_lite.catalog.devices import DEVICES, Architecture
from torchtitan_lite.planner import constants
from torchtitan_lite.planner.constants import (
    CONSTANTS,
    Constant,
    Rates,
    constants_of,
    move_constants,
    rates_of,
)

NAMES = {field.name for field in fields(Rates)}
SECONDS = {name for name in NAMES if "seconds" in name}
SLOWDOWNS = {"slow_accumulation", "row_scales", "overlap_slowdown", "slowest_device"}
ARCHITECTURES = get_args(Architecture)
EVERY_DEVICE = [
    *DEVICES,
    *(replace(DEVICE, name="unlisted", architecture=each) for each in ARCHITECTURES),
]

# ----- CONSTANTS -----


def offenders(holds: Callable[[Constant], bool]) -> list[tuple[str, ...]]:
    return [(each.name, *each.of) for each in CONSTANTS if not holds(each)]


def test_every_row_is_a_rate_of_known_devices_with_a_source() -> None:
    known = {*ARCHITECTURES, *(device.name for device in DEVICES)}
    assert offenders(lambda row: row.name in NAMES and row.source.strip() != "") == []
    assert offenders(lambda row: set(row.of) <= known) == []


def test_every_value_is_plausible_and_between_its_slow_and_its_fast_end() -> None:
    def plausible(row: Constant) -> bool:
        least, most = (0, 0.01) if row.name in SECONDS else (0, 1)
        if row.name in SLOWDOWNS - {"overlap_slowdown"}:
            least, most = (1, 2)
        return all(least <= value <= most for value in (row.value, *(row.between or ())))

    def between(row: Constant) -> bool:
        slow, fast = row.between
        more_is_slower = row.name in SECONDS | SLOWDOWNS
        return fast < row.value < slow if more_is_slower else slow < row.value < fast

    assert offenders(plausible) == []
    assert offenders(lambda row: not row.between or between(row)) == []


def test_no_device_or_architecture_has_two_values_of_a_constant() -> None:
    rows = Counter((each.name, of) for each in CONSTANTS for of in each.of or ("every other",))
    assert [row for row, times in rows.items() if times > 1] == []


# ----- constants_of, rates_of, move_constants -----


def test_every_device_has_every_rate_and_moves_each_uncertain_one_alone() -> None:
    others = dict.fromkeys(NAMES, -1.0)
    for device in EVERY_DEVICE:
        assert constants_of(device).keys() == NAMES
        assert min(asdict(rates_of(device)).values()) > 0
        moves = [
            [dict(asdict(end).items() - others.items()) for end in ends]
            for ends in move_constants(device, Rates(**others)).values()
        ]
        assert moves == [
            [{name: end} for end in each.between]
            for name, each in constants_of(device).items()
            if each.between
        ]
        assert moves


def test_a_device_goes_before_its_architecture_and_that_before_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The order of the rows does not matter.
    rows = (
        Constant("link", 0.3, "device", ("special",)),
        Constant("link", 0.2, "architecture", ("Hopper", "Ada"), (0.1, 0.4)),
        Constant("link", 0.1, "all"),
    )
    monkeypatch.setattr(constants, "CONSTANTS", rows)
    for architecture, name, value in (
        *((each, "special", 0.3) for each in ("Hopper", "Ada", "CDNA3")),
        *((each, "other", 0.2) for each in ("Hopper", "Ada")),
        ("CDNA3", "other", 0.1),
    ):
        device = replace(DEVICE, architecture=architecture, name=name)
        assert constants.constants_of.__wrapped__(device)["link"].value == value
