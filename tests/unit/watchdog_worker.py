"""One rank of a small job: it meets the others, does what its arguments say at step 7, and then
joins an all-reduce."""

import math
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from torchtitan_lite.logger import init_logger
from torchtitan_lite.parallel import watchdog
from torchtitan_lite.parallel.distributed import connect_store
from torchtitan_lite.parallel.watchdog import Watchdog, is_rank_loss

watchdog.TICK_SECONDS, watchdog.LOOK_SECONDS, watchdog.GRACE_TICKS = 0.2, 1.0, 5
watchdog.STORE_SECONDS, watchdog.EXTRA_SECONDS = 0.5, 0
OUTLASTING_SECONDS = 6.0
"""Longer than a watchdog takes, ticking that fast, to see that the store is gone."""


def parent(*commands: str) -> None:
    """Play torchrun: serve the store and start two ranks, each with its command, and wait."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    env = {"MASTER_PORT": str(store.port), "WORLD_SIZE": str(len(commands))}
    for rank, command in enumerate(commands):
        subprocess.Popen(
            [sys.executable, __file__, command], env=os.environ | env | {"RANK": str(rank)}
        )
    time.sleep(60)


def say(line: str) -> None:
    """Print a line in one piece, as ranks share a pipe, and at once, as ranks are killed."""
    os.write(1, f"{line}\n".encode())


def work(command: str) -> None:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    init_logger()
    if command == "sleep first":
        time.sleep(60)
    dog = Watchdog(
        report=lambda cause: say(f"report: {cause}"),
        timeout_s=1.0 if command == "wait" else math.inf,
    )
    if command == "stop and join":
        os.kill(os.getpid(), signal.SIGTERM)
    timeout = timedelta(seconds=60 if command == "wait" else 3)
    dist.init_process_group(
        "gloo", store=connect_store(10), rank=rank, world_size=world_size, timeout=timeout
    )
    dist.barrier()
    dog.at(7, "forward")
    say("ready")
    if command == "sleep":
        time.sleep(60)
    elif command == "freeze":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif command == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    elif command == "fail":
        dog.fail("the text ended")
        os._exit(3)
    elif command in ("outlast", "close and outlast", "stop on SIGTERM and outlast"):
        if command.startswith("close"):
            dog.close()
        elif command.startswith("stop"):
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(OUTLASTING_SECONDS)
        say("outlasted")
        os._exit(0)
    dog.at(7, "agreement")
    try:
        dist.all_reduce(torch.ones(1))
    except RuntimeError as error:
        assert is_rank_loss(error), error
        lost = dog.explain(error)
        say(f"explained: {lost}\nrank: {lost.rank}")
        dog.fail(str(lost))
        os._exit(6)
    os._exit(0)


if __name__ == "__main__":
    commands = sys.argv[1:]
    parent(*commands) if len(commands) > 1 else work(commands[0])
