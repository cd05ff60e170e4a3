"""The data of a run: the stores that a config names, opened, checked and mixed."""

import hashlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from torchtitan_lite.base.errors import DataError, StorageError
from torchtitan_lite.base.files import storage_fix
from torchtitan_lite.base.logger import logger
from torchtitan_lite.catalog.datasets import DATASETS, NamedDataset
from torchtitan_lite.config import TrainingConfig, ValidationConfig, expand_user

from .columns import HF_PREFIX
from .dataloader import Corpus, TrainingBatches, count_windows
from .mixture import Mixture
from .sources import Source, build_source
from .store_writer import make_store
from .token_store import TokenStore, is_store
from .tokenizer import Tokenizer

HELD_OUT = 100
"""With [validation] steps = -1, one of so many windows of the training data is held out."""


def build_corpora(
    training: TrainingConfig,
    validation: ValidationConfig,
    tokenizer: Tokenizer,
    *,
    shares: tuple[int, ...],
    vocab_size: int,
    seed: int,
    held_out_before: Callable[[int], int],
) -> tuple[Corpus, Corpus, int]:
    """Open the data to train on and the data to validate on, which can be the same corpus. Return
    both, and the number of samples to validate on.

    `shares` are the samples of each dataset in a period of the mix. Windows are held out of the
    training data if validation reads the same store. `held_out_before` returns how many windows of
    a store, numbered from 1, a resumed run has held out. A collective call."""
    shape = {"seq_len": training.seq_len, "vocab_size": vocab_size, "seed": seed}
    stores = open_stores(training, tokenizer)
    check_same_tokens(stores)
    mixture = Mixture(shares)

    # Windows held out of the training data.
    most = [count_windows(store, training.seq_len) // HELD_OUT for store in stores.values()]
    all_samples = min(mixture.sample(store, max(count, 1)) for store, count in enumerate(most))
    validated = _validated(training, validation, all_samples)
    held_out = mixture.counts(validated).tolist()

    # Validation data of its own: only a store that is trained on too gives windows away.
    other: Corpus | None = None
    if validation.enable and has_own_data(validation):
        other, validated = build_validation_corpus(training, validation, tokenizer, **shape)
        fingerprint = other.stores["validation"].fingerprint
        held_out = [
            validated if store.fingerprint == fingerprint else 0 for store in stores.values()
        ]

    # Windows once held out stay so: the order of the others depends on their number.
    held_out = [
        max(count, held_out_before(number)) for number, count in enumerate(held_out, start=1)
    ]
    corpus = Corpus(stores, mixture, held_out=held_out, trained=1, **shape)
    return corpus, other or corpus, validated


def has_own_data(validation: ValidationConfig) -> bool:
    """Return whether validation reads other data than the windows held out of the training data."""
    return bool(validation.dataset or validation.dataset_path)


def build_validation_corpus(
    training: TrainingConfig, validation: ValidationConfig, tokenizer: Tokenizer, **shape: int
) -> tuple[Corpus, int]:
    """Open the data of [validation]. Return it and the number of samples to validate on. `shape`
    is for the Corpus. A collective call."""
    path, dataset = validation.dataset_path, validation.dataset or training.dataset
    options: dict[str, Any] = {"text_field": training.text_field, "tokenizer": tokenizer}
    own = {"validation": open_data("[validation]", path, dataset=dataset, **options)}
    check_same_tokens(own)
    all_samples = max(count_windows(own["validation"], training.seq_len), 1)
    validated = _validated(training, validation, all_samples)
    return Corpus(own, Mixture((1,)), held_out=[validated], trained=0, **shape), validated


def _validated(training: TrainingConfig, validation: ValidationConfig, all_samples: int) -> int:
    """Return the number of samples of a validation. With steps = -1, that is `all_samples`."""
    if not validation.enable:
        return 0
    asked = validation.steps * training.local_batch_size
    return asked if asked > 0 else all_samples


def open_stores(training: TrainingConfig, tokenizer: Tokenizer) -> dict[str, TokenStore]:
    """Open the stores to train on, by name.

    A name is the last part of the path, after its number in the list where two are alike. Raises
    DataError where two stores hold the same tokens."""
    options: dict[str, Any] = {"text_field": training.text_field, "tokenizer": tokenizer}
    if not training.datasets:
        path, dataset = training.dataset_path, training.dataset
        store = open_data("[training]", path, dataset=dataset, **options)
        return {Path(path or dataset).resolve().name: store}

    names = [Path(dataset.path).resolve().name for dataset in training.datasets]
    stores: dict[str, TokenStore] = {}
    numbers: dict[str, int] = {}  # of the first store with a fingerprint
    for number, (name, row) in enumerate(zip(names, training.datasets, strict=True), start=1):
        table = f"[[training.datasets]] {number}:"
        store = open_data(table, row.path, key="path", **options)
        stores[f"{number}-{name}" if names.count(name) > 1 else name] = store
        if (first := numbers.setdefault(store.fingerprint, number)) != number:
            raise DataError(
                f'{table} path = "{row.path}" holds the same tokens as {first}; list it once, with '
                "the sum of the weights"
            )
    return stores


def open_data(
    table: str,
    path: str | None,
    *,
    key: str = "dataset_path",
    dataset: str = "",
    text_field: str,
    tokenizer: Tokenizer,
) -> TokenStore:
    """Open the tokens at a path, or of one of DATASETS where it is None.

    Text is tokenized unless its tokens are in the cache. Messages start with the table and key of
    the config. Raises DataError, for a store of another tokenizer too, and StorageError if the
    cache's disk is full."""
    row = DATASETS[dataset] if path is None else NamedDataset(path, text_field=text_field)
    option = f"--{table.strip('[]')}.{key}" if key == "dataset_path" else key
    try:
        if row.path.startswith(HF_PREFIX):
            ways = _ways_out(row, option)
            raise DataError(f"training reads no Hugging Face dataset; {ways}")
        if row.sample_of and not Path(row.path).exists():
            ways = _ways_out(DATASETS[row.sample_of], option)
            raise DataError(f"{row.path} is in torchtitan's repository, not here; {ways}")
        # A store is read where it is; other text becomes a store in the cache.
        if is_store(folder := Path(row.path)):
            return _check_tokenizer(TokenStore(folder), tokenizer)
        return open_cached(build_source(path or dataset, row), tokenizer)
    except (DataError, StorageError) as error:
        setting = f'dataset = "{dataset}"' if path is None else f'{key} = "{path}"'
        raise type(error)(f"{table} {setting}: {error}") from error


def _ways_out(row: NamedDataset, option: str) -> str:
    """Say how to read a Hugging Face dataset: as files, or as a store of it, named by `option`."""
    name = f" --hf-name {row.hf_name}" if row.hf_name else ""
    split = f" --hf-split {row.hf_split}" if row.hf_split != "train" else ""
    return (
        f"use {option} PATH with files of its text, or torchtitan-lite data make "
        f"{row.path} STORE{name}{split} --max-tokens N and then {option} STORE"
    )


def _check_tokenizer(store: TokenStore, tokenizer: Tokenizer) -> TokenStore:
    recipe = store.manifest.recipe
    found = (recipe.tokenizer_fingerprint, recipe.vocab_size)
    if found != (tokenizer.fingerprint, tokenizer.vocab_size):
        raise DataError(
            f"token store {store.folder} was made with tokenizer {recipe.tokenizer} "
            f"({recipe.vocab_size} ids, fingerprint {recipe.tokenizer_fingerprint[:12]}), and "
            f"[model] tokenizer_path names {tokenizer.name} ({tokenizer.vocab_size} ids, "
            f"{tokenizer.fingerprint[:12]}); name the tokenizer that it was made with"
        )
    if tokenizer.one_separator and not recipe.one_separator:
        logger.warning(
            f"token store {store.folder} is of an earlier version, and has id {tokenizer.bos_id}, "
            "which is BOS and EOS, twice between documents: [training] document_mask and "
            "mfu_documents count two for each; make it again in another folder"
        )
    return store


def open_cached(source: Source, tokenizer: Tokenizer) -> TokenStore:
    """Open the tokens of a source in the cache, `torchtitan_lite/tokens` in $XDG_CACHE_HOME.

    The first process to ask makes them while the others wait, once per machine or shared file
    system. Raises DataError; StorageError if the cache cannot be
    written or read; ConfigError if the home folder is not known."""
    inputs = f"{source.fingerprint} {tokenizer.fingerprint}"
    if tokenizer.one_separator:  # earlier versions made another store of the same inputs
        inputs += " one separator"
    key = hashlib.sha256(inputs.encode()).hexdigest()[:16]
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = expand_user(home, what=f"token cache $XDG_CACHE_HOME = {home}: ")
    folder = Path(home) / "torchtitan_lite" / "tokens" / key
    try:
        return make_store(folder, source, tokenizer)
    except OSError as error:
        raise StorageError(
            f"token cache {folder.parent} cannot be written: {error.strerror}; {storage_fix(error)}"
            ", or set XDG_CACHE_HOME to a writable folder with room for 2 to 4 bytes a token"
        ) from error


def check_same_tokens(stores: Mapping[str, TokenStore]) -> None:
    """Raise DataError, on every rank, unless all ranks have the same tokens in each store.

    A collective call."""
    fingerprints: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(fingerprints, [store.fingerprint for store in stores.values()])
    for name, of_ranks in zip(stores, zip(*fingerprints, strict=True), strict=True):
        others = [rank for rank, found in enumerate(of_ranks) if found != of_ranks[0]]
        if others:
            raise DataError(
                f"{name}: rank 0 has other tokens than {len(others)} of {len(of_ranks)} ranks, the "
                f"first of them {others[0]}; train on one copy of the text, and for pystdlib with "
                "the same Python on every node."
            )


def check_same_data(
    before: Mapping[str, int | str],
    now: Mapping[str, int | str],
    *,
    step: int,
    samples: int,
    allow_change: bool,
) -> None:
    """Compare the `Corpus.identity` of a resumed run with the one `before` it.

    Raises DataError for a difference, unless it is allowed. A new name is only logged."""
    changed = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    if not changed:
        return
    changes = "; ".join(
        f"{key}: {before.get(key, 'none')} -> {now.get(key, 'none')}" for key in changed
    )
    if allow_change or all(key.endswith(" name") for key in changed):
        logger.info(
            f"the data has changed since step {step}; going on at sample {samples:,}: {changes}"
        )
        return

    raise DataError(
        f"[training] allow_data_change = false, and the data is not what step {step} was trained "
        f"on: {changes}. Undo that, or set it to true, to go on at sample {samples:,} of the new "
        "order. ([validation] steps * [training] local_batch_size are held out; windows newly held "
        "out may have been trained on.)"
    )


def log_data(batches: TrainingBatches, training: TrainingConfig) -> None:
    """Log what the stores hold, how often the run passes each, and what ends the run."""
    corpus, last_step = batches.corpus, batches.last_step
    epochs = corpus.epochs(batches.samples(last_step))
    shares = corpus.mixture.shares / corpus.mixture.period

    # A line for each store, then which of steps and epochs ends the run.
    for windows, share in zip(corpus.windows, shares, strict=True):
        store = windows.store
        held_out = ""
        if windows.held_out > 0:
            held_out = f"{windows.held_out:,} more are held out for validation; "
        logger.info(
            f"{windows.name}: {store.documents:,} documents, {store.tokens:,} tokens, {share:.2%} "
            f"of the samples; an epoch is {windows.epoch_size:,} windows of {training.seq_len}, "
            f"{held_out}{epochs[windows.name]:.4g} epochs up to step {last_step:,}"
        )
    if batches.left_over is not None:
        logger.info(
            f"[training] epochs = {training.epochs:g} end the run at step {last_step:,} of "
            f"{training.steps:,}; {batches.left_over:,} samples are left over, fewer than a step "
            "takes"
        )
    elif training.epochs is not None:
        logger.info(
            f"[training] steps = {training.steps} end the run, before {training.epochs:g} epochs do"
        )
