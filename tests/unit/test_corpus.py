"""The data of a run: which stores are opened, what is held out, and which changes are refused."""

import re
from types import SimpleNamespace
from typing import Any

import pytest
from sample_stores import FakeStore, windows_of

from torchtitan_lite.base.errors import DataError
from torchtitan_lite.checkpoint.manifest import TrainingProgress
from torchtitan_lite.config import BatchSizes, TrainingConfig, ValidationConfig, resolve_shares
from torchtitan_lite.data import corpus as corpus_module
from torchtitan_lite.data.corpus import (
    build_corpora,
    check_same_data,
    check_same_tokens,
    log_data,
    open_stores,
)
from torchtitan_lite.data.dataloader import TrainingBatches, ValidationBatches

TOKENIZER: Any = SimpleNamespace()
VALIDATION_OFF = ValidationConfig()


# ----- check_same_tokens -----


@pytest.mark.parametrize("others", [[], [2], [1, 3]])
def test_ranks_with_other_tokens_are_named(others, monkeypatch):
    def on_all_ranks(make: Any) -> list[list[str]]:
        return [[make()[0], "other" if rank in others else make()[1]] for rank in range(4)]

    monkeypatch.setattr(corpus_module, "on_all_ranks", on_all_ranks)
    fingerprints = {"books": "one", "texts": "same"}
    stores: Any = {name: SimpleNamespace(fingerprint=f) for name, f in fingerprints.items()}
    if not others:
        check_same_tokens(stores)
        return
    message = (
        rf"^books, texts: rank 0 has other tokens than {len(others)} of 4 .* of them {others[0]}; "
    )
    with pytest.raises(DataError, match=message):
        check_same_tokens(stores)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Tables and paths of the stores that were opened. A store has 40 windows of 4, from id 0 on
    for "a", and 1000 ids further for each letter."""
    settings: list[str] = []

    def open_data(table: str, path: str | None, *_: Any, dataset: str = "", **key: str) -> Any:
        settings.append(f"{table} {path or dataset}")
        return FakeStore(40, first=1000 * (ord((path or "a")[0]) - ord("a")))

    monkeypatch.setattr(corpus_module, "open_data", open_data)
    monkeypatch.setattr(corpus_module, "check_same_tokens", lambda stores: None)
    return settings


def data_of(trained_on=None, *, validation=VALIDATION_OFF, **training) -> Any:
    """Training and validation batches of the stores of `opened`, a sample a step. With `trained_on`
    they go on after 3 steps of 4 samples."""
    section = TrainingConfig(**{"seq_len": 4, "local_batch_size": 1, "steps": 40, **training})
    progress = TrainingProgress(step=3, samples=12, tokens=48, data=trained_on or {})
    shares = resolve_shares(section.datasets)
    shape = {"shares": shares, "vocab_size": 9999, "seed": 0, "held_out_before": progress.held_out}
    corpus, to_validate, validated = build_corpora(section, validation, TOKENIZER, **shape)
    first: dict[str, int] = {}
    if trained_on:
        change = section.allow_data_change
        check_same_data(trained_on, corpus.identity(), step=3, samples=12, allow_change=change)
        first = {"first_step": 4, "first_sample": 12}
    ranks = {"dp_rank": 0, "dp_degree": 1}
    length = {"steps": section.steps, "epochs": section.epochs}
    sizes = BatchSizes(1, 1, 1)
    batches = TrainingBatches(corpus=corpus, sizes=sizes, **length, **ranks, **first)
    log_data(batches, section)
    held_out = ValidationBatches(to_validate, local_batch_size=1, samples=validated, **ranks)
    return batches, held_out


def trained(batches: Any) -> list[int]:
    return [window for tokens, _ in batches for window in windows_of(tokens)]


# ----- open_stores -----


def names(*paths: str) -> list[str]:
    section = TrainingConfig(datasets=[{"path": path} for path in paths])
    return list(open_stores(section, TOKENIZER))


def test_stores_have_the_names_of_their_paths_and_numbers_where_two_are_alike(opened):
    assert names("data/a", "b.txt") == ["a", "b.txt"]
    assert opened == ["[[training.datasets]] 1: data/a", "[[training.datasets]] 2: b.txt"]
    assert names("b/text", "c", "a/c2", "d/c2") == ["text", "c", "3-c2", "4-c2"]


def test_one_store_has_the_name_of_its_path_or_of_its_dataset(opened):
    assert list(open_stores(TrainingConfig(), TOKENIZER)) == ["pystdlib"]
    assert list(open_stores(TrainingConfig(dataset_path="data/a.txt"), TOKENIZER)) == ["a.txt"]
    assert opened == ["[training] pystdlib", "[training] data/a.txt"]


def test_the_same_tokens_twice_are_refused(opened):
    message = r'^\[\[training.datasets]] 3: path = "a/copy" holds the same tokens as a; list'
    with pytest.raises(DataError, match=message):
        names("a", "b", "a/copy")


# ----- build_corpora, build_validation_corpus -----


@pytest.mark.parametrize("dataset_path", [None, "a/same"])
def test_validation_on_the_training_data_is_held_out(dataset_path, opened):
    section = ValidationConfig(enable=True, steps=5, dataset_path=dataset_path)
    batches, validation = data_of(validation=section, steps=35)
    assert sorted(trained(batches) + trained(validation)) == list(range(40))


def test_validation_on_one_of_several_stores_is_held_out_of_that_one(opened):
    section = ValidationConfig(enable=True, steps=5, dataset_path="b")
    stores = [{"path": "a"}, {"path": "b"}]
    batches, validation = data_of(validation=section, datasets=stores, steps=70)
    assert [windows.held_out for windows in batches.corpus.windows] == [0, 5]
    assert len({*trained(batches), *trained(validation)}) == 35 + 40
    assert not set(trained(batches)) & set(trained(validation))


def test_validation_on_all_data(opened):
    every = ValidationConfig(enable=True, steps=-1, dataset_path="c")
    batches, validation = data_of(validation=every)
    assert sorted(trained(validation)) == list(range(500, 540))
    assert sorted(trained(batches)) == list(range(40))


@pytest.mark.parametrize(("steps", "windows"), [(-1, 80), (5, 15)])
def test_validation_has_a_batch_and_a_length_of_its_own(steps, windows, opened):
    section = ValidationConfig(
        enable=True, steps=steps, dataset_path="c", seq_len=2, local_batch_size=3
    )
    batches, validation = data_of(validation=section)
    assert (validation.corpus.seq_len, validation.samples) == (2, windows)
    assert {tuple(tokens.shape) for tokens, _ in validation} == {(1, 2)}
    assert sorted(trained(batches)) == list(range(40))


def test_a_batch_of_its_own_holds_out_as_many_windows(opened):
    section = ValidationConfig(enable=True, steps=5, local_batch_size=3)
    assert data_of(validation=section)[0].corpus.windows[0].held_out == 15


def test_another_length_needs_data_that_is_not_trained_on(opened):
    section = ValidationConfig(enable=True, dataset_path="a", seq_len=2)
    with pytest.raises(DataError, match=r"^\[validation] seq_len = 2, but it is 4 in \[training]"):
        data_of(validation=section)


@pytest.mark.parametrize("steps", [-1, 1])
def test_validation_on_too_little_data_is_refused(steps, opened):
    section = ValidationConfig(enable=True, steps=steps, dataset_path="c")
    with pytest.raises(
        DataError, match=r"^\[validation] or .* 161 tokens, which make 0 windows of 200"
    ):
        data_of(validation=section, seq_len=200)


@pytest.mark.parametrize("enable", [True, False])
def test_validation_on_other_data_or_none_takes_nothing(enable, opened):
    section = ValidationConfig(enable=enable, steps=40, dataset_path="c")
    batches, validation = data_of(validation=section)
    assert sorted(trained(batches)) == list(range(40))
    assert sorted(trained(validation)) == list(range(500, 540)) * enable
    assert opened == ["[training] pystdlib", "[validation] c"][: 1 + enable]


# ----- check_same_data, held_out_before -----


def test_a_resumed_run_goes_on_at_its_sample(opened):
    whole, _ = data_of()
    assert trained(data_of(whole.corpus.identity(), steps=31)[0]) == trained(whole)[12:]


@pytest.mark.parametrize("validation", [VALIDATION_OFF, ValidationConfig(enable=True, steps=2)])
def test_what_was_held_out_stays_so_for_a_smaller_validation(validation, opened):
    """As for a smaller local batch: the order goes on."""
    whole, _ = data_of(validation=ValidationConfig(enable=True, steps=5), steps=35)
    batches, _ = data_of(whole.corpus.identity(), validation=validation, steps=26)
    assert trained(batches) == trained(whole)[12:]


@pytest.mark.parametrize("no_count", ["many", 2**63])
def test_a_held_out_entry_that_is_no_count_holds_nothing_out(no_count, opened):
    before = data_of()[0].corpus.identity() | {"store 1 held out": no_count}
    batches, _ = data_of(before, allow_data_change=True)
    assert [windows.held_out for windows in batches.corpus.windows] == [0]


def test_changed_data_is_refused_on_resume_with_the_changes(opened):
    before = data_of(dataset_path="a")[0].corpus.identity()
    changed = {"dataset_path": "b", "seq_len": 5}
    changes = "seq_len: 4 -> 5; store 1 name: a -> b; store 1 fingerprint: 0{16} -> 10{15}"
    message = f"allow_data_change = false, .* step 3 .*: {changes}. .* at sample 12 of the new"
    with pytest.raises(DataError, match=message):
        data_of(before, **changed)
    assert data_of(before, allow_data_change=True, **changed)[0].samples(4) == 13


def test_a_store_more_or_less_is_a_change():
    one = {"seq_len": 4, "store 1 name": "a"}
    two = one | {"store 2 name": "b", "store 2 tokens": 9}
    for before, after, change in ((one, two, "none -> 9"), (two, one, "9 -> none")):
        with pytest.raises(DataError, match=f"store 2 tokens: {change}"):
            check_same_data(before, after, step=1, samples=1, allow_change=False)


def test_a_store_that_was_moved_is_logged(notices):
    before = {"seq_len": 4, "store 1 name": "a"}
    resumed = {"step": 3, "samples": 12, "allow_change": False}
    check_same_data(before, before, **resumed)
    assert notices.messages == []
    check_same_data(before, before | {"store 1 name": "b"}, **resumed)
    (message,) = notices.messages
    assert message.startswith("the same tokens under another name since step 3; ")
    assert message.endswith("at sample 12: store 1 name: a -> b")


def test_validation_that_takes_windows_away_is_refused_with_another_way(opened):
    before = data_of()[0].corpus.identity()
    way = "--validation.dataset_path FILE --validation.steps -1"
    with pytest.raises(DataError, match=f"store 1 held out: 0 -> 5. .* of its own .*: {way}$"):
        data_of(before, validation=ValidationConfig(enable=True, steps=5))
    own = ValidationConfig(enable=True, dataset_path="b", steps=-1)
    _, validation = data_of(before, validation=own)
    assert validation is not None


# ----- log_data -----


@pytest.mark.parametrize(("training", "step", "last"), [
    ({}, 40, []),
    ({"epochs": 0.5}, 20, [r"epochs = 0.5 end the run at step 20 of 40; 0 samples are left over"]),
    ({"epochs": 1.5}, 40, []),
    ({"steps": 404}, 404, ["steps = 404 are 10 epochs of pystdlib: .* dataset_path"]),
    ({"steps": 400}, 400, []),
    ({"steps": 404, "epochs": 20}, 404, []),
])  # fmt: skip
def test_log_data(training, step, last, opened, notices):
    data_of(**training)
    pattern = (
        r"pystdlib: 3 documents, 161 tokens, 100.00% .* 40 windows of 4, 0 more are held out; "
        rf"{step / 40:g} epochs up to step {step}$"
    )
    for text, message in zip([pattern, *last], notices.messages, strict=True):
        assert re.search(text, message), message


def test_log_data_counts_held_out_windows(opened, notices):
    data_of(validation=ValidationConfig(enable=True, steps=5))
    assert "an epoch is 35 windows of 4, 5 more are held out" in notices.messages[0]
