"""The part of waits.py that saves, resumes, exports and imports, on two processes.

`wait_checkpoints.py FOLDER TITLE ARGUMENTS`, under torchrun, prints the figures of one model.
"""

import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from common import (
    environment,
    figures_told,
    measure_pairs,
    seconds_of,
    tell,
    torchrun,
    watch,
)

from torchtitan_lite.checkpoint.checkpointer import Checkpointer
from torchtitan_lite.checkpoint.hf_export import export_hf
from torchtitan_lite.checkpoint.manifest import NEW_RUN
from torchtitan_lite.checkpoint.resume import find_resume
from torchtitan_lite.checkpoint.state import training_state
from torchtitan_lite.config import load_config
from torchtitan_lite.models.init import local_part
from torchtitan_lite.parallel.mesh import build_mesh
from torchtitan_lite.planner.prepare import prepare_job
from torchtitan_lite.run.process_group import end_process, init_distributed
from torchtitan_lite.training.build import build_loaded_model

MODELS = {
    "250 MB a rank": ("--model.dim=768", "--model.n_layers=6", "--model.ffn_dim=2048"),
    "1 GB a rank": ("--model.dim=1280", "--model.n_layers=9", "--model.ffn_dim=3584"),
}
PAIRS = {"250 MB a rank": 4, "1 GB a rank": 2}
FIRST = "--job.config_file=train_configs/debug_model.toml"
SAVES = ("--checkpoint.enable", "--checkpoint.keep_latest_k=2", "--training.seq_len=64")


def measure() -> Iterator[dict[str, Any]]:
    """Yield the figures of both models."""
    for title, words in MODELS.items():
        with tempfile.TemporaryDirectory(prefix="benchmark_") as name:
            arguments = [name, title, FIRST, *SAVES, f"--job.dump_folder={name}/run", *words]
            command = torchrun([__file__, *arguments], processes=2)
            yield from figures_told(watch(command, env=environment()))


def together(action: Callable[[], object]) -> float:
    """Return the seconds that `action` takes on all ranks."""
    dist.barrier()
    return seconds_of(lambda: (action(), dist.barrier()))


def report(name: str, peer: str, ours: Callable[[], float], theirs: Callable[[], float]) -> None:
    """Measure both in pairs, after one of each that is not counted, and print the figure."""
    ours(), theirs()
    one, other = measure_pairs(ours, theirs, pairs=PAIRS[sys.argv[2]])
    if dist.get_rank() == 0:
        figure = {"name": f"{sys.argv[2]}: {name}", "peer": peer, "ours": one, "theirs": other}
        tell([figure])


def main() -> None:
    """Print the figures of the model that the command line describes."""
    folder, config = Path(sys.argv[1]), load_config(sys.argv[3:], world_size=2)
    device = init_distributed(config.comm)
    job, _ = prepare_job(config, device=device)
    mesh = build_mesh(job.degrees, device_type=device.type)
    built, optimizer, checkpointer = build_loaded_model(job, mesh, device=device, resume=None)
    state = training_state(built.model, optimizer)
    behind = Checkpointer(
        built.model,
        optimizer,
        config.checkpoint.model_copy(update={"async_mode": "async"}),
        folder=checkpointer.folder,
        device=device,
        manifest=checkpointer._manifest,
        stages=None,
    )
    steps = iter(range(1, 1000))

    def new_folder(kind: str) -> Path:
        """Return a new folder. The last two of a kind stay, as ours do."""
        step = next(steps)
        if dist.get_rank() == 0:
            old = sorted(folder.glob(f"{kind}-*"), key=lambda path: int(path.name.split("-")[1]))
            for each in old[:-2]:
                shutil.rmtree(each)
            (folder / f"{kind}-{step}").mkdir()
        dist.barrier()
        return folder / f"{kind}-{step}"

    def save(by: Checkpointer) -> float:
        progress = replace(NEW_RUN, step=next(steps))
        seconds = together(lambda: by.save(progress, last=False))
        by.wait()
        return seconds

    def save_plain() -> float:
        path = new_folder("dcp")
        return together(lambda: dcp.save(state, checkpoint_id=path))

    def save_plain_behind() -> float:
        path, started = new_folder("dcp"), list[Any]()
        seconds = together(lambda: started.append(dcp.async_save(state, checkpoint_id=path)))
        started[0].result()
        return seconds

    def save_torch() -> float:
        local = {name: local_part(tensor) for name, tensor in state.items()}
        file = new_folder("torch") / f"{dist.get_rank()}.pt"
        return together(lambda: torch.save(local, file))

    def resume() -> None:
        found = find_resume(config.checkpoint, folder=checkpointer.folder)
        assert found is not None, "there are checkpoints"
        checkpointer.load(found)

    report("a save, s", "DCP", lambda: save(checkpointer), save_plain)
    report("a save, s", "torch.save, a file a rank", lambda: save(checkpointer), save_torch)
    report(
        "an asynchronous save stops training for, s",
        "DCP's async_save",
        lambda: save(behind),
        save_plain_behind,
    )
    newest = max(folder.glob("dcp-*"), key=lambda path: int(path.name.split("-")[1]))
    report(
        "resume, s",
        "DCP",
        lambda: together(resume),
        lambda: together(partial(dcp.load, state, checkpoint_id=newest)),
    )
    if dist.get_rank() == 0 and checkpointer.last_saved is not None:
        report_hugging_face(folder, checkpointer.last_saved)
    dist.barrier()
    end_process(0)


def report_hugging_face(folder: Path, saved: Path) -> None:
    """Print the figures of an export and an import in this process."""
    from transformers import LlamaForCausalLM

    from torchtitan_lite.tools.generate import load_model

    target = folder / "exported"

    def export() -> float:
        shutil.rmtree(target, ignore_errors=True)
        return seconds_of(lambda: export_hf(saved, target, dtype="keep"))

    export()
    theirs = LlamaForCausalLM.from_pretrained(target)
    form: Any = {"dtype": torch.float32}

    def read(model: torch.nn.Module) -> None:  # what is mapped into memory only, is not loaded
        sum(parameter.sum() for parameter in model.parameters())

    def load_ours() -> None:
        read(load_model(target, device=torch.device("cpu"), **form)[0])

    def load_theirs() -> None:
        read(LlamaForCausalLM.from_pretrained(target, **form))

    pairs: dict[str, tuple[Callable[[], float], Callable[[], float]]] = {
        "export, s": (export, lambda: seconds_of(lambda: theirs.save_pretrained(folder / "hf"))),
        "import, s": (partial(seconds_of, load_ours), partial(seconds_of, load_theirs)),
    }
    for name, (ours, other) in pairs.items():
        one, others = measure_pairs(ours, other, pairs=PAIRS[sys.argv[2]])
        figure = {"name": f"{sys.argv[2]}: {name}", "peer": "transformers"}
        tell([{**figure, "ours": one, "theirs": others}])


if __name__ == "__main__":
    main() if sys.argv[1:] else tell(measure())
