"""`torchtitan-lite doctor`: each check runs the real thing, and a failure is a line of the page."""

import json
import re
import resource
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from torchtitan_lite import doctor
from torchtitan_lite.cli import run_command
from torchtitan_lite.doctor import Finding, Unfit, can_train, examine, format_findings
from torchtitan_lite.errors import RunError
from torchtitan_lite.float8.recipes import RECIPES

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test of its own compiles."""
    monkeypatch.setattr(torch, "compile", lambda function: function)


def test_a_machine_on_which_all_works(tmp_path: Path) -> None:
    findings = {each.check: each for each in examine(folder=tmp_path, quick=True)}
    broken = {name for name, each in findings.items() if not each.works}
    assert broken <= doctor.EXTRAS.keys()
    assert findings["packages"].text.startswith(f"torch {torch.__version__}, torchao ")
    for name in RECIPES:
        sqnr_db = re.fullmatch(
            r"multiplied: SQNR ([\d.]+) dB against float32, forward and backward, emulated",
            findings[f"float8 {name}"].text,
        )
        assert sqnr_db and 20 < float(sqnr_db[1]) < 40
    bf16 = re.match(r"multiplied: SQNR ([\d.]+)", findings["bf16"].text)
    assert bf16 and float(bf16[1]) > 45
    assert str(tmp_path) in findings["disk"].text
    assert list(tmp_path.iterdir()) == []


def test_the_compiler_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert "torch.compile works" in doctor.check_compiler(CPU)
    monkeypatch.setattr(torch, "compile", lambda function: torch.neg)
    with pytest.raises(Unfit, match="torch.compile gives a wrong result"):
        doctor.check_compiler(CPU)


def test_speeds_are_measured(tmp_path: Path) -> None:
    assert re.fullmatch(
        r"[\d.]+ GiB free in .*, [\d,]+ MB/s with fsync",
        disk := doctor.check_disk(tmp_path, quick=False),
    ), disk
    assert re.fullmatch(r"[\d.,]+ TFLOPS in bf16", doctor.check_peaks(CPU))


def test_a_wrong_matmul_is_found() -> None:
    def negate(model: Any) -> None:
        model[0].weight.data.neg_()

    with pytest.raises(Unfit, match=r"a matmul is wrong: SQNR -?[\d.]+ dB against float32"):
        doctor._compare(negate, CPU)


def test_other_versions_of_torch_are_not_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.metadata, "version", lambda name: "2.1.0")
    with pytest.raises(Unfit, match=r"torch 2.1.0 is not in .*>=2.11.*; install one that is"):
        doctor.check_packages()


def test_a_build_without_gloo_or_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    with pytest.raises(Unfit, match="has no NCCL"):
        doctor.check_backends()
    monkeypatch.setattr(dist, "is_gloo_available", lambda: False)
    with pytest.raises(Unfit, match="has no gloo"):
        doctor.check_backends()


def test_few_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 256))
    with pytest.raises(Unfit, match="at most 256 at once, and a run may need 1,024: ulimit -n"):
        doctor.check_limits()


def test_a_file_system_whose_clock_is_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time() + 60
    monkeypatch.setattr(time, "time", lambda: now)
    with pytest.raises(Unfit, match=r"the clock of .* is -60 s off this host's"):
        doctor.check_clock(tmp_path)


def test_a_package_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(Unfit, match=r"not installed; it is for plots"):
        doctor._extra_check("matplotlib", "plots")()


def test_a_package_that_is_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("wandb", "torch"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('libfoo.so: no such file')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    found = doctor._run("wandb", doctor._extra_check("wandb", "curves"))
    assert found == Finding("wandb", False, "ImportError: libfoo.so: no such file")

    monkeypatch.delitem(sys.modules, "torchtitan_lite.doctor")
    monkeypatch.delitem(sys.modules, "torch")
    with pytest.raises(RunError, match="does not work here: torch cannot be imported: ImportError"):
        run_command(["doctor"])


def test_training_needs_a_folder_that_can_be_written(tmp_path: Path) -> None:
    assert doctor.can_train([Finding("wandb", False, "")])
    finding = doctor._run("disk", lambda: doctor.check_disk(tmp_path / "none", quick=True))
    assert not doctor.can_train([finding])


def test_no_failure_ends_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> str:
        raise AttributeError("a driver\nfails")

    for name in ("check_packages", "check_device", "check_host", "check_disk", "check_bf16"):
        monkeypatch.setattr(doctor, name, broken)
    findings = examine(folder=tmp_path, quick=True)
    assert Finding("device", False, "AttributeError: a driver fails") in findings
    assert not can_train(findings)
    page = format_findings(findings)
    assert page.endswith("training does not work here")


def test_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_command(["doctor", "--quick", "--folder", str(tmp_path)]) == 0
    assert capsys.readouterr().out.endswith("training works here\n")
    monkeypatch.setattr(doctor, "check_bf16", lambda _: 1 / 0)
    assert run_command(["doctor", "--quick", "--folder", str(tmp_path), "--json"]) == 1
    findings = json.loads(capsys.readouterr().out)
    assert {
        "check": "bf16",
        "works": False,
        "text": "ZeroDivisionError: division by zero",
    } in findings
    assert run_command(["doctor", "--quick", "--folder", str(tmp_path / "none")]) == 1
    assert "disk" in capsys.readouterr().out.partition("does not work here")[2]
