"""The table of constants: complete, unambiguous, and each value with a source."""

from collections import Counter
from dataclasses import asdict, fields, replace
from typing import get_args

import pytest
from sample_plans import DEVICE

from torchtitan_lite.metrics.devices import DEVICES, Architecture, DeviceSpec
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
by_device = pytest.mark.parametrize(
    "device", EVERY_DEVICE, ids=lambda device: f"{device.name} {device.architecture}"
)
by_constant = pytest.mark.parametrize(
    "constant", CONSTANTS, ids=lambda constant: " ".join((constant.name, *constant.of))
)


@by_device
def test_every_device_has_every_rate_and_no_other(device: DeviceSpec) -> None:
    assert constants_of(device).keys() == NAMES
    assert all(value > 0 for value in asdict(rates_of(device)).values())


@by_constant
def test_a_constant_is_a_rate_of_known_devices_with_a_source(constant: Constant) -> None:
    assert constant.name in NAMES
    assert set(constant.of) <= {*ARCHITECTURES, *(device.name for device in DEVICES)}
    assert constant.source.strip()


@by_constant
def test_a_constant_is_between_its_slow_and_its_fast_end(constant: Constant) -> None:
    if constant.between:
        slow, fast = constant.between
        more_is_slower = constant.name in SECONDS | SLOWDOWNS
        assert fast < constant.value < slow if more_is_slower else slow < constant.value < fast


def test_no_device_or_architecture_has_two_values_of_a_constant() -> None:
    rows = Counter((each.name, of) for each in CONSTANTS for of in each.of or ("every other",))
    assert [row for row, times in rows.items() if times > 1] == []


@by_constant
def test_no_share_is_above_1_and_no_latency_is_above_10_ms(constant: Constant) -> None:
    values = (constant.value, *(constant.between or ()))
    least, most = (0, 0.01) if constant.name in SECONDS else (0, 1)
    if constant.name in SLOWDOWNS - {"overlap_slowdown"}:
        least, most = (1, 2)
    assert all(least <= value <= most for value in values)


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
    values = {
        (architecture, name): constants.constants_of.__wrapped__(
            replace(DEVICE, architecture=architecture, name=name)
        )["link"].value
        for architecture in ("Hopper", "Ada", "CDNA3")
        for name in ("special", "other")
    }
    assert values == {
        ("Hopper", "special"): 0.3,
        ("Hopper", "other"): 0.2,
        ("Ada", "special"): 0.3,
        ("Ada", "other"): 0.2,
        ("CDNA3", "special"): 0.3,
        ("CDNA3", "other"): 0.1,
    }


@by_device
def test_a_constant_is_moved_to_its_slow_and_its_fast_end_and_nothing_else_moves(
    device: DeviceSpec,
) -> None:
    others = dict.fromkeys(NAMES, -1.0)
    moves = [
        [dict(asdict(end).items() - others.items()) for end in ends]
        for ends in move_constants(device, Rates(**others)).values()
    ]
    assert moves == [
        [{name: each.between[0]}, {name: each.between[1]}]
        for name, each in constants_of(device).items()
        if each.between
    ]
    assert moves
