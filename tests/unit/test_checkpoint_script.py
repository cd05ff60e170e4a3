"""The command line of checkpoints, as users call it."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from sample_checkpoints import write_checkpoint

from torchtitan_lite.checkpoint.manifest import FileEntry, read_manifest, write_manifest

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
    command = f"torchtitan_lite.cli.run_command(['checkpoint', 'ls', {str(run)!r}])"
    code = f"import sys, torchtitan_lite.cli; {command}; print('torch' in sys.modules)"
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
        (("ls", "nowhere"), "nowhere is missing."),
        (("diff", "a", "b"), "a is missing"),
    ],
)
def test_what_is_not_there(arguments, message):
    result = checkpoint(*arguments)
    assert result.returncode == 4 and message in result.stderr and "Traceback" not in result.stderr


def test_ctrl_c_ends_a_long_verification(run, tmp_path):
    step = tmp_path / "step-00000010"
    shutil.copytree(run / "checkpoint" / step.name, step)
    manifest = read_manifest(step)
    files = manifest.files | {"__0_0.distcp": FileEntry(2**43, "0" * 64)}
    os.truncate(step / "__0_0.distcp", 2**43)  # sparse: hours to hash
    write_manifest(step, replace(manifest, files=files))
    command = [sys.executable, str(ROOT / "scripts" / "checkpoint.py"), "verify", str(step)]
    # The shell of a background job ignores Ctrl-C, and its children would too.
    default = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, preexec_fn=default
    ) as process:
        try:
            reads = Path(f"/proc/{process.pid}/fd")
            hashing = False
            while not hashing:
                assert process.poll() is None
                time.sleep(0.1)
                with suppress(FileNotFoundError):  # a file that was just closed
                    hashing = any(
                        each.readlink().name == "__0_0.distcp" for each in reads.iterdir()
                    )
            process.send_signal(signal.SIGINT)
            assert process.communicate(timeout=60)[1] == "interrupted\n"
        finally:
            process.kill()
    assert process.returncode == 130
