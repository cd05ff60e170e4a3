"""The command torchtitan-lite data, as users call it: token stores."""

import json
import os
import subprocess
import sys

import pytest

from torchtitan_lite.data.token_store import TokenStore


def data(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torchtitan_lite", "data", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"body": f"text number {i}"}) + "\n" for i in range(100)))
    return path


# ----- data make, data verify -----


def test_from_text_to_a_store_and_to_damage(tmp_path, corpus):
    store = tmp_path / "store"
    made = data("make", corpus, store, "--text-field", "body")
    assert made.returncode == 0, made.stderr
    assert "tokenized" in made.stderr
    again = data("make", corpus, store, "--text-field", "body")
    assert (again.returncode, "is made already: 100 documents" in again.stdout) == (0, True)
    verified = data("verify", store)
    counts = f"100 documents, {TokenStore(store).tokens} tokens, every byte is as it was made"
    assert (verified.returncode, verified.stdout) == (0, f"{store}: {counts}\n")

    # A damaged store is named.
    os.truncate(store / "tokens-00000.bin", 10)
    result = data("verify", store)
    assert result.returncode == 3
    assert "tokens-00000.bin has 10 bytes, not " in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(("words", "exit_code", "message"), [
    ("make nowhere store", 3, "nowhere: does not exist"),
    ("make corpus.jsonl store --skip-bad 99", 3, "line 100: "),
    ("make corpus.jsonl store --skip-bad all", 3, "holds 0 documents"),
    ("make corpus.jsonl store --skip-bad some", 2, "--skip-bad: some must be a whole number"),
    ("make corpus.jsonl corpus.jsonl/store", 7, "corpus.jsonl/store"),
    ("make corpus.jsonl store --tokenizer nowhere", 3, "nowhere"),
    ("make corpus.jsonl store --max-tokens 0", 2, "--max-tokens: 0 must be a whole number from 1"),
    ("verify nowhere", 3, "nowhere is missing; name the folder of a store"),
    ("", 2, "the following arguments are required"),
])  # fmt: skip
def test_bad_inputs(corpus, monkeypatch, words, exit_code, message):
    monkeypatch.chdir(corpus.parent)
    before = sorted(corpus.parent.rglob("*"))
    result = data(*words.split())
    assert result.returncode == exit_code, result.stderr
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    after = [path for path in sorted(corpus.parent.rglob("*")) if not path.name.endswith(".lock")]
    assert [path for path in after if "partial" not in str(path)] == before


@pytest.mark.parametrize("encoding", ["utf-8:strict", "ascii:strict"])
def test_paths_and_letters_that_the_terminal_lacks(tmp_path, monkeypatch, encoding):
    monkeypatch.setenv("PYTHONIOENCODING", encoding)
    texts, store = tmp_path / os.fsdecode(b"t\xff"), tmp_path / os.fsdecode(b"s\xff")
    texts.mkdir()
    (texts / os.fsdecode(b"\xe9.txt")).write_text("Größe\n")
    (texts / "b.jsonl").write_text("{")
    make = ("make", texts, store, "--skip-bad", 1)
    commands = (make, make, ("verify", store))
    results = [data(*command) for command in commands]
    assert [result.returncode for result in results] == [0] * 3, results
    assert not any("Error" in result.stderr for result in results)
    missing = data("make", texts / os.fsdecode(b"\xfe"), store)
    assert missing.returncode == 3 and "does not exist" in missing.stderr
