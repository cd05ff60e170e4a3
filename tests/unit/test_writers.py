import errno
import json
import logging
import math
import os
import re
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fake_wandb import FakeWandb
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_records import NUMERICS, RECORD, SUMMARY
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from torchtitan_lite.config import MetricsConfig
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.metrics.flops import FlopsLedger
from torchtitan_lite.metrics.hardware import Peaks
from torchtitan_lite.metrics.processor import MetricsProcessor
from torchtitan_lite.metrics.writers import (
    ConsoleWriter,
    JsonlWriter,
    build_writers,
    last_losses,
    wants_color,
)

RUN = {
    "rank": 0,
    "total_steps": 30,
    "resume_step": 0,
    "config_toml": "[training]\nseq_len = 64\n",
    "changes_toml": "",
    "hparams": {"flavor": "8B"},
    "contents": ["metrics"],
}
LINE = (
    "step 12/30  loss 5.4321  grad_norm 1.23  tps 2,345  tflops 0.08  mfu 41.2%  mem 0.9GiB  "
    "time 1.250s (data 0.2%)  "
)


@pytest.fixture
def log(monkeypatch, caplog):
    monkeypatch.setattr(logging.getLogger("torchtitan_lite"), "propagate", True)
    caplog.set_level(logging.INFO, logger="torchtitan_lite")
    return caplog


def read_lines(path) -> list[dict]:
    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def write_steps(writer, steps) -> None:
    for step in steps:
        writer.write(replace(RECORD, step=step, loss=float(step)))
    writer.close(SUMMARY)


def test_console_line(log):
    writer = ConsoleWriter(total_steps=30, color=False)
    writer.write(RECORD)
    writer.write(RECORD)
    writer.write(replace(RECORD, step=9, mfu=None))
    writer.write_scalars(9, {"validation_loss": 5.5, "validation_s": 1.23456})
    writer.close(SUMMARY)
    assert log.messages == [
        LINE + "warm-up",
        LINE + "eta 0:00:22",  # 18 steps of 1.25 s
        LINE.replace("step 12", "step  9").replace("41.2%", "n/a") + "eta 0:00:26",
        "step  9/30  validation_loss 5.5000  validation_s 1.2346",
    ]


def test_console_marks_an_approximate_mfu(log):
    writer = ConsoleWriter(total_steps=30, color=False)
    record = replace(RECORD, approximate_mfu=True)
    writer.write(record)
    writer.write(replace(record, mfu=None))
    assert log.messages == [
        LINE.replace("41.2%", "~41.2%") + "warm-up",
        LINE.replace("41.2%", "n/a") + "eta 0:00:22",
    ]


def test_console_shows_the_mfu_of_documents(log):
    writer = ConsoleWriter(total_steps=30, color=False)
    record = replace(RECORD, mfu_documents=30.52)
    writer.write(record)
    writer.write(replace(record, approximate_mfu=True))
    assert log.messages == [
        LINE.replace("41.2%", "41.2% (documents 30.5%)") + "warm-up",
        LINE.replace("41.2%", "~41.2% (documents ~30.5%)") + "eta 0:00:22",
    ]


def test_console_shows_the_bubble_of_a_pipeline_and_its_largest_rank(log):
    record = replace(RECORD, bubble_pct=33.34, memory_max_gib=1.27, memory_max_rank=3)
    ConsoleWriter(total_steps=30, color=False).write(record)
    assert "mfu 41.2%  bubble 33.3%  mem 1.3GiB (rank 3)  time" in log.messages[0]


def test_console_shows_steps_without_an_update(log):
    ConsoleWriter(total_steps=30, color=False).write(replace(RECORD, skipped_steps=2))
    assert log.messages == [LINE.replace("1.23  tps", "1.23  skipped 2  tps") + "warm-up"]


