import subprocess
import sys
from pathlib import Path

import pytest

from torchtitan_lite.config.__main__ import main
from torchtitan_lite.errors import ConfigError

ROOT = Path(__file__).parents[2]
SHIPPED = {
    "debug_model": (
        2,
        "debugmodel, world size 2 = dp_replicate 1 x dp_shard 2 x tp 1, global batch 16",
    ),
    "float8_parity": (
        1,
        "debugmodel_4layers, world size 1 = dp_replicate 1 x dp_shard 1 x tp 1, global batch 8",
    ),
    "llama3_8b": (8, "8B, world size 8 = dp_replicate 1 x dp_shard 8 x tp 1, global batch 8"),
    "llama3_8b_float8": (
        8,
        "8B, world size 8 = dp_replicate 1 x dp_shard 8 x tp 1, global batch 8",
    ),
    "llama3_70b": (
        256,
        "70B, world size 256 = dp_replicate 1 x dp_shard 32 x tp 8, global batch 256",
    ),
    "llama3_405b": (
        512,
        "405B, world size 512 = dp_replicate 1 x dp_shard 64 x tp 8, global batch 128",
    ),
}


def run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torchtitan_lite.config", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_every_shipped_config_is_listed() -> None:
    assert {path.stem for path in (ROOT / "train_configs").glob("*.toml")} == SHIPPED.keys()


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_config_loads(name: str) -> None:
    world_size, line = SHIPPED[name]
    result = run("--job.config_file", f"train_configs/{name}.toml", "--world-size", str(world_size))
    assert (result.returncode, result.stdout, result.stderr) == (0, f"config ok: {line}\n", "")


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_config_has_a_run_folder_of_its_own(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(ROOT / f"train_configs/{name}.toml")
    main(
        [
            "--get",
            "job.dump_folder",
            "--job.config_file",
            path,
            "--world-size",
            str(SHIPPED[name][0]),
        ]
    )
    assert capsys.readouterr().out == f"./outputs/{name}\n"


def test_config_error_exits_with_2_and_no_traceback() -> None:
    result = run(
        "--job.config_file=train_configs/debug_model.toml",
        "--training.steps",
        "-1",
        "--optimizer.lr",
        "-1e-3",
    )
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.splitlines() == [
        "[optimizer] lr = -0.001 (from the command line): must be above 0",
        "[training] steps = -1 (from the command line): must be at least 1",
    ]


def test_get_prints_nothing_but_the_value() -> None:
    words = ("--job.config_file", "train_configs/debug_model.toml", "--training.batch_size=3")
    result = run("--get", "training.local_batch_size", *words)
    assert (result.returncode, result.stdout, result.stderr) == (0, "3\n", "")
    assert "[training] batch_size is now [training] local_batch_size\n" in run(*words).stdout


def test_get_of_other_types(capsys: pytest.CaptureFixture[str]) -> None:
    for key in ("compile.components", "float8.enable_float8_linear", "lr_scheduler.total_steps"):
        main(["--get", key, "--job.config_file", str(ROOT / "train_configs/debug_model.toml")])
    assert capsys.readouterr().out == '["model", "loss"]\ntrue\nunset\n'


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--get", "training.stepz"], "argument --get: invalid choice: 'training.stepz'"),
        (["--world-size", "0"], "--world-size 0 must be at least 1"),
        (["--world-size", "two"], "argument --world-size: invalid int value: 'two'"),
    ],
)
def test_wrong_use_exits_with_2(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(words)
    assert message in capsys.readouterr().err


def test_world_size_is_1_unless_given() -> None:
    with pytest.raises(ConfigError, match="world size, 1; run 8 or 16 processes"):
        main(
            [
                "--get",
                "training.steps",
                "--job.config_file",
                str(ROOT / "train_configs/llama3_70b.toml"),
            ]
        )


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--job.config_file", "missing.toml", "--help"])
    page = capsys.readouterr().out
    assert "--training.steps int (default: 1000)" in page
    assert "--world-size N" in page


def test_the_check_needs_no_torch() -> None:
    code = "import sys, torchtitan_lite.config.__main__; sys.exit('torch' in sys.modules or 'torchao' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60).returncode == 0
