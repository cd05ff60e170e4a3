"""Names of the files of a token store. Imports nothing, as processes that tokenize need them."""


def tokens_file(shard: int) -> str:
    """Return the name of the file with a shard's ids."""
    return f"tokens-{shard:05d}.bin"


def documents_file(shard: int) -> str:
    """Return the name of the file with the places in a shard at which documents begin."""
    return f"documents-{shard:05d}.bin"
