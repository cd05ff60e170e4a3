"""A run, a record, figures of casts and a summary to hand to writers."""

import math
from pathlib import Path
from typing import Any

from torchtitan_lite.metrics.base_writer import WrittenRun
from torchtitan_lite.metrics.figures import StepRecord
from torchtitan_lite.metrics.summary import Summary

RECORD = StepRecord(
    step=12, tokens=49152, epochs={"pystdlib": 0.75}, lr=8e-4, skipped_steps=0, time=1.7e9,
    loss=5.43211, loss_max=5.9, grad_norm=1.2345, tps=2345.4, sequences_per_s=2.34, tflops=0.0812,
    mfu=41.24, mfu_bf16_peak=8.1, mfu_fp8_peak=None, hfu=50.5,
    step_time_s=1.25, data_time_s=0.0025, data_time_pct=0.2, memory_gib=0.93, memory_pct=None,
)  # fmt: skip


def cast(*figures: float, layers: tuple[int, ...] = ()) -> dict[str, float]:
    """Figures of a cast, and the layer that each comes from."""
    names = ("sqnr_db", "amax", "underflow", "saturation")
    named = dict(zip(names, figures, strict=True))
    return named | {f"{name}_layer": layer for name, layer in zip(named, layers, strict=False)}


WEIGHT = cast(31.5, 0.25, 0.0, 0.0)
NUMERICS = {
    "feed_forward.w2": {
        "weight": cast(31.5, 0.25, 0.0, 0.0, layers=(1, 0, 0, 0)),
        "grad_output": cast(-math.inf, math.inf, 0.125, 0.0, layers=(4, 4, 2, 0)),
    },
    "output": {"weight": cast(31.5, 0.25, 0.0, 0.001)},
}
SUMMARY = Summary(
    last=RECORD,
    losses=(5.5, 5.0),
    validation=(10, 5.75),
    tps=2340.5,
    mfu=41.0,
    times_s={"training": 15.0},
)
NO_RECORDS = [
    *(b"", b'{"step": 5, "tok', b'{"loss": 5}', b"[5]", b"\0" * 20, b"\xff", b'{"step": "5"}'),
    *(b'{"step": true}', b'{"step": NaN}', b'{"step": ' + b"1" * 400 + b"}", b"1" * 5000),
    *(b"[" * 100_000, b'{"step": 13, "x": ' + b"[" * 400 + b"]" * 400 + b"}"),
]
"""Lines that a crash or somebody else has written."""


def written_run(folder: Path, **changes: Any) -> WrittenRun:
    """A new run on rank 0."""
    run: dict[str, Any] = {"rank": 0, "total_steps": 30, "resume_step": 0}
    run |= {"config_toml": "[training]\nseq_len = 64\n"}
    return WrittenRun(folder=folder, **(run | changes))
