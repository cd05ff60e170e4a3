"""The data of a run: the stores that a config names, opened, checked and mixed."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from torchtitan_lite.base.collectives import on_all_ranks
from torchtitan_lite.base.errors import DataError, StorageError
from torchtitan_lite.base.files import storage_fix
from torchtitan_lite.base.logger import logger
from torchtitan_lite.base.paths import fetch, open_path
from torchtitan_lite.catalog.datasets import DATASETS, HF_PREFIX, NamedDataset
from torchtitan_lite.config import TrainingConfig, ValidationConfig
from torchtitan_lite.config.keys import changes

from .dataloader import Corpus, TrainingBatches, count_windows
from .mixture import Mixture
from .token_store import TokenStore, is_store
from .tokenizer import Tokenizer


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
    """Return the data to train on and the data to validate on, which can be the same corpus, and
    the number of samples to validate on. A collective call.

    `shares` are the samples of each dataset in a period of the mix. `held_out_before` returns how
    many windows of a store, numbered from 1, a resumed run has held out."""
    shape = {"seq_len": training.seq_len, "vocab_size": vocab_size, "seed": seed}
    stores = open_stores(training, tokenizer)
    check_same_tokens(stores)
    mixture = Mixture(shares)

    # Validation data of its own: only a store that is trained on too gives windows away.
    other: Corpus | None = None
    batch_size = validation.local_batch_size or training.local_batch_size
    validated = validation.steps * batch_size if validation.enable else 0
    held_out = mixture.counts(validated).tolist()
    if validation.enable and (validation.dataset or validation.dataset_path):
        other, validated = open_validation(training, validation, tokenizer, **shape)
        (own,) = other.stores.values()
        twins = [each.fingerprint == own.fingerprint for each in stores.values()]
        held_out = [validated if is_twin else 0 for is_twin in twins]
        if any(held_out) and other.seq_len != training.seq_len:
            raise DataError(
                f"[validation] seq_len = {validation.seq_len}, but it is {training.seq_len} in "
                "[training], which reads the same data; use that length, or name other data"
            )

    # Windows once held out stay so: the order of the others depends on their number.
    held_out = [
        max(count, held_out_before(number)) for number, count in enumerate(held_out, start=1)
    ]
    corpus = Corpus(stores, mixture, held_out=held_out, trained=1, **shape)
    return corpus, other or corpus, validated


def open_validation(
    training: TrainingConfig, validation: ValidationConfig, tokenizer: Tokenizer, **shape: int
) -> tuple[Corpus, int]:
    """Open the data that [validation] names. Return it, and the number of samples to validate on. A
    collective call."""
    path, dataset = validation.dataset_path, validation.dataset or training.dataset
    store = open_data("[validation]", path, training.text_field, tokenizer, dataset=dataset)
    return build_validation_corpus(training, validation, store, **shape)


def build_validation_corpus(
    training: TrainingConfig, validation: ValidationConfig, store: TokenStore, **shape: int
) -> tuple[Corpus, int]:
    """Return the data of [validation], which is `store`, and the number of samples to validate on.
    `shape` is for the Corpus, whose length [validation] can change. A collective call."""
    shape = shape | {"seq_len": validation.seq_len or training.seq_len}
    own = {"validation": store}
    check_same_tokens(own)
    validated = validation.steps * (validation.local_batch_size or training.local_batch_size)
    if validation.steps < 0:
        validated = max(count_windows(store, shape["seq_len"]), 1)
    return Corpus(own, Mixture((1,)), held_out=[validated], trained=0, **shape), validated


def open_stores(training: TrainingConfig, tokenizer: Tokenizer) -> dict[str, TokenStore]:
    """Open the stores to train on. A name is the last part of the path, after its number in the
    list where two are alike. Raises DataError where two stores hold the same tokens."""
    if not training.datasets:
        path, dataset = training.dataset_path, training.dataset
        store = open_data("[training]", path, training.text_field, tokenizer, dataset=dataset)
        return {Path(path or dataset).resolve().name: store}

    names = [Path(dataset.path).resolve().name for dataset in training.datasets]
    stores: dict[str, TokenStore] = {}
    for number, (name, row) in enumerate(zip(names, training.datasets, strict=True), start=1):
        table = f"[[training.datasets]] {number}:"
        store = open_data(table, row.path, training.text_field, tokenizer, key="path")
        twins = [other for other, each in stores.items() if each.fingerprint == store.fingerprint]
        if twins:
            raise DataError(
                f'{table} path = "{row.path}" holds the same tokens as {twins[0]}; list it once, '
                "with the sum of the weights"
            )
        stores[f"{number}-{name}" if names.count(name) > 1 else name] = store
    return stores


def open_data(
    table: str,
    path: str | None,
    text_field: str,
    tokenizer: Tokenizer,
    *,
    key: str = "dataset_path",
    dataset: str = "",
) -> TokenStore:
    """Open the tokens at a path, or of one of DATASETS where it is None. Raises DataError and
    StorageError that start with the table and key of the config."""
    row = DATASETS[dataset] if path is None else NamedDataset(path, text_field=text_field)
    try:
        if row.path.startswith(HF_PREFIX):
            raise DataError(
                "training reads files and token stores; make a store, and name it as the path: "
                f"torchtitan-lite data make {row.path} STORE (docs/data.md, Train on C4)"
            )
        # A store is read where it is; other text becomes a store in the cache.
        folder = fetch(open_path(row.path))
        if is_store(folder):
            return _check_tokenizer(TokenStore(folder), tokenizer)
        # A run on a store loads neither the readers of text nor the writer of stores.
        from .store_writer import open_cached

        return open_cached(path or dataset, replace(row, path=str(folder)), tokenizer)
    except (DataError, StorageError, OSError) as error:
        kind, problem = type(error), str(error)
        if isinstance(error, OSError):
            cache = "the cache of tokens (XDG_CACHE_HOME)"
            kind = DataError if isinstance(error, FileNotFoundError) else StorageError
            problem = f"{error.filename or cache}: {error.strerror}; {storage_fix(error)}"
        setting = f'dataset = "{dataset}"' if path is None else f'{key} = "{path}"'
        raise kind(f"{table} {setting}: {problem}") from error


def _check_tokenizer(store: TokenStore, tokenizer: Tokenizer) -> TokenStore:
    recipe = store.manifest.recipe
    found = (recipe.tokenizer_fingerprint, recipe.vocab_size)
    if found != (tokenizer.fingerprint, tokenizer.vocab_size):
        raise DataError(
            f"token store {store.folder} was made with tokenizer {recipe.tokenizer} of "
            f"{recipe.vocab_size} ids, and [model] tokenizer_path names another, {tokenizer.name} "
            f"of {tokenizer.vocab_size}; name the one that it was made with"
        )
    return store


def check_same_tokens(stores: Mapping[str, TokenStore]) -> None:
    """Raise DataError, on every rank, unless all have the same tokens. A collective call."""
    of_ranks = on_all_ranks(lambda: [store.fingerprint for store in stores.values()])
    if others := [rank for rank, found in enumerate(of_ranks) if found != of_ranks[0]]:
        raise DataError(
            f"{', '.join(stores)}: rank 0 has other tokens than {len(others)} of {len(of_ranks)} "
            f"ranks, the first of them {others[0]}; train on one copy of the text, and for "
            "pystdlib with one version of Python"
        )


def check_same_data(
    before: Mapping[str, int | str],
    now: Mapping[str, int | str],
    *,
    step: int,
    samples: int,
    allow_change: bool,
) -> None:
    """Compare the `Corpus.identity` of a resumed run with the one `before` it. Raises DataError for
    a difference, unless it is allowed; a new name is only logged."""
    changed = changes(before, now, absent="none", text=str)
    if not changed:
        return

    # The fingerprints of the same tokens are equal, wherever they lie.
    is_same = all(change.partition(": ")[0].endswith(" name") for change in changed)
    listed = "; ".join(changed)
    if allow_change or is_same:
        what = "the same tokens under another name" if is_same else "new data"
        logger.info(f"{what} since step {step}; going on at sample {samples:,}: {listed}")
        return

    raise DataError(
        f"[training] allow_data_change = false, and the data is not what step {step} was trained "
        f"on: {listed}. Undo that, or set it to true, to go on at sample {samples:,} of the new "
        "order; windows newly held out may have been trained on, and validation data of its own "
        "holds none out: --validation.dataset_path FILE --validation.steps -1"
    )


def log_data(batches: TrainingBatches, training: TrainingConfig) -> None:
    """Log what the stores hold, how often the run passes each, and what ends the run."""
    corpus, last_step = batches.corpus, batches.last_step
    epochs = corpus.epochs(batches.samples(last_step))
    shares = corpus.mixture.shares / corpus.mixture.period
    for windows, share in zip(corpus.windows, shares, strict=True):
        logger.info(
            f"{windows.name}: {windows.store.manifest}, {share:.2%} of the samples; an epoch is "
            f"{windows.epoch_size:,} windows of {training.seq_len}, {windows.held_out:,} more are "
            f"held out; {epochs[windows.name]:.4g} epochs up to step {last_step:,}"
        )
    if batches.left_over is not None:
        logger.info(
            f"[training] epochs = {training.epochs:g} end the run at step {last_step:,} of "
            f"{training.steps:,}; {batches.left_over:,} samples are left over"
        )
    most = max(epochs, key=lambda name: epochs[name])
    if training.epochs is None and epochs[most] > 10:
        logger.warning(
            f"[training] steps = {training.steps:,} are {epochs[most]:,.0f} epochs of {most}: the "
            "model will know it by heart; name more text as dataset_path, or take fewer steps"
        )
