"""What words of a command line and lines of TOML files set."""

import re
import shlex
from pathlib import Path

import pytest

from torchtitan_lite.base.errors import ConfigError
from torchtitan_lite.config.layers import Setting, read_command_line, read_files


def write(path: Path, text: str | bytes) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


# ----- read_command_line -----

HUGE = "9" * 5000  # more digits than Python converts


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        ("--training.steps 20", "training.steps", 20),
        ("--training.steps=20", "training.steps", 20),
        ("--training.steps 1 --training.steps=2", "training.steps", 2),
        ("--training.steps ten", "training.steps", "ten"),
        ("--training.steps 10.5", "training.steps", 10.5),
        pytest.param(f"--training.steps {HUGE}", "training.steps", HUGE, id="huge"),
        ("--training.steps=", "training.steps", ""),
        ("--training.global_batch_size -1", "training.global_batch_size", -1),
        ("--optimizer.lr 1e-3", "optimizer.lr", 1e-3),
        ("--optimizer.lr -1e-3", "optimizer.lr", -1e-3),
        ("--optimizer.lr .1", "optimizer.lr", 0.1),
        ("--optimizer.lr -1.e-3", "optimizer.lr", -1e-3),
        ("--optimizer.lr +3", "optimizer.lr", 3.0),
        ("--optimizer.lr .", "optimizer.lr", "."),
        ("--compile.enable", "compile.enable", True),
        ("--compile.enable --training.steps 3", "compile.enable", True),
        ("--compile.enable false", "compile.enable", False),
        ("--compile.enable=false", "compile.enable", False),
        ("--training.compile", "training.compile", True),
        # As tyro, and so torchtitan, takes them.
        ("--training.seq-len 64", "training.seq_len", 64),
        ("--job.description=a-b", "job.description", "a-b"),
        ("--compile.no_enable", "compile.enable", False),
        ("--compile.no-enable --training.steps 3", "compile.enable", False),
        ("--training.no-compile", "training.compile", False),
        ("--model.no-print-after-conversion", "model.print_after_conversion", False),
        ("--training.dataset_path None", "training.dataset_path", None),
        ("--training.dataset_path=", "training.dataset_path", None),
        ("--job.description None", "job.description", "None"),
        ("--no.steps", "no.steps", True),
        ("--compile.no_enable=true", "compile.no_enable", True),
        ("--optimizer.no_decay norm,wq", "optimizer.no_decay", "norm,wq"),
        ("--optimizer.no-decay=norm", "optimizer.no_decay", "norm"),
        ("--optimizer.lr_factors '{wq=0.5}'", "optimizer.lr_factors", {"wq": 0.5}),
        # Strings need no quotes.
        ("--job.description 5", "job.description", "5"),
        ("--job.description 'two words'", "job.description", "two words"),
        ("--job.description '\"quoted\"'", "job.description", "quoted"),
        (r"--job.description \'tis", "job.description", "'tis"),
        ("--job.description=--x=y", "job.description", "--x=y"),
        ("--job.description=", "job.description", ""),
        ("--float8.filter_fqns output,wk", "float8.filter_fqns", "output,wk"),
        ('--float8.filter_fqns \'["a", "wk"]\'', "float8.filter_fqns", ["a", "wk"]),
        ("--float8.filter_fqns=", "float8.filter_fqns", ""),
        ("--quantize.linear.mx.recipe_name mx", "quantize.linear.mx.recipe_name", "mx"),
        ("--no.such 3", "no.such", 3),
        ("--no.such", "no.such", True),
    ],
)
def test_words_that_set_a_key(words: str, name: str, value: object) -> None:
    argv = ["--job.config_file", "run.toml", *shlex.split(words)]
    path, layer, problems = read_command_line(argv)
    assert (path, problems) == (Path("run.toml"), [])
    assert layer[name] == Setting(value, "the command line")
    assert type(layer[name].value) is type(value)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("junk", r'unexpected "junk" .* --table\.key value, lists as a,b'),
        ("training.steps=3", r'unexpected "training.steps=3" .* write --training\.steps '),
        ("-training.step 3", r'unexpected "-training.step" .* write --training\.steps '),
        ("--", r'unexpected "--" .* --table\.key'),
        ("--=3", r'unexpected "--=3" .* --table\.key'),
        ("--training.steps", "--training.steps on .* needs .* integer$"),
        ("--job.no_dump_folder", "--job.dump_folder on .* needs .* string$"),
        ("--compile.no-enable false", r'unexpected "false"'),
        ("--float8.recipe_name --compile.enable", r'--float8\.recipe_name .* "tensorwise"\|'),
    ],
)
def test_words_that_are_no_override(words: str, problem: str) -> None:
    _, _, problems = read_command_line(["--job.config_file=run.toml", *words.split()])
    assert re.match(problem, problems[0])


