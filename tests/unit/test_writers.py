"""The writers of a run: what each one writes, after a crash too, and when its disk is full."""

import errno
import json
import math
import os
import re
import threading
from dataclasses import replace
from pathlib import Path
from unittest.mock import DEFAULT, Mock

import pytest
from fake_wandb import FakeWandb
from sample_records import NO_RECORDS, NUMERICS, RECORD, SUMMARY, written_run
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer.record_writer import RecordWriter

from torchtitan_lite.base.errors import ConfigError
from torchtitan_lite.config import MetricsConfig
from torchtitan_lite.metrics.records import has_validation
from torchtitan_lite.metrics.writers import ConsoleWriter, JsonlWriter, build_writers

LINE = (
    "step 12/30  loss 5.4321  grad_norm 1.23  tps 2,345  tflops 0.0812  mfu 41.2%  mem 0.9GiB  "
    "time 1.250s (data 0.2%)  "
)


def build(folder: Path, *, rank: int = 0, **metrics):
    """Build the writers of a new run."""
    return build_writers(MetricsConfig(**metrics), written_run(folder, rank=rank))


def read_lines(path) -> list[dict]:
    refuse = Mock(side_effect=ValueError("not strict JSON"))
    return [json.loads(line, parse_constant=refuse) for line in path.open()]


def write_steps(writer, steps) -> None:
    for step in steps:
        writer.write(replace(RECORD, step=step, loss=float(step)))
    writer.close(SUMMARY)


# ----- ConsoleWriter -----


def test_console_lines(notices):
    writer = ConsoleWriter(total_steps=30)
    writer.write(RECORD)
    writer.write(RECORD)
    writer.write(replace(RECORD, step=9))
    writer.write_scalars(9, {"validation_loss": 5.5, "validation_s": 1.23456})
    writer.write_samples(9, [{"prompt": "a" * 30, "text": "\n" + "b" * 50}])
    writer.close(SUMMARY)
    assert notices.messages == [
        LINE + "warm-up",
        LINE + "eta 0:00:22",  # 18 steps of 1.25 s
        LINE.replace("step 12", "step  9") + "eta 0:00:26",
        "step  9/30  validation_loss 5.5000  validation_s 1.2346",
        f"step  9/30  sample '{'a' * 20}': '\\n{'b' * 39}'",
    ]


@pytest.mark.parametrize(
    ("changes", "old", "new"),
    [
        ({"tflops": 412.37}, "0.0812", "412"),
        ({"tflops": 1234.5}, "0.0812", "1,230"),
        ({"mfu": None, "approximate_mfu": True}, "41.2%", "n/a"),
        ({"approximate_mfu": True}, "41.2%", "~41.2%"),
        ({"mfu_documents": 30.52}, "41.2%", "41.2% (documents 30.5%)"),
        ({"mfu_documents": 30.5, "approximate_mfu": True}, "41.2%", "~41.2% (documents ~30.5%)"),
        ({"bubble_pct": 33.34}, "41.2%", "41.2%  bubble 33.3%"),
        ({"memory_max_gib": 1.27, "memory_max_rank": 3}, "0.9GiB", "1.3GiB (rank 3)"),
        ({"skipped_steps": 2}, "1.23  tps", "1.23  skipped 2  tps"),
    ],
)
def test_console_line_with(notices, changes, old, new):
    ConsoleWriter(total_steps=30).write(replace(RECORD, **changes))
    assert notices.messages == [LINE.replace(old, new) + "warm-up"]


def test_console_shows_the_casts_that_lost_most(notices):
    writer = ConsoleWriter(total_steps=30)
    writer.write_numerics(12, NUMERICS)
    good = {"sqnr_db": 31.46, "sqnr_db_layer": 0, "underflow": 0.0, "saturation": 0.0}
    writer.write_numerics(15, {"output": {"input": good}})
    assert notices.messages == [
        "step 12/30  float8 casts: least SQNR -inf dB (grad_output of feed_forward.w2, layer 4)",
        "step 15/30  float8 casts: least SQNR 31.5 dB (input of output, layer 0)",
    ]


# ----- JsonlWriter -----


