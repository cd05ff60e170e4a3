"""What a run does on a GPU, but for values and times: that it ends well, its float8 matmuls, its
waits, its memory."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import pytest
from running import FLAVORS_OF_TESTS, TWO_LAYERS, train

from torchtitan_lite.config import load_config
from torchtitan_lite.models.flavors import FLAVORS
from torchtitan_lite.planner.plan import find_device, make_plan

pytestmark = [pytest.mark.deviceless, pytest.mark.timeout(900)]
COMPILED = "--compile.enable"
FLOAT8 = "--float8.enable_float8_linear"
GATHERED = "--float8.enable_fsdp_float8_all_gather"
PRECOMPUTED = "--float8.precompute_float8_dynamic_scale_for_fsdp"
TP = "--parallelism.tensor_parallel_degree=2"
DOCUMENTS = "--training.document_mask"
CP = "--parallelism.context_parallel_degree=2"
PP = "--parallelism.pipeline_parallel_degree=2"
FOUR_STAGES = (
    PP,
    "--parallelism.pipeline_parallel_schedule=Interleaved1F1B",
    "--parallelism.pipeline_parallel_layers_per_stage=1",
    "--parallelism.pipeline_parallel_first_stage_less_layers=0",
    "--parallelism.pipeline_parallel_last_stage_less_layers=0",
    "--model.n_layers=4",
)
LONG = (CP, "--training.seq_len=131072", FLOAT8, GATHERED, PRECOMPUTED, COMPILED)
SMALL = ("--model.flavor=small_two_layers", "--training.seq_len=256")
TIED = ("--model.tie_embeddings=true", "--model.vocab_size=128256")
BLACKWELL = {"FAKE_GPU_MAJOR": "10", "FAKE_GPU_NAME": "NVIDIA B200", "FAKE_GPU_GIB": "178"}
MX_TORCHAO, BUDGET_TORCH = ("torchao", "0.18"), ("torch", "2.13")
PER_MATMUL = 7 * 2 * 2 * 3
"""Seven linears in each of two layers, two microbatches, three steps."""
TENSORWISE = {
    "matmul e4m3 x e4m3, scales: tensor, tensor": PER_MATMUL,
    "matmul e4m3 x e5m2, scales: tensor, tensor": 2 * PER_MATMUL,
}
ONE_LAYER = {name: n // 2 for name, n in TENSORWISE.items()}
RECOMPUTED = TENSORWISE | {
    # All but w2, of which the backward pass needs no output.
    "matmul e4m3 x e4m3, scales: tensor, tensor": PER_MATMUL + PER_MATMUL * 6 // 7,
}
# Without fast accumulation, as it multiplies gradients, torchao scales the product in place of its
# operands.
ROWWISE = {
    "matmul e4m3 x e4m3, scales: row, row": PER_MATMUL,
    "matmul e4m3 x e4m3, scales: tensor, tensor": 2 * PER_MATMUL,
}
SCALED_IN_MATMUL = "--float8.scale_gradients_in_matmul"
ROWWISE_SCALED = {"matmul e4m3 x e4m3, scales: row, row": 3 * PER_MATMUL}
GW_HP = {
    "matmul e4m3 x e4m3, scales: row, row": PER_MATMUL,
    "matmul e4m3 x e4m3, scales: tensor, tensor": PER_MATMUL,
}
MXFP8 = {"matmul e4m3 x e4m3, scales: 32, 32": 3 * PER_MATMUL}
CASTS = 2 * 4 * 8192 * 14336 / 2**30
"""GiB of an activation of w2, twice in float32: what eager casts to float8 hold, and the planner
leaves out."""


def recipe(name: str) -> tuple[str, str]:
    return FLOAT8, f"--float8.recipe_name={name}"


def checkpointing(mode: str, *more: str) -> tuple[str, ...]:
    return f"--activation_checkpoint.mode={mode}", *more


@dataclass(frozen=True)
class Case:
    overrides: tuple[str, ...]
    matmuls: dict[str, int] = field(default_factory=dict)
    """In float8, of each rank."""
    gpus: int = 1
    device: Mapping[str, str] = field(default_factory=dict)
    """Settings of the fake GPU."""
    steady: bool = False
    """Whether the waits of longer runs are compared too."""
    needs: tuple[str, str] = ("torch", "2.11")
    """A package and its first version with which such a run is not refused."""

    @property
    def words(self) -> list[str]:
        """What is added to the config."""
        dp_degree = self.gpus // 2 ** len({TP, CP, PP} & set(self.overrides))
        return [f"--training.global_batch_size={2 * dp_degree}", *self.overrides]


CASES = {
    # Optimizer states.
    "float32 states": Case(("--optimizer.state_dtype=float32",), steady=True),
    "bfloat16 states": Case(("--optimizer.state_dtype=bfloat16",), steady=True),
    # Float8.
    "tensorwise": Case((FLOAT8,), TENSORWISE, steady=True),
    "tensorwise, compiled": Case((FLOAT8, COMPILED), TENSORWISE, steady=True),
    "tensorwise, gathered": Case((FLOAT8, GATHERED), TENSORWISE),
    "tensorwise, gathered, compiled": Case((FLOAT8, GATHERED, PRECOMPUTED, COMPILED), TENSORWISE),
    "rowwise": Case(recipe("rowwise"), ROWWISE),
    "rowwise, compiled": Case((*recipe("rowwise"), COMPILED), ROWWISE),
    "rowwise, scaled in matmul": Case((*recipe("rowwise"), SCALED_IN_MATMUL), ROWWISE_SCALED),
    "rowwise, scaled in matmul, compiled": Case(
        (*recipe("rowwise"), SCALED_IN_MATMUL, COMPILED), ROWWISE_SCALED
    ),
    "rowwise_with_gw_hp": Case(recipe("rowwise_with_gw_hp"), GW_HP),
    "rowwise_with_gw_hp, compiled": Case((*recipe("rowwise_with_gw_hp"), COMPILED), GW_HP),
    "rowwise_with_gw_hp, scaled in matmul, compiled": Case(
        (*recipe("rowwise_with_gw_hp"), SCALED_IN_MATMUL, COMPILED),
        {"matmul e4m3 x e4m3, scales: row, row": 2 * PER_MATMUL},
    ),
    "mxfp8": Case(recipe("mxfp8"), MXFP8, device=BLACKWELL, needs=MX_TORCHAO),
    "mxfp8, compiled": Case(
        (*recipe("mxfp8"), COMPILED), MXFP8, device=BLACKWELL, steady=True, needs=MX_TORCHAO
    ),
    # What is recomputed.
    "bf16, compiled": Case((COMPILED,)),
    "selective op": Case(checkpointing("selective")),
    "selective op, compiled": Case((*checkpointing("selective"), COMPILED)),
    "selective 2": Case(
        checkpointing("selective", "--activation_checkpoint.selective_ac_option=2")
    ),
    "full": Case(checkpointing("full")),
    "memory budget": Case((*checkpointing("memory_budget"), COMPILED), needs=BUDGET_TORCH),
    "auto": Case(checkpointing("auto")),
    # Attention within documents.
    "document mask": Case((DOCUMENTS,), steady=True),
    "document mask, compiled": Case((DOCUMENTS, COMPILED)),
    # Layouts.
    "FSDP": Case((FLOAT8, GATHERED, PRECOMPUTED), TENSORWISE, gpus=2, steady=True),
    "FSDP, compiled": Case((FLOAT8, GATHERED, PRECOMPUTED, COMPILED), TENSORWISE, gpus=2),
    "FSDP, never, compiled": Case(
        (FLOAT8, GATHERED, PRECOMPUTED, COMPILED, "--parallelism.fsdp_reshard_after_forward=never"),
        TENSORWISE,
        gpus=2,
    ),
    "FSDP, tied": Case((FLOAT8, GATHERED, PRECOMPUTED, *TIED), TENSORWISE, gpus=2),
    "TP": Case((FLOAT8, TP), TENSORWISE, gpus=2, steady=True),
    "TP, compiled": Case((FLOAT8, TP, COMPILED), TENSORWISE, gpus=2),
    "TP, memory budget": Case(
        (TP, *checkpointing("memory_budget"), COMPILED), gpus=2, needs=BUDGET_TORCH
    ),
    "CP": Case((FLOAT8, GATHERED, CP), TENSORWISE, gpus=2, steady=True),
    "CP, long, compiled": Case((*LONG, *checkpointing("full")), RECOMPUTED, gpus=2, steady=True),
    # Stages of a pipeline.
    "PP": Case((FLOAT8, GATHERED, PP), ONE_LAYER, gpus=2, steady=True),
    "PP, GPipe, compiled": Case(
        (FLOAT8, GATHERED, PP, "--parallelism.pipeline_parallel_schedule=GPipe", COMPILED),
        ONE_LAYER,
        gpus=2,
    ),
    "PP, interleaved": Case((FLOAT8, GATHERED, *FOUR_STAGES), TENSORWISE, gpus=2),
    "PP, FSDP, compiled": Case(
        (FLOAT8, GATHERED, PRECOMPUTED, PP, COMPILED), ONE_LAYER, gpus=4, steady=True
    ),
    "PP, TP, compiled": Case((FLOAT8, PP, TP, COMPILED), ONE_LAYER, gpus=4),
    # One matrix for the embedding and the output.
    "tied": Case(TIED),
    "tied, FSDP, compiled": Case((*TIED, COMPILED), gpus=2),
    "tied, TP": Case((*TIED, TP), gpus=2),
    "CPU offload": Case((*SMALL, "--training.enable_cpu_offload")),
}


@pytest.mark.parametrize("name", CASES)
def test_it_trains(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    package, first = case.needs
    if version(package) < first:
        pytest.skip(f"refused before {package} {first}")
    run = train(tmp_path / "run", *case.words, gpus=case.gpus, env=case.device)
    assert run.float8_matmuls == case.matmuls

    if SMALL[0] not in case.overrides:  # else what the libraries take for themselves is most of it
        assert run.reserved_gib <= planned_gib(case, monkeypatch)

    if case.steady:  # the first run compiled, for which the host may wait, too
        waits = [
            train(
                tmp_path / steps,
                *case.words,
                f"--training.steps={steps}",
                gpus=case.gpus,
                env=case.device,
            ).waits
            for steps in ("3", "6")
        ]
        assert waits[0] == waits[1]


@pytest.mark.parametrize(
    # The ends of the model and its two blocks; "default" also the blocks for their backward.
    ("value", "gathers"),
    [("never", 4), ("default", 2 * (4 + 2))],
)
def test_weights_that_stay_are_gathered_and_copied_once_for_two_microbatches(
    value: str, gathers: int, tmp_path: Path
) -> None:
    case = Case((f"--parallelism.fsdp_reshard_after_forward={value}",), gpus=2)
    run = train(tmp_path, *case.words, gpus=2)
    copies = sum(n for name, n in run.calls.items() if "split_with_sizes_copy_out" in name)
    assert copies == 3 * gathers
    all_gathers = sum(n for name, n in run.calls.items() if name.startswith("nccl all-gather"))
    assert all_gathers == 3 * (gathers + 1)  # of the losses, too


def test_ranks_gather_the_keys_and_values_of_a_long_sequence_in_each_pass(tmp_path: Path) -> None:
    case = CASES["CP, long, compiled"]
    run = train(tmp_path, *case.words, gpus=2)

    def count(name: str) -> int:
        return sum(n for each, n in run.calls.items() if name in each)

    # Each of a rank's two chunks has a kernel of its own. The backward pass computes them again.
    layers = 2 * 2 * 3  # in two microbatches, three steps
    assert count("flash_fwd_kernel") == layers * 2 * 2
    assert count("flash_bwd_dq_dk_dv") == layers * 2

    # Half of the keys and values of 8 heads of 128, in bfloat16.
    nbytes = 2 * 131072 // 2 * 8 * 128 * 2
    assert run.calls[f"nccl all-gather of {nbytes} bytes"] == layers * 2
    assert run.calls[f"nccl reduce-scatter of {nbytes} bytes"] == layers


def test_a_shared_sequence_reserves_no_more_beyond_the_plan_than_a_short_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With so few tokens on a rank, FSDP's streams reserve more than the planner's bound."""
    ratios = []
    for name, words in {"short": ("--training.seq_len=4096",), "shared": (CP,)}.items():
        case = Case((*words, *checkpointing("selective")), gpus=2)
        run = train(tmp_path / name, *case.words, gpus=2)
        ratios.append(run.reserved_gib / planned_gib(case, monkeypatch))
    short, shared = ratios
    assert shared <= short < 1.04


