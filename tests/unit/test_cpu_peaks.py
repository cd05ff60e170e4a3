"""The CPU's peaks: how they are measured, and kept in the run folder."""

import itertools
import json
import logging
import os
import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from torchtitan_lite.errors import ConfigError
from torchtitan_lite.metrics import hardware
from torchtitan_lite.metrics.hardware import cpu_name, find_cpu_peaks, measure_peak

CPU = torch.device("cpu")
MEASURED = {"bf16": 0.2, "fp32": 0.1}


@pytest.fixture(autouse=True)
def one_rank_on_two_cores(monkeypatch):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    monkeypatch.setattr(hardware, "usable_cores", lambda: {0, 1})
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def calls(monkeypatch) -> list[str]:
    """The precisions that were measured, in order."""
    calls: list[str] = []

    def measure(precision, device):
        assert (device, torch.get_num_threads()) == (CPU, 1)
        calls.append(precision)
        return MEASURED[precision]

    monkeypatch.setattr(hardware, "measure_peak", measure)
    return calls


@pytest.fixture
def log(monkeypatch, caplog):
    monkeypatch.setattr(logging.getLogger("torchtitan_lite"), "propagate", True)
    caplog.set_level(logging.INFO, logger="torchtitan_lite")
    return caplog


def test_the_peak_is_the_best_of_many_matmuls(monkeypatch):
    # One matmul takes 2 ms, all others, which another process interrupts, 30 ms.
    seconds = itertools.chain([0.03] * 3, [0.002], itertools.repeat(0.03))
    pauses = itertools.chain.from_iterable((0.0, s) for s in seconds)
    now = itertools.accumulate(pauses)
    monkeypatch.setattr(hardware.time, "perf_counter", lambda: next(now))
    assert measure_peak("fp32", CPU) == pytest.approx(2 * 256**3 / 0.002 / 1e12)


def test_ranks_measure_on_one_thread(tmp_path, monkeypatch, calls):
    threads: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    find_cpu_peaks(MEASURED, file=tmp_path / "peaks.json")
    assert (calls, threads) == (["bf16", "fp32"], [1, 1])


def test_measuring_leaves_the_random_state_alone(monkeypatch):
    monkeypatch.setattr(hardware, "_MEASURE_SECONDS", 0.001)
    before = torch.get_rng_state()
    assert measure_peak("bf16", CPU) > 0
    assert torch.equal(torch.get_rng_state(), before)


def test_precisions_are_measured_in_one_order_whatever_order_they_come_in(tmp_path, calls):
    for precisions in (["fp32", "bf16"], ["bf16", "fp32"]):
        assert find_cpu_peaks(precisions, file=tmp_path / str(precisions)) == MEASURED
    assert calls == ["bf16", "fp32"] * 2


def test_the_peak_is_the_largest_of_the_ranks(tmp_path, monkeypatch, calls):
    faster = {"bf16": 0.15, "fp32": 0.3}
    on_all_ranks = hardware.on_all_ranks
    monkeypatch.setattr(
        hardware,
        "on_all_ranks",
        lambda make: (
            ranks if isinstance((ranks := on_all_ranks(make))[0], tuple) else [*ranks, faster]
        ),
    )
    assert find_cpu_peaks(MEASURED, file=tmp_path / "peaks.json") == {"bf16": 0.2, "fp32": 0.3}


@pytest.mark.parametrize(
    ("threads", "others", "rank_threads"),
    [
        (1, [], 1),
        (8, [], 2),
        (1, [{0, 1}], 1),
        (2, [{0, 1}], 1),
        (1, [{0, 1}] * 3, 0.5),
        (2, [{2, 3}], 2),  # ranks that are pinned share no core
        (2, [{1, 2}], 1.5),
    ],
)
def test_a_rank_has_its_threads_but_no_more_than_its_share_of_the_cores(
    monkeypatch, threads, others, rank_threads
):
    here, elsewhere = socket.gethostname(), ("another host", {0, 1})
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(
        hardware,
        "on_all_ranks",
        lambda make: [make(), elsewhere, *((here, cores) for cores in others)],
    )
    assert hardware._rank_threads() == pytest.approx(rank_threads)


