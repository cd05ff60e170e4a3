"""What is asked of a step, by which data sheet it is predicted, and which weights begin a run."""

from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from sample_jobs import TOKENIZER, job_of
from torchao.float8.float8_linear import Float8Linear

from torchtitan_lite.base.errors import CheckpointError
from torchtitan_lite.base.torchao_types import is_gathered_in_float8
from torchtitan_lite.catalog.flavors import ModelArgs
from torchtitan_lite.checkpoint.manifest import NEW_RUN, CheckpointManifest
from torchtitan_lite.checkpoint.resume import Resume
from torchtitan_lite.config import (
    CheckpointConfig,
    CompileConfig,
    Config,
    Float8Config,
    MetricsConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelismConfig,
    TrainingConfig,
    ValidationConfig,
)
from torchtitan_lite.config.job import build_job
from torchtitan_lite.planner.prepare import planned_device
from torchtitan_lite.training import build
from torchtitan_lite.training.build import build_batches, build_loaded_model, check_resume
from torchtitan_lite.training.model import asked_of_step, build_meta_model, choose_linears

FLOAT8 = {"enable_float8_linear": True}
ROWWISE = FLOAT8 | {"recipe_name": "rowwise"}
ROWWISE_HP = FLOAT8 | {"recipe_name": "rowwise_with_gw_hp"}
GATHER = FLOAT8 | {"enable_fsdp_float8_all_gather": True}
SIZES: dict[str, Any] = {"dim": 64, "n_layers": 2, "n_heads": 8, "ffn_dim": 128, "vocab_size": 64}

# ----- asked_of_step -----


@pytest.mark.parametrize(
    ("float8", "tied", "degrees", "expected"),
    [
        ({}, False, (1, 2, 2), (0, 0, 0, 0)),
        (FLOAT8, False, (1, 2, 2), (14, 168, 0, 32)),
        (ROWWISE, False, (1, 2, 2), (14, 168, 0, 0)),
        (ROWWISE_HP, False, (1, 4, 1), (14, 56, 0, 0)),
        (GATHER, False, (2, 2, 1), (14, 84, 2, 0)),
        (GATHER, False, (4, 1, 1), (14, 84, 0, 0)),
        (FLOAT8 | {"filter_fqns": ("wk", "layers.1")}, False, (1, 2, 2), (6, 72, 0, 12)),
        (GATHER | {"convert_output": True}, False, (1, 2, 2), (15, 180, 3, 36)),
        (GATHER | {"convert_output": True}, True, (1, 4, 1), (15, 90, 2, 0)),  # not the output
    ],
)
def test_what_a_step_asks_for_follows_from_recipe_filters_and_degrees(
    float8, tied, degrees, expected
):
    training = TrainingConfig(seq_len=32, local_batch_size=1, global_batch_size=8)
    config = Config(training=training, float8=Float8Config(**float8))
    job = job_of(config, ModelArgs(**SIZES, tie_embeddings=tied), degrees=degrees)
    meta = build_meta_model(job, choose_linears(job), emulate=True)
    asked = asked_of_step(job, meta, stages=[0])
    assert (asked.linears, asked.matmuls, asked.fsdp_gathers, asked.tp_gathers) == expected
    assert asked.matmuls_run_in == ("float32" if float8 else "float8")
    if tied:
        assert type(meta.model.output) is Float8Linear
        assert meta.model.output.weight is meta.model.tok_embeddings.weight
        assert sum(map(is_gathered_in_float8, meta.model.parameters())) == 14


@pytest.mark.parametrize(
    ("compile", "graphs"),
    [
        ({"enable": True}, [1, 2, 1]),
        ({"enable": True, "components": ("loss",)}, [0, 1, 1]),
        ({}, [0, 0, 0]),
    ],
)
def test_a_rank_compiles_a_graph_for_blocks_and_one_for_the_loss(compile, graphs):
    job = job_of(Config(compile=CompileConfig(**compile)), ModelArgs(**SIZES))
    meta = build_meta_model(job, choose_linears(job))
    job = replace(job, stages=(("tok_embeddings", "layers.0"), ("layers.1",), ("norm", "output")))
    of_ranks = [asked_of_step(job, meta, stages=stages) for stages in ([0], [1, 2], [2])]
    assert [asked.graphs for asked in of_ranks] == graphs


