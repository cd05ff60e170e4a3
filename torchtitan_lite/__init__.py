"""FP8 pretraining for Llama 3, small enough to read: see README.md for the map."""

import logging
import warnings

# What the libraries say on every rank and a user of this package can do nothing about. Set before
# they are imported.
for _name in (
    "torchao",  # its optional CUDA extensions are not built for this machine
    "torch.utils._pytree",  # a deprecation within torchao
):
    logging.getLogger(_name).setLevel(logging.ERROR)
for _message in (
    "FSDP2-wrapped module .* returned a view tensor",  # no one changes the embedding's output in place
    "Warning: Profiler clears events at the end of each cycle",  # each cycle is written before
    "Profiler won't be using warmup",  # asked for by profile_freq = 1
):
    warnings.filterwarnings("ignore", message=_message)
