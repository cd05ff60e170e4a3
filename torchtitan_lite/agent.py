"""The elastic agent of this node: starts the workers, and starts them again after a failure.

`torchtitan_lite.launch` runs it in a process of its own: `python -m torchtitan_lite.agent SPEC
WORDS...`. SPEC is JSON with four keys; WORDS are the arguments of `torchtitan_lite.train`.

  elastic     arguments of torch's LaunchConfig
  log_dir     folder of the workers' logs
  terminal    file descriptor for the workers' lines on stderr; the agent's own stderr is a log
  failure     file descriptor for a line of JSON about the first worker that failed
"""

import os
import sys

if __name__ == "__main__" and sys.path[0] == os.getcwd():  # noqa: PTH109
    del sys.path[0]  # as in torchtitan_lite.launch

import json
from contextlib import redirect_stderr

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, launch_agent

from torchtitan_lite.patches import allow_long_saves


def main() -> None:
    """Run the workers until they are done. Exit code 1, with a traceback, if they are not."""
    spec, words = json.loads(sys.argv[1]), sys.argv[2:]
    allow_long_saves()
    logs = DefaultLogsSpecs(log_dir=spec["log_dir"], tee=Std.ALL)
    config = LaunchConfig(**spec["elastic"], logs_specs=logs)
    python = os.environ.get("PYTHON_EXEC", sys.executable)  # as under torchrun

    # torch shows the workers' stderr on sys.stderr. Its loggers keep the stream of its import.
    with os.fdopen(spec["terminal"], "w", buffering=1) as terminal, redirect_stderr(terminal):
        try:
            launch_agent(config, python, ["-u", "-m", "torchtitan_lite.train", *words])
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            line = json.dumps({"rank": rank, "rank_code": failure.exitcode})
            os.write(spec["failure"], line.encode())
            raise


if __name__ == "__main__":
    main()
