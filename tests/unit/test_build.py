"""What is asked of a step, by which data sheet it is predicted, and which weights begin a run."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from sample_jobs import job_of
from torchao.float8.float8_linear import Float8Linear

from torchtitan_lite import build
from torchtitan_lite.build import build_checkpointer
from torchtitan_lite.build_model import asked_of_step
from torchtitan_lite.config import (
    CheckpointConfig,
    Config,
    Float8Config,
    MetricsConfig,
    ModelConfig,
    TrainingConfig,
)
from torchtitan_lite.models.flavors import ModelArgs
from torchtitan_lite.planner.meta_model import MetaModel, build_meta_model, planned_device
from torchtitan_lite.torchao_types import is_gathered_in_float8


def converted_names(meta: MetaModel) -> list[str]:
    return [name for choice in meta.converted for name in choice.names]


@pytest.mark.parametrize(
    ("float8", "degrees", "expected"),
    [
        ({}, (1, 2, 2), (0, 0, 0, 0)),
        ({"enable_float8_linear": True}, (1, 2, 2), (14, 168, 0, 32)),
        ({"enable_float8_linear": True, "recipe_name": "rowwise"}, (1, 2, 2), (14, 168, 0, 0)),
        (
            {"enable_float8_linear": True, "recipe_name": "rowwise_with_gw_hp"},
            (1, 4, 1),
            (14, 56, 0, 0),
        ),
        (
            {"enable_float8_linear": True, "enable_fsdp_float8_all_gather": True},
            (2, 2, 1),
            (14, 84, 2, 0),
        ),
        (
            {"enable_float8_linear": True, "enable_fsdp_float8_all_gather": True},
            (4, 1, 1),
            (14, 84, 0, 0),
        ),
        (
            {"enable_float8_linear": True, "filter_fqns": ("wk", "layers.1")},
            (1, 2, 2),
            (6, 72, 0, 12),
        ),
        (
            {
                "enable_float8_linear": True,
                "enable_fsdp_float8_all_gather": True,
                "convert_output": True,
            },
            (1, 2, 2),
            (15, 180, 3, 36),
        ),
    ],
)
def test_what_is_asked_of_a_step_follows_from_recipe_filters_and_degrees(
    float8: dict[str, Any], degrees: tuple[int, int, int], expected: tuple[int, ...]
) -> None:
    args = ModelArgs(
        dim=64, n_layers=2, n_heads=4, n_kv_heads=4, ffn_dim=128, vocab_size=64, max_seq_len=32
    )
    training = TrainingConfig(seq_len=32, local_batch_size=1, global_batch_size=8)
    asking = Config(training=training, float8=Float8Config(**float8))
    job = job_of(asking, args, degrees=degrees)
    meta = build_meta_model(job, emulate=True)
    asked = asked_of_step(job, converted_names(meta), ledger=meta.ledger)
    assert (asked.linears, asked.matmuls, asked.fsdp_gathers, asked.tp_gathers) == expected
    assert asked.matmuls_run_in == ("float32" if float8 else "float8")


def test_tied_embeddings_are_gathered_in_high_precision_also_for_a_float8_output() -> None:
    float8 = Float8Config(
        enable_float8_linear=True, enable_fsdp_float8_all_gather=True, convert_output=True
    )
    job = job_of(
        Config(training=TrainingConfig(seq_len=32), float8=float8),
        ModelArgs(dim=64, n_layers=2, n_heads=8, ffn_dim=128, vocab_size=64, tie_embeddings=True),
        degrees=(1, 2, 1),
    )
    meta = build_meta_model(job, emulate=True)
    assert type(meta.model.output) is Float8Linear
    assert meta.model.output.weight is meta.model.tok_embeddings.weight
    assert [is_gathered_in_float8(weight) for weight in meta.model.parameters()].count(True) == 14
    asked = asked_of_step(job, converted_names(meta), ledger=meta.ledger)
    assert (asked.linears, asked.fsdp_gathers) == (15, 2)  # of the blocks


@pytest.mark.parametrize(
    ("name", "float8", "planned"),
    [
        ("NVIDIA H200", True, "H200"),
        ("NVIDIA A100 80GB PCIe", False, "A100 PCIe 80GB"),
        ("NVIDIA A100 80GB PCIe", True, None),
        ("Some GPU", False, None),
    ],
)
def test_rates_are_not_guessed(
    name: str, float8: bool, planned: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    config = Config(
        metrics=MetricsConfig(peak_tflops_bf16=800.0),
        float8=Float8Config(enable_float8_linear=float8),
    )
    spec = planned_device(torch.device("cuda", 0), config)
    assert (spec and (spec.name, spec.bf16_tflops)) == (planned and (planned, 800))
    assert planned_device(torch.device("cpu"), config) is None


@pytest.mark.parametrize(
    ("keys", "loaded"),
    [
        ({"initial_load_in_hf": True}, ["/llama"]),
        ({"initial_load_in_hf": True, "initial_load_path": "/other"}, ["/other"]),
        ({}, []),
    ],
)
def test_a_hugging_face_model_may_be_in_the_folder_of_the_tokenizer(
    monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any], loaded: list[str]
) -> None:
    loads: list[Path] = []
    checkpointer = SimpleNamespace(load_weights=lambda path, _: loads.append(path))
    monkeypatch.setattr(build, "Checkpointer", lambda *_, **__: checkpointer)
    checkpoint = CheckpointConfig(enable=True, **keys)
    job = job_of(Config(model=ModelConfig(tokenizer_path="/llama"), checkpoint=checkpoint))
    mesh: Any = MagicMock(mesh_dim_names=("dp_shard",), shape=(1,))
    nothing: Any = None
    build_checkpointer(job, nothing, nothing, mesh=mesh, device=torch.device("cpu"), resume=None)
    assert loads == list(map(Path, loaded))


@pytest.mark.parametrize(("steps", "warned"), [(500, False), (501, True)])
def test_a_long_run_that_saves_nothing_says_so(
    monkeypatch: pytest.MonkeyPatch, notices: pytest.LogCaptureFixture, steps: int, warned: bool
) -> None:
    monkeypatch.setattr(build, "Checkpointer", lambda *_, **__: SimpleNamespace())
    job = job_of(Config(training=TrainingConfig(steps=steps)))
    mesh: Any = MagicMock(mesh_dim_names=("dp_shard",), shape=(1,))
    nothing: Any = None
    build_checkpointer(job, nothing, nothing, mesh=mesh, device=torch.device("cpu"), resume=None)
    assert ("nothing is saved in 501 steps" in notices.text) == warned
