"""The commands that README.md and docs/ show, and a fresh copy of the project to run them in."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from launching import ROOT
from torchtitan_layout import save_torchtitan

from torchtitan_lite.catalog.flavors import FLAVORS
from torchtitan_lite.models.llama3 import Transformer

PAGES = ["README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))]
FEW_LAYERS = 2
"""Of the models whose commands are tested, and of the checkpoint of torchtitan."""
COMMAND = re.compile(r"(?:[A-Z_]+=\S+ )*(?:\./|python |pip |torchrun |torchtitan-lite )")


def list_commands(page: str) -> Iterator[str]:
    """Yield the commands of the bash blocks and of the table of tasks of a page, in its order."""
    text = (ROOT / page).read_text()
    shown = r"^```bash\n(.*?)^```$|^\| [^\n]* \| ([^\n]*) \|$"
    for block, row in re.findall(shown, text, re.M | re.S):
        lines = re.sub(r"\\\n *", "", block).splitlines() or re.findall(r"`(.*?)`", row)
        for line in lines:
            command = re.sub(r"  +#.*|^#.*", "", line).strip()
            if COMMAND.match(command) or (block and command):
                yield command


def make_copy(folder: Path) -> dict[str, str]:
    """Copy the project's files into `folder`, and return the environment of its commands.

    Their `python` is this one; it imports the copy. The copy counts as set up, so that nothing is
    installed.
    """
    for name in subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines():
        if (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)

    programs = folder / "env/bin"
    programs.mkdir(parents=True)
    for name, words in {
        "python": "",
        "torchrun": "-m torch.distributed.run ",
        "torchtitan-lite": "-m torchtitan_lite ",
    }.items():
        (programs / name).write_text(f'#!/bin/sh\nexec {sys.executable} {words}"$@"\n')
        (programs / name).chmod(0o755)
    stamp = f"{folder}\n{(folder / 'pyproject.toml').read_text()}"
    for extra in ("", "-dev"):
        (folder / f"env/torchtitan_lite{extra}.stamp").write_text(stamp)

    return os.environ | {
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "PATH": f"{programs}:{os.environ['PATH']}",
        "PYTHONPATH": str(folder),
        "VIRTUAL_ENV": str(folder / "env"),
        "XDG_CACHE_HOME": str(folder / "cache"),
    }


def write_inputs(folder: Path) -> None:
    """Write the files that the pages take for the user's own: texts, a checkpoint of torchtitan,
    and the configs and programs that they show, with the shipped tokenizer instead of Llama's."""
    args = replace(FLAVORS["debugmodel_gqa"], vocab_size=2256, n_layers=FEW_LAYERS)
    weights = dict(Transformer(args).named_parameters())
    init = {name: torch.full_like(each, 0.01) for name, each in weights.items()}
    save_torchtitan(folder / "torchtitan/checkpoint/step-1000", init)
    (folder / "my_texts").mkdir()
    library = Path(sysconfig.get_path("stdlib"))
    for name in ("argparse", "ast", "inspect", "typing"):
        shutil.copy(library / f"{name}.py", folder / "my_texts" / f"{name}.txt")
    (folder / "big.txt").write_text("One.\n<|endoftext|>\nTwo.\n<|endoftext|>\n")
    for page in PAGES:
        shown = r"^```(?:toml|python)\n# (my_\w+\.(?:toml|py))\n(.*?)^```$"
        for name, text in re.findall(shown, (folder / page).read_text(), re.M | re.S):
            (folder / name).write_text(text.replace('"Llama-3.1-8B/"', '""'))
