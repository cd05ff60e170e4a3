"""Text to token ids and back, by a sentencepiece model, a tiktoken file or a tokenizer.json.

The packages of the last two are optional, so they are imported where they are used.
"""

import base64
import hashlib
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import sentencepiece

from torchtitan_lite.base.errors import DataError
from torchtitan_lite.base.jsonfile import read_json_object, read_regular
from torchtitan_lite.base.paths import expand_user
from torchtitan_lite.config.job import TokenizerValues

# The package tokenizers would tokenize each batch on all cores; it reads this at every batch. Set
# while the process has one thread: C code that reads the environment in another one could crash.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

SHIPPED_MODEL = Path(__file__).with_name("pystdlib-2256.model")
FILES_OF_A_FOLDER = ("tokenizer.json", "tokenizer.model", "original/tokenizer.model")
FIX = 'name the whole file or the folder of a tokenizer, or "" for the included one'

# Llama 3's reference tokenizer (Meta, llama3/llama/tokenizer.py): how text is split before BPE; the
# number of special tokens after the ranks (<|begin_of_text|> and <|end_of_text|> come first); and
# the longest text, and run of only whitespace or only non-whitespace, given to tiktoken at once.
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_SPECIAL_TOKENS = 256
MAX_BYTES = 2**30  # of a vocabulary file
MAX_TEXT = 400_000
MAX_RUN = 25_000

# Linear in the text: a match is only tried where a run begins.
LONG_RUN = re.compile(rf"(?<!\s)\s{{{MAX_RUN},}}|(?<!\S)\S{{{MAX_RUN},}}")
HALF_RUN = re.compile(rf"\s{{{MAX_RUN // 2}}}|\S{{{MAX_RUN // 2}}}")

TIKTOKEN_LINE = re.compile(rb"\S+ \d+\s")


class Tokenizer:
    """The vocabulary in a file, or in the first of FILES_OF_A_FOLDER that a folder has. Raises
    DataError for one that is broken, lacks BOS or EOS, or needs a package that is missing."""

    def __init__(self, given: Path) -> None:
        setting = f'[model] tokenizer_path = "{given}"'
        try:
            inside = [given / name for name in FILES_OF_A_FOLDER if (given / name).is_file()]
            if given.is_dir() and not inside:
                raise ValueError(f"is a folder with none of {', '.join(FILES_OF_A_FOLDER)}")
            self.path = [*inside, given][0]
            content = read_regular(self.path, max_bytes=MAX_BYTES)
            with _panics_as_errors():
                self._vocabulary = read_vocabulary(content, self.path.parent)
            self.bos_id, self.eos_id = self._vocabulary.bos_id, self._vocabulary.eos_id
            if min(self.bos_id, self.eos_id) < 0:
                raise ValueError(
                    f"has BOS id {self.bos_id} and EOS id {self.eos_id}, where -1 is none; "
                    "documents need both: name them in a tokenizer_config.json beside its .json"
                )
        except ModuleNotFoundError as error:
            fix = 'pip install "torchtitan-lite[llama]"'
            raise DataError(f"{setting} needs the package {error.name}; {fix}") from error
        except OSError as error:
            raise DataError(f"{setting} cannot be read: {error.strerror}; {FIX}") from error
        except ValueError as error:
            raise DataError(f"{setting} {error}; {FIX}") from error

        self.name = str(self.path.relative_to(given.parent))
        self.vocab_size = self._vocabulary.size
        # Where one id is both, as in SmolLM2 and GPT-2, it stands between documents once.
        self.one_separator = self.bos_id == self.eos_id
        frame = b" %d %d" % (self.bos_id, self.eos_id)
        self.fingerprint = hashlib.sha256(content + frame).hexdigest()

    @property
    def values(self) -> TokenizerValues:
        """The properties that a job keeps."""
        return TokenizerValues(str(self.path), self.vocab_size, self.bos_id, self.fingerprint)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without BOS and EOS. Special tokens in a text are text."""
        return self._encode([text])[0]

    def encode_documents(self, texts: list[str]) -> list[list[int]]:
        """Return BOS, the ids and EOS of each text, computed on one core. If BOS is EOS, it only
        begins a document. Raises DataError for a broken vocabulary, which may show only now."""
        end = [] if self.one_separator else [self.eos_id]
        return [[self.bos_id, *ids, *end] for ids in self._encode(texts)]

    def _encode(self, texts: list[str]) -> list[list[int]]:
        try:
            with _panics_as_errors():
                return self._vocabulary.encode(texts)
        except Exception as error:
            raise DataError(f"tokenizer {self.path} fails: {error}; use another") from error

    def decode(self, ids: list[int]) -> str:
        """Return the text of ids; BOS and EOS have none."""
        return self._vocabulary.decode(ids)


@contextmanager
def _panics_as_errors() -> Iterator[None]:
    """Turn a panic in Rust, which is no Exception, into ValueError."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"panics: {error}") from error


def build_tokenizer(tokenizer_path: str) -> Tokenizer:
    """Open the tokenizer in a file or folder; for "" the one shipped with the package."""
    return Tokenizer(Path(expand_user(tokenizer_path)) if tokenizer_path else SHIPPED_MODEL)