def test_peaks_are_kept_and_only_those_that_are_missing_are_measured(tmp_path, calls, log):
    file = tmp_path / "peaks.json"
    assert find_cpu_peaks(["bf16"], file=file) == {"bf16": 0.2}
    assert log.messages == []
    assert find_cpu_peaks(["bf16", "fp32"], file=file) == MEASURED
    assert find_cpu_peaks(["bf16", "fp32"], file=file) == MEASURED
    assert calls == ["bf16", "fp32"]
    assert [str(file) in message for message in log.messages] == [True, True]
    assert json.loads(file.read_text()) == {"cpu": cpu_name(), "threads": 1, "tflops": MEASURED}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b'{"cpu": "x", "thr',
        b"\xff\xfe",
        b"[1]",
        b'{"cpu": "x"}',
        b'{"cpu": "x", "threads": 1, "tflops": [1]}',
        b'{"cpu": "x", "threads": 1, "tflops": {"bf16": "fast"}}',
        b'{"cpu": "x", "threads": 1, "tflops": {"bf16": 0}}',
        b'{"cpu": "x", "threads": 1, "tflops": {"bf16": NaN}}',
        b'{"cpu": "x", "threads": 1, "tflops": {"int8": 1.0}}',
        b'{"cpu": "x", "threads": 1' + b"0" * 400 + b', "tflops": {}}',
        b"[" * 100_000,
    ],
)
def test_a_damaged_file_is_said_and_replaced(tmp_path, calls, log, content):
    file = tmp_path / "peaks.json"
    file.write_bytes(content)
    assert find_cpu_peaks(["bf16"], file=file) == {"bf16": 0.2}
    (message,) = log.messages
    assert f"{file} is damaged" in message
    assert json.loads(file.read_text())["tflops"] == {"bf16": 0.2}


def test_a_pipe_in_place_of_the_file_is_not_waited_for(tmp_path, calls):
    os.mkfifo(tmp_path / "peaks.json")
    assert find_cpu_peaks(["bf16"], file=tmp_path / "peaks.json") == {"bf16": 0.2}


def test_a_folder_in_place_of_the_file_is_refused(tmp_path, calls):
    with pytest.raises(ConfigError, match=f"{tmp_path} is not a file, and a run keeps one there"):
        find_cpu_peaks(["bf16"], file=tmp_path)


@pytest.mark.parametrize(("cpu", "threads"), [("Another", 1), (None, 4)])
def test_peaks_of_another_cpu_or_number_of_threads_are_said_and_replaced(
    tmp_path, calls, log, cpu, threads
):
    file, here = tmp_path / "peaks.json", cpu_name()
    file.write_text(json.dumps({"cpu": cpu or here, "threads": threads, "tflops": {"bf16": 9.0}}))
    assert find_cpu_peaks(["bf16"], file=file) == {"bf16": 0.2}
    (message,) = log.messages
    for part in (str(file), f"{cpu or here}, {threads} threads", f"{here}, 1 threads"):
        assert part in message
    assert json.loads(file.read_text()) == {"cpu": here, "threads": 1, "tflops": {"bf16": 0.2}}


def test_the_cpu_is_named_by_its_model_else_by_its_architecture(monkeypatch):
    lines = "processor\t: 0\nmodel name\t: Fast CPU\nprocessor\t: 1\nmodel name\t: Fast CPU\n"
    monkeypatch.setattr(Path, "exists", lambda path: True)
    monkeypatch.setattr(Path, "read_text", lambda path: lines)
    assert cpu_name() == "Fast CPU"
    monkeypatch.setattr(Path, "read_text", lambda path: "processor\t: 0\n")
    monkeypatch.setattr(hardware.platform, "machine", lambda: "aarch64")
    assert cpu_name() == "aarch64"