@pytest.mark.parametrize(("schedule", "blocks", "crossings"), [((PP,), 1, 1), (FOUR_STAGES, 2, 3)])
def test_a_pipeline_moves_weights_and_gradients_once_a_step_and_activations_once_a_microbatch(
    schedule: tuple[str, ...], blocks: int, crossings: int, tmp_path: Path
) -> None:
    overrides = (FLOAT8, GATHERED, PRECOMPUTED, *schedule, "--training.global_batch_size=8")
    run = train(tmp_path, *overrides, gpus=4)

    # The residual stream, in bfloat16: to each following stage, and its gradient back.
    hidden = f"{8192 * 4096 * 2} bytes"
    # A block's matrices and its two norms: float8 and bfloat16 to compute, gradients in float32.
    matrices, norms = 4096 * (2 * 4096 + 2 * 1024 + 3 * 14336), 2 * 4096
    for calls in run.rank_calls:
        transfers = {name: n for name, n in calls.items() if name.endswith(hidden)}
        four_in_three_steps = crossings * 4 * 3
        assert transfers == {
            f"nccl send of {hidden}": four_in_three_steps,
            f"nccl receive of {hidden}": four_in_three_steps,
        }
        assert calls[f"nccl all-gather of {(matrices + 2 * norms) // 2} bytes"] == blocks * 3
        assert calls[f"nccl reduce-scatter of {4 * (matrices + norms) // 2} bytes"] == blocks * 3

        # Besides blocks, the embedding or the output, and losses.
        gathers = sum(n for name, n in calls.items() if name.startswith("nccl all-gather"))
        reductions = sum(n for name, n in calls.items() if name.startswith("nccl reduce-scatter"))
        assert (gathers, reductions) == ((blocks + 2) * 3, (blocks + 1) * 3)


