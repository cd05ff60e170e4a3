"""`torchtitan-lite doctor`: each check runs the real thing, and a failure is a line of the page."""

import os
import re
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

from torchtitan_lite.base.errors import RunError
from torchtitan_lite.catalog.recipes import RECIPES
from torchtitan_lite.cli import run_command
from torchtitan_lite.tools import doctor
from torchtitan_lite.tools.doctor import (
    build_checks,
    check_compiler,
    check_matmuls,
    check_ranks,
    run_check,
)

CPU = torch.device("cpu")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile nothing, and start no ranks."""
    monkeypatch.setattr(torch, "compile", lambda function: function)
    monkeypatch.setattr(doctor, "check_ranks", lambda: "two met")


# ----- build_checks, run_check, doctor -----


def test_a_machine_on_which_all_works(quick, tmp_path, capsys) -> None:
    assert run_command(["doctor", "--folder", str(tmp_path)]) == 0
    *lines, empty, verdict = capsys.readouterr().out.splitlines()
    assert (empty, verdict) == ("", "training works here")
    found = dict(re.findall(r"^(.+?) +works  (.+)$", "\n".join(lines), flags=re.MULTILINE))
    assert found.keys() == build_checks(tmp_path).keys()
    assert f"torch {metadata.version('torch')}, torchao " in found["versions"]
    assert re.fullmatch(rf"[\d.]+ GiB free in {tmp_path}", found["disk"])
    assert list(tmp_path.iterdir()) == []


def test_no_failure_ends_the_page(quick, tmp_path, capsys, monkeypatch) -> None:
    def broken(*_: Any) -> str:
        raise AttributeError("a driver\nfails")

    monkeypatch.setattr(doctor, "check_matmuls", broken)
    assert run_command(["doctor", "--folder", str(tmp_path / "none")]) == 1
    page = capsys.readouterr().out
    assert re.search(r"\nbf16 +FAILS  AttributeError: a driver fails\n", page)
    assert re.search(r"\ndisk +FAILS  FileNotFoundError: .*/none", page)
    assert page.endswith("\ntraining does not work here\n")


def test_a_torch_that_is_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libfoo.so: no such file')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torchtitan_lite.tools.doctor")
    monkeypatch.delitem(sys.modules, "torch")
    with pytest.raises(RunError, match=r"torch cannot be imported: ImportError: libfoo\.so"):
        run_command(["doctor"])


# ----- check_matmuls -----


@pytest.mark.parametrize("recipe", [None, *RECIPES])
def test_check_matmuls_compares_with_float32(recipe: str | None) -> None:
    how, sqnr_db = re.match(r"(\w+): SQNR ([\d.]+) dB", check_matmuls(recipe, CPU)).groups()
    lowest, highest = (45, 60) if recipe is None else (20, 40)
    assert lowest < float(sqnr_db) < highest
    assert how == ("multiplied" if recipe is None else "emulated")


@pytest.mark.parametrize(("factor", "sqnr_db"), [(-1, "-6.0"), (torch.nan, "nan")])
def test_check_matmuls_finds_wrong_results(factor, sqnr_db, monkeypatch) -> None:
    def break_weight(model: Any, *_: Any, **__: Any) -> None:
        model[0].weight.data *= factor

    monkeypatch.setattr(doctor, "convert_linears", break_weight)
    with pytest.raises(RunError, match=f"a matmul is wrong: SQNR {sqnr_db} dB"):
        check_matmuls("tensorwise", CPU)


# ----- check_compiler, check_ranks -----


@pytest.mark.slow
def test_check_compiler_compiles() -> None:
    assert "is right" in check_compiler(CPU)


def test_check_compiler_finds_a_wrong_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda _: torch.neg)
    with pytest.raises(RunError, match="wrong result; set .compile. enable = false"):
        check_compiler(CPU)


@pytest.mark.slow
@pytest.mark.timeout(90)
def test_check_ranks_starts_two_that_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_check(check_ranks) == (True, "two met by gloo")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none")
    works, text = run_check(check_ranks)
    assert not works and re.match(r".*RuntimeError: .*none$", text)


# ----- device_name -----
def test_device_name_of_a_cpu_is_its_model_else_the_architecture(monkeypatch):
    lines = "processor\t: 0\nmodel name\t: Fast CPU\nprocessor\t: 1\nmodel name\t: Fast CPU\n"
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(Path, "read_text", lambda path: lines)
    assert doctor.device_name() == "CPU: Fast CPU, 2 cores"
    monkeypatch.setattr(Path, "read_text", lambda path: "processor\t: 0\n")
    monkeypatch.setattr(doctor.platform, "machine", lambda: "aarch64")
    assert doctor.device_name() == "CPU: aarch64, 2 cores"
