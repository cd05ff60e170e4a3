from pathlib import Path

import pytest

from torchtitan_lite.config.layers import Setting, read_command_line, read_files
from torchtitan_lite.errors import ConfigError


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


def override(*words: str) -> dict[str, object]:
    path, layer, problems = read_command_line(["--job.config_file", "run.toml", *words])
    assert (path, problems) == (Path("run.toml"), [])
    assert all(setting.source == "the command line" for setting in layer.values())
    return {name: setting.value for name, setting in layer.items()}


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        (("--training.steps", "20"), "training.steps", 20),
        (("--training.steps=20",), "training.steps", 20),
        (("--training.steps", "1", "--training.steps=2"), "training.steps", 2),
        (("--training.steps", "ten"), "training.steps", "ten"),
        (("--training.steps", "10.5"), "training.steps", 10.5),
        (("--training.steps", "9" * 5000), "training.steps", "9" * 5000),
        (("--training.global_batch_size", "-1"), "training.global_batch_size", -1),
        (("--optimizer.lr", "1e-3"), "optimizer.lr", 1e-3),
        (("--optimizer.lr", "-1e-3"), "optimizer.lr", -1e-3),
        (("--compile.enable",), "compile.enable", True),
        (("--compile.enable", "--training.steps", "3"), "compile.enable", True),
        (("--compile.enable", "false"), "compile.enable", False),
        (("--compile.enable=false",), "compile.enable", False),
        (("--training.compile",), "training.compile", True),
        # As tyro, and so torchtitan, takes them.
        (("--training.seq-len", "64"), "training.seq_len", 64),
        (
            ("--activation-checkpoint.memory-budget=0.1",),
            "activation_checkpoint.memory_budget",
            0.1,
        ),
        (("--job.description=a-b",), "job.description", "a-b"),
        (("--compile.no_enable",), "compile.enable", False),
        (("--compile.no-enable", "--training.steps", "3"), "compile.enable", False),
        (("--training.no-compile",), "training.compile", False),
        (("--model.no-print-after-conversion",), "model.print_after_conversion", False),
        (("--training.dataset_path", "None"), "training.dataset_path", None),
        (("--job.description", "None"), "job.description", "None"),
        (("--no.steps",), "no.steps", True),
        (("--compile.no_enable=true",), "compile.no_enable", True),
        (("--job.description", "5"), "job.description", "5"),
        (("--job.description", "two words"), "job.description", "two words"),
        (("--job.description", '"quoted"'), "job.description", "quoted"),
        (("--job.description", "'tis"), "job.description", "'tis"),
        (("--job.description=--x=y",), "job.description", "--x=y"),
        (("--job.description=",), "job.description", ""),
        (("--training.dataset_path=",), "training.dataset_path", None),
        (("--lr_scheduler.total_steps", ""), "lr_scheduler.total_steps", None),
        (("--training.steps=",), "training.steps", ""),
        (("--float8.filter_fqns", "output,wk"), "float8.filter_fqns", "output,wk"),
        (("--float8.filter_fqns", "layers.0"), "float8.filter_fqns", "layers.0"),
        (("--float8.filter_fqns", '["output", "wk"]'), "float8.filter_fqns", ["output", "wk"]),
        (("--float8.filter_fqns=",), "float8.filter_fqns", ""),
        (
            ("--quantize.linear.float8.recipe_name", "rowwise"),
            "quantize.linear.float8.recipe_name",
            "rowwise",
        ),
        (("--no.such", "3"), "no.such", 3),
        (("--no.such",), "no.such", True),
    ],
)
def test_override(words: tuple[str, ...], name: str, value: object) -> None:
    result = override(*words)[name]
    assert result == value
    assert type(result) is type(value)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (
            ["junk"],
            'unexpected "junk" on the command line; write options as --table.key value, lists as '
            "a,b",
        ),
        (
            ["training.steps=3"],
            'unexpected "training.steps=3" on the command line; did you mean --training.steps?',
        ),
        (
            ["-training.step", "3"],
            'unexpected "-training.step" on the command line; did you mean --training.steps?',
        ),
        (
            ["--"],
            'unexpected "--" on the command line; write options as --table.key value, lists as a,b',
        ),
        (
            ["--=3"],
            'unexpected "--=3" on the command line; write options as --table.key value, lists as '
            "a,b",
        ),
        (
            ["--training.steps"],
            "--training.steps (from the command line): needs a value of type int",
        ),
        (
            ["--job.no_dump_folder"],
            "--job.dump_folder (from the command line): needs a value of type str",
        ),
        (
            ["--compile.no-enable", "false"],
            'unexpected "false" on the command line; write options as --table.key value, lists as '
            "a,b",
        ),
        (
            ["--float8.recipe_name", "--compile.enable"],
            "--float8.recipe_name (from the command line): needs a value of type "
            '"tensorwise"|"rowwise"|"rowwise_with_gw_hp"|"mxfp8"',
        ),
    ],
)
def test_words_that_are_no_override(words: list[str], problem: str) -> None:
    _, _, problems = read_command_line(["--job.config_file=run.toml", *words])
    assert problems[0] == problem


