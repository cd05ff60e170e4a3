"""Named datasets, of which `[training] dataset` and `[validation] dataset` name one."""

import sysconfig
from dataclasses import dataclass

HF_PREFIX = "hf:"
"""What the path of a Hugging Face dataset begins with."""


@dataclass(frozen=True)
class NamedDataset:
    """Where the text of a dataset is, and which part of it is read."""

    path: str
    """Folder, file, or `hf:NAME` of a Hugging Face dataset (only for torchtitan-lite data)."""
    endings: tuple[str, ...] | None = None
    """File names that are read from a folder; None: all readable kinds."""
    skipped_folders: frozenset[str] = frozenset()
    """Names of sub-folders that are not read."""
    text_field: str = "text"
    """Field of .jsonl and Hugging Face rows that holds the text."""
    hf_name: str | None = None
    """Configuration of a Hugging Face dataset."""
    hf_split: str = "train"


DATASETS = {
    # The source text of the running Python's standard library: on every machine, no download.
    "pystdlib": NamedDataset(
        path=sysconfig.get_path("stdlib"),
        endings=(".py",),
        skipped_folders=frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"}),
    ),
    # torchtitan's names. c4_test is a file of torchtitan's repository, which is not shipped here.
    "c4": NamedDataset(path="hf:allenai/c4", hf_name="en"),
    "c4_test": NamedDataset(path="tests/assets/c4_test"),
    "c4_validation": NamedDataset(path="hf:allenai/c4", hf_name="en", hf_split="validation"),
}
