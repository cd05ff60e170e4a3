"""What the model is made with, what a run trains on, and the refusals on the way."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from test_dataloader import FakeStore, windows_of

from torchtitan_lite import build
from torchtitan_lite.build import (
    asked_of_step,
    build_batches,
    check_same_data,
    check_same_tokens,
    open_stores,
)
from torchtitan_lite.checkpoint.manifest import NEW_RUN, TrainingProgress
from torchtitan_lite.config import (
    BatchSizes,
    Config,
    Float8Config,
    ModelConfig,
    ParallelDegrees,
    TrainingConfig,
    ValidationConfig,
)
from torchtitan_lite.errors import ConfigError, DataError
from torchtitan_lite.logger import logger
from torchtitan_lite.models.flavors import ModelArgs
from torchtitan_lite.planner.meta_model import build_meta_model, resolve_model_args


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


@pytest.mark.parametrize("others", [[], [2], [1, 3]])
def test_ranks_with_other_tokens_are_named(
    others: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def gather(into: list[list[str]], own: list[str]) -> None:
        into[:] = [[own[0], "other" if rank in others else own[1]] for rank in range(4)]

    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(dist, "all_gather_object", gather)
    stores: Any = {
        "books": SimpleNamespace(fingerprint="one"),
        "texts": SimpleNamespace(fingerprint="same"),
    }
    if not others:
        check_same_tokens(stores)
        return
    with pytest.raises(
        DataError,
        match=rf"^texts: rank 0 has other tokens than {len(others)} of 4.* first of them {others[0]}",
    ):
        check_same_tokens(stores)


@pytest.fixture
def messages(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> pytest.LogCaptureFixture:
    """What is logged."""
    monkeypatch.setattr(logger, "propagate", True)
    caplog.set_level("INFO", logger.name)
    return caplog


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Settings of the stores that were opened, of 40 windows of 4 for "a" and 1000 ids further for
    each letter on."""
    settings: list[str] = []

    def open_data(path: str | None, *, text_field: str, tokenizer: Any, setting: str) -> Any:
        settings.append(setting)
        return FakeStore(40, first=1000 * (ord((path or "a")[0]) - ord("a")))

    monkeypatch.setattr(build, "open_data", open_data)
    monkeypatch.setattr(build, "check_same_tokens", lambda stores: None)
    return settings


def data_of(
    progress: TrainingProgress = NEW_RUN, *, validation: ValidationConfig | None = None, **training: Any
) -> Any:
    """Training and validation batches of the stores of `opened`, a sample a step."""
    section = TrainingConfig(**{"seq_len": 4, "local_batch_size": 1, "steps": 40, **training})
    config = Config(training=section, validation=validation or ValidationConfig())
    sizes = BatchSizes(1, 1, 1)
    return build_batches(
        config, tokenizer(9), sizes, vocab_size=9999, dp_rank=0, dp_degree=1, progress=progress
    )


def trained(batches: Any) -> list[int]:
    return [window for tokens, _ in batches for window in windows_of(tokens)]


def test_stores_have_the_names_of_their_paths_and_numbers_where_two_are_alike(
    opened: list[str],
) -> None:
    def names(*paths: str) -> list[str]:
        return list(
            open_stores(TrainingConfig(datasets=[{"path": path} for path in paths]), tokenizer(9))
        )

    assert names("data/a", "b.txt") == ["a", "b.txt"]
    assert opened == [
        '[[training.datasets]] 1: path = "data/a"',
        '[[training.datasets]] 2: path = "b.txt"',
    ]
    assert names("b/text", "c", "a/c2", "d/c2") == ["text", "c", "3-c2", "4-c2"]


def test_one_store_has_the_name_of_its_path_or_of_its_corpus(opened: list[str]) -> None:
    assert list(open_stores(TrainingConfig(), tokenizer(9))) == ["pystdlib"]
    assert list(open_stores(TrainingConfig(dataset_path="data/a.txt"), tokenizer(9))) == ["a.txt"]
    assert opened == ['[training] dataset = "pystdlib"', '[training] dataset_path = "data/a.txt"']


def test_the_same_tokens_twice_are_refused(opened: list[str]) -> None:
    training = TrainingConfig(datasets=[{"path": path} for path in ("a", "b", "a/copy")])
    with pytest.raises(
        DataError,
        match=r'^\[\[training.datasets\]\] 3: path = "a/copy" holds the same tokens as 1; list',
    ):
        open_stores(training, tokenizer(9))


def test_without_validation_all_is_trained_on(opened: list[str]) -> None:
    batches, validation = data_of()
    assert sorted(trained(batches)) == list(range(40))
    assert validation is None


@pytest.mark.parametrize("dataset_path", [None, "a/same"])
def test_validation_on_the_training_data_is_held_out(
    dataset_path: str | None, opened: list[str]
) -> None:
    section = ValidationConfig(enable=True, steps=5, dataset_path=dataset_path)
    batches, validation = data_of(validation=section, steps=35)
    assert sorted(trained(batches) + trained(validation)) == list(range(40))