def test_console_shows_the_casts_that_lost_most(log):
    writer = ConsoleWriter(total_steps=30, color=False)
    writer.write_numerics(12, NUMERICS)
    writer.write_numerics(
        15, {"output": {"input": {"sqnr_db": 31.46, "underflow": 0.0, "saturation": 0.0}}}
    )
    assert log.messages == [
        "step 12/30  float8 casts: least SQNR -inf dB (grad_output of feed_forward.w2, layer 4), "
        "underflow up to 12.50% (grad_output of feed_forward.w2, layer 2), "
        "saturation up to 0.10% (weight of output)",
        "step 15/30  float8 casts: least SQNR 31.5 dB (input of output)",
    ]


@pytest.mark.parametrize(
    ("columns", "left_out"),
    [
        (137, []),
        (136, ["time"]),
        (100, ["time", "mem"]),
        (99, ["time", "mem", "grad_norm"]),
        (80, ["time", "mem", "grad_norm", "tflops"]),
        (1, ["time", "mem", "grad_norm", "tflops"]),
    ],
)
def test_a_line_fits_the_terminal(log, columns, left_out):
    ConsoleWriter(total_steps=30, color=True, columns=columns).write(RECORD)
    line = re.sub("\033\\[[0-9]+m", "", log.messages[0])
    assert len("[rank0] 12:34:56 " + line) <= max(columns, 80)
    names = ["step", "loss", "grad_norm", "tps", "tflops", "mfu", "mem", "time", "warm-up"]
    shown = [part.split(" ")[0] for part in line.split("  ")]
    assert shown == [name for name in names if name not in left_out]


@pytest.mark.parametrize(("variables", "whole"), [({}, True), ({"COLUMNS": "90"}, False)])
def test_a_line_is_cut_only_if_the_width_is_known(tmp_path, monkeypatch, log, variables, whole):
    monkeypatch.delenv("COLUMNS", raising=False)
    for name, value in {"FORCE_COLOR": "1", **variables}.items():  # as a CI service may set it
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.__stdout__", None)
    for writer in build_writers(MetricsConfig(), dump_folder=tmp_path, **RUN):
        writer.write(RECORD)
    assert ("grad_norm" in log.messages[0]) == whole


def test_coloured_console_line_has_the_same_text(log):
    ConsoleWriter(total_steps=30, color=True).write(RECORD)
    (line,) = log.messages
    assert line.startswith("\033[31mstep 12/30\033[0m  \033[32mloss 5.4321\033[0m  ")
    for code in (0, *range(31, 37)):
        line = line.replace(f"\033[{code}m", "")
    assert line == LINE + "warm-up"


@pytest.mark.parametrize(
    ("disabled", "terminal", "env", "colored"),
    [
        (False, True, {}, True),
        (False, False, {}, False),
        (False, False, {"FORCE_COLOR": "1"}, True),
        (False, False, {"FORCE_COLOR": ""}, False),
        (False, True, {"NO_COLOR": "1"}, False),
        (False, True, {"NO_COLOR": ""}, True),
        (False, True, {"NO_COLOR": "1", "FORCE_COLOR": "1"}, False),
        (True, True, {"FORCE_COLOR": "1"}, False),
    ],
)
def test_color(monkeypatch, disabled, terminal, env, colored):
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.stdout.isatty", lambda: terminal)
    assert wants_color(disabled=disabled) is colored


def test_jsonl_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    writer = JsonlWriter(path, resume_step=0)
    writer.write(RECORD)
    writer.write_scalars(12, {"validation_loss": 5.5})
    assert path.read_text() == (  # before it is closed
        '{"step": 12, "tokens": 49152, "epochs": {"pystdlib": 0.75}, "loss": 5.43211, '
        '"loss_max": 5.9, "grad_norm": 1.2345, "lr": 0.0008, '
        '"skipped_steps": 0, "tps": 2345.4, "tflops": 0.0812, "mfu": 41.24, "mfu_bf16_peak": 8.1, '
        '"mfu_fp8_peak": null, "mfu_achievable": 44.5, "hfu": 50.5, "step_time_s": 1.25, '
        '"data_time_s": 0.0025, "memory_gib": 0.93, "time": 1700000000.0}\n'
    )
    writer.close(SUMMARY)


