"""The benchmark without its runs; they are in tests/distributed/test_bench_runs.py."""

import json
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import bench
import pytest
from bench import CONFIGS, ROWS, row_words, run_row, run_rows
from sample_records import RECORD

from torchtitan_lite.base.errors import ConfigError, RunError, StorageError
from torchtitan_lite.config import load_config

LINES = "\n".join(json.dumps(replace(RECORD, step=step).to_json()) for step in (1, 2, 3))
DONE = f"(folder / 'metrics.jsonl').write_text({LINES + chr(10)!r})"


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    """Undo what run_rows sets."""
    kept = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, kept)


@pytest.fixture
def write_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Have rows run a program, which finds its words in `words` and its run folder in `folder`."""
    program = tmp_path / "program.py"
    head = "import os, pathlib, subprocess, sys\nwords = ' '.join(sys.argv[1:])\n"
    head += "folder = pathlib.Path(words.partition('dump_folder=')[2])\n"
    monkeypatch.setattr(bench, "TRAIN", (str(program),))
    return lambda source: program.write_text(f"{head}folder.mkdir(exist_ok=True)\n{source}\n")


# ----- ROWS, row_words -----


@pytest.mark.parametrize("on", CONFIGS)
def test_rows_are_configs_that_have_what_their_names_say(on: str) -> None:
    for name in ROWS:
        config = load_config(row_words(name, [], on=on), world_size=1)
        recipe = name.removesuffix("_compiled").removesuffix("_full_ac")
        float8 = config.float8
        assert (float8.recipe_name if float8.enable_float8_linear else "bf16") == recipe
        assert config.compile.enable is name.endswith("_compiled")
        assert (config.activation_checkpoint.mode == "full") is name.endswith("_full_ac")
        assert config.training.steps == 12


def test_users_config_and_overrides_hold_for_rows_but_not_for_what_they_compare() -> None:
    words = ["--job.config_file", "llama3_8b_float8", "--training.steps=20", "--compile.enable"]
    config = load_config(row_words("bf16", words, on="CPU"), world_size=1)
    assert (config.model.flavor, config.training.steps) == ("8B", 20)
    assert not (config.compile.enable or config.float8.enable_float8_linear)


# ----- run_row, run_rows -----


def test_run_row_has_the_exit_code_and_keeps_the_log(tmp_path: Path, write_program) -> None:
    write_program("print('why'); exit(3)")
    assert run_row([], tmp_path / "row") == 3
    assert (tmp_path / "row.log").read_text() == "why\n"
    write_program("os.kill(os.getpid(), 9)")
    assert run_row([], tmp_path / "killed") == -9


def test_a_row_that_is_stopped_ends_with_all_it_has_started(tmp_path: Path, write_program) -> None:
    # The row's child holds the pipe open, and writes to it if it lives on.
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    child = "import os, sys, time; time.sleep(20); os.write(int(sys.argv[1]), b'alive')"
    stopping = f"{DONE}\nif 'recipe_name' in words: os.kill(os.getppid(), 15)\n"
    write_program(
        f"pipe = os.open({str(tmp_path / 'pipe')!r}, os.O_WRONLY)\n{stopping}"
        f"if 'recipe_name' in words: subprocess.run([sys.executable, '-c', {child!r}, str(pipe)],"
        " pass_fds=[pipe])"
    )
    rows = ["bf16", "tensorwise", "rowwise"]
    with pytest.raises(KeyboardInterrupt):
        run_rows(rows, [], on="CPU", out=tmp_path / "out")
    assert (tmp_path / "out/tensorwise").exists()
    assert not (tmp_path / "out/rowwise").exists()
    os.set_blocking(reader, True)
    assert os.read(reader, 10) == b""  # once every writer has ended
    os.close(reader)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="--out .*file/out"):
        run_rows(["bf16"], [], on="CPU", out=tmp_path / "file/out")


# ----- bench -----


def test_the_table_has_the_rows_that_are_done(tmp_path: Path, write_program, capsys) -> None:
    write_program(f"exit(1) if 'rowwise' in words else {DONE}")
    rows = ["tensorwise", "rowwise", "bf16", "tensorwise"]
    bench.main([*rows, "--out", str(tmp_path / "out")])
    out = capsys.readouterr().out
    heading = next(line for line in out.splitlines() if line[:1] == "|")
    assert heading.replace("|", " ").split() == ["run", "tensorwise", "bf16"]
    assert "times first" in out and "emulated" in out
    with pytest.raises(RunError, match="no row is done"):
        bench.main(["rowwise", "--out", str(tmp_path / "out")])


def test_an_unknown_row_is_refused_with_the_rows() -> None:
    with pytest.raises(ConfigError, match="bf15 is not a row; .* bf16, tensorwise"):
        bench.main(["bf16", "bf15"])
