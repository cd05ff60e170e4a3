"""The commands that README.md and docs/ show work in a fresh copy, and each script has a --help."""

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
from documented import FEW_LAYERS, PAGES, list_commands, make_copy, write_inputs
from launching import ROOT

DEFAULT_RUN = "./run_train.sh"
PARTS = {"common", "fake_gpu_probe", "gpu_day_tables", "kernel_rates"}  # of other scripts
PARTS |= {path.stem for path in (ROOT / "scripts/benchmarks").glob("wait_*.py")}
SCRIPTS = sorted(
    str(path.relative_to(ROOT))
    for path in (ROOT / "run_train.sh", *(ROOT / "scripts").rglob("*.*"))
    if path.suffix in (".py", ".sh") and path.stem not in PARTS
)
REFUSED = "--debug.seed=-1"
"""On GPUs' configs: run_train.sh checks the variables and the config, and refuses this alone."""
BENCH, MAKE = "python scripts/benchmarks/bench.py", "torchtitan-lite data make"
LLAMA = "--tokenizer Llama-3.1-8B/"
RUN_150M = "NGPU=1 CONFIG_FILE=my_150m.toml ./run_train.sh"
RUN_1B = "NGPU=1 CONFIG_FILE=my_1b.toml ./run_train.sh"
TINY = (
    f"--model.flavor debugmodel_gqa --model.n_layers {FEW_LAYERS} --training.seq_len 32 "
    "--training.local_batch_size 2 --training.global_batch_size 2 --training.steps 2 "
    "--validation.steps 1 --compile.enable=false"
)
INSTEAD = {
    "./scripts/test.sh": "./scripts/test.sh --version",  # this test is one of its tests
    "CONFIG_FILE=llama3_70b sbatch --nodes=4 scripts/train.slurm --training.steps 1000": (
        "bash -n scripts/train.slurm"  # tests/distributed/test_slurm.py runs it
    ),
    # The network is not there for all. tests/distributed/test_object_store_runs.py has a bucket.
    'pip install -e ".[remote]"': "true",
    "./run_train.sh --checkpoint.enable --checkpoint.folder s3://my-bucket/llama": "true",
    "torchtitan-lite checkpoint verify s3://my-bucket/llama": "true",
    "torchtitan-lite convert export s3://my-bucket/llama s3://my-bucket/llama-hf": "true",
    'pip install -e ".[hf]"': "true",
    'pip install -e ".[llama]"': "true",
    'pip install -e ".[eval]"': "true",
    f"{MAKE} hf:allenai/c4 stores/c4 --hf-name en --max-tokens 10000000000": (
        f"{MAKE} my_texts/ stores/c4 --max-tokens 1000"
    ),
    f"{MAKE} hf:allenai/c4 stores/c4_val --hf-name en --hf-split validation": (
        f"{MAKE} my_texts/ stores/c4_val"
    ),
    # Llama's tokenizers have to be downloaded.
    f"{MAKE} my_texts/ stores/mine {LLAMA}": f"{MAKE} my_texts/ stores/mine",
    # docs/small_llama.md, with a small vocabulary and small models.
    "python my_tokenizer.py": "sed s/32000/1000/ my_tokenizer.py | python -",
    RUN_150M: f"{RUN_150M} {TINY}",
    RUN_1B: f"{RUN_1B} {TINY}",
    'pip install -e ".[llama,hf]"': "true",
    "hf download meta-llama/Llama-3.2-1B --local-dir Llama-3.2-1B": (
        "torchtitan-lite convert export outputs/small Llama-3.2-1B"
    ),
    # tests/distributed/test_evaluate.py runs a task where lm_eval is installed.
    "torchtitan-lite evaluate outputs/debug_model --tasks hellaswag arc_easy --limit 200": "true",
    "torchtitan-lite evaluate outputs/debug_model --tasks my_text --include-path tasks": "true",
    "pip install compressed-tensors": "true",
    "vllm serve outputs/saved-float8": "true",
    # The benchmark takes minutes; tests/distributed/test_bench_runs.py runs some of its rows.
    BENCH: f"{BENCH} --help",
    f"{BENCH} bf16_compiled tensorwise_compiled --out outputs/compiled": f"{BENCH} --help",
    f"{BENCH} bf16 tensorwise --job.config_file llama3_1b": f"{BENCH} --help",
}
"""What is run in place of commands that cannot run everywhere."""
BEFORE = {
    "docs/metrics.md": [
        each for each in list_commands("README.md") if "dump_folder outputs/" in each
    ]
}
"""What a page takes for done."""
RESUMES = re.compile(r"^(.*?) +# resumes at step (\d+)$", re.M)
"""Commands whose comment promises what they log."""