def test_jsonl_has_figures_of_documents_only_where_they_are_known(tmp_path):
    figures = {"mfu_documents": 30.5, "attention_imbalance": 1.25}
    writer = JsonlWriter(tmp_path / "metrics.jsonl", resume_step=0)
    writer.write(RECORD)
    writer.write(replace(RECORD, **figures))
    writer.close(SUMMARY)
    without, line = read_lines(tmp_path / "metrics.jsonl")
    assert line == without | figures and not figures.keys() & without.keys()


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_jsonl_of_a_loss_that_is_not_finite_is_null(tmp_path, loss):
    writer = JsonlWriter(tmp_path / "metrics.jsonl", resume_step=0)
    writer.write(replace(RECORD, loss=loss, grad_norm=0.0))
    writer.close(SUMMARY)
    (line,) = read_lines(tmp_path / "metrics.jsonl")
    assert (line["loss"], line["loss_max"], line["grad_norm"]) == (None, 5.9, 0.0)


@pytest.mark.parametrize(
    "torn", ["", '{"step": 5, "tok', '{"loss": 5}', "[5]", "\0" * 20, "\udcff"]
)
def test_jsonl_has_each_step_once_after_a_crash(tmp_path, torn):
    path = tmp_path / "metrics.jsonl"
    write_steps(JsonlWriter(path, resume_step=0), range(1, 11))
    with path.open("a", errors="surrogateescape") as file:
        file.write(torn)
    write_steps(JsonlWriter(path, resume_step=6), range(7, 9))
    assert [(line["step"], line["loss"]) for line in read_lines(path)] == [
        (step, step) for step in range(1, 9)
    ]
    assert list(tmp_path.iterdir()) == [path]


