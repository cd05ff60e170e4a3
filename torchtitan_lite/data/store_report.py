"""Token stores in words: their counts, and the text of a window."""

from itertools import pairwise

from torchtitan_lite.errors import DataError

from .token_store import TokenStore
from .tokenizer import Tokenizer


def format_store(store: TokenStore) -> str:
    """Describe the content of a store and what it was made from."""
    manifest = store.manifest
    recipe = manifest.recipe
    per_document = store.tokens / store.documents
    largest = max(shard.tokens for shard in manifest.shards)
    return "\n".join(
        (
            f"{store.folder}: made from {recipe.source}",
            f"{store.tokens:,} tokens in {store.documents:,} documents, {per_document:,.1f} each; "
            f"{manifest.skipped_rows:,} bad rows were skipped",
            f"{len(manifest.shards):,} shards of up to {largest:,} tokens of "
            f"{store.dtype.itemsize} bytes",
            f"tokenizer {recipe.tokenizer}, fingerprint {recipe.tokenizer_fingerprint}, "
            f"{recipe.vocab_size:,} ids; the highest here is {manifest.max_token_id}",
            f"fingerprint {store.fingerprint}",
        )
    )


def format_window(store: TokenStore, tokenizer: Tokenizer, *, window: int, seq_len: int) -> str:
    """Decode the `seq_len` tokens from place `window * seq_len` on, a line for each document.

    Raises DataError for a window that the store does not have, and for another tokenizer than the
    store's.
    """
    recipe = store.manifest.recipe
    if tokenizer.fingerprint != recipe.tokenizer_fingerprint:
        raise DataError(
            f"--tokenizer {tokenizer.path} is not the one that {store.folder} was made with: "
            f"{recipe.tokenizer}, fingerprint {recipe.tokenizer_fingerprint}; name that one to see "
            "text"
        )
    windows = -(-store.tokens // seq_len)
    if not 0 <= window < windows:
        raise DataError(
            f"--window {window}: {store.folder} has windows 0 to {windows - 1} of {seq_len} tokens"
        )

    start = window * seq_len
    stop = min(start + seq_len, store.tokens)
    lines = [f"window {window}, tokens {start:,} to {stop - 1:,}:"]
    for begin, end in pairwise([start, *store.documents_between(start + 1, stop), stop]):
        lines.append(repr(tokenizer.decode(store.read(begin, end - begin).tolist())))
    return "\n".join(lines)
