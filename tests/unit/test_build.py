"""What the model is made with, and the refusals on the way."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torchtitan_lite.meta import build_meta_model, resolve_model_args

from torchtitan_lite.build import asked_of_step
from torchtitan_lite.config import (
    Config,
    Float8Config,
    ModelConfig,
    ParallelDegrees,
    TrainingConfig,
)
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.models.flavors import ModelArgs


def tokenizer(vocab_size: int) -> Any:
    return SimpleNamespace(vocab_size=vocab_size, bos_id=1, path=Path("some.model"))


def config(flavor: str) -> Config:
    return Config(model=ModelConfig(flavor=flavor), training=TrainingConfig(seq_len=4096))


@pytest.mark.parametrize(
    ("flavor", "vocab_size"), [("debugmodel", 2256), ("8B", 128256), ("405B", 128256)]
)
def test_the_vocabulary_is_the_flavors_own_and_the_debug_models_the_tokenizers(
    flavor: str, vocab_size: int
) -> None:
    args = resolve_model_args(config(flavor), tokenizer(2256))
    assert (args.vocab_size, args.max_seq_len) == (vocab_size, 4096)


def test_documents_begin_at_the_tokenizers_bos_where_attention_is_not_to_leave_them() -> None:
    assert resolve_model_args(config("8B"), tokenizer(2256)).document_bos_id is None
    masked = config("8B").model_copy(update={"training": TrainingConfig(document_mask=True)})
    assert resolve_model_args(masked, tokenizer(2256)).document_bos_id == 1


def test_a_tokenizer_with_more_ids_than_the_model_is_refused() -> None:
    assert resolve_model_args(config("8B"), tokenizer(128256)).vocab_size == 128256
    with pytest.raises(
        ConfigError,
        match=r"\[model\] tokenizer_path = 'some.model' has 128257 ids, more than the 128256",
    ):
        resolve_model_args(config("8B"), tokenizer(128257))


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
    meta = build_meta_model(
        asking, args, tp_degree=degrees[2], emulate=True, fused_attention=True, rates=None
    )
    asked = asked_of_step(
        asking, meta.choices, degrees=ParallelDegrees(*degrees), ledger=meta.ledger
    )
    assert (asked.linears, asked.matmuls, asked.fsdp_gathers, asked.tp_gathers) == expected
    assert asked.matmuls_run_in == ("float32" if float8 else "float8")
