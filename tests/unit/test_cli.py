"""The command torchtitan-lite: its help, its hints, its exit codes, and configs by name."""

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from torchtitan_lite.base.errors import ConfigError
from torchtitan_lite.cli import COMMANDS, build_parser, format_commands, run_command
from torchtitan_lite.cli.parser import split_keys
from torchtitan_lite.config import find_config, load_config, shipped_configs

ROOT = Path(__file__).parents[2]
MAIN = [sys.executable, "-m", "torchtitan_lite"]


def run(*words: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run([*MAIN, *words], cwd=cwd, env=env, capture_output=True, text=True)


# ----- build_parser, format_commands, run_command -----


def test_every_help_has_one_form():
    for name in COMMANDS:
        page = build_parser(name).format_help()
        assert page.startswith("usage: ") and f"torchtitan-lite {name}" in page.split("\n")[0]
        assert "\noptions:\n  -h, --help" in page
        assert [line for line in page.splitlines() if len(line) > 100] == []


def test_the_help_of_the_program_lists_the_commands(capsys):
    assert run_command([]) is None
    assert capsys.readouterr().out == f"{format_commands()}\n"
    assert all(f"\n  {name}" in format_commands() for name in COMMANDS)


def test_the_help_of_train_names_the_variables_and_the_keys():
    page = build_parser("train").format_help()
    assert all(name in page for name in ("NGPU", "OMP_NUM_THREADS", "OMP_WAIT_POLICY"))
    assert "--training.steps integer (default: 1000)" in page


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--verison", "--verison is not a command of .* did you mean --version"),
        ("zzz", "zzz is not a command of torchtitan-lite; torchtitan-lite --help lists them"),
        ("plan --devise=L4", "unrecognized arguments: --devise=L4; did you mean --device"),
        ("train --steps 3", "unrecognized arguments: --steps 3; did you mean --training.steps"),
        ("train --training.stps 3", r"\[training\] stps = 3 .* did you mean \[training\] steps"),
        ("train --compile.enable True", r'enable = "True" .*: must be a valid boolean'),
        ("train --job.config_file llama3_8", "llama3_8: cannot be .* did you mean .llama3_8b."),
        ("data mak", "invalid choice: 'mak' .*did you mean make"),
        (
            "data make a b --skip-ba 2",
            "unrecognized arguments: --skip-ba 2; did you mean --skip-bad",
        ),
        ("compare ~no-user/a", "runs: ~no-user/a: the folder ~no-user is not known; write the"),
        ("data make ~no-user/a b", "source: ~no-user/a: the folder ~no-user is not known"),
        ("train --job.config_file ~no-user/x", "config_file ~no-user/x: the folder ~no-user is"),
        ("generate", "generate: the following arguments are required: .*; --help shows"),
    ],
)
def test_a_mistyped_word_gets_a_hint(line, message):
    with pytest.raises(ConfigError, match=message):
        run_command(shlex.split(line))


def test_an_error_is_one_line_and_exit_code_2(tmp_path):
    folder = tmp_path / "a folder"
    folder.mkdir()
    (folder / "random.py").write_text("raise SystemExit('shadowed')")
    result = run("train", "--job.config_file", "debug_model", "--training.steps=-1", cwd=folder)
    assert (result.returncode, result.stdout) == (2, "")
    assert re.fullmatch(r"\[training\] steps = -1 .* or equal to 1\n", result.stderr)


def test_a_command_runs_in_a_folder_that_is_deleted(tmp_path):
    (tmp_path / "gone").mkdir()
    line = f"cd {tmp_path}/gone; rmdir ../gone; exec {shlex.join(MAIN)} schema"
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    found = subprocess.run(["bash", "-c", line], env=env, capture_output=True, text=True)
    assert found.returncode == 0 and "rowwise_with_gw_hp" in found.stdout, found.stderr


INTERRUPTS = """
import os, signal, sys

class Interrupt:
    def find_spec(self, name, *_):
        if name == "torchtitan_lite.cli":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
"""


def test_ctrl_c_in_the_imports_ends_without_a_traceback(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(INTERRUPTS)
    found = subprocess.run(
        [*MAIN, "schema"],
        env=os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"},
        capture_output=True,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert (found.returncode, found.stdout, found.stderr) == (-signal.SIGINT, "", "")


# ----- check -----
def test_check_reports_every_error_or_the_layout_without_torch(tmp_path):
    (tmp_path / "torch.py").write_text("raise SystemExit('imported')")
    env = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    for words, code, pattern in (
        ("llama3_70b --world-size 256", 0, r"70B; 256 processes: .* x tp 1; global batch 256 x"),
        ("llama3_70b --world-size 256 --model.flavor 8B", 0, "8B; 256 proce"),
        ("llama3_8b", 0, "8B; 8 processes"),
        ("nothere", 2, "nothere: cannot be read: .*; name a TOML .*debug_model, .*llama3_8b, "),
        ("./no.toml", 2, "no.toml: cannot be read: No such file or directory$"),
        ("llama3_8b --world-size 2 --debug.seed=-1 --training.steps 0", 2, r".* steps.*\n.* seed"),
        ("llama3_70b --world-size 0", 2, ".* --world-size: 0 must be .* 1 to 1000000;"),
        ("", 2, "no config file; name one"),
    ):
        command = [*MAIN, "check", *f"--job.config_file={words}".split()]
        found = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
        assert found.returncode == code and re.match(pattern, found.stderr + found.stdout), found


# ----- split_keys, Parser, find_config -----


def test_keys_of_the_config_are_split_from_a_commands_own_words():
    words = "run --checkpoint.enable --tps 5 --training.steps 3 --model.flavor=8B text --a.b -1"
    own, keys = split_keys(words.split())
    assert own == ["run", "--tps", "5", "text"]
    assert keys == words.replace("run ", "").replace("--tps 5 ", "").replace("text ", "").split()
    words = "--debug.deterministic run --float8.no_emulate a --compile.enable false b"
    assert split_keys(words.split())[0] == ["run", "a", "b"]


def test_options_may_stand_between_other_words():
    args = build_parser("generate").parse(["runs/a", "--temperature", "0.8", "def main("])
    assert (str(args.source), args.prompts, args.temperature) == ("runs/a", ["def main("], 0.8)
    args = build_parser("compare").parse(["a", "--last", "5", "b"])
    assert [*map(str, args.runs)] == ["a", "b"]


def test_a_shipped_config_is_found_by_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in shipped_configs():
        assert find_config(name).is_file() and find_config(f"{name}.toml") == find_config(name)
    config = load_config(["--job.config_file", "llama3_8b"], world_size=8)
    assert config.model.flavor == "8B"
    Path("llama3_8b").mkdir()
    assert find_config("llama3_8b").is_file()
    Path("llama3_8b").rmdir()
    Path("llama3_8b").write_text('[model]\nflavor = "1B"\n')  # a file comes first
    assert load_config(["--job.config_file", "llama3_8b"], world_size=8).model.flavor == "1B"
    assert find_config("elsewhere/llama3_8b") == Path("elsewhere/llama3_8b")
