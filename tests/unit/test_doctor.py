"""`torchtitan-lite doctor`: each check runs the real thing, and a failure is a line of the page."""

import json
import re
import resource
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from torchtitan_lite.base.errors import ConfigError, RunError
from torchtitan_lite.catalog.recipes import RECIPES
from torchtitan_lite.cli import run_command
from torchtitan_lite.tools import doctor
from torchtitan_lite.tools.doctor import Finding, Unfit, can_train, examine, format_findings

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def no_compiler_and_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only one test compiles, and one starts ranks."""
    monkeypatch.setattr(torch, "compile", lambda function: function)
    monkeypatch.setattr(doctor, "check_ranks", lambda: "two met")


# ----- examine -----


def test_a_machine_on_which_all_works(tmp_path: Path) -> None:
    findings = {each.check: each for each in examine(folder=tmp_path, quick=True)}
    broken = {name for name, each in findings.items() if not each.works}
    unsupported = {"float8 mxfp8"} if metadata.version("torchao") < "0.18" else set()
    assert broken <= doctor.EXTRAS.keys() | unsupported
    assert findings["packages"].text.startswith(f"torch {metadata.version('torch')}, torchao ")
    for name in RECIPES.keys() - {each.removeprefix("float8 ") for each in unsupported}:
        sqnr_db = re.fullmatch(r".*SQNR ([\d.]+) dB .*, emulated", findings[f"float8 {name}"].text)
        assert sqnr_db and 20 < float(sqnr_db[1]) < 40
    bf16 = re.match(r"multiplied: SQNR ([\d.]+)", findings["bf16"].text)
    assert bf16 and float(bf16[1]) > 45
    assert findings["ranks"].text == "two met"
    assert str(tmp_path) in findings["disk"].text
    assert list(tmp_path.iterdir()) == []


def test_no_failure_ends_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> str:
        raise AttributeError("a driver\nfails")

    for name in ("check_packages", "check_device", "check_host", "check_disk", "check_bf16"):
        monkeypatch.setattr(doctor, name, broken)
    findings = examine(folder=tmp_path, quick=True)
    assert Finding("device", False, "AttributeError: a driver fails") in findings
    assert not can_train(findings)
    assert format_findings(findings).endswith("training does not work here")


# ----- check_compiler, check_ranks, check_disk, check_peaks -----


@pytest.mark.slow
def test_check_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert "torch.compile works" in doctor.check_compiler(CPU)


def test_check_compiler_names_a_variable_that_turns_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    with pytest.raises(ConfigError, match="TORCH_COMPILE_DISABLE=1 turns the compiler off"):
        doctor.check_compiler(CPU)


@pytest.mark.slow
@pytest.mark.timeout(90)
def test_check_ranks_starts_two_that_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    assert re.match(r"two met by gloo in \d", CHECK_RANKS())
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none")
    with pytest.raises(Unfit, match="^RuntimeError: .*none$"):
        CHECK_RANKS()


def test_check_disk_and_check_peaks_measure_speeds(tmp_path: Path) -> None:
    disk = doctor.check_disk(tmp_path, quick=False)
    assert re.fullmatch(r"[\d.]+ GiB free in .*, [\d,]+ MB/s with fsync", disk), disk
    assert re.fullmatch(r"[\d.,]+ TFLOPS in bf16", doctor.check_peaks(CPU))


# ----- Unfit, EXTRAS -----


def negate(model: Any, *_: Any, **__: Any) -> None:
    model[0].weight.data.neg_()


CHECK_RANKS = doctor.check_ranks
CHECK_RECIPE = doctor._recipe_check("tensorwise", CPU)
UNFIT = [
    (torch, "compile", lambda _: torch.neg, lambda: doctor.check_compiler(CPU), "wrong result"),
    (doctor, "convert_linears", negate, CHECK_RECIPE, r"a matmul is wrong: SQNR -?[\d.]+ dB"),
    (metadata, "version", lambda _: "2.1.0", doctor.check_packages, r"torch 2.1.0 .*>=2\.11"),
    (dist, "is_gloo_available", lambda: False, CHECK_RANKS, "has no gloo"),
    (dist, "is_nccl_available", lambda: False, CHECK_RANKS, "has no NCCL"),
    (resource, "getrlimit", lambda _: (1023, 0), doctor.check_limits, "1023 .* 1,024: ulimit -n"),
    (time, "time", lambda: 0.0, lambda: doctor.check_clock(Path("/tmp")), r"/tmp is \+\d{9,} s"),
]


@pytest.mark.parametrize(
    ("owner", "name", "value", "check", "message"), UNFIT, ids=[row[1] for row in UNFIT]
)
def test_unfit(monkeypatch, owner: Any, name: str, value: Any, check: Any, message: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(owner, name, value)
    with pytest.raises(Unfit, match=message):
        check()


def test_a_package_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(Unfit, match="not installed; it is for plots"):
        doctor._extra_check("matplotlib", "plots")()


def test_a_package_that_is_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("wandb", "torch"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('libfoo.so: no such file')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    found = doctor._run("wandb", doctor._extra_check("wandb", "curves"))
    assert found == Finding("wandb", False, "ImportError: libfoo.so: no such file")

    monkeypatch.delitem(sys.modules, "torchtitan_lite.tools.doctor")
    monkeypatch.delitem(sys.modules, "torch")
    with pytest.raises(RunError, match="torch cannot be imported: ImportError"):
        run_command(["doctor"])


# ----- can_train, doctor -----


def test_can_train_needs_a_folder_that_can_be_written(tmp_path: Path) -> None:
    assert can_train([Finding("wandb", False, "")])
    finding = doctor._run("disk", lambda: doctor.check_disk(tmp_path / "none", quick=True))
    assert not can_train([finding])


def test_the_command(tmp_path, capsys, monkeypatch) -> None:
    assert run_command(["doctor", "--quick", "--folder", str(tmp_path)]) == 0
    assert capsys.readouterr().out.endswith("training works here\n")
    monkeypatch.setattr(doctor, "check_bf16", lambda _: 1 / 0)
    assert run_command(["doctor", "--quick", "--folder", str(tmp_path), "--json"]) == 1
    findings = json.loads(capsys.readouterr().out)
    (bf16,) = (each for each in findings if each["check"] == "bf16")
    assert (bf16["works"], bf16["text"]) == (False, "ZeroDivisionError: division by zero")
    assert run_command(["doctor", "--quick", "--folder", str(tmp_path / "none")]) == 1
    assert "disk" in capsys.readouterr().out.partition("does not work here")[2]
