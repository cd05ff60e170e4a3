"""Texts that a run generates at its validations, to read beside the loss."""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torchtitan_lite.base.collectives import on_all_ranks, on_rank0
from torchtitan_lite.base.errors import NumericError
from torchtitan_lite.base.logger import logger
from torchtitan_lite.checkpoint.hf_folder import PREFIX, weight_shapes
from torchtitan_lite.checkpoint.state import model_state
from torchtitan_lite.config.job import Job
from torchtitan_lite.data.tokenizer import Tokenizer
from torchtitan_lite.models.generate import Generator, Sampling, build_empty_model, encode_prompt
from torchtitan_lite.models.llama3 import Transformer


class Samples:
    """The prompts of [validation], continued by the weights of a training run.

    Rank 0 generates, greedily, with a copy of the whole model in mixed_precision_param."""

    def __init__(
        self,
        job: Job,
        tokenizer: Tokenizer,
        model: nn.Module,
        *,
        stages: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        """`model` has the parameters of this rank's stages; the ranks of `stages` have the others.
        Raises ConfigError for a prompt that leaves no room in a sequence."""
        self._validation, self._args = job.config.validation, job.model_args
        self._tokenizer, self._model = tokenizer, model
        self._stages, self._device = stages, device
        self._dtype = getattr(torch, job.config.training.mixed_precision_param)
        for prompt in self._validation.prompts:
            encode_prompt(prompt, tokenizer, context=self._args.max_seq_len)

    def make(self) -> list[dict[str, Any]]:
        """Return the fields of a sample for each prompt; none if rank 0 has no memory for the copy.
        A collective call."""
        if not self._validation.prompts:
            return []
        copies: list[Transformer] = []
        if not on_rank0(lambda: self._allocate(copies)):
            return []
        targets = dict(copies[0].named_parameters()) if copies else {}
        self._gather(lambda name, weight: targets and targets[name].data.copy_(weight))
        return on_rank0(lambda: self._generate(copies))

    def _allocate(self, copies: list[Transformer]) -> bool:
        try:
            copies.append(build_empty_model(self._args, device=self._device, dtype=self._dtype))
        except torch.OutOfMemoryError:
            logger.warning("no samples: the memory of rank 0 has no room for a copy of the model")
            return False
        return True

    def _gather(self, take: Callable[[str, Tensor], object]) -> None:
        """Pass each weight to `take`, whole, on rank 0 and the ranks of its pipeline."""
        state = model_state(self._model)
        dtype = next(iter(state.values())).dtype
        of_rank0 = dist.get_global_rank(self._stages, 0) == 0

        # The rank of `stages` that has each weight.
        names = on_all_ranks(lambda: list(state), group=self._stages)
        owners = {name: rank for rank, own in enumerate(names) for name in own}
        for name, shape in weight_shapes(self._args, most_layers=self._args.n_layers).items():
            weight = state.get(name)
            if isinstance(weight, DTensor):
                weight = weight.full_tensor()
            if of_rank0 and self._stages.size() > 1:
                if weight is None:
                    weight = torch.empty(shape, device=self._device, dtype=dtype)
                weight = weight.to(self._device)
                dist.broadcast(weight, group=self._stages, group_src=owners[name])
            if weight is not None:
                take(name.removeprefix(PREFIX), weight)

    def _generate(self, copies: list[Transformer]) -> list[dict[str, Any]]:
        generator = Generator(copies[0], self._tokenizer)
        try:
            samples = generator.run(
                self._validation.prompts,
                max_new_tokens=self._validation.max_new_tokens,
                sampling=Sampling(),
            )
        except (NumericError, torch.OutOfMemoryError) as error:
            logger.warning(f"no samples: {error}")
            return []
        return [asdict(sample) for sample in samples]