def test_validation_on_one_of_several_stores_is_held_out_of_that_one(opened: list[str]) -> None:
    section = ValidationConfig(enable=True, steps=5, dataset_path="b")
    batches, validation = data_of(
        validation=section, datasets=[{"path": "a"}, {"path": "b"}], steps=70
    )
    assert [windows.held_out for windows in batches.corpus.windows] == [0, 5]
    assert len({*trained(batches), *trained(validation)}) == 35 + 40
    assert not set(trained(batches)) & set(trained(validation))


def test_validation_on_other_data_takes_nothing(opened: list[str]) -> None:
    batches, validation = data_of(
        validation=ValidationConfig(enable=True, steps=40, dataset_path="c")
    )
    assert sorted(trained(batches)) == list(range(40))
    assert sorted(trained(validation)) == list(range(500, 540))
    assert opened == ['[training] dataset = "pystdlib"', '[validation] dataset_path = "c"']


def test_a_resumed_run_goes_on_at_its_sample(opened: list[str]) -> None:
    whole, _ = data_of()
    progress = TrainingProgress(step=3, samples=12, tokens=48, data=whole.corpus.identity())
    assert trained(data_of(progress, steps=31)[0]) == trained(whole)[12:]


@pytest.mark.parametrize("validation", [ValidationConfig(), ValidationConfig(enable=True, steps=2)])
def test_what_was_held_out_stays_so_for_a_smaller_validation(
    validation: ValidationConfig, opened: list[str]
) -> None:
    """As for a smaller local batch: the order goes on."""
    whole, _ = data_of(validation=ValidationConfig(enable=True, steps=5), steps=35)
    progress = TrainingProgress(step=3, samples=12, tokens=48, data=whole.corpus.identity())
    batches, _ = data_of(progress, validation=validation, steps=26)
    assert trained(batches) == trained(whole)[12:]


def test_changed_data_is_refused_on_resume_with_the_changes(opened: list[str]) -> None:
    before = data_of(dataset_path="a")[0].corpus.identity()
    progress = TrainingProgress(step=3, samples=12, tokens=48, data=before)
    changed = {"dataset_path": "b", "seq_len": 5}
    with pytest.raises(DataError) as caught:
        data_of(progress, **changed)
    assert str(caught.value) == (
        "[training] allow_data_change = false, and the data is not what step 3 was trained on: seq_len: 4 -> 5; "
        "store 1 name: a -> b; store 1 fingerprint: 0000000000000000 -> 1000000000000000. "
        "Undo that, or set it to true, to go on at sample 12 of the new order. "
        "([validation] steps * [training] local_batch_size are held out; what is newly so may have been trained on.)"
    )
    assert data_of(progress, allow_data_change=True, **changed)[0].samples(4) == 13


def test_a_store_more_or_less_is_a_change() -> None:
    one = {"seq_len": 4, "store 1 name": "a"}
    two = one | {"store 2 name": "b", "store 2 tokens": 9}
    for before, after, change in ((one, two, "none -> 9"), (two, one, "9 -> none")):
        with pytest.raises(DataError, match=f"store 2 tokens: {change}"):
            check_same_data(TrainingProgress(1, 1, 1, before), after, allow_change=False)


def test_a_store_that_was_moved_is_told_of(messages: Any) -> None:
    before = {"seq_len": 4, "store 1 name": "a"}
    check_same_data(TrainingProgress(3, 12, 48, before), before, allow_change=False)
    assert messages.records == []
    check_same_data(TrainingProgress(3, 12, 48, before), before | {"store 1 name": "b"}, allow_change=False)
    assert [record.getMessage() for record in messages.records] == [
        "since step 3 the data has changed; on at sample 12: store 1 name: a -> b"
    ]


@pytest.mark.parametrize(
    ("training", "said"),
    [
        ({}, []),
        (
            {"epochs": 0.5},
            ["[training] epochs = 0.5 end the run at step 20 of 40; 0 samples are left over"],
        ),
        ({"epochs": 1.5}, ["[training] steps = 40 end the run, before 1.5 epochs do"]),
    ],
)
def test_what_is_said_of_the_data(
    training: dict[str, Any], said: list[str], opened: list[str], messages: Any
) -> None:
    data_of(**training)
    first, *others = [record.getMessage() for record in messages.records]
    steps = 20 if training.get("epochs") == 0.5 else 40
    assert first == (
        "pystdlib: 3 documents, 161 tokens, 100.00% of the samples; an epoch is 40 windows of 4, 0 more are held out "
        f"for validation; {steps / 40:g} epochs up to step {steps}"
    )
    assert [other[: len(text)] for other, text in zip(others, said, strict=True)] == said
