"""What only a GPU runs: training on real float8 matmuls, FlexAttention. One command: pytest
tests/gpu."""

import json
from pathlib import Path

import pytest
import torch
from launching import ask, differing_tensors, losses, torchrun, train, train_arguments

from torchtitan_lite.models.llama3 import attend, document_mask, document_starts

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
FLOAT8 = "--float8.enable_float8_linear"


# ----- recipe_name, emulate -----


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_real_float8_trains_as_emulated_float8_does(recipe: str, tmp_path: Path) -> None:
    settings = [FLOAT8, "--float8.recipe_name", recipe, "--training.steps=10"]
    real = losses(tmp_path / "real", *settings, processes=1)
    emulated = losses(tmp_path / "emulated", *settings, "--float8.emulate", processes=1)
    assert real == pytest.approx(emulated, rel=5e-3)


@pytest.mark.parametrize(("recipe", "major"), [("mxfp8", 10), ("blockwise", 9)])
def test_a_recipe_of_one_capability_trains_there_and_is_refused_elsewhere(
    recipe: str, major: int, tmp_path: Path
) -> None:
    settings = [FLOAT8, f"--float8.recipe_name={recipe}", "--training.steps=10"]
    if torch.cuda.get_device_capability()[0] == major:
        real = losses(tmp_path / "real", *settings, processes=1)
        assert real == pytest.approx(
            losses(tmp_path / "emulated", *settings, "--float8.emulate", processes=1), rel=5e-3
        )
    else:
        result = torchrun(*train_arguments(tmp_path, *settings), processes=1)
        assert result.returncode != 0
        refusal = f'recipe_name = "{recipe}" needs a GPU of compute capability {major}.x'
        assert refusal in result.stdout + result.stderr


