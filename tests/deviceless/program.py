"""A program of the project on the fake GPU: `program.py train ARGUMENTS`, under torchrun, or
`program.py bench ARGUMENTS`.

It adds the models of these tests. It switches off what needs values or times of a device (the
checks that new and saved weights are finite, the timing of a kernel's configurations), and cuDNN's
attention, which the fake GPU does not have.
"""

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

sys.path.append(str(Path(__file__).parents[2] / "scripts"))

# The benchmark's rows run this program too.
torchtitan_lite.bench.TRAIN = (str(Path(__file__).resolve()), "train")
FLAVORS.update(FLAVORS_OF_TESTS)
torch.backends.cuda.enable_cudnn_sdp(False)
init.all_finite = lambda tensor: True
checkpointer.states.check_finite = lambda state, *, step: None
take_first_configurations()

if __name__ == "__main__":
    if sys.argv.pop(1) == "train":
        train.main()
    else:
        import bench

        run_script(bench.main)
