"""What all tests share."""

import gc
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._functorch.config
import torch._inductor.config
import torch.distributed as dist
from hypothesis import settings as hypothesis_settings
from torch._dynamo.callback import callback_handler
from torch._dynamo.utils import counters
from torch._functorch import partitioners
from torch._inductor import cpu_vec_isa
from torch._inductor.choices import InductorChoices
from torch._inductor.codegen import cpp_utils
from torch._inductor.scheduler import MixOrderReduction
from torch.distributed.elastic.multiprocessing import PContext
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
from torchao.float8 import float8_ops, float8_training_tensor
from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor

from torchtitan_lite.base.logger import logger
from torchtitan_lite.run.compiler_checks import check_compiler

sys.path.insert(0, str(Path(__file__).parent / "distributed"))

# No test is timed: a busy machine is not a fault. CI tries the same examples in each run.
hypothesis_settings.register_profile("untimed", deadline=None, derandomize="CI" in os.environ)
hypothesis_settings.load_profile("untimed")

check_compiler(os.environ, compiles=False, on_gpu=False)  # the cache of runs that tests start
COMPILER_SETTINGS: tuple[Any, ...] = (
    torch.compiler.config,
    torch._dynamo.config,
    torch._functorch.config,
    torch._inductor.config,
)
PATCHED: list[tuple[Any, str]] = [
    (partitioners, "has_recomputable_rng_ops"),
    (partitioners, "get_default_op_list"),
    (MixOrderReduction, "get_fusion_score"),
    (InductorChoices, "can_fuse"),
    (WeightWithDynamicFloat8CastTensor, "fsdp_pre_all_gather"),
    (float8_ops, "addmm_float8_unwrapped"),
    (float8_training_tensor, "_ToFloat8ConstrFunc"),
    (PContext.close, "__defaults__"),
    (SubprocessHandler, "close"),
    (SubprocessHandler, "_popen"),
    (cpu_vec_isa, "supported_vec_isa_list"),
    (torch.optim.Optimizer, "_group_tensors_by_device_and_dtype"),
]
"""What patches.py replaces."""
ORIGINALS = [
    vars(owner)[name] if isinstance(owner, type) else getattr(owner, name)
    for owner, name in PATCHED
]
PATCHED_TABLES: list[dict[Any, Any]] = [cpp_utils.DTYPE_TO_CPP, float8_ops.FLOAT8_OPS_TABLE]
"""Where patches.py adds or replaces entries."""
ORIGINAL_TABLES = [dict(table) for table in PATCHED_TABLES]


@pytest.fixture(autouse=True)
def restore_process() -> Iterator[None]:
    """Undo what a test, or the product in it, changes in this process: tests pass in any order."""
    environment, folder = dict(os.environ), Path.cwd()
    level, handlers, propagate = logger.level, logger.handlers[:], logger.propagate
    filters, threads = warnings.filters[:], torch.get_num_threads()
    torch.manual_seed(0)  # as pytest-randomly does for Python and NumPy
    with restored_compiler():
        yield
    if dist.is_initialized():
        dist.destroy_process_group()
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)
    gc.enable()
    logger.handlers, logger.propagate = handlers, propagate
    logger.setLevel(level)
    warnings.filters[:] = filters
    os.chdir(folder)
    if os.environ != environment:
        os.environ.clear()
        os.environ.update(environment)


@contextmanager
def restored_compiler() -> Iterator[None]:
    """Undo changes of the compiler's settings and what patches.py replaces, and forget what was
    compiled: a process compiles a function a few times only."""
    before = [settings.get_config_copy() for settings in COMPILER_SETTINGS]
    yield
    for settings, values in zip(COMPILER_SETTINGS, before, strict=True):
        for name, value in settings.get_config_copy().items():
            if value != values[name]:
                setattr(settings, name, values[name])
    for (owner, name), original in zip(PATCHED, ORIGINALS, strict=True):
        setattr(owner, name, original)
    for table, entries in zip(PATCHED_TABLES, ORIGINAL_TABLES, strict=True):
        table.clear()
        table.update(entries)
    if counters:  # something was compiled
        torch._dynamo.reset()
        counters.clear()
    callback_handler.clear()


@pytest.fixture
def notices(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> pytest.LogCaptureFixture:
    """What the package logs at info level and above."""
    monkeypatch.setattr(logger, "propagate", True)
    caplog.set_level(logging.INFO, logger=logger.name)
    return caplog


@pytest.hookimpl(trylast=True)  # after the shuffle
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start with the tests of several processes, which take longest; skip those that need a GPU
    where there is none."""
    items.sort(key=lambda item: item.path.parent.name != "distributed")
    if torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9):
        return
    for item in items:
        if item.get_closest_marker("gpu"):  # the keywords hold the names of folders too
            item.add_marker(
                pytest.mark.skip(reason="no CUDA GPU of compute capability 8.9 or newer")
            )