@dataclass(frozen=True)
class Project:
    """A fresh copy of the project."""

    folder: Path
    env: dict[str, str]

    def run(self, command: str, *, timeout: int = 400) -> subprocess.CompletedProcess[str]:
        """Run a shell command in the copy."""
        options = {"cwd": self.folder, "env": self.env, "timeout": timeout}
        return subprocess.run(["bash", "-c", command], capture_output=True, text=True, **options)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A copy whose default config has shorter and fewer sequences and as few layers as the
    checkpoint of torchtitan, and in which run_train.sh starts one process."""
    folder = tmp_path_factory.mktemp("project").resolve()
    env = make_copy(folder)
    write_inputs(folder)
    config = folder / "train_configs/debug_model.toml"
    text = config.read_text().replace("seq_len = 256", "seq_len = 32")
    text = text.replace("local_batch_size = 8", "local_batch_size = 2")
    config.write_text(text.replace("[model]\n", f"[model]\nn_layers = {FEW_LAYERS}\n"))

    # A repository, which shows the files that commands leave outside of ignored folders.
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
    (folder / ".git/info/exclude").write_text("/cache/\n/big.jsonl\n")
    subprocess.run(["git", "add", "-A"], cwd=folder, check=True)
    return Project(folder, env | {"NGPU": "1"})


# ----- README.md, run_train.sh -----
@pytest.mark.quick
@pytest.mark.timeout(1000)
def test_the_default_run_ends_with_what_the_pages_show(tmp_path: Path) -> None:
    run = Project(tmp_path, make_copy(tmp_path)).run(DEFAULT_RUN, timeout=900)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    last_step = r"step 30/30  loss ([\d.]+)  grad_norm ([\d.]+)  tps "
    summary = r"final loss ([\d.]+) nat, mean of the last 20"
    readme = [("README.md", last_step), ("README.md", summary)]
    for page, pattern in (*readme, ("docs/metrics.md", last_step)):
        texts = ((ROOT / page).read_text(), run.stdout)
        found = [re.search(pattern, text) for text in texts]
        shown, printed = ([*map(float, match.groups())] for match in found)
        # The text is Python's library, which differs a little between versions; a step's gradient
        # norm more (0.669 on 3.11.2, 0.559 on 3.11.7).
        assert printed[0] == pytest.approx(shown[0], rel=0.1)
        assert printed[1:] == pytest.approx(shown[1:], rel=0.3)


# ----- list_commands: README.md and docs/ -----
@pytest.mark.timeout(2000)
@pytest.mark.parametrize("page", [page for page in PAGES if any(list_commands(page))])
def test_the_commands_of_a_page_work_in_their_order(page: str, project: Project) -> None:
    # Whatever other pages have left in outputs/.
    promised = {
        command: f"/step-{step.zfill(8)}"
        for command, step in RESUMES.findall((project.folder / page).read_text())
    }
    for command in [*BEFORE.get(page, []), *list_commands(page)]:
        if command == DEFAULT_RUN:
            continue  # the test above has run it
        on_gpus = "NGPU=8 " in command
        instead = f"{command} {REFUSED}" if on_gpus else INSTEAD.get(command, command)
        result = project.run(instead)
        output = result.stdout[-2000:] + result.stderr[-2000:]
        assert result.returncode == (2 if on_gpus else 0), output
        assert "Traceback" not in result.stderr, output
        if on_gpus:
            assert re.fullmatch(r"\[debug\] seed = -1 .* 0\n", result.stderr)
        if command in promised:
            assert re.search(f"resumed from .*{promised.pop(command)}", result.stdout), output
    assert not promised
    others = ["git", "ls-files", "--others", "--exclude-standard"]
    assert subprocess.check_output(others, cwd=project.folder, text=True) == ""


# ----- scripts -----


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_answers_help(script: str, project: Project) -> None:
    program = "bash" if script.endswith(".sh") else "python"
    result = project.run(f"{program} {script} --help", timeout=100)
    assert result.returncode == 0, result.stderr
    assert len(result.stdout.splitlines()) > 1 and "Traceback" not in result.stderr


def test_every_command_that_is_not_run_is_documented() -> None:
    documented = {command for page in PAGES for command in list_commands(page)}
    assert {*INSTEAD, DEFAULT_RUN} <= documented
