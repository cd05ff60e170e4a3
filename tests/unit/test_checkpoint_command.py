"""The command torchtitan-lite checkpoint: ls and verify."""

import subprocess
import sys

import pytest
from sample_checkpoints import flip_bit, write_checkpoint

from torchtitan_lite.base.errors import CheckpointError
from torchtitan_lite.base.terminal import run_script
from torchtitan_lite.checkpoint import manifest
from torchtitan_lite.cli import run_command


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Of three checkpoints two are broken."""
    folder = tmp_path_factory.mktemp("run")
    for step in (10, 20, 30):
        write_checkpoint(folder / "checkpoint", step)
    flip_bit(folder / "checkpoint/step-00000020/__0_0.distcp")
    (folder / "checkpoint/step-00000030/.metadata").unlink()
    return folder


@pytest.fixture
def checkpoint(capsys):
    """Runs the command; returns the exit code and what it printed."""

    def call(*words):
        code = run_command(["checkpoint", *map(str, words)])
        return code, capsys.readouterr().out

    return call


# ----- checkpoint ls -----


def test_ls(run, checkpoint):
    code, printed = checkpoint("ls", run)
    lines = printed.splitlines()
    assert (code, [line.split()[0] for line in lines]) == (0, ["step", "10", "20", "30"])
    assert "broken: .metadata: No such file" in lines[3]


def test_ls_does_not_import_torch(run):
    command = f"torchtitan_lite.cli.run_command(['checkpoint', 'ls', {str(run)!r}])"
    code = f"import sys, torchtitan_lite.cli; {command}; print('torch' in sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.splitlines()[-1] == "False"


def test_ls_names_what_is_missing(checkpoint):
    with pytest.raises(CheckpointError, match="nowhere is missing; name a run folder"):
        checkpoint("ls", "nowhere")


# ----- checkpoint verify -----


def test_verify(run, checkpoint):
    first, second, third = (run / "checkpoint" / f"step-000000{step}" for step in (10, 20, 30))
    changed = "__0_0.distcp: its contents have changed"
    missing = ".metadata: No such file or directory"
    whole = f"{first}: every byte is as written\n{second}: {changed}\n{third}: {missing}\n"
    assert checkpoint("verify", run) == (4, whole)
    quick = f"{first}: sizes are as written\n{second}: sizes are as written\n"
    assert checkpoint("verify", first, second, "--quick") == (0, quick)


def test_verify_is_interrupted_by_ctrl_c(run, monkeypatch, capsys):
    def interrupt(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(manifest, "hash_file", interrupt)
    monkeypatch.setattr(sys, "argv", ["torchtitan-lite", "checkpoint", "verify", str(run)])
    with pytest.raises(SystemExit) as ended:
        run_script(run_command)
    assert (ended.value.code, capsys.readouterr().err) == (130, "interrupted\n")
