"""What the model is made with, and the refusals on the way."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from torchtitan_lite.build import check_same_tokens
from torchtitan_lite.config import Config, ModelConfig, TrainingConfig
from torchtitan_lite.errors import ConfigError, DataError
from torchtitan_lite.meta import resolve_model_args


def tokenizer(vocab_size: int) -> Any:
    return SimpleNamespace(vocab_size=vocab_size, path=Path("some.model"))


def config(flavor: str) -> Config:
    return Config(model=ModelConfig(flavor=flavor), training=TrainingConfig(seq_len=4096))


@pytest.mark.parametrize(("flavor", "vocab_size"), [("debugmodel", 2256), ("8B", 128256), ("405B", 128256)])
def test_the_vocabulary_is_the_flavors_own_and_the_debug_models_the_tokenizers(flavor: str, vocab_size: int) -> None:
    args = resolve_model_args(config(flavor), tokenizer(2256))
    assert (args.vocab_size, args.max_seq_len) == (vocab_size, 4096)


def test_a_tokenizer_with_more_ids_than_the_model_is_refused() -> None:
    assert resolve_model_args(config("8B"), tokenizer(128256)).vocab_size == 128256
    with pytest.raises(
        ConfigError, match=r"\[model\] tokenizer_path = 'some.model' has 128257 ids, more than the 128256"
    ):
        resolve_model_args(config("8B"), tokenizer(128257))


@pytest.mark.parametrize("others", [[], [2], [1, 3]])
def test_ranks_with_other_tokens_are_named(others: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    def gather(into: list[str], own: str) -> None:
        into[:] = ["other" if rank in others else own for rank in range(4)]

    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(dist, "all_gather_object", gather)
    store: Any = SimpleNamespace(fingerprint="same")
    if not others:
        check_same_tokens(store, "texts")
        return
    with pytest.raises(
        DataError, match=rf"texts: rank 0 has other tokens than {len(others)} of 4.* first of them {others[0]}"
    ):
        check_same_tokens(store, "texts")
