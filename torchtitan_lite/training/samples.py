"""Texts that a run generates at its validations, to read beside the loss."""

from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from torchtitan_lite.base.collectives import on_all_ranks, on_rank0
from torchtitan_lite.base.errors import NumericError
from torchtitan_lite.base.logger import logger
from torchtitan_lite.checkpoint.state import PREFIX, model_state
from torchtitan_lite.config.job import Job
from torchtitan_lite.data.tokenizer import Tokenizer
from torchtitan_lite.models.generate import (
    Sampling,
    build_empty_model,
    continue_prompts,
    encode_prompt,
)
from torchtitan_lite.models.llama3 import Transformer


class Samples:
    """The prompts of [validation], continued by the weights of a training run.

    Rank 0 generates, greedily, with a copy of the whole model in mixed_precision_param."""

    def __init__(
        self,
        job: Job,
        tokenizer: Tokenizer,
        model: nn.Module,
        stages: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        """`model` has the parameters of this rank's stages; the ranks of `stages` have the others.
        Raises ConfigError for a prompt that leaves no room in a sequence."""
        self._job, self._tokenizer, self._model = job, tokenizer, model
        self._stages, self._device = stages, device
        for prompt in job.config.validation.prompts:
            encode_prompt(prompt, tokenizer, context=job.model_args.max_seq_len)

    def make(self) -> list[dict[str, Any]]:
        """Return the fields of a sample for each prompt; none if rank 0 has no memory for the copy.
        A collective call."""
        copy, dtype = None, getattr(torch, self._job.config.training.mixed_precision_param)
        if dist.get_rank() == 0:
            try:
                copy = build_empty_model(self._job.model_args, device=self._device, dtype=dtype)
            except torch.OutOfMemoryError:
                logger.warning("no samples: rank 0 has no memory for a copy of the model")
        if not on_rank0(lambda: copy is not None):
            return []
        self._gather_into(copy)
        return on_rank0(lambda: self._generate(copy))

    def _gather_into(self, copy: Transformer | None) -> None:
        """Copy each weight into the copy of rank 0."""
        state = model_state(self._model)
        dtype = next(iter(state.values())).dtype
        passes_on = self._stages.size() > 1 and dist.get_global_rank(self._stages, 0) == 0

        # Each rank of the pipeline in turn has some of the weights.
        shapes = {name: weight.shape for name, weight in state.items()}
        for owner, owned in enumerate(on_all_ranks(lambda: shapes, group=self._stages)):
            for name, shape in owned.items():
                weight = state.get(name)
                if isinstance(weight, DTensor):
                    weight = weight.full_tensor()
                if passes_on:
                    if weight is None:
                        weight = torch.empty(shape, device=self._device, dtype=dtype)
                    weight = weight.to(self._device)
                    dist.broadcast(weight, group=self._stages, group_src=owner)
                if copy is not None and weight is not None:
                    copy.get_parameter(name.removeprefix(PREFIX)).data.copy_(weight)

    def _generate(self, model: Transformer | None) -> list[dict[str, Any]]:
        assert model is not None, "rank 0 has allocated it"
        validation = self._job.config.validation
        sampling = Sampling(validation.max_new_tokens)
        try:
            samples = continue_prompts(model, self._tokenizer, validation.prompts, sampling)
        except (NumericError, torch.OutOfMemoryError) as error:
            logger.warning(f"no samples: {error}")
            return []
        return [asdict(sample) for sample in samples]
