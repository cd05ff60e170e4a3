"""Text to token ids and back."""

import hashlib
from pathlib import Path

from torchtitan_lite.errors import DataError
from torchtitan_lite.job import TokenizerValues

from .vocabularies import read_vocabulary

SHIPPED_MODEL = Path(__file__).with_name("pystdlib-2256.model")
FILES_OF_A_FOLDER = ("tokenizer.json", "tokenizer.model", "original/tokenizer.model")


class Tokenizer:
    """The vocabulary in a file, or in the first of FILES_OF_A_FOLDER that a folder has.

    `vocab_size` is above every id; `fingerprint` changes with the file and with the ids of BOS and
    EOS. Raises DataError for a path without a whole vocabulary that has both, and where the package
    that reads it is missing.
    """

    def __init__(self, given: Path) -> None:
        setting = f'[model] tokenizer_path = "{given}"'
        try:
            self.path = _vocabulary_file(given) if given.is_dir() else given
            content = self.path.read_bytes()
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
                "documents need both, so train the model with both, or name them in a "
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
