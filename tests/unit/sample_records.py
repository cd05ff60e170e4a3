"""A record and a summary to hand to writers."""

from torchtitan_lite.metrics.records import Record, Summary

RECORD = Record(
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
    time=1.7e9,
)
SUMMARY = Summary(step=12, tokens=49152, loss=5.25, tps=2340.5, mfu=41.0, memory_gib=0.93, times_s={"training": 15.0})
