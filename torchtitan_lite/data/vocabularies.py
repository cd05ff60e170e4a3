"""The three forms of vocabulary files, each read into a class of the same shape: sentencepiece,
tiktoken, and Hugging Face's tokenizer.json. The packages of the last two are optional, so they are
imported where they are used."""

import base64
import json
import os
import re
from collections.abc import Iterator
from itertools import chain, pairwise
from pathlib import Path
from typing import Protocol

import sentencepiece

# Llama 3's reference tokenizer (Meta, llama3/llama/tokenizer.py): how text is split before BPE, how
# many special tokens follow the ranks (the first two are <|begin_of_text|> and <|end_of_text|>),
# and the longest text and the longest run, of only whitespace or only the rest, in characters, that
# tiktoken is given at once.
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_SPECIAL_TOKENS = 256
MAX_TEXT = 400_000
MAX_RUN = 25_000

# In time linear in the text: a match is only tried where a run begins.
LONG_RUN = re.compile(rf"(?<!\s)\s{{{MAX_RUN},}}|(?<!\S)\S{{{MAX_RUN},}}")
HALF_RUN = re.compile(rf"\s{{{MAX_RUN // 2}}}|\S{{{MAX_RUN // 2}}}")

TIKTOKEN_LINE = re.compile(rb"\S+ \d+\s")


class Vocabulary(Protocol):
    """What a vocabulary file holds: ids below `size`; -1 for a BOS or EOS that it does not have."""

    size: int
    bos_id: int
    eos_id: int

    def encode(self, texts: list[str]) -> list[list[int]]:
        """The ids of each text, none of them special, computed on one core."""

    def decode(self, ids: list[int]) -> str:
        """The text of ids, without BOS and EOS."""


def read_vocabulary(content: bytes, folder: Path) -> Vocabulary:
    """The vocabulary in the content of a file, whose form it shows, from a folder. Raises
    ValueError with the reason and the fix for one that is broken, ModuleNotFoundError where its
    package is missing."""
    if content.startswith(b"{"):
        return JsonVocabulary(content, folder / "tokenizer_config.json")
    if TIKTOKEN_LINE.match(content):
        return TiktokenVocabulary(content)
    return SentencepieceVocabulary(content)


class SentencepieceVocabulary:
    """A sentencepiece model."""

    def __init__(self, content: bytes) -> None:
        self._model = sentencepiece.SentencePieceProcessor()
        try:
            self._model.load_from_serialized_proto(content)
        except RuntimeError as error:
            raise ValueError(
                "is not a whole sentencepiece model, nor a tiktoken file or a tokenizer.json; "
                "scripts/train_tokenizer.py makes a sentencepiece model"
            ) from error
        self.size: int = self._model.vocab_size()
        self.bos_id: int = self._model.bos_id()
        self.eos_id: int = self._model.eos_id()

    def encode(self, texts: list[str]) -> list[list[int]]:
        """The ids of each text."""
        return self._model.encode(texts, num_threads=1)

    def decode(self, ids: list[int]) -> str:
        """The text of ids."""
        return self._model.decode(ids)


class TiktokenVocabulary:
    """A tiktoken file, a line for each token: its bytes in base64 and its rank. It is read as Llama
    3's: with its way to split text, and its special tokens after the ranks."""

    def __init__(self, content: bytes) -> None:
        import tiktoken  # of the [llama] extra

        ranks = _read_ranks(content)
        self._encoding = tiktoken.Encoding(
            "llama3", pat_str=LLAMA3_PATTERN, mergeable_ranks=ranks, special_tokens={}
        )
        self.bos_id = len(ranks)
        self.eos_id = len(ranks) + 1
        self.size = len(ranks) + LLAMA3_SPECIAL_TOKENS

    def encode(self, texts: list[str]) -> list[list[int]]:
        """The ids of each text."""
        return [
            list(chain.from_iterable(map(self._encoding.encode_ordinary, _pieces(text))))
            for text in texts
        ]

    def decode(self, ids: list[int]) -> str:
        """The text of ids; special tokens have none."""
        return self._encoding.decode([token for token in ids if token < self.bos_id])


def _read_ranks(content: bytes) -> dict[bytes, int]:
    """The rank of each token. tiktoken's own reader is not used: it goes on with its copy after a
    file has changed."""
    ranks: dict[bytes, int] = {}
    for rank, line in enumerate(content.splitlines()):
        try:
            token = base64.b64decode(line.partition(b" ")[0], validate=True)
        except ValueError:
            token = b""
        if token in ranks or line != base64.b64encode(token) + b" %d" % rank:
            raise ValueError(
                f"is not a whole tiktoken file: line {rank + 1} is not a new token in base64, a space and the rank "
                f"{rank}; get the file again"
            )
        ranks[token] = rank
    missing = 256 - sum(bytes([byte]) in ranks for byte in range(256))
    if missing:
        raise ValueError(
            f"is not a whole tiktoken file: {missing} of the 256 bytes are no token; get the file again"
        )
    return ranks


def _pieces(text: str) -> Iterator[str]:
    """`text`, cut where it exceeds MAX_TEXT or a run in it MAX_RUN: longer ones overflow tiktoken's
    stack."""
    for start in range(0, len(text), MAX_TEXT):
        part = text[start : start + MAX_TEXT]
        cuts = [0]
        # To look at every character takes as long as to encode it; a long run shows at one in
        # MAX_RUN // 2 of them.
        if any(HALF_RUN.match(part, at) for at in range(0, len(part), MAX_RUN // 2)):
            for run in LONG_RUN.finditer(part):
                cuts += range(run.start() + MAX_RUN, run.end(), MAX_RUN)
        for begin, end in pairwise([*cuts, len(part)]):
            yield part[begin:end]


class JsonVocabulary:
    """A Hugging Face tokenizer.json. BOS and EOS are those that the file `config` names, which need
    not exist, or else Llama 3's, or <s> and </s>."""

    def __init__(self, content: bytes, config: Path) -> None:
        import tokenizers  # of the [llama] extra

        # The package reads this whenever it encodes a batch; its threads would be as many as cores
        # in each process.
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(content)
        except ValueError as error:
            raise ValueError(
                f"is not a whole tokenizer.json: {error}; get the file again"
            ) from error
        self._tokenizer.encode_special_tokens = True  # as text
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.size = max(self._tokenizer.get_vocab().values(), default=-1) + 1
        try:
            named = json.loads(config.read_bytes()) if config.exists() else {}
            self.bos_id = self._special_id(named.get("bos_token"), ["<|begin_of_text|>", "<s>"])
            self.eos_id = self._special_id(named.get("eos_token"), ["<|end_of_text|>", "</s>"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"has a broken {config.name} beside it: {error}; mend or remove that"
            ) from error
        # Some files do not say that these are special, and then would read them in a text.
        ids = [i for i in (self.bos_id, self.eos_id) if i >= 0]
        self._tokenizer.add_special_tokens([self._tokenizer.id_to_token(i) for i in ids])

    def _special_id(self, named: str | dict[str, str] | None, usual: list[str]) -> int:
        """The id of the named token, a string or a dict with its `content`, or else of the first
        usual one; or -1."""
        token = named["content"] if isinstance(named, dict) else named
        ids = map(self._tokenizer.token_to_id, [token] if token else usual)
        return next((found for found in ids if found is not None), -1)

    def encode(self, texts: list[str]) -> list[list[int]]:
        """The ids of each text."""
        return [
            encoding.ids
            for encoding in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        ]

    def decode(self, ids: list[int]) -> str:
        """The text of ids; special tokens have none."""
        return self._tokenizer.decode(ids)
