"""torchtitan 0.2.2's Llama 3 on a CPU; started by versus_torchtitan.py with torchtitan's Python.

torchrun torchtitan_cpu.py DIMENSIONS ...    DIMENSIONS is a JSON object of model arguments; the
                                             rest are torchtitan's own options

torchtitan trains on accelerators. Here it finds a CPU as its device, one that has no memory
statistics and needs no synchronization. Its Triton kernels for mixtures of experts are left out:
Llama 3 does not use them. FSDP averages gradients, because gloo has no scaled sum. It trains on one
batch of random tokens that stays in memory, so that it spends no time on data.
"""

import argparse
import dataclasses
import importlib.util
import json
import os
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

SHARD_ONE = "--shard-one"


class RandomBatches:
    """The same batch of random tokens at every step."""

    def __init__(self, job_config: Any, vocab_size: int) -> None:
        training = job_config.training
        tokens = torch.randint(vocab_size, (training.local_batch_size, training.seq_len + 1))
        self.batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        """Yield the batch without end, as torchtitan expects it."""
        tokens, labels = self.batch
        while True:
            yield {"input": tokens}, labels

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: there is no position to save."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Do nothing."""


def import_torchtitan() -> None:
    """Import torchtitan so that it finds a CPU: it looks for its device while it is imported."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cpu = SimpleNamespace(
        current_device=lambda: 0,
        empty_cache=lambda: None,
        get_device_name=lambda device: "CPU",
        get_device_properties=lambda device: SimpleNamespace(total_memory=memory),
        memory_stats=lambda device: {},
        reset_peak_memory_stats=lambda: None,
        set_device=lambda device: None,
        synchronize=lambda: None,
    )
    kernels: Any = SimpleNamespace(generate_permute_indices=None)
    sys.modules["torchtitan.models.moe.kernels"] = kernels

    utils: Any = torch._utils
    found = utils._get_available_device_type, utils._get_device_module
    utils._get_available_device_type = lambda: "cpu"
    utils._get_device_module = lambda device_type: cpu
    importlib.import_module("torchtitan.train")
    utils._get_available_device_type, utils._get_device_module = found


def shard_on_one_rank() -> None:
    """Make torchtitan use FSDP2 on one rank too."""
    from torchtitan.distributed import ParallelDims

    ParallelDims.fsdp_enabled = True
    ParallelDims._mesh_exist = lambda self, name, degree: degree > 1 or name == "fsdp"


def register_model(dimensions: dict[str, Any]) -> None:
    """Make torchtitan's Llama 3 a model of `dimensions`, trained on random batches."""
    from torchtitan.models import llama3
    from torchtitan.models.llama3.model.args import RoPEScalingArgs
    from torchtitan.protocols import train_spec

    scaling = RoPEScalingArgs(**dimensions.pop("rope_scaling_args"))
    args = llama3.TransformerModelArgs(**dimensions, rope_scaling_args=scaling)
    spec = dataclasses.replace(
        llama3.get_train_spec(),
        model_args={"debugmodel": args},
        build_tokenizer_fn=None,
        build_dataloader_fn=lambda *, job_config, **_: RandomBatches(job_config, args.vocab_size),
    )
    train_spec.register_train_spec("llama3", spec)


def main() -> None:
    """Train with the options on the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("dimensions", type=json.loads)
    dimensions = parser.parse_known_args()[0].dimensions
    if importlib.util.find_spec("torchtitan") is None:
        parser.error("this Python has no torchtitan; versus_torchtitan.py names one that has")

    # torchtitan reads sys.argv when it is imported.
    del sys.argv[1]
    shard_one = SHARD_ONE in sys.argv
    sys.argv[:] = [word for word in sys.argv if word != SHARD_ONE]
    import_torchtitan()
    from torchtitan import train
    from torchtitan.models.llama3.infra import parallelize

    parallelize.disable_fsdp_gradient_division = lambda model: None
    if shard_one:
        shard_on_one_rank()
    register_model(dimensions)
    train.main(train.Trainer)

    # gloo's threads can outlive the process group and would abort the process at its end.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
