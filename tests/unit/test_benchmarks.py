"""scripts/benchmarks on tiny inputs: the formulas of their figures, and what is compared."""

import json
import os
import statistics
import sys
from pathlib import Path

import bare_loop
import common
import pytest
import torch
import waits
from common import Figures, Ratios, Watched, measure_pairs, watch
from fake_gpu_probe import FIRST_STEADY, STEPS, Settings, fake_gpu, note_steps
from micro import measure_loss
from versus_on_fake_gpu import FIGURES, choose_cases, torchtitan_float8
from versus_torchtitan import (
    ADAPTER,
    compare,
    torchtitan_dimensions,
    torchtitan_options,
)

from torchtitan_lite.base.errors import ConfigError, RunError
from torchtitan_lite.config import Config, load_config

pytestmark = pytest.mark.slow

DEBUG_MODEL = str(Path(__file__).parents[2] / "train_configs/debug_model.toml")
OURS = "[rank0] 00:56:39 step {step:>2}/12  loss 2.00  grad_norm 2.12  tps 1,238"
THEIRS = "[titan] 2026-11-22 00:56:00,470 - INFO - step: {step:>2}  loss:  2.00200  grad_norm"


def load(*words: str) -> Config:
    return load_config(["--job.config_file", DEBUG_MODEL, *words], world_size=2)


def watched(line: str, seconds: float) -> Watched:
    """The log of a run of 12 steps, the first of which ends after 4 seconds."""
    lines = ((4 + seconds * (step - 1), line.format(step=step)) for step in range(1, 13))
    return Watched(((0.0, "6 parameters"), *lines), 256.0)


# ----- common.py -----


def test_ratios_of_pairs() -> None:
    ratios = Ratios.of([1.0, 4.0, 9.0], [2.0, 4.0, 6.0])
    assert str(ratios) == "1.000 +- 0.268 (quartiles 0.750, 1.250; 3 pairs)"
    turn = iter(range(6)).__next__
    assert measure_pairs(turn, turn, pairs=3) == ([0, 3, 4], [1, 2, 5])


def test_watch_and_figures() -> None:
    code = f"for step in range(1, 13): print({OURS!r}.format(step=step))"
    run = watch([sys.executable, "-c", code], env=os.environ)
    assert len(run.lines) == 12 and run.peak_mib > 1
    with pytest.raises(RunError, match="(?s)ended with 2:\n.*this Python has no torchtitan"):
        watch([sys.executable, str(ADAPTER), "{}"], env=os.environ)
    assert Figures.of(watched(THEIRS, 0.5), tokens=100) == Figures(200.0, 4.0, 256.0)
    with pytest.raises(RunError, match="the log has steps"):
        Figures.of(Watched(run.lines[1:], 1.0), tokens=1)


def test_device_name_of_a_cpu_is_its_model_else_the_architecture(monkeypatch) -> None:
    lines = "processor\t: 0\nmodel name\t: Fast CPU\nprocessor\t: 1\nmodel name\t: Fast CPU\n"
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(Path, "read_text", lambda path: lines)
    assert common.device_name() == "CPU: Fast CPU, 2 cores"
    monkeypatch.setattr(Path, "read_text", lambda path: "processor\t: 0\n")
    monkeypatch.setattr(common.platform, "machine", lambda: "aarch64")
    assert common.device_name() == "CPU: aarch64, 2 cores"


# ----- waits.py -----


def test_waits_tables() -> None:
    pairs = {"name": "a save, s", "peer": "DCP", "ours": [1.0, 3.0, 2.0], "theirs": [2.0, 2.0, 2.0]}
    costs = {"name": "a step", "over": "layers", "seconds": {"4": 0.5, "8": 1.0}}
    page = waits.table({"saves": {"figures": [pairs]}, "growth": {"figures": [costs]}})
    assert "| a save, s | 2 | 2 | 1.00 ± 0.27 | DCP |\n" in page
    assert page.endswith("| a step | layers | 4: 0.5, 8: 1 |")