@pytest.mark.parametrize(
    ("argv", "example"),
    [
        ([], "debug_model"),
        (["--job.config_file"], "debug_model"),
        (["--job.config_file="], "debug_model"),
        (["--training.steps", "3"], "debug_model"),
        (["own/8b.toml", "--training.steps", "3"], "own/8b.toml"),
    ],
)
def test_no_config_file(argv: list[str], example: str) -> None:
    with pytest.raises(
        ConfigError, match=f"no config file; name one: --job.config_file {example}$"
    ):
        read_command_line(argv)


@pytest.mark.parametrize("option", ["--job.config_file=b.toml", "--job.config-file=b.toml"])
def test_the_last_config_file_wins(option: str) -> None:
    path, _, problems = read_command_line(["--job.config_file", "a.toml", option])
    assert (path, problems) == (Path("b.toml"), [])


def test_base_files_come_first_and_are_relative_to_the_file_that_names_them(tmp_path: Path) -> None:
    write(tmp_path / "root.toml", "[training]\nsteps = 1\nseq_len = 1")
    write(tmp_path / "middle/middle.toml", 'base = "../root.toml"\n[training]\nsteps = 2')
    leaf = write(tmp_path / "leaf.toml", 'base = "middle/middle.toml"\n[compile]\nenable = true')
    layers = [
        {name: setting.value for name, setting in layer.items()} for layer in read_files(leaf)
    ]
    assert layers == [
        {"training.steps": 1, "training.seq_len": 1},
        {"training.steps": 2},
        {"compile.enable": True},
    ]
    assert read_files(leaf)[0]["training.steps"].source == str(tmp_path / "middle/../root.toml")


def test_empty_tables_count_only_where_their_name_is_unknown(tmp_path: Path) -> None:
    path = write(
        tmp_path / "run.toml", "[training]\n[quantize.linear.float8]\n[trainng]\n[debug.seed]\n"
    )
    assert {name: setting.value for name, setting in read_files(path)[0].items()} == {
        "trainng": {},
        "debug.seed": {},
    }


def test_base_cycle(tmp_path: Path) -> None:
    a = write(tmp_path / "a.toml", 'base = "b.toml"')
    b = write(tmp_path / "b.toml", 'base = "./a.toml"')
    with pytest.raises(
        ConfigError,
        match=f"base files form a cycle: {a} -> {b} -> {a}; remove one of these `base` lines",
    ):
        read_files(a)


def test_base_of_itself(tmp_path: Path) -> None:
    a = write(tmp_path / "a.toml", 'base = "a.toml"')
    with pytest.raises(ConfigError, match=f"cycle: {a} -> {a};"):
        read_files(a)


def test_base_that_is_missing(tmp_path: Path) -> None:
    leaf = write(tmp_path / "leaf.toml", 'base = "gone.toml"')
    gone = tmp_path / "gone.toml"
    with pytest.raises(
        ConfigError,
        match=rf"{gone} \(base files: {leaf} -> {gone}\): cannot be read: No such file or "
        rf"directory",
    ):
        read_files(leaf)


def test_base_that_is_no_path(tmp_path: Path) -> None:
    path = write(tmp_path / "run.toml", "base = 3")
    with pytest.raises(
        ConfigError, match=rf"base = 3 \(from {path}\): must be the path of a TOML file"
    ):
        read_files(path)


def test_file_that_is_a_directory(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"^{tmp_path}: is not a regular file$"):
        read_files(tmp_path)


def test_file_that_links_to_itself(tmp_path: Path) -> None:
    (tmp_path / "loop.toml").symlink_to("loop.toml")
    with pytest.raises(
        ConfigError, match="loop.toml: cannot be read: Too many levels of symbolic links"
    ):
        read_files(tmp_path / "loop.toml")


def test_base_that_links_to_itself(tmp_path: Path) -> None:
    leaf = write(tmp_path / "leaf.toml", 'base = "loop.toml"')
    (tmp_path / "loop.toml").symlink_to("loop.toml")
    with pytest.raises(ConfigError, match="cannot be read: Too many levels of symbolic links"):
        read_files(leaf)


def test_file_that_is_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(b'description = "\xff"')
    with pytest.raises(
        ConfigError,
        match=f"{path}: not valid TOML: 'utf-8' codec can't decode byte 0xff in position 15",
    ):
        read_files(path)


def test_syntax_error_names_file_and_line(tmp_path: Path) -> None:
    path = write(tmp_path / "run.toml", "[training]\nsteps = ten\n")
    with pytest.raises(
        ConfigError, match=rf"{path}: not valid TOML: Invalid value \(at line 2, column 9\)"
    ):
        read_files(path)


def test_setting_cites_its_source() -> None:
    assert (
        Setting("ten", "run.toml").cite("training.steps")
        == '[training] steps = "ten" (from run.toml)'
    )
