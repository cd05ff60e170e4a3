"""Train on every process with a clock whose events never complete by themselves, as if the device
were behind, and print as a line of JSON how often each step reads a tensor's value, which on a GPU
would wait for the device."""

import json
import os
import sys
from collections import Counter
from typing import Any

import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from torchtitan_lite.base.logger import init_logger
from torchtitan_lite.config import load_config
from torchtitan_lite.metrics.hardware import HostEvent
from torchtitan_lite.parallel.mesh import set_determinism
from torchtitan_lite.planner.prepare import prepare_job
from torchtitan_lite.run.process_group import end_process, init_distributed
from torchtitan_lite.run.watchdog import Watchdog
from torchtitan_lite.training.trainer import Trainer

READS = {"item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__"}


class LateEvent(HostEvent):
    """An event that passes only when it, or a later one, is waited for."""

    done_s = 0.0

    def query(self) -> bool:
        return self.time_s <= LateEvent.done_s

    def synchronize(self) -> None:
        LateEvent.done_s = max(LateEvent.done_s, self.time_s)


class Reads(TorchFunctionMode):
    """Counts the calls that read a tensor's value."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        # Code that means the host, not the device, which here is the same, writes the word.
        to_host = name == "to" and any(isinstance(arg, str) and arg == "cpu" for arg in args)
        waits = to_host and not (kwargs or {}).get("non_blocking")
        if name in READS or waits:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def main() -> None:
    init_logger()
    config = load_config(sys.argv[1:], world_size=int(os.environ["WORLD_SIZE"]))
    watchdog = Watchdog(report=print)
    set_determinism(config.debug)
    device = init_distributed(config.comm)
    job, tokenizer = prepare_job(config, device=device)
    trainer = Trainer(
        job, tokenizer, device=device, run_folder=None, resume=None, watchdog=watchdog
    )
    trainer.metrics.record_event = LateEvent
    trainer.metrics._began = LateEvent()
    trainer.report_progress()
    steps = []
    for step in range(1, trainer.last_step + 1):
        with Reads() as reads:
            trainer.advance(step)
        steps.append(dict(reads.counts))
    if dist.get_rank() == 0:
        print(json.dumps(steps), flush=True)
    end_process(0)


if __name__ == "__main__":
    main()
