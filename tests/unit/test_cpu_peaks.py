"""The peaks of a CPU: how they are measured, and kept in the run folder."""

import itertools
import json
import os
import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from torchtitan_lite.base.errors import ConfigError
from torchtitan_lite.metrics import hardware
from torchtitan_lite.metrics.hardware import cpu_name, find_cpu_peaks, measure_peak

CPU = torch.device("cpu")
MEASURED = {"bf16": 0.2, "fp32": 0.1}


@pytest.fixture(autouse=True)
def one_rank_on_two_cores(monkeypatch):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    monkeypatch.setattr(hardware, "usable_cores", lambda: {0, 1})
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)


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
def file(tmp_path) -> Path:
    return tmp_path / "peaks.json"


# ----- measure_peak -----


def test_measure_peak_takes_the_best_of_many_matmuls(monkeypatch):
    # One matmul takes 2 ms, all others, which another process interrupts, 30 ms.
    seconds = itertools.chain([0.03] * 3, [0.002], itertools.repeat(0.03))
    pauses = itertools.chain.from_iterable((0.0, s) for s in seconds)
    now = itertools.accumulate(pauses)
    monkeypatch.setattr(hardware.time, "perf_counter", lambda: next(now))
    assert measure_peak("fp32", CPU) == pytest.approx(2 * 256**3 / 0.002 / 1e12)


def test_measure_peak_leaves_the_random_state_alone(monkeypatch):
    monkeypatch.setattr(hardware, "_MEASURE_SECONDS", 0.001)
    before = torch.get_rng_state()
    assert measure_peak("bf16", CPU) > 0
    assert torch.equal(torch.get_rng_state(), before)


# ----- find_cpu_peaks -----


def test_find_cpu_peaks_measures_on_one_thread(file, monkeypatch, calls):
    threads: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1 if threads == [1] else 2)
    assert find_cpu_peaks(["bf16"], file=file) == {"bf16": 2 * 0.2}
    assert threads == [1, 2]


def test_find_cpu_peaks_measures_in_one_order_on_all_ranks(tmp_path, calls):
    for precisions in (["fp32", "bf16"], ["bf16", "fp32"]):
        assert find_cpu_peaks(precisions, file=tmp_path / str(precisions)) == MEASURED
    assert calls == ["bf16", "fp32"] * 2


def test_find_cpu_peaks_takes_the_largest_of_the_ranks(file, monkeypatch, calls):
    on_all_ranks, faster = hardware.on_all_ranks, {"bf16": 0.15, "fp32": 0.3}

    def on_two_ranks(make):
        ranks = on_all_ranks(make)
        return ranks if isinstance(ranks[0], tuple) else [*ranks, faster]

    monkeypatch.setattr(hardware, "on_all_ranks", on_two_ranks)
    assert find_cpu_peaks(MEASURED, file=file) == {"bf16": 0.2, "fp32": 0.3}


@pytest.mark.parametrize(
    ("threads", "others", "rank_threads"),
    [
        (1, [], 1),
        (8, [], 2),
        (2, [{0, 1}], 1),
        (1, [{0, 1}] * 3, 0.5),
        (2, [{2, 3}], 2),  # ranks that are pinned share no core
        (2, [{1, 2}], 1.5),
    ],
)
def test_rank_threads_are_at_most_a_share_of_the_cores(monkeypatch, threads, others, rank_threads):
    here, elsewhere = socket.gethostname(), ("another host", {0, 1})
    ranks = [elsewhere, *((here, cores) for cores in others)]
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(hardware, "on_all_ranks", lambda make: [make(), *ranks])
    assert hardware._rank_threads() == pytest.approx(rank_threads)


# ----- find_cpu_peaks, peaks.json -----


def test_find_cpu_peaks_measures_only_what_is_not_kept(file, calls, notices):
    assert find_cpu_peaks(["bf16"], file=file) == {"bf16": 0.2}
    assert notices.messages == []
    for _ in range(2):
        assert find_cpu_peaks(["bf16", "fp32"], file=file) == MEASURED
    assert calls == ["bf16", "fp32"]
    assert [str(file) in message for message in notices.messages] == [True, True]
    assert json.loads(file.read_text()) == {"cpu": cpu_name(), "threads": 1, "tflops": MEASURED}


def kept(cpu: str, threads: int) -> bytes:
    return json.dumps({"cpu": cpu, "threads": threads, "tflops": {"bf16": 9.0}}).encode()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "damaged"),
        (b'{"cpu": "x", "thr', "damaged"),
        (b"\xff\xfe", "damaged"),
        (b'{"cpu": "x"}', "damaged"),
        (b'{"cpu": "x", "threads": 1, "tflops": {"bf16": 0}}', "damaged"),
        (b'{"cpu": "x", "threads": 1, "tflops": {"bf16": NaN}}', "damaged"),
        (b'{"cpu": "x", "threads": 1, "tflops": {"int8": 1.0}}', "damaged"),
        (b'{"cpu": "x", "threads": 1' + b"0" * 400 + b', "tflops": {}}', "damaged"),
        (b"[" * 100_000, "damaged"),
        (kept("Another", 1), f"Another, 1 threads a rank, and this is {cpu_name()}, 1 threads"),
        (kept(cpu_name(), 4), f"4 threads a rank, and this is {cpu_name()}, 1 threads"),
    ],
)
def test_find_cpu_peaks_replaces_what_it_cannot_use(file, calls, notices, content, said):
    file.write_bytes(content)
    assert find_cpu_peaks(["bf16"], file=file) == {"bf16": 0.2}
    (message,) = notices.messages
    assert str(file) in message and said in message
    here = {"cpu": cpu_name(), "threads": 1, "tflops": {"bf16": 0.2}}
    assert json.loads(file.read_text()) == here


def test_find_cpu_peaks_does_not_wait_for_a_pipe(file, calls):
    os.mkfifo(file)
    assert find_cpu_peaks(["bf16"], file=file) == {"bf16": 0.2}


def test_find_cpu_peaks_refuses_a_folder(tmp_path, calls):
    with pytest.raises(ConfigError, match=f"{tmp_path} is not a file"):
        find_cpu_peaks(["bf16"], file=tmp_path)


# ----- cpu_name -----
def test_cpu_name_is_the_model_else_the_architecture(monkeypatch):
    lines = "processor\t: 0\nmodel name\t: Fast CPU\nprocessor\t: 1\nmodel name\t: Fast CPU\n"
    monkeypatch.setattr(Path, "exists", lambda path: True)
    monkeypatch.setattr(Path, "read_text", lambda path: lines)
    assert cpu_name() == "Fast CPU"
    monkeypatch.setattr(Path, "read_text", lambda path: "processor\t: 0\n")
    monkeypatch.setattr(hardware.platform, "machine", lambda: "aarch64")
    assert cpu_name() == "aarch64"
