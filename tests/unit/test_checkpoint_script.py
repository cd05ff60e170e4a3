"""The command line of checkpoints, as users call it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from sample_checkpoints import write_checkpoint

ROOT = Path(__file__).parents[2]


def checkpoint(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / "checkpoint.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    for step in (10, 20, 30):
        write_checkpoint(folder / "checkpoint", step)
    file = folder / "checkpoint" / "step-00000020" / "__0_0.distcp"
    content = file.read_bytes()
    file.write_bytes(content[:-300] + b"x" + content[-299:])
    (folder / "checkpoint" / "step-00000030" / "rank-00000.json").unlink()
    return folder


def test_ls(run):
    result = checkpoint("ls", run)
    assert (result.returncode, result.stderr) == (0, "")
    assert [line.split("  ")[0] for line in result.stdout.splitlines()] == [
        "step",
        "10",
        "20",
        "30",
    ]
    assert "broken: rank-00000.json: No such file" in result.stdout.splitlines()[3]
    rows = json.loads(checkpoint("ls", run / "checkpoint", "--json").stdout)
    assert [(row["step"], row["problems"] == []) for row in rows] == [
        (10, True),
        (20, True),
        (30, False),
    ]


def test_ls_does_not_import_torch(run):
    command = (
        f"runpy.run_path({str(ROOT / 'scripts' / 'checkpoint.py')!r})['main'](['ls', {str(run)!r}])"
    )
    code = f"import runpy, sys; {command}; print('torch' in sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.splitlines()[-1] == "False"


def test_verify(run):
    result = checkpoint("verify", run)
    folder = run / "checkpoint"
    assert (result.returncode, result.stderr) == (4, "")
    assert result.stdout.splitlines() == [
        f"{folder}/step-00000010: every byte is as written",
        f"{folder}/step-00000020: __0_0.distcp: its contents have changed",
        f"{folder}/step-00000030: rank-00000.json: No such file or directory",
    ]
    steps = [folder / "step-00000010", folder / "step-00000020"]
    result = checkpoint("verify", *steps, "--quick")
    assert result.returncode == 0
    assert result.stdout.splitlines() == [f"{step}: sizes are as written" for step in steps]
    result = checkpoint("verify", *steps, "--json")
    assert result.returncode == 4
    assert json.loads(result.stdout) == {
        str(steps[0]): [],
        str(steps[1]): ["__0_0.distcp: its contents have changed"],
    }


def test_diff(run):
    folder = run / "checkpoint"
    old, new = folder / "step-00000010", folder / "step-00000030"
    same = checkpoint("diff", old, old)
    assert (same.returncode, same.stdout) == (0, "3 tensors are equal in every bit\n")
    other = checkpoint("diff", old, new)
    assert other.returncode == 1
    assert "  model.w: 12 of 12 elements differ, by 20 at most\n" in other.stdout
    found = json.loads(checkpoint("diff", old, new, "--json").stdout)
    assert found["values"][0] == {
        "name": "model.w",
        "elements": 12,
        "different": 12,
        "largest": 20.0,
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("ls", "nowhere"), "nowhere has no checkpoints"),
        (("diff", "a", "b"), "a is broken: manifest.json: No such file"),
    ],
)
def test_what_is_not_there(arguments, message):
    result = checkpoint(*arguments)
    assert result.returncode == 4 and message in result.stderr and "Traceback" not in result.stderr