@pytest.mark.parametrize(
    "words", ["", "--job.config_file", "--job.config_file=", "own/8b.toml --training.steps 3"]
)
def test_no_config_file(words: str) -> None:
    with pytest.raises(ConfigError, match="no config file; .* --job.config_file debug_model$"):
        read_command_line(words.split())


@pytest.mark.parametrize("option", ["--job.config_file=b.toml", "--job.config-file=b.toml"])
def test_the_last_config_file_wins(option: str) -> None:
    path, _, problems = read_command_line(["--job.config_file", "a.toml", option])
    assert (path, problems) == (Path("b.toml"), [])


# ----- read_files, Setting -----


def test_base_files_come_first_and_are_relative_to_the_file_that_names_them(tmp_path: Path) -> None:
    write(tmp_path / "root.toml", "[training]\nsteps = 1\nseq_len = 1")
    write(tmp_path / "middle/middle.toml", 'base = "../root.toml"\n[training]\nsteps = 2')
    leaf = write(tmp_path / "leaf.toml", 'base = "middle/middle.toml"\n[compile]\nenable = true')
    root = str(tmp_path / "middle/../root.toml")
    assert read_files(leaf) == [
        {"training.steps": Setting(1, root), "training.seq_len": Setting(1, root)},
        {"training.steps": Setting(2, str(tmp_path / "middle/middle.toml"))},
        {"compile.enable": Setting(True, str(leaf))},
    ]


@pytest.mark.parametrize(
    ("text", "refused"),
    [
        ('base = "b.toml"', r"T/x/../a.toml \(base of T/b.toml\): base files form a cycle; remove"),
        ('base = "a.toml"', r"T/a.toml \(base of T/a.toml\): base files form a cycle;"),
        ('base = "gone.toml"', r"T/gone.toml \(base of T/a.toml\): cannot be read: No such file"),
        ('base = "loop.toml"', "loop.toml.*: cannot be read: Too many levels of symbolic links"),
        ('base = "~no-user/b"', r"base = .~no-user/b. \(from T/a.toml\): .* ~no-user is not known"),
        ("base = 3", r"base = 3 \(from T/a.toml\): must be the path"),
        (b'description = "\xff"', "^T/a.toml: not valid TOML: .*byte 0xff in position 15"),
        ("[training]\nsteps = ten\n", r"^T/a.toml: not valid TOML: .*at line 2, column 9"),
    ],
)
def test_files_that_cannot_be_read(text: str | bytes, refused: str, tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    write(tmp_path / "b.toml", 'base = "x/../a.toml"')
    (tmp_path / "loop.toml").symlink_to("loop.toml")
    with pytest.raises(ConfigError, match=refused.replace("T/", f"{tmp_path}/")):
        read_files(write(tmp_path / "a.toml", text))


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"^{tmp_path}: is not a regular file$"):
        read_files(tmp_path)


def test_setting_cites_its_source() -> None:
    found = Setting("ten", "run.toml").cite("training.steps")
    assert found == '[training] steps = "ten" (from run.toml)'