@dataclass(frozen=True)
class Vocabulary:
    """Content of a vocabulary file: ids below `size`; a missing BOS or EOS is -1."""

    size: int
    bos_id: int
    eos_id: int
    encode: Callable[[list[str]], list[list[int]]]
    """Return the ids of each text, none of them special, computed on one core."""
    decode: Callable[[list[int]], str]
    """Return the text of ids, without BOS and EOS."""


def read_vocabulary(content: bytes, folder: Path) -> Vocabulary:
    """Read a vocabulary file from a folder; sentencepiece and tiktoken files may share a name.
    Raises ValueError for a broken file, ModuleNotFoundError for a missing package."""
    if content.startswith(b"{"):
        return read_json(content, folder / "tokenizer_config.json")
    if TIKTOKEN_LINE.match(content):
        return read_tiktoken(content)
    return read_sentencepiece(content)


def read_sentencepiece(content: bytes) -> Vocabulary:
    """Read a sentencepiece model."""
    model = sentencepiece.SentencePieceProcessor()
    try:
        model.load_from_serialized_proto(content)
    except RuntimeError as error:
        problem = "is not a whole sentencepiece model, nor a tiktoken file or a tokenizer.json"
        raise ValueError(problem) from error
    encode = partial(model.encode, num_threads=1)
    return Vocabulary(model.vocab_size(), model.bos_id(), model.eos_id(), encode, model.decode)


def read_tiktoken(content: bytes) -> Vocabulary:
    """Read a tiktoken file: a line for each token, its bytes in base64 and its rank. Text is split
    as Llama 3's, whose special tokens follow the ranks."""
    import tiktoken  # of the [llama] extra

    # tiktoken's own reader caches files, and would go on with its copy after a file has changed.
    try:
        pairs = [line.split() for line in content.splitlines()]
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
    except ValueError as error:
        raise ValueError(f"is not a whole tiktoken file: {error}") from error
    if list(ranks.values()) != list(range(len(pairs))):
        raise ValueError("is not a whole tiktoken file: ranks are missing, or tokens stand twice")

    bos_id = len(ranks)
    encoding = tiktoken.Encoding(
        "llama3", pat_str=LLAMA3_PATTERN, mergeable_ranks=ranks, special_tokens={}
    )

    def encode(text: str) -> list[int]:
        return list(chain.from_iterable(map(encoding.encode_ordinary, _pieces(text))))

    return Vocabulary(
        size=len(ranks) + LLAMA3_SPECIAL_TOKENS,
        bos_id=bos_id,
        eos_id=bos_id + 1,
        encode=lambda texts: [encode(text) for text in texts],
        decode=lambda ids: encoding.decode([token for token in ids if token < bos_id]),
    )


def _pieces(text: str) -> Iterator[str]:
    """Cut a text at MAX_TEXT, a run at MAX_RUN: longer ones overflow tiktoken's stack."""
    for start in range(0, len(text), MAX_TEXT):
        part = text[start : start + MAX_TEXT]
        cuts = [0]
        # Looking at every character takes as long as encoding it; a long run shows at one in
        # MAX_RUN // 2 of them.
        if any(HALF_RUN.match(part, at) for at in range(0, len(part), MAX_RUN // 2)):
            for run in LONG_RUN.finditer(part):
                cuts += range(run.start() + MAX_RUN, run.end(), MAX_RUN)
        for begin, end in pairwise([*cuts, len(part)]):
            yield part[begin:end]


def read_json(content: bytes, config: Path) -> Vocabulary:
    """Read a Hugging Face tokenizer.json. BOS and EOS are those that the file `config` names, if it
    exists; otherwise Llama 3's, or <s> and </s>."""
    import tokenizers  # of the [llama] extra

    try:
        tokenizer = tokenizers.Tokenizer.from_buffer(content)
    except ValueError as error:
        raise ValueError(f"is not a whole tokenizer.json: {error}") from error
    tokenizer.encode_special_tokens = True  # a special token within a text is text
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if isinstance(tokenizer.model, tokenizers.models.BPE):
        tokenizer.model.dropout = None  # would draw other ids of a text each time

    def special_id(named: str | dict[str, str] | None, usual: list[str]) -> int:
        token = named["content"] if isinstance(named, dict) else named
        ids = map(tokenizer.token_to_id, [token] if token else usual)
        return next((found for found in ids if found is not None), -1)

    try:
        named = read_json_object(config) if config.exists() else {}
        bos_id = special_id(named.get("bos_token"), ["<|begin_of_text|>", "<s>"])
        eos_id = special_id(named.get("eos_token"), ["<|end_of_text|>", "</s>"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"has a broken {config.name} beside it: {error}") from error

    # Some files do not mark these as special, and would then find them in a text.
    special = [tokenizer.id_to_token(i) for i in (bos_id, eos_id) if i >= 0]
    tokenizer.add_special_tokens(special)

    def encode(texts: list[str]) -> list[list[int]]:
        encodings: list[Any] = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    size = max(tokenizer.get_vocab().values(), default=-1) + 1
    return Vocabulary(size, bos_id, eos_id, encode, tokenizer.decode)
