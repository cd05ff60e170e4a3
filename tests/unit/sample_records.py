"""A record, figures of casts and a summary to hand to writers."""

import math

from torchtitan_lite.metrics.figures import StepRecord, Summary

RECORD = StepRecord(
    step=12,
    tokens=49152,
    epochs={"pystdlib": 0.75},
    loss=5.43211,
    loss_max=5.9,
    grad_norm=1.2345,
    lr=8e-4,
    skipped_steps=0,
    tps=2345.4,
    tflops=0.0812,
    mfu=41.24,
    mfu_bf16_peak=8.1,
    mfu_fp8_peak=None,
    mfu_achievable=44.5,
    hfu=50.5,
    step_time_s=1.25,
    data_time_s=0.0025,
    memory_gib=0.93,
    memory_pct=None,
    data_time_pct=0.2,
    time=1.7e9,
)
WEIGHT = {"sqnr_db": 31.5, "amax": 0.25, "underflow": 0.0, "saturation": 0.0}
NUMERICS = {
    "feed_forward.w2": {
        "weight": WEIGHT
        | {"sqnr_db_layer": 1, "amax_layer": 0, "underflow_layer": 0, "saturation_layer": 0},
        "grad_output": {
            "sqnr_db": -math.inf,
            "amax": math.inf,
            "underflow": 0.125,
            "saturation": 0.0,
            "sqnr_db_layer": 4,
            "amax_layer": 4,
            "underflow_layer": 2,
            "saturation_layer": 0,
        },
    },
    "output": {"weight": WEIGHT | {"saturation": 0.001}},
}
SUMMARY = Summary(
    last=RECORD,
    losses=(5.5, 5.0),
    validation_loss=5.75,
    tps=2340.5,
    mfu=41.0,
    times_s={"training": 15.0},
)
