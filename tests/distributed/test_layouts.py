"""One global batch, the same weights: every layout gives the losses of one process, with each recipe."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from launching import ask, losses

FLOAT8 = "--float8.enable_float8_linear"
RECIPES = {
    "bf16": [],
    "tensorwise": [FLOAT8],
    "all_gather": [
        FLOAT8,
        "--float8.enable_fsdp_float8_all_gather",
        "--float8.precompute_float8_dynamic_scale_for_fsdp",
    ],
    "rowwise": [FLOAT8, "--float8.recipe_name", "rowwise"],
    "rowwise_with_gw_hp": [FLOAT8, "--float8.recipe_name", "rowwise_with_gw_hp"],
}
INSPECT = "inspect_worker.py"
TP = "--parallelism.tensor_parallel_degree=2"
HSDP = "--parallelism.data_parallel_replicate_degree=2"
GATHERED_LOGITS = "--parallelism.disable_loss_parallel"


@pytest.fixture(scope="module")
def on_one_process(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Callable:
    """Losses on one process by recipe, each run when first asked for."""
    runs: dict[str, list[float]] = {}
    steps = f"--training.steps={request.config.getoption('layout_steps')}"

    def get(recipe: str) -> list[float]:
        if recipe not in runs:
            runs[recipe] = losses(tmp_path_factory.mktemp("one") / "run", steps, *RECIPES[recipe], processes=1)
        return runs[recipe]

    return get


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("recipe", "layout"),
    [
        *((recipe, [TP]) for recipe in ("bf16", "all_gather")),
        ("bf16", [TP, GATHERED_LOGITS]),
        ("bf16", [HSDP]),
        ("all_gather", [HSDP]),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value).replace("--parallelism.", ""),
)
def test_four_processes_train_as_one_does(
    recipe: str, layout: list[str], on_one_process: Callable, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    steps = request.config.getoption("layout_steps")
    expected = on_one_process(recipe)
    actual = losses(tmp_path / "run", f"--training.steps={steps}", *RECIPES[recipe], *layout, processes=4)
    assert len(expected) == steps and expected[-1] < expected[0] - 0.3
    assert actual == pytest.approx(expected, rel=5e-4)


@pytest.mark.timeout(600)
def test_masked_documents_train_on_four_processes_as_on_one(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    texts = tmp_path / "texts.jsonl"
    lines = (" ".join(map(str, range(i, i + 5 + i % 9))) for i in range(600))  # several documents a window
    texts.write_text("\n".join(json.dumps({"text": line}) for line in lines))
    settings = [f"--training.steps={request.config.getoption('layout_steps')}", f"--training.dataset_path={texts}"]
    mask = "--training.document_mask"
    one = losses(tmp_path / "one", *settings, mask, processes=1)
    assert losses(tmp_path / "four", *settings, mask, TP, processes=4) == pytest.approx(one, rel=5e-4)
    unmasked = losses(tmp_path / "unmasked", *settings, processes=1)
    assert max(abs(a / b - 1) for a, b in zip(one, unmasked, strict=True)) > 2e-3


@pytest.mark.timeout(300)
def test_weights_are_the_same_on_any_mesh() -> None:
    one = ask(INSPECT, processes=1)["weights"]
    assert len(one) == 6 * 9 + 3
    assert ask(INSPECT, processes=2)["weights"] == one
    assert ask(INSPECT, TP, processes=4)["weights"] == one
    assert ask(INSPECT, HSDP, FLOAT8, "--float8.enable_fsdp_float8_all_gather", processes=4)["weights"] == one


BLOCK_WEIGHTS = 256 * 256 * 2 + 128 * 256 * 2 + 3 * 256 * 768
NORM_BYTES = 2 * 256 * 2


@pytest.mark.parametrize(("float8", "bytes_per_weight"), [(False, 2), (True, 1)], ids=["bf16", "float8"])
def test_fsdp_gathers_a_block_in_the_bytes_of_its_weights(float8: bool, bytes_per_weight: int) -> None:
    traffic = ask(INSPECT, *(RECIPES["all_gather"] if float8 else []), processes=2)["traffic"]
    sizes = {"torch.uint8": 1, "torch.bfloat16": 2}
    gathered = [elements * sizes[dtype] for name, dtype, elements in traffic if name == "_allgather_base_"]
    block = (BLOCK_WEIGHTS * bytes_per_weight + NORM_BYTES) // 2  # each of two ranks sends half
    embedding, output = 2256 * 256 * 2 // 2, (2256 * 256 + 256) * 2 // 2
    # Forward and again for the backward, but for the last group, which stays whole in between.
    assert sorted(gathered) == sorted([block] * 6 * 2 + [embedding] * 2 + [output])


@pytest.mark.parametrize(
    ("recipe", "dtype"), [("tensorwise", "torch.uint8"), ("rowwise", "torch.bfloat16"), ("bf16", "torch.bfloat16")]
)
def test_tensor_parallelism_gathers_activations_in_float8_under_tensorwise(recipe: str, dtype: str) -> None:
    traffic = ask(INSPECT, *RECIPES[recipe], TP, processes=2)["traffic"]
    shard = 2 * 64 * 256 // 2
    gathered = [(kind, elements) for name, kind, elements in traffic if name == "all_gather_into_tensor"]
    # Attention and feed-forward of six blocks gather their input forward and the gradient of their output backward;
    # the projection to the vocabulary, always in bf16, adds its input, and the embedding its gradient.
    assert sorted(gathered) == sorted([(dtype, shard)] * 24 + [("torch.bfloat16", shard)] * 2)
