import math
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from sample_records import NUMERICS, RECORD, SUMMARY, WEIGHT
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.hparams import plugin_data_pb2
from tensorboard.plugins.hparams.backend_context import _sort_and_reduce_to_hparams_limit

from torchtitan_lite.metrics.tensorboard_writer import TensorBoardWriter

CONFIG_TOML = '[training]\nseq_len = 64\n\n[job]\ndescription = "```"\n'
CHANGES_TOML = "[training]\nseq_len = 64\n"
CURVES = {
    "n_tokens_seen": 49152,
    "data/epochs/pystdlib": 0.75,
    "loss_metrics/global_avg_loss": 5.43211,
    "loss_metrics/global_max_loss": 5.9,
    "grad_norm": 1.2345,
    "lr": 8e-4,
    "skipped_steps": 0,
    "throughput(tps)": 2345.4,
    "tflops": 0.0812,
    "mfu(%)": 41.24,
    "mfu_bf16_peak(%)": 8.1,  # and no mfu_fp8_peak(%), which is unknown
    "mfu_achievable(%)": 44.5,
    "hfu(%)": 50.5,
    "time_metrics/end_to_end(s)": 1.25,
    "time_metrics/data_loading(s)": 0.0025,
    "time_metrics/data_loading(%)": 0.2,
    "memory/max_reserved(GiB)": 0.93,
    "validation_metrics/global_avg_loss": 5.5,
    "time_metrics/validation_s": 2.0,
    "time_metrics/checkpoint_s": 3.0,
    "time_metrics/gc_s": 5.0,
    "time_metrics/profiling_s": 6.0,
    "time_metrics/compile_s": 4.0,
}
FINAL = {
    "final/loss": 5.25,
    "final/validation_loss": 5.75,
    "final/median_tps": 2340.5,
    "final/median_mfu": 41.0,
}
OUTSIDE = {
    "validation_loss": 5.5,
    "validation_s": 2.0,
    "checkpoint_s": 3.0,
    "compile_s": 4.0,
    "gc_s": 5.0,
    "profiling_s": 6.0,
}


def open_writer(
    folder: Path,
    *,
    resume_step: int = 0,
    numerics: bool = False,
) -> TensorBoardWriter:
    return TensorBoardWriter(
        folder,
        resume_step=resume_step,
        config_toml=CONFIG_TOML,
        changes_toml=CHANGES_TOML,
        hparams={"float8": True, "flavor": "8B", "lr": 8e-4, "seq_len": 64},
        numerics=numerics,
    )


def write_steps(writer: TensorBoardWriter, steps: range) -> None:
    for step in steps:
        writer.write(replace(RECORD, step=step, loss=float(step)))


