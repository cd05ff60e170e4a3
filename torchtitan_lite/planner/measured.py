"""Read the rates that scripts/gpu_day.sh measured on a GPU, to plan for such GPUs."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, Field, ValidationError

from torchtitan_lite.base.errors import ConfigError
from torchtitan_lite.base.jsonfile import read_json_object
from torchtitan_lite.catalog.devices import DeviceSpec, lookup_device

from .constants import Rates

VERSION = 2  # of the results file
DATA_SHEET = ("bf16_tflops", "fp8_tflops", "bandwidth_tb_s")
"""Figures of DeviceSpec that rates are relative to."""


class Results(BaseModel, strict=True):
    """What a plan reads of a results file."""

    version: Literal[2]
    date: Annotated[str, Field(pattern=r"^[\w:+.-]{1,40}$")]
    device: str  # torch's name of the GPU
    data_sheet: dict[str, float | None]
    rates: dict[str, Annotated[float, Field(gt=0, le=10, allow_inf_nan=False)]]


def add_measured(device: DeviceSpec, path: Path) -> DeviceSpec:
    """Return `device` with the rates in a results file in place of published ones.

    Raises ConfigError for a file that is malformed, or whose rates are not for this device."""
    here = {name: getattr(device, name) for name in DATA_SHEET}
    try:
        found = Results.model_validate(read_json_object(path))
        if unknown := found.rates.keys() - {field.name for field in fields(Rates)}:
            raise ValueError(f"the planner has no constants {', '.join(sorted(unknown))}")
        if getattr(lookup_device(found.device), "name", None) != device.name:
            raise ValueError(f'is of device "{found.device}", and the plan is for "{device.name}"')
        if found.data_sheet != here:
            raise ValueError(f"is relative to {found.data_sheet}, and the plan to {here}")
    except (OSError, ValueError) as error:
        first = error.errors()[0] if isinstance(error, ValidationError) else None
        reason = f"{'.'.join(map(str, first['loc']))}: {first['msg']}" if first else error
        raise ConfigError(
            f"--measured {path}: {reason}; name a results.json that scripts/gpu_day.sh of this "
            "version measured on this GPU, and leave --bandwidth and the peaks in [metrics] out."
        ) from error
    source = f"measured on {found.device}, {found.date}"
    rows = ((name, value, source) for name, value in found.rates.items())
    return replace(device, measured=tuple(rows))
