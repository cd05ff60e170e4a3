"""FP8 pretraining for Llama 3. README.md names the files to read first, docs/library.md what may be
imported from here. Names are imported when they are used: most need torch."""

import importlib
import logging
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchtitan_lite.base.errors import RunError as RunError
    from torchtitan_lite.catalog.recipes import Recipe as Recipe
    from torchtitan_lite.config import Config as Config
    from torchtitan_lite.config import OptimizerConfig as OptimizerConfig
    from torchtitan_lite.config import load_config as load_config
    from torchtitan_lite.config.job import Job as Job
    from torchtitan_lite.config.job import build_job as build_job
    from torchtitan_lite.data.tokenizer import build_tokenizer as build_tokenizer
    from torchtitan_lite.float8.convert import convert_to_float8 as convert_to_float8
    from torchtitan_lite.float8.scaled_linear import swap_linears as swap_linears
    from torchtitan_lite.metrics.base_writer import Writer as Writer
    from torchtitan_lite.metrics.base_writer import WrittenRun as WrittenRun
    from torchtitan_lite.metrics.flops import FlopsLedger as FlopsLedger
    from torchtitan_lite.metrics.flops import compute_rates as compute_rates
    from torchtitan_lite.metrics.flops import count_flops as count_flops
    from torchtitan_lite.metrics.hardware import find_peaks as find_peaks
    from torchtitan_lite.metrics.processor import StepValues as StepValues
    from torchtitan_lite.models.generate import Sampling as Sampling
    from torchtitan_lite.models.llama3 import Transformer as Transformer
    from torchtitan_lite.planner.plan import find_device as find_device
    from torchtitan_lite.planner.plan import make_plan
    from torchtitan_lite.planner.prepare import prepare_job as prepare_job
    from torchtitan_lite.run.process_group import init_distributed as init_distributed
    from torchtitan_lite.tools.generate import generate as generate
    from torchtitan_lite.train import run
    from torchtitan_lite.training.trainer import Trainer as Trainer

    plan, run_training = make_plan, run

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

_PLACES = {
    "Config": "config",
    "FlopsLedger": "metrics.flops",
    "Job": "config.job",
    "OptimizerConfig": "config",
    "Recipe": "catalog.recipes",
    "RunError": "base.errors",
    "Sampling": "models.generate",
    "StepValues": "metrics.processor",
    "Trainer": "training.trainer",
    "Transformer": "models.llama3",
    "Writer": "metrics.base_writer",
    "WrittenRun": "metrics.base_writer",
    "build_job": "config.job",
    "build_tokenizer": "data.tokenizer",
    "compute_rates": "metrics.flops",
    "convert_to_float8": "float8.convert",
    "count_flops": "metrics.flops",
    "find_device": "planner.plan",
    "find_peaks": "metrics.hardware",
    "generate": "tools.generate",
    "init_distributed": "run.process_group",
    "load_config": "config",
    "plan": "planner.plan:make_plan",
    "prepare_job": "planner.prepare",
    "run_training": "train:run",
    "swap_linears": "float8.scaled_linear",
}
"""The library: the module of each name, and its name there where it is another."""
__all__ = [*_PLACES]


def __getattr__(name: str) -> Any:
    """Import a name of the library when it is first used."""
    if name not in _PLACES:
        raise AttributeError(f"torchtitan_lite has no {name}; docs/library.md lists its names")
    module, _, own = _PLACES[name].partition(":")
    return getattr(importlib.import_module(f"torchtitan_lite.{module}"), own or name)
