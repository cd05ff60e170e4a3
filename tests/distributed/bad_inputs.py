"""Bad inputs and the error message of each: `python tests/distributed/bad_inputs.py >
docs/errors.md` writes the page."""

import os
import re
import socket
import tempfile
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import warm
from launching import ENV, ROOT

FLOAT8 = "--float8.enable_float8_linear"
PP = "--parallelism.pipeline_parallel_degree"
BEFORE_START = [
    "CONFIG_FILE=missing.toml",
    "LOG_RANK=99",
    "NGPU=two",
    "RDZV_ENDPOINT=head NNODES=2 NODE_RANK=0",
    "--job.config_file syntax.toml",
    "--job.config_file cycle.toml",
    "--training.steps ten",
    "--training.steps 0",
    "--training.steps",
    "--training.stesp 5",
    "--trainnig.steps 5",
    "training.steps=5",
    "--optimizer.lr=-1",
    "--optimizer.name sgd",
    "NGPU=2 --training.loss my_code:loss --parallelism.tensor_parallel_degree 2",
    "--training.dataset my_code:batches --validation.enable",
    "--optimizer.no_decay norms",
    "--float8.recipe_name rowise",
    "--model.flavor 7B",
    f"{FLOAT8} --float8.filter_fqns lm_head",
    "--model.converters lora",
    "--model.norm_type layernorm",
    "--validation.enable --validation.seq_len 128",
    "--parallelism.tensor_parallel_degree 3",
    "--parallelism.data_parallel_shard_degree 2",
    "NGPU=4 --parallelism.context_parallel_degree 2 --training.seq_len 66",
    f"NGPU=4 {PP} 4 --parallelism.pipeline_parallel_schedule Interleaved1F1B --model.n_layers 6",
    f"NGPU=2 {PP} 2 --parallelism.pipeline_parallel_split_points layers.1,layers.2",
    f"NGPU=2 {PP} 2 --parallelism.pipeline_parallel_split_points layers.99",
    f"NGPU=2 {PP} 2 --parallelism.pipeline_parallel_microbatch_size 3",
    f"NGPU=2 {PP} 2 --training.global_batch_size 2 "
    "--parallelism.pipeline_parallel_microbatch_size 2",
    f"NGPU=2 {PP} 2 --model.tie_embeddings true",
    f"NGPU=2 {PP} 2 --parallelism.pipeline_parallel_schedule ZBVZeroBubble",
    f"NGPU=2 {PP} 2 --model.n_layers 2 "
    '--parallelism.module_fqns_per_model_part [["tok_embeddings","layers.0"],["norm","output"]]',
    "--training.local_batch_size 8 --training.global_batch_size 30",
    "--training.seq_len 200000",
    "--activation_checkpoint.selective_ac_option 9",
    f"{FLOAT8} --float8.recipe_name rowwise --float8.enable_fsdp_float8_all_gather",
    f"{FLOAT8} --float8.recipe_name mxfp8 --training.mixed_precision_param float32",
    "--parallelism.enable_async_tensor_parallel",
    "--checkpoint.folder ../elsewhere",
    "--training.datasets a,b",
    '--training.datasets [{path="a",weight=-1},{wieght=2}]',
    '--training.datasets [{path="a",weight=0.333333},{path="b",weight=0.666667}]',
    '--training.datasets [{path="a"}] --training.dataset_path b',
]
"""Refused by the launcher within a second, before any process starts."""
AT_START = [
    "--training.dataset c4",
    "--training.loss my_code:loss",
    "--training.loss posixpath:loss",
    "--training.dataset_path nowhere",
    "--training.dataset_path empty",
    "--training.dataset_path broken.jsonl",
    "--training.dataset_path no_field.jsonl",
    "--training.dataset_path latin1.txt",
    "--training.dataset_path short.txt",
    '--training.datasets [{path="short.txt"},{path="./short.txt",weight=2}]',
    "--training.epochs 0.0001",
    "--model.tokenizer_path nowhere.model",
    "--model.tokenizer_path short.txt",
    f"{FLOAT8} --float8.filter_fqns layers",
    f"{FLOAT8} --float8.filter_fqns output --float8.convert_output",
    f"{FLOAT8} --training.seq_len 33 --training.local_batch_size 1 --training.global_batch_size -1",
    f"{FLOAT8} --float8.filter_fqns auto",
    "--checkpoint.enable --checkpoint.load_step 7",
    "--checkpoint.enable --checkpoint.initial_load_path empty",
    "--profiling.enable_memory_snapshot",
    "--job.dump_folder short.txt",
]
"""Refused by the processes, once they read the data, the model or the run folder."""


