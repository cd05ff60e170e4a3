"""Training of a sentencepiece tokenizer."""

import io
import re
from collections.abc import Iterable
from pathlib import Path

import sentencepiece

from torchtitan_lite.base.errors import ConfigError, DataError, kind_of
from torchtitan_lite.base.files import replace_file, storage_fix


def train_tokenizer(
    documents: Iterable[str], *, vocab_size: int, output: Path, overwrite: bool = False
) -> None:
    """Write a sentencepiece BPE model of `vocab_size` ids: UNK 0, BOS 1, EOS 2, 256 bytes, pieces.

    It is lossless. The same documents make the same file; all are held in memory. Raises
    ConfigError or StorageError for an output that cannot be written, or exists without `overwrite`,
    and DataError for a vocabulary that the text cannot fill or fit in."""
    if output.exists() and not overwrite:
        raise ConfigError(f"OUTPUT = {output} exists; name another, or overwrite it with --force")
    if not output.absolute().parent.is_dir():
        raise ConfigError(f"OUTPUT = {output} cannot be written: {output.parent} is no folder")
    # A list: sentencepiece would turn an error that the documents raise into its own RuntimeError.
    lines = [line for text in documents for line in text.splitlines()]
    if not any(line.strip("\0") for line in lines):
        raise DataError("SOURCE holds no text, only blank lines; name another")
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            unk_id=0,
            bos_id=1,
            eos_id=2,
            pad_id=-1,
            byte_fallback=True,
            split_digits=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            add_dummy_prefix=False,
            max_sentence_length=2**30,  # bytes; longer lines would be left out silently
            minloglevel=2,
        )
    except RuntimeError as error:
        bound = re.search(r"(vs|<=) (\d+)\.", str(error))
        assert bound, f"sentencepiece: {error}"
        rule = f"at {'least' if bound[1] == 'vs' else 'most'} {bound[2]} for this text"
        raise DataError(f"SIZE = {vocab_size} must be {rule}") from error

    try:
        replace_file(output, model.getvalue())
    except OSError as error:
        reason = f"{error.strerror}; {storage_fix(error)}, or name another"
        raise kind_of(error)(f"OUTPUT = {output} cannot be written: {reason}") from error
