"""On any layout ranks start from the same weights, count the same documents, and gather weights in
the types that the config asks for."""

import hashlib
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import FOLDER, finish, read_records, told, train_arguments
from matrix import CP, FLOAT8_GATHER, HSDP, RECIPES
from safetensors.torch import save_file

from torchtitan_lite.catalog.flavors import ModelArgs
from torchtitan_lite.models.hf_llama import hf_config, hf_names, to_hf
from torchtitan_lite.models.llama3 import Transformer

TP = "--parallelism.tensor_parallel_degree=2"
RUNS = {
    1: {"FSDP": []},
    2: {
        "FSDP": [],
        "FSDP, all_gather": RECIPES["all_gather"],
        "FSDP, tied": ["--model.tie_embeddings=true"],
        "TP": [TP],
    },
    4: {"FSDP x TP": [TP], "HSDP, all_gather": [*FLOAT8_GATHER, HSDP]},
}
"""Overrides by the number of processes."""
DIM, KV_DIM, FFN_DIM, VOCABULARY, SEQ_LEN = 128, 64, 192, 2256, 64

Digests = dict[str, dict[str, str]]
Models = Callable[[int], dict[str, Any]]

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def hf_models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Digests]:
    """The folder of Hugging Face models of these dimensions, "untied" and "tied", and the sha256 of
    each weight in our order of rows."""
    folder, generator = tmp_path_factory.mktemp("hf"), torch.Generator().manual_seed(5)
    sizes = {"dim": DIM, "n_layers": 2, "n_heads": 8, "n_kv_heads": 4, "ffn_dim": FFN_DIM}
    digests: Digests = {"untied": {}, "tied": {}}
    for kind in digests:
        args = ModelArgs(**sizes, vocab_size=VOCABULARY, tie_embeddings=kind == "tied")
        names, weights = hf_names(args), {}
        for name, weight in Transformer(args).named_parameters():
            torch.nn.init.normal_(weight, generator=generator)
            digests[kind][name] = hashlib.sha256(weight.detach().numpy().tobytes()).hexdigest()
            weights[names[name]] = to_hf(name, weight.detach(), args).contiguous()
        (folder / kind).mkdir()
        save_file(weights, folder / kind / "model.safetensors")
        config = hf_config(args, dtype=torch.float32, bos_id=None, eos_id=None)
        (folder / kind / "config.json").write_text(json.dumps(config))
    return folder, digests


@pytest.fixture(scope="module")
def models(hf_models: tuple[Path, Digests]) -> Models:
    """Return a function that inspects the models of RUNS on a number of processes."""

    @cache
    def inspect(processes: int) -> dict[str, Any]:
        arguments = [json.dumps(RUNS[processes]), str(hf_models[0])]
        return told(finish(str(FOLDER / "inspect_worker.py"), *arguments, processes=processes))

    return inspect


# ----- init_weights -----
def test_weights_are_the_same_on_any_mesh(models: Models) -> None:
    one = models(1)["FSDP"]["weights"]
    assert len(one) == 2 * 9 + 3
    others = [models(2)["FSDP"], models(4)["FSDP x TP"], models(4)["HSDP, all_gather"]]
    assert [other["weights"] for other in others] == [one] * 3


# ----- load_hf -----
def test_a_hugging_face_model_is_loaded_into_any_mesh(
    models: Models, hf_models: tuple[Path, Digests]
) -> None:
    runs = {name: run for processes in RUNS for name, run in models(processes).items()}
    assert len(runs) == 6
    for name, run in runs.items():
        assert run["loaded"] == hf_models[1]["tied" if "tied" in name else "untied"], name


# ----- apply_fsdp -----
@pytest.mark.parametrize(
    ("name", "bytes_per_weight"), [("FSDP", 2), ("FSDP, all_gather", 1), ("FSDP, tied", 2)]
)
def test_fsdp_gathers_a_block_in_the_bytes_of_its_weights(
    name: str, bytes_per_weight: int, models: Models
) -> None:
    sizes = {"torch.uint8": 1, "torch.bfloat16": 2}
    traffic = models(2)[name]["traffic"]
    gathered = [count * sizes[dtype] for op, dtype, count in traffic if op == "_allgather_base_"]
    weights = 2 * DIM * DIM + 2 * KV_DIM * DIM + 3 * FFN_DIM * DIM
    norms, embedding, output = 2 * DIM * 2, VOCABULARY * DIM * 2, (VOCABULARY * DIM + DIM) * 2
    block = (weights * bytes_per_weight + norms) // 2  # each of two ranks sends half
    # Forward, and the blocks again for the backward: the output stays whole in between, and the
    # embedding's backward takes no weights. Tied, both ends are gathered once.
    ends = [output // 2] if "tied" in name else [embedding // 2, output // 2]
    assert sorted(gathered) == sorted([block] * 4 + ends)


def write_texts(folder: Path) -> Path:
    """Write texts of which several fit into a window."""
    texts = folder / "texts.jsonl"
    lines = (" ".join(map(str, range(i, i + 5 + i % 9))) for i in range(600))
    texts.write_text("\n".join(json.dumps({"text": line}) for line in lines))
    return texts


def document_squares(window: list[int], quarters: set[int]) -> int:
    """The squares of document lengths, of the tokens in `quarters` of a window with BOS ids at the
    indices `window`."""
    positions = [i - max(b for b in (0, *window) if b <= i) for i in range(SEQ_LEN)]
    return sum(2 * p + 1 for i, p in enumerate(positions) if i * 4 // SEQ_LEN in quarters)


# ----- mfu_documents, attention_imbalance -----
def test_a_run_counts_the_attention_of_the_documents_that_its_ranks_had(tmp_path: Path) -> None:
    """Of four ranks two share each window: one has the outer quarters, the other the inner ones. A
    step has two microbatches of two windows."""
    texts = f"--training.dataset_path={write_texts(tmp_path)}"
    settings = [texts, "--training.document_mask", "--training.steps=2", f"{CP}=2"]
    words = train_arguments(tmp_path, *settings)
    finish(str(FOLDER / "samples_worker.py"), *words[2:], processes=4)

    records = read_records(tmp_path)
    assert [record["step"] for record in records] == [1, 2]
    for record in records:
        squares = []  # [ranks, microbatches]
        for rank, quarters in enumerate([{0, 3}, {1, 2}] * 2):
            noted = (tmp_path / f"samples-{rank}.jsonl").read_text().splitlines()
            lines = [line for line in map(json.loads, noted) if line["step"] == record["step"]]
            assert [len(line["bos"]) for line in lines] == [2, 2]
            squares.append(
                [sum(document_squares(bos, quarters) for bos in line["bos"]) for line in lines]
            )
        total, busiest = sum(map(sum, squares)), sum(map(max, zip(*squares, strict=True)))

        # All runs in bf16, so utilisations are as FLOPs: 12 * layers * heads * head_dim * S.
        flops, attention = record["tflops"] * 1e12 / record["tps"], 12 * 1 * 2 * 16 * SEQ_LEN
        left_out = (1 - record["mfu_documents"] / record["mfu"]) * flops / attention
        assert 1 - left_out == pytest.approx(total / (8 * SEQ_LEN**2), rel=1e-9)
        assert left_out > 0.3
        assert record["attention_imbalance"] == pytest.approx(busiest * 4 / total, rel=1e-12)
        assert record["attention_imbalance"] > 1.01
