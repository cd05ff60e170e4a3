"""The command that makes a tokenizer."""

import subprocess
import sys
from pathlib import Path

import pytest

from torchtitan_lite.data.tokenizer import build_tokenizer

ROOT = Path(__file__).parents[2]


def run(*arguments: object) -> subprocess.CompletedProcess:
    command = [sys.executable, "scripts/train_tokenizer.py", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False)


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"body": "one text and another text and one more"}\n' * 3)
    return path


def test_model_from_rows(rows, tmp_path):
    output = tmp_path / "t.model"
    arguments = ("--source", rows, "--text-field", "body", "--vocab-size", 280, "--output", output)
    result = run(*arguments)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == f"{output}: 280 ids, {output.stat().st_size} bytes\n"
    assert build_tokenizer(str(output)).vocab_size == 280
    assert run(*arguments).returncode == 3
    assert run(*arguments, "--force").returncode == 0


def test_default_is_the_standard_library_with_2256_ids(tmp_path):
    assert run("--output", tmp_path / "t.model").returncode == 0
    assert build_tokenizer(str(tmp_path / "t.model")).vocab_size == 2256


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--source", "missing"), '--source = "missing": '),
        (
            ("--vocab-size", 9_999, "--text-field", "body"),
            "--vocab-size = 9999 does not suit this text: Vocabulary size",
        ),
        ((), '--source = "rows.jsonl": '),
    ],
)
def test_errors_are_one_line_and_exit_3(rows, tmp_path, arguments, message):
    result = run("--source", rows, "--output", tmp_path / "t.model", *arguments)
    assert result.returncode == 3
    assert result.stderr.replace(str(rows.parent) + "/", "").startswith(message)
    assert result.stderr.count("\n") == 1