@pytest.mark.parametrize("layout", [(), (PP,)], ids=["FSDP", "pipeline"])
def test_a_run_generates_samples(layout: tuple[str, ...], tmp_path: Path) -> None:
    prompts = ["--validation.enable", '--validation.prompts=["def", "import os"]']
    words = ["--validation.steps=1", "--validation.freq=3", "--validation.max_new_tokens=6"]
    train(tmp_path, *SMALL, *layout, *prompts, *words, gpus=2)
    samples = (tmp_path / "samples.jsonl").read_text().splitlines()
    assert [json.loads(line)["tokens"] for line in samples] == [6, 6]


def planned_gib(case: Case, monkeypatch: pytest.MonkeyPatch) -> float:
    """What the planner says that a GPU reserves at most."""
    for flavor, args in FLAVORS_OF_TESTS.items():
        monkeypatch.setitem(FLAVORS, flavor, args)
    config = load_config(["--job.config_file", str(TWO_LAYERS), *case.words], world_size=case.gpus)
    device = find_device("B200" if case.device else "H100 SXM")
    reserved = make_plan(config, world_size=case.gpus, device=device)["memory"]["reserved"] / 2**30
    return reserved + (CASTS if FLOAT8 in case.overrides and COMPILED not in case.overrides else 0)