def test_jsonl_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    writer = JsonlWriter(tmp_path, resume_step=0)
    writer.write(RECORD)
    writer.write_scalars(12, {"validation_loss": 5.5})
    assert path.read_text() == (  # before it is closed
        '{"step": 12, "tokens": 49152, "epochs": {"pystdlib": 0.75}, "loss": 5.43211, '
        '"loss_max": 5.9, "grad_norm": 1.2345, "lr": 0.0008, '
        '"skipped_steps": 0, "tps": 2345.4, "sequences_per_s": 2.34, "tflops": 0.0812, '
        '"mfu": 41.24, '
        '"mfu_documents": null, "mfu_bf16_peak": 8.1, "mfu_fp8_peak": null, '
        '"hfu": 50.5, "attention_imbalance": null, "bubble_pct": null, '
        '"stage_time_s": null, "stage_mfu": null, "step_time_s": 1.25, '
        '"data_time_s": 0.0025, "memory_gib": 0.93, "memory_pct": null, "memory_max_gib": null, '
        '"memory_max_rank": null, "data_time_pct": 0.2, "time": 1700000000.0}\n'
    )


def test_jsonl_line_with_documents_and_with_numbers_that_are_not_finite(tmp_path):
    writer = JsonlWriter(tmp_path, resume_step=0)
    documents = {"mfu_documents": 30.5, "attention_imbalance": 1.25}
    infinite = {"loss": math.nan, "tps": math.inf, "tflops": -math.inf}
    for changes in ({}, documents, {**infinite, "grad_norm": 0.0}):
        writer.write(replace(RECORD, **changes))
    line, with_documents, not_finite = read_lines(tmp_path / "metrics.jsonl")
    assert with_documents == line | documents
    assert not_finite == line | dict.fromkeys(infinite) | {"grad_norm": 0.0}


@pytest.mark.parametrize("torn", NO_RECORDS, ids=range(len(NO_RECORDS)))
def test_jsonl_has_each_step_once_after_a_crash(tmp_path, torn):
    path = tmp_path / "metrics.jsonl"
    write_steps(JsonlWriter(tmp_path, resume_step=0), range(1, 11))
    with path.open("ab") as file:
        file.write(torn)
    write_steps(JsonlWriter(tmp_path, resume_step=6), range(7, 9))
    lines = [(line["step"], line["loss"]) for line in read_lines(path)]
    assert lines == [(step, step) for step in range(1, 9)]
    assert list(tmp_path.iterdir()) == [path]


