"""Progress of long work: when and where it is shown, and which work counts itself."""

import io
import os
import re
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sample_checkpoints import write_checkpoint
from tqdm import std, tqdm

from torchtitan_lite.base import progress as base_progress
from torchtitan_lite.base.progress import progress
from torchtitan_lite.catalog.flavors import FLAVORS
from torchtitan_lite.checkpoint import hf_export
from torchtitan_lite.checkpoint.checkpointer import Checkpointer
from torchtitan_lite.checkpoint.manifest import TensorEntry, broken_files, read_manifest
from torchtitan_lite.config import Float8Config, given_keys, load_config
from torchtitan_lite.data import rows
from torchtitan_lite.data.sources import open_source
from torchtitan_lite.data.store_writer import make_store
from torchtitan_lite.data.token_store import find_damage
from torchtitan_lite.data.tokenizer import build_tokenizer
from torchtitan_lite.planner.plan import find_device
from torchtitan_lite.planner.search import Space, find_candidates

# ----- progress -----


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A function that does a unit of work a second, for so many seconds of 100."""

    def run(seconds: int, total: int | None = 100, **options: Any) -> None:
        now = 0
        monkeypatch.setattr(std, "time", lambda: now)
        with progress("reading a\r", total, unit=" files", **options) as bar:
            for now in range(1, seconds + 1):  # noqa: B007
                bar.update()

    return run


@pytest.mark.parametrize(
    ("total", "shown"), [(100, "10% 10/100 [00:10<01:30"), (None, "10 files [")]
)
def test_a_log_gets_a_line_every_10_s_from_any_rank(work, total, shown, notices, capfd) -> None:
    work(9, total)
    work(60, total, shown=False)
    assert notices.messages == []
    work(25, total)
    first, second = notices.records
    assert first.levelname == "WARNING" and first.getMessage().startswith(r"reading a\r: ")
    assert shown in first.getMessage() and "20" in second.getMessage()
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(("columns", "width"), [(90, 89), (0, 79), (1, 1)])  # 0: nobody has set it
def test_a_terminal_gets_a_bar_after_5_s(work, notices, monkeypatch, columns, width) -> None:
    monkeypatch.setattr(os, "isatty", lambda descriptor: descriptor == 2)
    monkeypatch.setattr(os, "get_terminal_size", lambda _: os.terminal_size((columns, 20)))
    monkeypatch.setattr(sys, "__stderr__", terminal := io.StringIO())
    work(4)
    work(60, shown=False)
    assert terminal.getvalue() == ""
    work(7)
    bars = terminal.getvalue().split("\r")
    form = r"reading a\\r: +5%\|.*\| 5/100 \[00:05<" if width > 1 else "r$"
    assert re.match(form, bars[1])
    assert len(bars[1]) == width
    assert not bars[-2].strip() and not bars[-1], "the bar is removed at the end"
    assert notices.messages == []


# ----- make_store, find_damage, broken_files, Checkpointer, write_weights, find_candidates -----


@pytest.fixture
def bars(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The progress of all work, with what it has counted as `counted`."""
    made: list[Any] = []

    class Bar(tqdm):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options | {"disable": True})
            self.name, self.is_shown = options["desc"], not options["disable"]
            self.of, self.counted = options["total"], 0
            made.append(self)

        def update(self, n: int = 1) -> None:
            self.counted += n

    monkeypatch.setattr(base_progress, "tqdm", Bar)
    return made


def test_tokenizing_counts_bytes_and_verifying_a_store_too(tmp_path, bars, monkeypatch) -> None:
    monkeypatch.setattr(rows, "PART_BYTES", 100)
    text, path = "é word\n" * 100, tmp_path / "a.txt"
    path.write_text(text)
    store = make_store(tmp_path / "store", open_source(str(path)), build_tokenizer(""))
    (tokenizing,) = (bar for bar in bars if bar.name == f"tokenizing {path}")
    assert tokenizing.is_shown and tokenizing.counted == len(text.encode())
    assert tokenizing.of is None

    assert [bar.of for bar in bars if bar.name.startswith("hashing ")] == [store.tokens]

    bars.clear()
    find_damage(store.folder, store.manifest)
    find_damage(store.folder, store.manifest, read=True)
    hidden, shown = bars
    assert (hidden.is_shown, shown.is_shown) == (False, True)
    assert shown.counted == shown.of == 2 * store.tokens


def test_verifying_a_checkpoint_counts_a_ranks_bytes_and_rank_0_shows_it(tmp_path, bars) -> None:
    path = write_checkpoint(tmp_path, 10)
    files = read_manifest(path).files
    for rank in range(2):
        assert broken_files(path, files, hashes=True, share=(rank, 2)) == []
    assert [bar.is_shown for bar in bars] == [True, False]
    assert all(bar.counted == bar.of for bar in bars)
    assert sum(bar.of for bar in bars) == sum(entry.size for entry in files.values())


def test_a_save_counts_the_bytes_that_it_hashes(tmp_path, bars, monkeypatch) -> None:
    path, saving = write_checkpoint(tmp_path, 10), SimpleNamespace()
    for rank in range(2):
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        files = Checkpointer._hash_files(saving, path)
        assert bars[-1].counted == bars[-1].of == sum(entry.size for entry in files.values())
    assert [(bar.is_shown, bar.of > 0) for bar in bars] == [(True, True), (False, False)]


def test_an_export_counts_the_bytes_of_the_weights(tmp_path, bars, monkeypatch) -> None:
    monkeypatch.setattr(hf_export, "read_weight", lambda *_: [torch.zeros(8)])
    monkeypatch.setattr(hf_export, "hf_names", lambda *_, **__: {"a": "x", "b": "y"})
    weights = dict.fromkeys("ab", TensorEntry("float32", (8,)))
    args: Any = FLAVORS["debugmodel"]
    reader: Any = type("Reader", (), {"manifest": read_manifest(write_checkpoint(tmp_path, 10))})
    hf_export.write_weights(reader, tmp_path, args, weights, Float8Config(), max_shard_bytes=32)
    (bar,) = bars
    assert (bar.name, bar.of, bar.counted) == ("exporting step 10", 64, 64)


def test_a_search_counts_configs_also_refused_ones(bars) -> None:
    words = ["--job.config_file=llama3_8b", "--model.n_layers=2", "--training.local_batch_size=1"]
    words += ["--parallelism.tensor_parallel_degree=1", "--float8.enable_float8_linear=false"]
    config = load_config(words, world_size=8)
    space = Space(config, 8, find_device("H100 SXM"), given_keys(words))
    found = find_candidates(space)
    (bar,) = bars
    assert bar.counted == bar.of == len([*space.settings()]) >= len(found) > 1