@pytest.mark.parametrize(
    ("name", "float8", "planned"),
    [
        ("NVIDIA H200", True, "H200"),
        ("NVIDIA A100 80GB PCIe", False, "A100 PCIe 80GB"),
        ("NVIDIA A100 80GB PCIe", True, None),
        ("Some GPU", False, None),
    ],
)
def test_planned_device_guesses_no_rates(name, float8, planned, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    metrics = MetricsConfig(peak_tflops_bf16=800.0)
    config = Config(metrics=metrics, float8=Float8Config(enable_float8_linear=float8))
    spec = planned_device(torch.device("cuda", 0), config)
    assert (spec and (spec.name, spec.bf16_tflops)) == (planned and (planned, 800))
    assert planned_device(torch.device("cpu"), config) is None


# ----- build_batches -----


@pytest.mark.parametrize(("own", "pp", "size"), [(3, 1, 3), (None, 1, 4), (3, 2, 2), (None, 2, 2)])
def test_batches_of_validation_have_its_size_but_a_pipelines_in_a_pipeline(
    own, pp, size, monkeypatch
):
    corpora = MagicMock(), SimpleNamespace(seq_len=8), 5
    monkeypatch.setattr(build, "build_corpora", lambda *_, **__: corpora)
    monkeypatch.setattr(build, "log_data", lambda *_: None)
    parallelism = ParallelismConfig(
        pipeline_parallel_degree=pp, pipeline_parallel_microbatch_size=2
    )
    validation = ValidationConfig(enable=True, local_batch_size=own)
    training = TrainingConfig(local_batch_size=4)
    config = Config(training=training, validation=validation, parallelism=parallelism)
    job = build_job(config, world_size=pp, tokenizer=TOKENIZER)
    _, batches = build_batches(job, MagicMock(), dp_rank=0, progress=NEW_RUN)
    assert batches is not None and (batches.local_batch_size, batches.samples) == (size, 5)


# ----- check_resume -----


def test_a_resume_logs_what_it_changes(notices):
    saved = CheckpointManifest(
        world_size=2,
        model=asdict(job_of(Config()).model_args),
        config="[training]\nsteps = 30\nlocal_batch_size = 8\nglobal_batch_size = -1",
        progress=replace(NEW_RUN, step=20),
    )
    resume = Resume(Path(), saved)
    job = job_of(Config(training=TrainingConfig(steps=40, global_batch_size=8)))
    check_resume(resume, job)
    assert "since step 20: [training] steps: 30 -> 40" in notices.messages
    assert "since step 20: [training] global_batch_size: -1 -> 8" in notices.messages


@pytest.mark.parametrize(("before", "now"), [("AdamW", "Muon"), ("Muon", "Adam"), ("", "Muon")])
def test_a_checkpoint_of_another_kind_of_optimizer_needs_new_moments(before, now):
    job = job_of(Config(optimizer=OptimizerConfig(name=now)))
    saved = CheckpointManifest(
        world_size=2,
        model=asdict(job.model_args),
        config=f'[optimizer]\nname = "{before}"' if before else "",
        progress=NEW_RUN,
    )
    message = (
        rf'\[optimizer\] name = "{now}": a/b .* of "{before or "AdamW"}".*exclude_from_loading'
    )
    with pytest.raises(CheckpointError, match=message):
        check_resume(Resume(Path("a/b"), saved), job)
    check_resume(Resume(Path("a/b"), saved, new_moments=True), job)
    for name in ("Adam", "AdamW"):
        other = replace(saved, config=f'[optimizer]\nname = "{name}"')
        check_resume(Resume(Path("a/b"), other), job_of(Config()))


# ----- build_loaded_model -----


def loaded_weights(monkeypatch: pytest.MonkeyPatch, config: Config) -> list[str]:
    """Build the model of a new run, and return what its checkpointer loads weights from."""
    loads: list[str] = []
    checkpointer = SimpleNamespace(load_weights=lambda path, _: loads.append(str(path)))
    monkeypatch.setattr(build, "Checkpointer", lambda *_, **__: checkpointer)
    monkeypatch.setattr(build, "build_model", MagicMock())
    monkeypatch.setattr(build, "build_optimizer", MagicMock())
    build_loaded_model(job_of(config), MagicMock(), device=torch.device("cpu"), resume=None)
    return loads


@pytest.mark.parametrize(
    ("keys", "loaded"),
    [
        ({"initial_load_in_hf": True}, ["/llama"]),
        ({"initial_load_in_hf": True, "initial_load_path": "/other"}, ["/other"]),
        ({}, []),
    ],
)
def test_a_hugging_face_model_may_be_in_the_folder_of_the_tokenizer(monkeypatch, keys, loaded):
    checkpoint = CheckpointConfig(enable=True, **keys)
    config = Config(model=ModelConfig(tokenizer_path="/llama"), checkpoint=checkpoint)
    assert loaded_weights(monkeypatch, config) == loaded