# ----- StepObserver, log_numerics_freq -----
@pytest.mark.parametrize("compiled", [[], ["--compile.enable"]], ids=["eager", "compiled"])
def test_a_run_says_that_it_multiplied_in_float8_and_measures_its_casts(
    compiled: list[str], tmp_path: Path
) -> None:
    # Deterministic, so that anything that did not run as asked for ends the run.
    settings = [
        FLOAT8,
        "--debug.deterministic",
        "--float8.log_numerics_freq=2",
        "--training.steps=4",
        *compiled,
    ]
    result = torchrun(*train_arguments(tmp_path, *settings), processes=1)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    # Seven linears in each of six blocks multiply three times in each of four microbatches.
    assert "42 of 43 linears are of float8" in result.stdout and "504 in float8" in result.stdout
    lines = [json.loads(line) for line in (tmp_path / "numerics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [2, 4]
    for figures in (
        roles[role] for line in lines for roles in line["kinds"].values() for role in roles
    ):
        assert 15 < figures["sqnr_db"] < 45 and figures["saturation"] == 0


# ----- parallelize: FSDP, tensor_parallel, enable_async_tensor_parallel -----


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs")
@pytest.mark.parametrize(
    "layout", [[], ["--parallelism.tensor_parallel_degree=2"]], ids=["fsdp", "tp"]
)
def test_two_gpus_that_gather_float8_train_as_one_does(layout: list[str], tmp_path: Path) -> None:
    scales = "--float8.precompute_float8_dynamic_scale_for_fsdp"
    settings = [FLOAT8, "--float8.enable_fsdp_float8_all_gather", scales, "--training.steps=10"]
    one = losses(tmp_path / "one", *settings, processes=1)
    assert losses(tmp_path / "two", *settings, *layout, processes=2) == pytest.approx(one, rel=5e-3)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs")
@pytest.mark.parametrize("float8", [[], [FLOAT8]], ids=["bf16", "tensorwise"])
def test_collectives_that_are_fused_with_matmuls_train_as_others_do(
    float8: list[str], tmp_path: Path
) -> None:
    compiled = ["--compile.enable", "--training.steps=10"]
    settings = [*float8, "--parallelism.tensor_parallel_degree=2", *compiled]
    apart = losses(tmp_path / "apart", *settings, processes=2)
    # Deterministic, so that a block of which nothing is fused ends the run.
    settings += ["--parallelism.enable_async_tensor_parallel", "--debug.deterministic"]
    assert losses(tmp_path / "fused", *settings, processes=2) == pytest.approx(apart, rel=5e-3)


# ----- compile -----


def test_compiled_float8_takes_little_more_memory_than_bf16(tmp_path: Path) -> None:
    # Weights and activations are kept in bf16 by both; what float8 adds are casts, of one linear at
    # a time.
    sizes = ["--training.seq_len=2048", "--training.local_batch_size=8", "--training.steps=5"]
    compiled = [*sizes, "--compile.enable"]
    peaks = {
        name: train(tmp_path / name, *compiled, *settings, processes=1)[-1]["memory_gib"]
        for name, settings in (("bf16", []), ("float8", [FLOAT8]))
    }
    assert peaks["float8"] < 1.15 * peaks["bf16"], peaks


def test_compiled_float8_with_its_all_gather_trains_as_eager_float8_does(tmp_path: Path) -> None:
    settings = [FLOAT8, "--float8.enable_fsdp_float8_all_gather", "--training.steps=10"]
    eager = losses(tmp_path / "eager", *settings, processes=1)
    compiled = losses(tmp_path / "compiled", *settings, "--compile.enable", processes=1)
    assert compiled == pytest.approx(eager, rel=5e-3)


# ----- attend, document_mask -----


def test_flex_attention_is_attention_under_the_dense_mask() -> None:
    torch.manual_seed(0)
    starts = document_starts(torch.randint(0, 100, (2, 500)), bos_id=0)
    inputs = [torch.randn(2, heads, 500, 64) for heads in (8, 2, 2)]
    weights = torch.randn(2, 8, 500, 64)

    def run(device: str, dtype: torch.dtype) -> list[torch.Tensor]:
        q, k, v = (tensor.to(device, dtype).requires_grad_() for tensor in inputs)
        mask = document_mask(starts.to(device), torch.arange(starts.shape[1], device=device))
        out = attend(q, k, v, mask)
        out.backward(weights.to(device, dtype))
        return [tensor.detach().cpu().float() for tensor in (out, q.grad, k.grad, v.grad)]

    pairs = zip(run("cuda", torch.bfloat16), run("cpu", torch.float32), strict=True)
    for actual, expected in pairs:
        assert ((actual - expected).norm() / expected.norm()).item() < 2e-2


def test_masked_documents_train_compiled_and_checkpointed_as_eager(tmp_path: Path) -> None:
    settings = ["--training.document_mask", "--training.steps=10"]
    eager = losses(tmp_path / "eager", *settings, processes=1)
    selective = "--activation_checkpoint.mode=selective"
    kept = losses(tmp_path / "kept", *settings, selective, processes=1)
    compiled = losses(tmp_path / "compiled", *settings, "--compile.enable", processes=1)
    assert kept == pytest.approx(eager, rel=1e-3)
    assert compiled == pytest.approx(eager, rel=5e-3)


# ----- log_freq, hfu -----


def test_a_logged_step_waits_for_the_device_no_more_often_than_another(tmp_path: Path) -> None:
    settings = ["--job.dump_folder", str(tmp_path), "--training.steps=13", "--metrics.log_freq=2"]
    waits = ask(str(Path(__file__).with_name("syncs_worker.py")), *settings, processes=1)["waits"]
    unlogged, logged = waits[4:12:2], waits[5:12:2]  # steps 5, 7, 9, 11 and 6, 8, 10, 12
    assert sorted(logged) == sorted(unlogged)


def test_hfu_is_at_least_mfu(tmp_path: Path) -> None:
    settings = [FLOAT8, "--training.steps=3"]
    record = train(tmp_path, *settings, processes=1)[-1]
    assert record["hfu"] >= record["mfu"] > 0


# ----- async_mode -----
@pytest.mark.parametrize(
    "settings",
    [
        [],
        [FLOAT8],
        ["--training.enable_cpu_offload"],
        [FLOAT8, "--float8.enable_fsdp_float8_all_gather", "--optimizer.state_dtype=bfloat16"],
    ],
    ids=["bf16", "float8", "offload", "bfloat16 states"],
)
def test_a_resumed_run_goes_on_bit_by_bit_from_a_pinned_snapshot(
    settings: list[str], tmp_path: Path
) -> None:
    mode = "--checkpoint.async_mode=async_with_pinned_mem"
    saved = ["--checkpoint.enable", "--checkpoint.interval=5", mode]
    settings = [*settings, *saved, "--debug.deterministic", "--lr_scheduler.total_steps=20"]
    straight = train(tmp_path / "straight", *settings, "--training.steps=20", processes=1)
    train(tmp_path / "resumed", *settings, "--training.steps=10", processes=1)
    resumed = train(tmp_path / "resumed", *settings, "--training.steps=20", processes=1)
    for name in ("loss", "grad_norm", "lr"):
        assert [record[name] for record in resumed] == [record[name] for record in straight]
    steps = [tmp_path / name / "checkpoint" / "step-00000020" for name in ("straight", "resumed")]
    assert differing_tensors(*steps) == []
