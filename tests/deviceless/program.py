"""A program of the project on the fake GPU: `program.py train ARGUMENTS`, under torchrun, or
`program.py bench ARGUMENTS`, `program.py gpu_day ARGUMENTS`, or its part `program.py kernel_times`.

It adds the models of these tests. It switches off what needs values or times of a device (the
checks that new and saved weights are finite, the timing of a kernel's configurations), and cuDNN's
attention, which the fake GPU does not have.
"""

import importlib
import sys
from pathlib import Path

import torch
from autotuning import take_first_configurations
from running import FLAVORS_OF_TESTS

import torchtitan_lite.bench
from torchtitan_lite import train
from torchtitan_lite.checkpoint import checkpointer
from torchtitan_lite.errors import run_script
from torchtitan_lite.models import init
from torchtitan_lite.models.flavors import FLAVORS

SCRIPTS = Path(__file__).parents[2] / "scripts"
sys.path += [str(SCRIPTS), str(SCRIPTS / "benchmarks")]

# The benchmark's rows run this program too.
torchtitan_lite.bench.TRAIN = (str(Path(__file__).resolve()), "train")
FLAVORS.update(FLAVORS_OF_TESTS)
torch.backends.cuda.enable_cudnn_sdp(False)
init.all_finite = lambda tensor: True
checkpointer.states.check_finite = lambda state, *, step: None
take_first_configurations()

if __name__ == "__main__":
    name = sys.argv.pop(1)
    if name == "train":
        train.main()
    else:
        program = importlib.import_module(name)
        if name == "gpu_day":
            program.KERNEL_TIMES = (str(Path(__file__).resolve()), "kernel_times")
        run_script(program.main)
