"""Make and verify token stores: text, tokenized once, that training reads from.

  make SOURCE STORE   tokenize; the same command goes on after an interruption
  verify STORE        read the whole store and list what is broken

SOURCE is a folder or a file of .txt .md .rst .py .jsonl .json, each also with .gz or .zst;
hf:NAME_OR_PATH, a Hugging Face dataset or a folder of .parquet (hf extra); or a name that
[training] dataset takes, such as pystdlib, the source text of Python's standard library.

Exit codes: 3 for missing or broken data, 7 if the disk fails.
"""

import argparse
import sys
from pathlib import Path

from torchtitan_lite.base.errors import DataError, StorageError
from torchtitan_lite.base.files import storage_fix
from torchtitan_lite.data.sources import open_source
from torchtitan_lite.data.store_writer import make_store
from torchtitan_lite.data.token_store import TokenStore, find_damage, read_manifest
from torchtitan_lite.data.tokenizer import build_tokenizer

from .parser import number, path_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add make and verify."""
    commands = parser.add_subparsers(dest="command", required=True)
    make = commands.add_parser("make", help="tokenize text into a store")
    text = "text files, hf:NAME or a dataset: see data --help"
    make.add_argument("source", type=path_text, help=text)
    make.add_argument("store", type=Path, help="folder to make")
    text = "sentencepiece, tiktoken or tokenizer.json file, or a folder with one (the shipped one)"
    make.add_argument("--tokenizer", type=path_text, default="", help=text)
    text = "field of .jsonl, .json and Hugging Face rows with the text (text)"
    make.add_argument("--text-field", default="text", help=text)
    text = "bad rows to leave out before giving up, or all (0)"
    make.add_argument("--skip-bad", type=bad_rows, default=0, metavar="N", help=text)
    text = "end with the document that reaches so many (all)"
    make.add_argument("--max-tokens", type=number, help=text)
    make.add_argument("--hf-name", help="configuration of a Hugging Face dataset")
    make.add_argument("--hf-split", default="train", help="split of a Hugging Face dataset (train)")

    verify = commands.add_parser("verify", help="read a whole store and list what is broken")
    verify.add_argument("store", type=Path, help="folder of the store")


def bad_rows(text: str) -> float:
    """Return how many bad rows to leave out: an argparse type."""
    return sys.maxsize if text == "all" else number(text, least=0)


def make(args: argparse.Namespace) -> None:
    """Make the store, or finish it."""
    source = open_source(
        args.source, text_field=args.text_field, hf_name=args.hf_name, hf_split=args.hf_split
    )
    tokenizer = build_tokenizer(args.tokenizer)
    existed = args.store.exists()
    store = make_store(
        args.store, source, tokenizer, skip_bad=args.skip_bad, max_tokens=args.max_tokens
    )
    if existed:
        print(f"{args.store} is made already: {store.manifest}")


def verify(args: argparse.Namespace) -> None:
    """Check the store. Raises DataError if something is wrong."""
    if problems := find_damage(args.store, read_manifest(args.store), read=True):
        raise DataError("\n".join(problems))
    print(f"{args.store}: {TokenStore(args.store).manifest}, every byte is as it was made")


def run(args: argparse.Namespace) -> None:
    """Run the chosen command. Raises RunError."""
    try:
        {"make": make, "verify": verify}[args.command](args)
    except OSError as error:
        problem = f"{args.store}: {error.filename or 'write'}: {error.strerror}"
        fix = storage_fix(error)
        if args.command == "make":
            fix += ", or name another folder; the same command goes on where it was"
        raise StorageError(f"{problem}; {fix}") from error
