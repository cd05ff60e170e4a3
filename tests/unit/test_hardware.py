"""Peaks of a device, given, published or measured, and memory."""

import itertools
import os
import socket
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from torchtitan_lite.config import MetricsConfig
from torchtitan_lite.metrics import hardware
from torchtitan_lite.metrics.hardware import (
    Peaks,
    find_peaks,
    measure_cpu_peaks,
    measure_peak,
    peak_memory_gib,
    total_memory_gib,
)

CPU, GPU = torch.device("cpu"), torch.device("cuda", 1)
ON_CPU = {"bf16": 0.2, "fp32": 0.1}


@pytest.fixture
def threads(monkeypatch):
    """One rank on two cores, and the numbers of threads that it has set."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    threads = [2]
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads[-1])
    return threads


@pytest.fixture
def measured(monkeypatch, threads):
    """The precisions that were measured, in order, on one thread of a CPU."""
    measured = []

    def measure(precision):
        assert threads[-1] == 1
        measured.append(precision)
        return ON_CPU[precision]

    monkeypatch.setattr(hardware, "measure_peak", measure)
    return measured


def find(device: torch.device, *precisions: str, **metrics) -> Peaks:
    return find_peaks(device, MetricsConfig(**metrics), precisions=precisions)


# ----- find_peaks -----


def test_find_peaks_measures_on_cpu_what_is_not_given(monkeypatch, measured):
    monkeypatch.setattr(hardware, "_rank_threads", lambda: 1)
    assert find(CPU, "bf16", "fp32") == Peaks("CPU", measured=ON_CPU, approximate=True)
    given, bf16 = {"peak_tflops_bf16": 1.0}, {"bf16": 1.0}
    peaks = find(CPU, "bf16", "fp32", **given)
    assert peaks == Peaks("CPU", measured={"fp32": 0.1}, given=bf16, approximate=True)
    assert find(CPU, "bf16", **given) == Peaks("CPU", given=bf16)


@pytest.mark.parametrize(
    ("name", "metrics", "origins", "tflops"),
    [
        ("NVIDIA L4", {}, {}, {"bf16": 121, "fp8": 242}),
        (
            "NVIDIA L4",
            {"peak_tflops_fp8": 200.0},
            {"given": {"fp8": 200.0}},
            {"bf16": 121, "fp8": 200.0},
        ),
        ("Tesla T4", {}, {}, {}),
    ],
)
def test_find_peaks_of_a_gpu_are_given_else_published(monkeypatch, name, metrics, origins, tflops):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: {GPU: name}[device])
    peaks = find(GPU, "bf16", "fp8", **metrics)
    published = {"bf16": 121, "fp8": 242} if name == "NVIDIA L4" else {}
    assert peaks == Peaks(name, published=published, **origins)
    assert peaks.tflops == tflops


def test_peaks_are_described_with_their_origins():
    assert "unknown" in str(Peaks("Tesla T4"))
    peaks = Peaks("CPU", measured={"bf16": 1.00132, "fp32": 0.147}, given={"bf16": 2.0})
    figures = "bf16 1.001 (measured), fp32 0.147 (measured), bf16 2 (given)"
    assert figures in str(peaks) and "approximate" not in str(peaks)
    assert "approximate" in str(replace(peaks, approximate=True))


# ----- measure_cpu_peaks -----


def test_measure_cpu_peaks_in_one_order_on_one_thread_each_time(threads, measured):
    for _ in range(2):
        assert measure_cpu_peaks(["bf16", "fp32"]) == {"bf16": 2 * 0.2, "fp32": 2 * 0.1}
    assert measured == ["bf16", "fp32"] * 2
    assert threads == [2, 1, 2, 1, 2]


def test_measure_cpu_peaks_takes_the_largest_of_the_ranks(monkeypatch, measured):
    monkeypatch.setattr(hardware, "_rank_threads", lambda: 1)
    monkeypatch.setattr(hardware, "on_all_ranks", lambda make: [make(), [0.15, 0.3]])
    assert measure_cpu_peaks(["bf16", "fp32"]) == {"bf16": 0.2, "fp32": 0.3}


@pytest.mark.parametrize(
    ("own", "others", "rank_threads"),
    [
        (1, [], 1),
        (8, [], 2),
        (2, [{0, 1}], 1),
        (1, [{0, 1}] * 3, 0.5),
        (2, [{2, 3}], 2),  # ranks that are pinned share no core
        (2, [{1, 2}], 1.5),
    ],
)
def test_rank_threads_are_at_most_a_share_of_the_cores(
    monkeypatch, threads, own, others, rank_threads
):
    here, elsewhere = socket.gethostname(), ("another host", {0, 1})
    ranks = [elsewhere, *((here, cores) for cores in others)]
    threads.append(own)
    monkeypatch.setattr(hardware, "on_all_ranks", lambda make: [make(), *ranks])
    assert hardware._rank_threads() == pytest.approx(rank_threads)


# ----- measure_peak -----


def test_measure_peak_takes_the_best_of_many_matmuls_on_a_cpu(monkeypatch):
    # One matmul takes 2 ms, all others, which another process interrupts, 20 ms.
    seconds = itertools.chain([0.02] * 2, [0.002], itertools.repeat(0.02))
    pauses = itertools.chain.from_iterable((0.0, s) for s in seconds)
    now = itertools.accumulate(pauses)
    monkeypatch.setattr(hardware.time, "perf_counter", lambda: next(now))
    assert measure_peak("fp32") == pytest.approx(2 * 256**3 / 0.002 / 1e12)


# ----- peak_memory_gib, total_memory_gib -----


def test_peak_memory_gib_on_cpu_is_this_processs_count_in_kib(monkeypatch):
    own = {hardware.resource.RUSAGE_SELF: SimpleNamespace(ru_maxrss=3 * 2**20)}
    monkeypatch.setattr(hardware.resource, "getrusage", own.__getitem__)
    assert peak_memory_gib(CPU) == 3.0
    assert total_memory_gib(CPU) == 4 * total_memory_gib(CPU, sharing=4) > 0.01


def test_peak_memory_gib_of_a_gpu_is_what_torch_reserved(monkeypatch):
    properties = SimpleNamespace(total_memory=80 * 2**30)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", {GPU: 3 * 2**30}.__getitem__)
    monkeypatch.setattr(torch.cuda, "get_device_properties", {GPU: properties}.__getitem__)
    assert peak_memory_gib(GPU) == 3.0
    assert total_memory_gib(GPU) == 80.0