def make_files(folder: Path) -> None:
    """Write the files that the arguments name into `folder`."""
    (folder / "ok.toml").write_text((ROOT / "tests/distributed/tiny.toml").read_text())
    (folder / "syntax.toml").write_text("[training]\nsteps = = 3\n")
    (folder / "cycle.toml").write_text('base = "cycle.toml"\n')
    (folder / "empty").mkdir()
    (folder / "broken.jsonl").write_text('{"text": "fine"}\n{"text": \n')
    (folder / "no_field.jsonl").write_text('{"content": "fine"}\n')
    (folder / "latin1.txt").write_bytes("caf\xe9\n".encode("latin-1"))
    (folder / "short.txt").write_text("Too short to train on.\n")


def refuse(arguments: str, *, folder: Path) -> tuple[int, str]:
    """Return the exit code and message for `arguments` in `folder`, with "." for its path."""
    words, config_file = arguments.split(), "ok.toml"
    variables = dict(word.split("=") for word in words if re.match("[A-Z_]+=", word))
    words = words[len(variables) :]
    if words[:1] == ["--job.config_file"]:
        config_file, words = words[1], words[2:]
    if arguments in BEFORE_START:
        command = ["torchtitan_lite", "train"]
        environment = ENV | {"NGPU": "1", "CONFIG_FILE": config_file} | variables
    else:
        words = ["--job.config_file", config_file, *words]
        with socket.socket() as free:
            free.bind(("", 0))
            port = free.getsockname()[1]
        command = ["torchtitan_lite.train"]
        environment = ENV | {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
        environment |= dict.fromkeys(("RANK", "LOCAL_RANK"), "0")
        environment |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), "1")
    without_gpus = environment | {"CUDA_VISIBLE_DEVICES": ""}
    result = warm.python(["-m", *command, *words], cwd=folder, env=without_gpus, timeout=120)
    assert "Traceback" not in result.stdout + result.stderr, result.stdout + result.stderr
    _, _, told = result.stdout.rpartition("error:\n")
    message = (result.stderr if arguments in BEFORE_START else told).strip()
    return result.returncode, message.replace(f"{folder}/", "").replace(str(folder), ".")


def table(rows: Iterable[str], refuse: Callable[[str], tuple[int, str]]) -> str:
    """Return the page's table of some arguments."""
    lines = ["| arguments | exit code | message |", "| --- | --- | --- |"]
    for arguments in rows:
        code, message = refuse(arguments)
        cell = message.replace("|", "\\|").replace("\n", "<br>").replace("<string>", "")
        lines.append(f"| `{arguments}` | {code} | {cell} |")
    return "\n".join(lines)


def page(refuse: Callable[[str], tuple[int, str]]) -> str:
    """Return the whole page."""
    before, at_start = (table(rows, refuse) for rows in (BEFORE_START, AT_START))
    return f"""# Error messages

A message names the table and key, the rule, every number in it, and the fix. All wrong words, keys
and values of a config are reported together; once these are right, so are all broken rules between
them. A test runs each row below on one process, with these arguments after `--job.config_file` and
a valid file, or these variables.

## Before any process starts

{before}

## Once the processes read data, model and run folder

{at_start}

## How a run that failed ends

`run_train.sh` prints the exit code with the cause, the rank if the cause is about one, the step,
the last checkpoint, the run folder and the logs. All but the last two are in `status.json` too:

    exit code 6: rank 1 was killed by SIGKILL
    rank: 1
    step: 8
    last checkpoint: outputs/debug_model/checkpoint/step-00000006
    run folder: outputs/debug_model
    logs: outputs/debug_model/logs/2026-11-20T20-53-20-node0

| exit code | cause | what to do |
| --- | --- | --- |
| 0 | done | |
| 1 | an unexpected error | look at the logs |
| 2 | the config, or an environment variable | fix it as the message says |
| 3 | a tokenizer or training text | fix the data |
| 4 | a checkpoint | the command `checkpoint verify` lists the intact ones |
| 5 | loss, gradients or weights are not finite | lower `[optimizer] lr`, or load an earlier step |
| 6 | a rank was killed, hangs or is out of reach | look at its logs and its host |
| 7 | no space left, a broken disk, a moved run folder | make room, or do as the error says |
| 75 | stopped by a signal; saved if checkpoints are enabled | start it again |

**Out of GPU memory** (`OutOfMemoryError` in a rank's log, exit code 1): start the run again with
the first of these changes, and add the next ones until it fits. It resumes from its newest
checkpoint, and a `training.global_batch_size` of -1 keeps the checkpoint's.

1. `activation_checkpoint.mode = "selective"`, then `"full"`; `"auto"` is the planner's choice.
2. Half the `training.local_batch_size` with the same `global_batch_size`, in twice as many passes.
3. With `compile.enable`: `activation_checkpoint.mode = "memory_budget"`, with a lower budget.
4. More GPUs: `data_parallel_shard_degree = -1` shards weights, gradients and moments over them.

The folder of each start in `logs/` has every rank's own lines, in `*/attempt_K/LOCAL_RANK/`, and
`torchrun.log`, which torch's elastic agent writes.
"""


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        make_files(Path(name))
        print(page(partial(refuse, folder=Path(os.path.realpath(name)))), end="")
