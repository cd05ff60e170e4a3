"""What TensorBoard reads from the files of a run."""

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from sample_records import NUMERICS, RECORD, SUMMARY, written_run
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from torchtitan_lite.metrics.tensorboard_writer import TensorBoardWriter

CONFIG_TOML = '[training]\nseq_len = 64\n\n[job]\ndescription = "```"\n'
SECONDS = {"validation": 2.0, "checkpoint": 3.0, "compile": 4.0, "gc": 5.0, "profiling": 6.0}
OUTSIDE = {"validation_loss": 5.5} | {f"{name}_s": each for name, each in SECONDS.items()}
CURVES = {
    "n_tokens_seen": 49152,
    "n_epochs/pystdlib": 0.75,
    "loss_metrics/global_avg_loss": 5.43211,
    "loss_metrics/global_max_loss": 5.9,
    "grad_norm": 1.2345,
    "lr": 8e-4,
    "skipped_steps": 0,
    "throughput(tps)": 2345.4,
    "sequences_per_s": 2.34,
    "tflops": 0.0812,
    "mfu(%)": 41.24,
    "mfu_bf16_peak(%)": 8.1,  # and no mfu_fp8_peak(%), which is unknown
    "utilisation/hfu(%)": 50.5,
    "time_metrics/end_to_end(s)": 1.25,
    "time_metrics/data_loading(s)": 0.0025,
    "time_metrics/data_loading(%)": 0.2,
    "memory/max_reserved(GiB)": 0.93,
    # Known of some runs only.
    "memory/max_reserved(%)": 10.0,
    "mfu_documents(%)": 30.5,
    "attention_imbalance": 1.25,
    "validation_metrics/global_avg_loss": 5.5,
    **{f"time_metrics/{name}_s": each for name, each in SECONDS.items()},
}


def open_writer(folder: Path, **changes) -> TensorBoardWriter:
    """Open the writer of a new run, unless `changes` say otherwise."""
    run = written_run(folder, **({"config_toml": CONFIG_TOML} | changes))
    return TensorBoardWriter(run, folder=folder)


def write_steps(writer: TensorBoardWriter, steps: range) -> None:
    for step in steps:
        writer.write(replace(RECORD, step=step, loss=float(step)))


def read_events(folder: Path) -> EventAccumulator:
    return EventAccumulator(str(folder)).Reload()


def read_curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    events = read_events(folder)
    return {
        tag: [(point.step, point.value) for point in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


# ----- TensorBoardWriter -----


def test_tags(tmp_path):
    writer = open_writer(tmp_path)
    optional = {"memory_pct": 10.0, "mfu_documents": 30.5, "attention_imbalance": 1.25}
    writer.write(replace(RECORD, **optional))
    writer.write_scalars(12, OUTSIDE)
    writer.flush()
    found = read_curves(tmp_path)
    assert found == {tag: [(12, pytest.approx(value))] for tag, value in CURVES.items()}


def test_tags_of_casts(tmp_path):
    writer = open_writer(tmp_path)
    writer.write_numerics(12, NUMERICS)
    writer.flush()
    curves = read_curves(tmp_path)
    assert set(curves) == {
        f"z_float8/{figure}/{cast}"
        for figure in ("sqnr_db", "amax", "underflow", "saturation")
        for cast in ("weight/feed_forward.w2", "grad_output/feed_forward.w2", "weight/output")
    }
    assert curves["z_float8/sqnr_db/weight/output"] == [(12, 31.5)]
    assert curves["z_float8/sqnr_db/grad_output/feed_forward.w2"] == [(12, -math.inf)]


def test_samples_are_on_the_text_page(tmp_path):
    writer = open_writer(tmp_path)
    for step in (2, 4):
        writer.write_samples(step, [{"prompt": "def", "text": f" main{step}\n"}])
    writer.flush()
    written = read_events(tmp_path).Tensors("samples/text_summary")
    assert [each.step for each in written] == [2, 4]
    assert b"**def**\n\n```text\n main4" in written[1].tensor_proto.string_val[0]


@pytest.mark.parametrize(
    "summary", [None, replace(SUMMARY, last=replace(RECORD, step=10))], ids=["crashed", "stopped"]
)
def test_each_step_and_text_is_there_once_after_a_resume(tmp_path, summary):
    writer = open_writer(tmp_path)
    write_steps(writer, range(1, 11))
    writer.write_scalars(10, {"checkpoint_s": 3.0})
    writer.flush()
    assert [step for step, _ in read_curves(tmp_path)["lr"]] == [*range(1, 11)]  # before it closes
    if summary is not None:
        writer.close(summary)
    # TensorBoard reads files in the order of their names, which hold the second of their start.
    for number, file in enumerate(sorted(tmp_path.iterdir())):
        file.rename(file.with_name(f"events.out.tfevents.170000000{number}.earlier"))
    resumed = open_writer(tmp_path, resume_step=6)
    write_steps(resumed, range(7, 9))
    resumed.close(replace(SUMMARY, last=replace(RECORD, step=8)))

    events, curves = read_events(tmp_path), read_curves(tmp_path)
    assert curves["loss_metrics/global_avg_loss"] == [(step, float(step)) for step in range(1, 9)]
    counts = [Counter(step for step, _ in points) for points in curves.values()]
    assert {count for each in counts for count in each.values()} == {1}
    texts = events.Tensors("config/text_summary")
    assert [text.step for text in texts] == [0, 6]
    assert f"```toml\n{CONFIG_TOML}\n```" in texts[1].tensor_proto.string_val[0].decode()