def test_jsonl_survives_a_crash_while_it_is_cut(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    write_steps(JsonlWriter(path, resume_step=0), range(1, 11))
    before = path.read_text()

    def crash(self, target):
        raise OSError("no more power")

    monkeypatch.setattr(type(path), "replace", crash)
    with pytest.raises(OSError, match="no more power"):
        JsonlWriter(path, resume_step=6)
    assert path.read_text() == before


def test_a_file_has_a_line_for_each_sample_up_to_the_resumed_step(tmp_path):
    path, texts = tmp_path / "samples.jsonl", [{"prompt": "a", "text": "\n"}, {"prompt": "b"}]
    for resume_step, steps in ((0, (5, 10)), (5, (10,))):
        writer = JsonlWriter(path, resume_step=resume_step, content="samples")
        writer.write(RECORD)
        writer.write_numerics(5, NUMERICS)
        for step in steps:
            writer.write_samples(step, texts)
        writer.close(SUMMARY)
    lines = read_lines(path)
    assert [(each["step"], each["prompt"]) for each in lines] == [
        (5, "a"),
        (5, "b"),
        (10, "a"),
        (10, "b"),
    ]
    assert lines[0]["text"] == "\n"


def test_a_file_has_a_line_for_each_measured_step_once(tmp_path):
    path = tmp_path / "numerics.jsonl"
    for resume_step, steps in ((0, (5, 10, 15)), (10, (15, 20))):
        writer = JsonlWriter(path, resume_step=resume_step, content="numerics")
        writer.write(RECORD)
        writer.write_scalars(12, {"validation_loss": 5.5})
        for step in steps:
            writer.write_numerics(step, NUMERICS)
        writer.flush()
        writer.close(SUMMARY)
    lines = read_lines(path)
    assert [line["step"] for line in lines] == [5, 10, 15, 20]
    kinds = lines[0]["kinds"]
    assert lines[0]["time"] > 1.7e9
    gradient = kinds["feed_forward.w2"].pop("grad_output")
    assert gradient == NUMERICS["feed_forward.w2"]["grad_output"] | {"sqnr_db": None, "amax": None}
    assert kinds == {
        name: {"weight": NUMERICS[name]["weight"]} for name in ("feed_forward.w2", "output")
    }


def test_validation_losses_have_a_file(tmp_path):
    writer = JsonlWriter(tmp_path / "validation.jsonl", resume_step=0, content="validation")
    writer.write(RECORD)
    writer.write_scalars(12, {"checkpoint_s": 1.0})
    writer.write_scalars(12, {"validation_loss": 5.5})
    writer.write_scalars(24, {"validation_loss": math.nan})
    lines = [line | {"time": 0} for line in read_lines(tmp_path / "validation.jsonl")]
    assert lines == [
        {"step": 12, "time": 0, "validation_loss": 5.5},
        {"step": 24, "time": 0, "validation_loss": None},
    ]


def test_losses_before_a_resume(tmp_path):
    writer = JsonlWriter(tmp_path / "metrics.jsonl", resume_step=0)
    for step in range(1, 31):
        writer.write(replace(RECORD, step=step, loss=math.nan if step == 20 else float(step)))
    JsonlWriter(tmp_path / "metrics.jsonl", resume_step=25)
    losses = last_losses(tmp_path)
    assert losses[:14] == [*map(float, range(6, 20))] and math.isnan(losses[14])
    assert losses[15:] == [21.0, 22.0, 23.0, 24.0, 25.0]


@pytest.mark.parametrize(("numerics", "left"), [(True, False), (False, True), (False, False)])
def test_casts_have_a_file_where_they_are_measured_and_one_that_was_left_is_cut(
    tmp_path, numerics, left
):
    path = tmp_path / "numerics.jsonl"
    if left:
        path.write_text('{"step": 10}\n{"step": 20}\n')
    writers = build_writers(
        MetricsConfig(),
        dump_folder=tmp_path,
        **(RUN | {"contents": ["metrics", "numerics"][: 1 + numerics], "resume_step": 10}),
    )
    for writer in writers:
        writer.close(None)
    assert path.exists() is (numerics or left)
    assert not (tmp_path / "samples.jsonl").exists()
    assert not left or path.read_text() == '{"step": 10}\n'


@pytest.mark.parametrize(
    "keys", [{}, {"save_tb_folder": "curves"}, {"enable_wandb": True}], ids=str
)
def test_several_writers_at_once(tmp_path, monkeypatch, log, keys):
    wandb = FakeWandb(monkeypatch)
    metrics = MetricsConfig(**keys)
    writers = build_writers(metrics, dump_folder=tmp_path, **RUN)
    for writer in writers:
        write_steps(writer, [1, 2])
    assert len(log.messages) == 2
    assert [line["step"] for line in read_lines(tmp_path / "metrics.jsonl")] == [1, 2]
    events = EventAccumulator(str(tmp_path / metrics.save_tb_folder)).Reload()
    assert [point.step for point in events.Scalars("lr")] == [1, 2]
    assert [step for run in wandb.runs for step, _ in run.rows] == (
        [1, 2] if metrics.enable_wandb else []
    )
    assert (tmp_path / "wandb").exists() == metrics.enable_wandb


@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_has_curves_of_its_own_where_all_save(tmp_path, monkeypatch, log, rank):
    wandb = FakeWandb(monkeypatch)
    metrics = MetricsConfig(save_for_all_ranks=True, enable_wandb=True)
    writers = build_writers(metrics, dump_folder=tmp_path, **(RUN | {"rank": rank}))
    for writer in writers:
        write_steps(writer, [1, 2])
    events = EventAccumulator(f"{tmp_path}/tb/rank_{rank}").Reload()
    assert [point.step for point in events.Scalars("memory/max_reserved(GiB)")] == [1, 2]
    (run,) = wandb.runs
    assert run.options["dir"] == f"{tmp_path}/wandb/rank_{rank}"
    assert run.options["name"] == f"{tmp_path.name}/rank_{rank}"
    assert run.options["group"] == tmp_path.name
    assert Path(f"{tmp_path}/wandb/rank_{rank}/wandb/run_id").read_text() == "new-id"
    assert len(log.messages) == (2 if rank == 0 else 0)
    assert (tmp_path / "metrics.jsonl").exists() is (rank == 0)


@pytest.mark.parametrize("name", ["metrics.jsonl", "numerics.jsonl", "tb", "wandb"])
@pytest.mark.parametrize("kind", ["other", "pipe", "device", "link to nowhere"])
def test_what_is_of_another_kind_is_refused(tmp_path, name, kind):
    path = tmp_path / name
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "other":
        path.mkdir() if name.endswith(".jsonl") else path.touch()
    else:
        path.symlink_to("/dev/full" if kind == "device" else tmp_path / "nowhere")
    with pytest.raises(
        ConfigError, match=rf"{name} is not a (file|folder), and a run keeps one there"
    ):
        build_writers(MetricsConfig(enable_wandb=True), dump_folder=tmp_path, **RUN)


class FullDisk:
    """A file on a disk without space, which takes the first `room` writes."""

    def __init__(self, file, room: int) -> None:
        self.file, self.room = file, room

    def write(self, data):
        self.room -= 1
        if self.room < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return self.file.write(data)

    def __getattr__(self, name):
        return getattr(self.file, name)


@pytest.mark.parametrize("room", [0, 5, 7], ids=["at the start", "for its texts", "for a step"])
def test_a_run_goes_on_when_tensorboards_disk_is_full(tmp_path, monkeypatch, log, room):
    original = type(tmp_path).open

    def opened(path, *arguments, **options):
        file = original(path, *arguments, **options)
        return FullDisk(file, room) if "tfevents" in path.name else file

    monkeypatch.setattr(type(tmp_path), "open", opened)
    writers = build_writers(MetricsConfig(), dump_folder=tmp_path, **RUN)
    processor = processor_of(writers)
    for step in range(1, 4):
        processor._tell(lambda writer, step=step: writer.write(replace(RECORD, step=step)))
    processor.close()
    assert [line["step"] for line in read_lines(tmp_path / "metrics.jsonl")] == [1, 2, 3]
    (warning,) = [record.getMessage() for record in log.records if record.levelname == "WARNING"]
    assert warning.startswith("TensorBoard failed and is disabled") and "No space left" in warning


def test_a_run_ends_when_its_own_disk_is_full(tmp_path):
    writers = build_writers(MetricsConfig(enable_tensorboard=False), dump_folder=tmp_path, **RUN)
    writers[1]._file = FullDisk(writers[1]._file, 1)
    processor = processor_of(writers)
    processor._tell(lambda writer: writer.write(RECORD))
    with pytest.raises(OSError, match="No space left on device"):
        processor._tell(lambda writer: writer.write(RECORD))


def processor_of(writers) -> MetricsProcessor:
    return MetricsProcessor(
        log_freq=1,
        ledger=FlopsLedger({"bf16": 1}, {"bf16": 0}, 0, 0, {}),
        peaks=Peaks("Tesla T4"),
        device=torch.device("cpu"),
        n_devices=1,
        writers=writers,
        start_tokens=0,
    )


KEYS = [*RECORD.to_json(), "unknown"]
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**400), 10**400)
    | st.floats()
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner),
    max_leaves=6,
)
ANY_LINE = (
    st.binary(max_size=60)
    | VALUES.map(lambda value: json.dumps(value).encode())
    | st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=3).map(
        lambda changes: json.dumps(RECORD.to_json() | changes).encode()
    )
    | st.sampled_from([b"[" * 100_000, b'{"step": ' + b"1" * 400 + b"}", b"1" * 5000])
    | st.just(b'{"step": 1, "x": ' + b"[" * 400 + b"]" * 400 + b"}")
)


@given(st.lists(ANY_LINE, max_size=3))
@settings(max_examples=100, deadline=None)
def test_no_line_stops_a_resume(lines):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "metrics.jsonl")
        ours = json.dumps(RECORD.to_json()).encode()
        path.write_bytes(b"\n".join([ours, *lines]))
        JsonlWriter(path, resume_step=12).close(None)
        kept = path.read_bytes().splitlines()
        assert kept[0] == ours and set(kept) <= {ours, *b"\n".join(lines).splitlines()}


def test_without_tensorboard(tmp_path):
    writers = build_writers(MetricsConfig(enable_tensorboard=False), dump_folder=tmp_path, **RUN)
    assert [type(writer) for writer in writers] == [ConsoleWriter, JsonlWriter]
    for writer in writers:
        writer.close(None)
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
