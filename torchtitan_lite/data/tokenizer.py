"""Text to token ids and back, and training of a sentencepiece tokenizer."""

import hashlib
import io
from collections.abc import Iterable
from pathlib import Path

import sentencepiece

from torchtitan_lite.documents import read_regular
from torchtitan_lite.errors import DataError
from torchtitan_lite.job import TokenizerValues

from .vocabularies import read_vocabulary

SHIPPED_MODEL = Path(__file__).with_name("pystdlib-2256.model")
MAX_BYTES = 1 << 30
"""Largest file of a vocabulary that is read."""
FILES_OF_A_FOLDER = ("tokenizer.json", "tokenizer.model", "original/tokenizer.model")


class Tokenizer:
    """The vocabulary in a file, or in the first of FILES_OF_A_FOLDER that a folder has.

    `vocab_size` is above every id; `fingerprint` changes with the file and with the ids of BOS and
    EOS. Raises DataError if the vocabulary is incomplete, lacks BOS or EOS, or if the package that
    reads it is missing.
    """

    def __init__(self, given: Path) -> None:
        setting = f'[model] tokenizer_path = "{given}"'
        try:
            self.path = _vocabulary_file(given) if given.is_dir() else given
            content = read_regular(self.path, max_bytes=MAX_BYTES)
            vocabulary = read_vocabulary(content, self.path.parent)
        except OSError as error:
            raise DataError(
                f"{setting} cannot be read: {error.strerror}; name a tokenizer's file or folder"
            ) from error
        except ModuleNotFoundError as error:
            raise DataError(
                f"{setting} is read with the package {error.name}, which is missing; "
                'pip install "torchtitan-lite[llama]"'
            ) from error
        except ValueError as error:
            raise DataError(f"{setting} {error}") from error

        self._vocabulary = vocabulary
        self.name = str(self.path.relative_to(given.parent))
        self.vocab_size = vocabulary.size
        self.bos_id, self.eos_id = vocabulary.bos_id, vocabulary.eos_id
        if min(self.bos_id, self.eos_id) < 0:
            raise DataError(
                f"{setting} has BOS id {self.bos_id} and EOS id {self.eos_id}, where -1 is none; "
                "documents need both, so train the tokenizer with both, or name them in a "
                "tokenizer_config.json beside a tokenizer.json"
            )
        special = b" %d %d" % (self.bos_id, self.eos_id)
        self.fingerprint = hashlib.sha256(content + special).hexdigest()

    @property
    def values(self) -> TokenizerValues:
        """The properties that a job keeps."""
        return TokenizerValues(str(self.path), self.vocab_size, self.bos_id, self.fingerprint)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without BOS and EOS. Special tokens in a text are text."""
        return self._vocabulary.encode([text])[0]

    def encode_documents(self, texts: list[str]) -> list[list[int]]:
        """Return BOS, the ids and EOS of each text, computed on one core."""
        return [[self.bos_id, *ids, self.eos_id] for ids in self._vocabulary.encode(texts)]

    def decode(self, ids: list[int]) -> str:
        """Return the text of ids; BOS and EOS have none.

        This is the encoded text where a vocabulary is lossless, as Llama 3's is. A vocabulary of
        `train_tokenizer` turns U+2581, sentencepiece's own mark for a space, into a space.
        """
        return self._vocabulary.decode(ids)


def build_tokenizer(tokenizer_path: str) -> Tokenizer:
    """Open the tokenizer in a file or folder; for "" the one shipped with the package."""
    return Tokenizer(Path(tokenizer_path).expanduser() if tokenizer_path else SHIPPED_MODEL)


def _vocabulary_file(folder: Path) -> Path:
    for name in FILES_OF_A_FOLDER:
        if (folder / name).is_file():
            return folder / name
    names = ", ".join(FILES_OF_A_FOLDER)
    raise ValueError(f"is a folder with none of {names}; name a tokenizer's file")


def train_tokenizer(
    documents: Iterable[str], *, vocab_size: int, output: Path, overwrite: bool = False
) -> None:
    """Write a sentencepiece BPE model of `vocab_size` ids: UNK 0, BOS 1, EOS 2, 256 bytes, pieces.

    It is lossless: whitespace is kept, and characters outside the vocabulary (newlines and tabs
    too) are spelled in bytes. The same documents make the same file; all of them are held in
    memory. Raises DataError for an output that cannot be written, or exists without `overwrite`,
    and for a vocabulary that the text cannot fill or fit in.
    """
    if output.exists() and not overwrite:
        raise DataError(
            f"--output = {output} exists; choose another name, or overwrite it with --force"
        )
    # A list: sentencepiece would turn an error that the documents raise into its own RuntimeError.
    lines = [line for text in documents for line in text.splitlines()]
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
        reason = str(error).rpartition("] ")[2] or error
        raise DataError(f"--vocab-size = {vocab_size} does not suit this text: {reason}") from error

    try:
        output.write_bytes(model.getvalue())
    except OSError as error:
        raise DataError(f"--output = {output} cannot be written: {error.strerror}") from error