def test_waits_keeps_the_parts_that_it_does_not_measure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="--python"):
        waits.main(["run", "--out", str(tmp_path), "--only", "launch"])
    (tmp_path / "waits.json").write_text('{"text": {"figures": []}}')
    program = tmp_path / "part.py"
    program.write_text("""print('a log line'); print('{"name": "x"}')""")
    monkeypatch.setattr(waits, "PARTS", {"data": (str(program),)})
    waits.run("", tmp_path, [])
    results = json.loads((tmp_path / "waits.json").read_text())
    assert [*results] == ["text", "data"] and results["data"]["figures"] == [{"name": "x"}]


# ----- bare_loop.py, micro.py -----


def test_bare_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(config: Config, *, processes: int, program: tuple[str, ...] = ()) -> object:
        ours = watched(OURS, 1.0), [{"loss": 2.0}] * 12
        return (watched(THEIRS, 0.5), []) if program else ours

    monkeypatch.setattr(bare_loop, "run_config", run)
    table = bare_loop.compare(load(), processes=2, pairs=2, our_loss=True)
    assert "0.500 +- 0.000" in table and "losses differ by 1.0e-03 at most" in table
    for word in ("training.steps=9", "training.global_batch_size=32"):
        with pytest.raises(ConfigError, match=word.split(".")[1].replace("=", " = ")):
            bare_loop.check_comparable(load(f"--{word}"), processes=2)


def test_losses_of_micro_are_the_same() -> None:
    kinds = ("plain", "ours, eager")
    plain, ours = (measure_loss(kind, tokens=64, vocab_size=500, dim=32) for kind in kinds)
    assert ours.loss == pytest.approx(plain.loss, rel=1e-5)
    assert ours.grad_norms == pytest.approx(plain.grad_norms, rel=1e-2)


# ----- versus_torchtitan.py, versus_on_fake_gpu.py, fake_gpu_probe.py -----


def test_versus_torchtitan(capsys: pytest.CaptureFixture[str]) -> None:
    ours, theirs = watched(OURS, 0.5), watched(THEIRS, 1.0)
    compare(lambda: ours, lambda: theirs, tokens=100, pairs=2)
    assert "200.0         100.0   2.000 +- 0.000" in capsys.readouterr().out
    dimensions = torchtitan_dimensions(load("--model.flavor=8B"))
    assert (dimensions["multiple_of"], dimensions["n_kv_heads"]) == (14336, 8)
    assert dimensions["rope_scaling_args"]["scaling_factor"] == 8.0
    options = torchtitan_options(load("--compile.enable"))
    assert {"--optimizer.lr=0.003", "--compile.enable"} <= set(options)


def test_cases_and_figures_of_versus_on_fake_gpu() -> None:
    assert len(choose_cases([])) == (2 + 2 + 3) * 2 * 3
    (case,) = choose_cases(["gathered", "eager", "full"])
    config = case.config(layers=3)
    assert "--activation_checkpoint.mode=full" in torchtitan_options(config)
    assert len(torchtitan_float8(config)) == 4
    calls = {"kernel a": 4, "matmul e4m3": 3, "set memory": 1, "wait for cudaFree": 1}
    calls |= {"copy from device to pageable": 1, "nccl all-gather of 1048576 bytes": 2}
    figures = [FIGURES[name]([{"calls": [calls, calls]}]) for name in list(FIGURES)[2:8]]
    assert figures == [9, 3, 2, 2, 2, 2.0]


def test_probe_counts_the_calls_of_steady_steps(tmp_path: Path, monkeypatch) -> None:
    class Trainer:
        launched = 9

        def train_step(self, kernels: int) -> None:
            self.launched += kernels
            counters.write_bytes(fake_gpu.COUNTER.pack(self.launched, b"kernel a"))

    counters, out = tmp_path / f"rank0-{os.getpid()}", tmp_path / "figures.json"
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("FAKE_GPU_COUNTS", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", None)  # restored after the test
    trainer = Trainer()
    trainer.train_step(0)
    note_steps(Trainer, Settings(out=str(out), began=0.0, compiled=True), [3 * 2**20, 2**20])
    for step in range(1, STEPS + 1):
        trainer.train_step(1000 if step < FIRST_STEADY else step)
    figures = json.loads(out.read_text())
    assert FIGURES["launches"]([figures]) == statistics.mean(range(FIRST_STEADY, STEPS))
    assert FIGURES["block MiB"]([figures]) == 4
