"""Text to token ids and back: sentencepiece models, read and trained."""

import hashlib
import io
from collections.abc import Iterable
from pathlib import Path

import sentencepiece

from torchtitan_lite.errors import DataError

SHIPPED_MODEL = Path(__file__).with_name("pystdlib-2256.model")


class Tokenizer:
    """A sentencepiece model. Raises DataError for a file that is none, or that has no BOS or EOS id."""

    def __init__(self, path: Path) -> None:
        setting = f'[model] tokenizer_path = "{path}"'
        self.path = path
        self._model = sentencepiece.SentencePieceProcessor()
        try:
            proto = path.read_bytes()
            self._model.load_from_serialized_proto(proto)
        except OSError as error:
            raise DataError(f"{setting} cannot be read: {error.strerror}; name a sentencepiece model file") from error
        except RuntimeError as error:
            raise DataError(f"{setting} is not a sentencepiece model; scripts/train_tokenizer.py makes one") from error
        self.fingerprint = hashlib.sha256(proto).hexdigest()
        self.vocab_size: int = self._model.vocab_size()
        self.bos_id: int = self._model.bos_id()
        self.eos_id: int = self._model.eos_id()
        if min(self.bos_id, self.eos_id) < 0:
            raise DataError(
                f"{setting} has BOS id {self.bos_id} and EOS id {self.eos_id}, where -1 is none; documents need both, "
                "so train the model with both"
            )

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without BOS and EOS."""
        return self._model.encode(text)

    def encode_documents(self, texts: list[str]) -> list[list[int]]:
        """BOS, the ids, EOS of each text, computed on all cores."""
        return self._model.encode(texts, add_bos=True, add_eos=True, num_threads=-1)

    def decode(self, ids: list[int]) -> str:
        """The text of ids; BOS and EOS have none. Models of `train_tokenizer` give back every character of the encoded
        text but U+2581, sentencepiece's own mark for a space, which comes back as a space."""
        return self._model.decode(ids)


def build_tokenizer(tokenizer_path: str) -> Tokenizer:
    """The tokenizer of a sentencepiece model file; of the one shipped with the package for ""."""
    return Tokenizer(Path(tokenizer_path).expanduser() if tokenizer_path else SHIPPED_MODEL)


def train_tokenizer(documents: Iterable[str], *, vocab_size: int, output: Path, overwrite: bool = False) -> None:
    """Write a sentencepiece BPE model of exactly `vocab_size` ids: UNK 0, BOS 1, EOS 2, the 256 bytes, then pieces.

    Lossless: whitespace is kept, and what is not in the vocabulary (newlines and tabs too) is spelled in bytes. The
    same documents make the same file. All of them are held in memory. Raises DataError for an output that exists,
    unless told to overwrite it, or cannot be written, and for a vocabulary that the text cannot fill or fit in.
    """
    if output.exists() and not overwrite:
        raise DataError(f"--output = {output} exists; choose another name, or overwrite it with --force")
    # A list, because sentencepiece would turn an error that the documents raise into a RuntimeError of its own.
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
