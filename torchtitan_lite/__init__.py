"""FP8 pretraining for Llama 3. README.md lists the files to read first.

__init__.pyi lists the names of the library. Each is imported at its first use: most need torch."""

import logging
import warnings

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
__version__ = "0.3.0"

# Silence messages of libraries that every rank prints and no user can act on. This must happen
# before the libraries are imported.
for _name in (
    "torchao",  # its optional CUDA extensions are not built for this machine
    "torch.utils._pytree",  # a deprecation within torchao
    "torch._higher_order_ops.wrap",  # selective recomputation; no block has in-place operators
    # It reduces the gradient norm over one dimension of the mesh at a time: pytorch/pytorch#174630.
    "torch.distributed.tensor._redistribute",
):
    logging.getLogger(_name).setLevel(logging.ERROR)
for _message in (
    "FSDP2-wrapped module .* returned a view "
    "tensor",  # nothing changes the embedding's output in place
    "Warning: Profiler clears events at the end of each cycle",  # each cycle is written first
    "torch.distributed is disabled",  # DCP within one process: no_dist asks for that
    "Profiler won't be using warmup",  # profile_freq = 1 asks for that
):
    warnings.filterwarnings("ignore", message=_message)