def read_curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    events = EventAccumulator(str(folder)).Reload()
    return {
        tag: [(point.step, point.value) for point in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def read_layout(events: EventAccumulator) -> dict[str, dict[str, list[str]]]:
    """Tags of each chart of each page; the layout is there once."""
    (event,) = events.Tensors("custom_scalars__config__")
    layout = layout_pb2.Layout.FromString(event.tensor_proto.string_val[0])
    return {
        page.title: {chart.title: list(chart.multiline.tag) for chart in page.chart}
        for page in layout.category
    }


def read_hparams(events: EventAccumulator) -> dict[str, plugin_data_pb2.HParamsPluginData]:
    contents = events.PluginTagToContent("hparams")
    return {
        tag.rpartition("/")[2]: plugin_data_pb2.HParamsPluginData.FromString(content)
        for tag, content in contents.items()
    }


def test_tags(tmp_path):
    writer = open_writer(tmp_path)
    writer.write(RECORD)
    writer.write_scalars(12, OUTSIDE)
    writer.close(None)
    curves = {
        tag: points
        for tag, points in read_curves(tmp_path).items()
        if not re.match("Overview/|z_pages/", tag)
    }
    assert curves == {tag: [(12, pytest.approx(value))] for tag, value in CURVES.items()}


def test_what_casts_lost(tmp_path):
    writer = open_writer(tmp_path)
    writer.write_numerics(12, NUMERICS)
    writer.close(None)
    curves = read_curves(tmp_path)
    assert set(curves) == {
        f"z_float8/{figure}/{cast}"
        for figure in ("sqnr_db", "amax", "underflow", "saturation")
        for cast in ("weight/feed_forward.w2", "grad_output/feed_forward.w2", "weight/output")
    }
    assert curves["z_float8/sqnr_db/weight/output"] == [(12, 31.5)]
    assert curves["z_float8/sqnr_db/grad_output/feed_forward.w2"] == [(12, -math.inf)]


def test_share_of_a_gpus_memory(tmp_path):
    open_writer(tmp_path).write(replace(RECORD, memory_pct=10.0))
    assert read_curves(tmp_path)["memory/max_reserved(%)"] == [(12, pytest.approx(10.0))]


def test_figures_of_documents(tmp_path):
    figures = {"mfu_documents": 30.5, "attention_imbalance": 1.25}
    open_writer(tmp_path).write(replace(RECORD, **figures))
    curves = read_curves(tmp_path)
    assert curves["mfu_documents(%)"] == curves["z_pages/mfu_documents"] == [(12, 30.5)]
    assert curves["attention_imbalance"] == [(12, 1.25)]


def test_curves_are_on_disk_before_they_are_closed(tmp_path):
    writer = open_writer(tmp_path)
    write_steps(writer, range(1, 4))
    assert [step for step, _ in read_curves(tmp_path)["lr"]] == [1, 2, 3]
    writer.close(None)


def test_samples_are_on_the_text_page(tmp_path):
    writer = open_writer(tmp_path)
    for step in (2, 4):
        writer.write_samples(step, [{"prompt": "def", "text": f" main{step}\n"}])
    writer.close(None)
    events = EventAccumulator(str(tmp_path)).Reload()
    written = events.Tensors("samples/text_summary")
    assert [each.step for each in written] == [2, 4]
    assert b"**def**\n\n```text\n main4" in written[1].tensor_proto.string_val[0]


def test_every_curve_of_a_page_can_be_drawn(tmp_path):
    writer = open_writer(tmp_path, numerics=True)
    writer.write(replace(RECORD, mfu_fp8_peak=7.0, mfu_documents=30.5))
    writer.write_scalars(12, OUTSIDE)
    casts = dict.fromkeys(("input", "weight", "grad_output"), WEIGHT)
    writer.write_numerics(12, {"attention.wo": casts, "feed_forward.w2": casts})
    writer.close(None)
    events = EventAccumulator(str(tmp_path)).Reload()
    pages = read_layout(events)
    assert list(pages) == ["loss", "throughput", "MFU", "memory", "times", "float8"]
    drawn_together = {
        title: [tag for tag in events.Tags()["scalars"] if re.match(pattern, tag)]
        for title, (pattern,) in pages.pop("float8").items()
    }
    assert drawn_together == {
        title: [f"z_float8/{cast}/attention.wo", f"z_float8/{cast}/feed_forward.w2"]
        for title, cast in {
            "SQNR of inputs, dB": "sqnr_db/input",
            "SQNR of weights, dB": "sqnr_db/weight",
            "SQNR of grad_outputs, dB": "sqnr_db/grad_output",
            "share of inputs that became 0": "underflow/input",
            "share of weights that became 0": "underflow/weight",
            "share of grad_outputs that became 0": "underflow/grad_output",
        }.items()
    }
    found = {
        pattern: [tag for tag in events.Tags()["scalars"] if re.match(pattern, tag)]
        for charts in pages.values()
        for patterns in charts.values()
        for pattern in patterns
    }
    assert {len(tags) for tags in found.values()} == {1}
    tags = {tag for (tag,) in found.values()}
    assert not [tag for tag in tags if "(" in tag]
    assert tags == {
        "Overview/loss",
        "loss_metrics/global_max_loss",
        "Overview/validation_loss",
        "Overview/tps",
        "Overview/mfu",
        "tflops",
        *(
            f"z_pages/{name}"
            for name in (
                "mfu_documents",
                "mfu_bf16_peak",
                "mfu_fp8_peak",
                "mfu_achievable",
                "hfu",
            )  # fmt: skip
        ),
        "z_pages/memory_gib",
        "z_pages/step_time_s",
        "z_pages/data_time_s",
        "time_metrics/compile_s",
        "time_metrics/checkpoint_s",
        "time_metrics/validation_s",
        "time_metrics/gc_s",
        "time_metrics/profiling_s",
    }


def test_a_figure_on_a_page_is_the_one_under_its_tag(tmp_path):
    write_steps(open_writer(tmp_path), range(1, 3))
    curves = read_curves(tmp_path)
    for name, tag in {
        "Overview/loss": "loss_metrics/global_avg_loss",
        "Overview/tps": "throughput(tps)",
        "Overview/mfu": "mfu(%)",
        "z_pages/hfu": "hfu(%)",
        "z_pages/step_time_s": "time_metrics/end_to_end(s)",
    }.items():
        assert curves[name] == curves[tag]


def test_runs_can_be_compared(tmp_path):
    writer = open_writer(tmp_path)
    hparams = read_hparams(EventAccumulator(str(tmp_path)).Reload())
    assert hparams.keys() == {
        "experiment",
        "session_start_info",
    }  # also of a run that goes on, or crashed
    metrics = hparams["experiment"].experiment.metric_infos
    assert [metric.name.tag for metric in metrics] == [f"z_{name}" for name in FINAL]
    assert [metric.display_name for metric in metrics] == list(FINAL)
    start = hparams["session_start_info"].session_start_info.hparams
    values = {name: getattr(value, value.WhichOneof("kind")) for name, value in start.items()}
    assert values == {"float8": "true", "flavor": "8B", "lr": 8e-4, "seq_len": 64}
    writer.close(SUMMARY)
    assert read_hparams(EventAccumulator(str(tmp_path)).Reload()).keys() == {
        "experiment",
        "session_start_info",
        "session_end_info",
    }
    assert read_curves(tmp_path) == {f"z_{name}": [(12, value)] for name, value in FINAL.items()}


def test_five_hparams_are_shown_first(tmp_path):
    names = ["float8", "lr", "parallelism", "seq_len", "world_size", "compile", "flavor"]
    TensorBoardWriter(
        tmp_path,
        resume_step=0,
        config_toml="",
        changes_toml="",
        hparams=dict.fromkeys(names, 1.0),
        numerics=False,
    )
    experiment = read_hparams(EventAccumulator(str(tmp_path)).Reload())["experiment"].experiment
    _sort_and_reduce_to_hparams_limit(experiment)  # as TensorBoard does before it shows them
    assert [each.name for each in experiment.hparam_infos] == names


def test_a_single_record_has_no_median(tmp_path):
    unknown = {"tps": None, "mfu": None, "validation_loss": None}
    open_writer(tmp_path).close(replace(SUMMARY, **unknown))
    assert read_curves(tmp_path) == {"z_final/loss": [(12, 5.25)]}


@pytest.mark.parametrize(
    "summary", [None, replace(SUMMARY, last=replace(RECORD, step=10))], ids=["crashed", "stopped"]
)
def test_each_step_stands_once_after_a_resume(tmp_path, summary):
    writer = open_writer(tmp_path)
    write_steps(writer, range(1, 11))
    writer.write_scalars(10, {"checkpoint_s": 3.0})
    if summary is not None:
        writer.close(summary)
    (events_file,) = (
        tmp_path.iterdir()
    )  # files are read in the order of the second, in their name, of their start
    events_file.rename(events_file.with_name("events.out.tfevents.1700000000.earlier"))
    resumed = open_writer(tmp_path, resume_step=6)
    write_steps(resumed, range(7, 9))
    resumed.close(replace(SUMMARY, last=replace(RECORD, step=8)))

    events = EventAccumulator(str(tmp_path)).Reload()
    curves = read_curves(tmp_path)
    assert curves["loss_metrics/global_avg_loss"] == [(step, float(step)) for step in range(1, 9)]
    assert curves["z_final/loss"] == [(8, 5.25)]
    repeated = {
        tag: Counter(step for step, _ in points).most_common(1)
        for tag, points in curves.items()
        if points
    }
    assert {count for ((_, count),) in repeated.values()} == {1}
    assert list(read_layout(events)) == ["loss", "throughput", "MFU", "memory", "times"]
    (text,) = events.Tensors("config/text_summary")
    changes, all_keys = text.tensor_proto.string_val[0].decode().split("All keys:")
    assert f"```toml\n{CHANGES_TOML}\n```" in changes
    assert f"```toml\n{CONFIG_TOML}\n```" in all_keys
    assert read_hparams(events).keys() == {"experiment", "session_start_info", "session_end_info"}
