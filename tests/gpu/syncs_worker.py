"""Trains on a GPU, and tells as a line of JSON how often the host waited for it in each step."""

import json
import os
import sys

from torch.profiler import ProfilerActivity, profile

from torchtitan_lite.base.logger import init_logger
from torchtitan_lite.config import load_config
from torchtitan_lite.parallel.mesh import set_determinism
from torchtitan_lite.planner.prepare import prepare_job
from torchtitan_lite.run.process_group import end_process, init_distributed
from torchtitan_lite.run.watchdog import Watchdog
from torchtitan_lite.training.trainer import Trainer

WAITS = ("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpy")


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
    trainer.report_progress()
    waits = []
    for step in range(1, trainer.last_step + 1):
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            trainer.advance(step)
        # The profiler itself waits once, at its end.
        waits.append(sum(event.name in WAITS for event in profiler.events()))
    print(json.dumps({"waits": waits}), flush=True)
    end_process(0)


if __name__ == "__main__":
    main()
