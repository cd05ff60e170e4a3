"""torchtitan 0.2.2's Llama 3 on CPU, for scripts/bench_torchtitan.py, run under torchrun by the
Python that has it:

scripts/torchtitan_cpu.py DIMENSIONS ...    a JSON object of what its model arguments are to be;
then its own options

torchtitan trains on accelerators, and asks theirs for memory figures and for synchronisation: on
CPU it is told that there is nothing to tell. Its kernels for mixtures of experts, which Llama 3 has
not, need Triton, and are left out. Its text and tokenizer are no part of its package: it trains on
random tokens that are there before they are asked for, and so spends nothing on data. FSDP averages
gradients, as gloo has no scaled sum. All else is its own.
"""

import dataclasses
import importlib
import json
import os
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

SHARD_ONE = "--shard-one"
MODEL = "llama3"
FLAVOR = "debugmodel"


class RandomBatches:
    """The same batch of random tokens again and again, and what a checkpoint keeps of it:
    nothing."""

    def __init__(self, job_config: Any, vocab_size: int) -> None:
        """As large as the config says."""
        training = job_config.training
        tokens = torch.randint(vocab_size, (training.local_batch_size, training.seq_len + 1))
        self.batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        """Without end."""
        tokens, labels = self.batch
        while True:
            yield {"input": tokens}, labels

    def state_dict(self) -> dict[str, Any]:
        """Empty."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Do nothing."""


def import_for_cpu() -> None:
    """Import torchtitan, which looks for its device while it is imported, so that it finds the
    CPU."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    device_module = SimpleNamespace(
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
    with (
        mock.patch.object(torch._utils, "_get_available_device_type", lambda: "cpu"),
        mock.patch.object(torch._utils, "_get_device_module", lambda device_type: device_module),
    ):
        importlib.import_module("torchtitan.train")


def main(dimensions: str) -> None:
    """Train as the rest of the command line says."""
    shard_one = SHARD_ONE in sys.argv
    sys.argv[:] = [
        word for word in sys.argv if word != SHARD_ONE
    ]  # before torchtitan is imported, which reads them
    import_for_cpu()
    from torchtitan import train
    from torchtitan.distributed import ParallelDims
    from torchtitan.models import llama3
    from torchtitan.models.llama3.infra import parallelize
    from torchtitan.protocols import train_spec

    parallelize.disable_fsdp_gradient_division = lambda model: None
    if shard_one:
        ParallelDims.fsdp_enabled = True
        ParallelDims._mesh_exist = lambda self, name, degree: degree > 1 or name == "fsdp"
    args = llama3.TransformerModelArgs(**json.loads(dimensions))
    spec = dataclasses.replace(
        llama3.get_train_spec(),
        model_args={FLAVOR: args},
        build_tokenizer_fn=None,
        build_dataloader_fn=lambda *, job_config, **_: RandomBatches(job_config, args.vocab_size),
    )
    train_spec.register_train_spec(MODEL, spec)
    train.main(train.Trainer)
    sys.stdout.flush()
    os._exit(
        0
    )  # gloo's threads may outlive the process group, and would abort the process as it ends


if __name__ == "__main__":
    main(sys.argv.pop(1))