def test_jsonl_survives_a_crash_while_it_is_cut(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    write_steps(JsonlWriter(tmp_path, resume_step=0), range(1, 11))
    before = path.read_text()
    monkeypatch.setattr(Path, "replace", Mock(side_effect=OSError("no more power")))
    with pytest.raises(OSError, match="no more power"):
        JsonlWriter(tmp_path, resume_step=6)
    assert path.read_text() == before


def test_jsonl_files_have_their_own_content_of_each_step_once(tmp_path):
    texts = [{"prompt": "a", "text": "\n"}, {"prompt": "b"}]
    for resume_step, steps in ((0, (5, 10)), (5, (10, 15))):
        writer = JsonlWriter(tmp_path, resume_step=resume_step)
        for step in steps:
            writer.write(replace(RECORD, step=step))
            writer.write_scalars(step, {"checkpoint_s": 1.0})
            writer.write_scalars(step, {"validation_loss": 5.5 if step > 5 else math.nan})
            writer.write_numerics(step, NUMERICS)
            writer.write_samples(step, texts)
        writer.flush()
        writer.close(SUMMARY)

    contents = ("metrics", "validation", "numerics", "samples")
    lines = {content: read_lines(tmp_path / f"{content}.jsonl") for content in contents}
    steps = [[line["step"] for line in each] for each in lines.values()]
    assert steps == [[5, 10, 15]] * 3 + [[5, 5, 10, 10, 15, 15]]
    assert all(line.pop("time") > 1.6e9 for each in lines.values() for line in each)
    assert [line["validation_loss"] for line in lines["validation"]] == [None, 5.5, 5.5]
    assert lines["samples"][:2] == [{"step": 5, **text} for text in texts]
    assert [step for step in range(12) if has_validation(tmp_path, step)] == [5, 10]
    w2, output = NUMERICS["feed_forward.w2"], NUMERICS["output"]
    lossy = w2["grad_output"] | {"sqnr_db": None, "amax": None}
    kinds = {"feed_forward.w2": w2 | {"grad_output": lossy}, "output": output}
    assert lines["numerics"][0] == {"step": 5, "kinds": kinds}


# ----- build_writers -----


def test_a_file_exists_once_it_has_a_line_and_an_old_one_is_cut(tmp_path):
    (tmp_path / "numerics.jsonl").write_text('{"step": 10}\n{"step": 20}\n')
    writer = JsonlWriter(tmp_path, resume_step=10)
    assert [path.name for path in tmp_path.iterdir()] == ["numerics.jsonl"]
    assert (tmp_path / "numerics.jsonl").read_text() == '{"step": 10}\n'
    assert not has_validation(tmp_path, 10)
    writer.write(RECORD)
    assert {path.name for path in tmp_path.iterdir()} == {"metrics.jsonl", "numerics.jsonl"}


@pytest.mark.parametrize(
    ("keys", "rank", "own"),
    [
        ({"save_tb_folder": "curves"}, 0, ""),
        ({"enable_wandb": True}, 0, ""),
        ({"enable_wandb": True, "save_for_all_ranks": True}, 0, "rank_0"),
        ({"enable_wandb": True, "save_for_all_ranks": True}, 1, "rank_1"),
    ],
)
def test_several_writers_at_once(tmp_path, monkeypatch, notices, keys, rank, own):
    wandb = FakeWandb(monkeypatch)
    for writer in build(tmp_path, rank=rank, **keys):
        write_steps(writer, [1, 2])
    records = tmp_path / "metrics.jsonl"
    written = [line["step"] for line in read_lines(records)] if records.exists() else None
    assert (len(notices.messages), written) == ((2, [1, 2]) if rank == 0 else (0, None))
    events = EventAccumulator(str(tmp_path / keys.get("save_tb_folder", "tb") / own)).Reload()
    assert [point.step for point in events.Scalars("memory/max_reserved(GiB)")] == [1, 2]

    assert (tmp_path / "wandb").exists() == bool(wandb.runs) == ("enable_wandb" in keys)
    for run in wandb.runs:
        folder = tmp_path / "wandb" / own if own else tmp_path
        name = f"{tmp_path.name}/{own}" if own else tmp_path.name
        group = tmp_path.name if own else tmp_path.parent.name
        assert run.options.items() >= {"dir": str(folder), "name": name, "group": group}.items()
        assert (folder / "wandb/run_id").read_text() == "new-id"
        assert [step for step, _ in run.rows] == [1, 2]


@pytest.mark.parametrize("name", ["metrics.jsonl", "numerics.jsonl"])
@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_records_that_are_no_file_are_refused(tmp_path, name, make):
    make(tmp_path / name)
    with pytest.raises(ConfigError, match=f"{name} is not a regular file"):
        build(tmp_path)


@pytest.mark.parametrize("make", [Path.touch, os.mkfifo, lambda path: path.symlink_to("nowhere")])
def test_curves_whose_folder_is_something_else_are_left_out(tmp_path, notices, monkeypatch, make):
    FakeWandb(monkeypatch)
    for name in ("tb", "wandb"):
        make(tmp_path / name)
    _, _, curves = build(tmp_path, enable_wandb=True)
    (warning,) = notices.messages
    assert re.match("wandb failed .*Error: .*/wandb", warning)
    with pytest.raises(OSError, match="/tb"):  # the first point opens the folder
        curves.write(RECORD)
    assert curves.spare == "TensorBoard"


def test_without_tensorboard(tmp_path):
    writers = build(tmp_path, enable_tensorboard=False)
    assert [type(writer) for writer in writers] == [ConsoleWriter, JsonlWriter]
    assert list(tmp_path.iterdir()) == []
    assert build(tmp_path, rank=1) == []


FULL = OSError(errno.ENOSPC, "No space left on device")


def fill_tensorboards_disk(monkeypatch, room: int) -> None:
    """Let TensorBoard's disk have no space after `room` events. Its thread prints a traceback."""
    outcomes = [*[DEFAULT] * room, *[FULL] * 100]
    monkeypatch.setattr(RecordWriter, "write", Mock(side_effect=outcomes))
    monkeypatch.setattr(threading, "excepthook", lambda failed: None)


@pytest.mark.parametrize("room", [0, 4], ids=["at the start", "for its texts"])
def test_only_curves_are_spare_when_a_disk_is_full(tmp_path, monkeypatch, room):
    console, records, curves = build(tmp_path)
    records._files["metrics"] = Mock(write=Mock(side_effect=FULL))
    fill_tensorboards_disk(monkeypatch, room)
    for writer in (records, curves):
        with pytest.raises(OSError, match="No space left on device"):
            writer.write(RECORD)
            writer.flush()
    assert [each.spare for each in (console, records, curves)] == ["", "", "TensorBoard"]
