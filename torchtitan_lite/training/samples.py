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
from torchtitan_lite.checkpoint.hf_folder import PREFIX, weight_shapes
from torchtitan_lite.checkpoint.state import model_state
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
        self._copy: Transformer | None = None  # on rank 0, while it samples
        for prompt in self._validation.prompts:
            encode_prompt(prompt, tokenizer, context=self._args.max_seq_len)

    def make(self) -> list[dict[str, Any]]:
        """Return the fields of a sample for each prompt; none if rank 0 has no memory for the copy.
        A collective call."""
        if not self._validation.prompts or not on_rank0(self._allocate):
            return []
        self._gather()
        return on_rank0(self._generate)

    def _allocate(self) -> bool:
        try:
            self._copy = build_empty_model(self._args, device=self._device, dtype=self._dtype)
        except torch.OutOfMemoryError:
            logger.warning("no samples: the memory of rank 0 has no room for a copy of the model")
            return False
        return True

    def _gather(self) -> None:
        """Copy each weight into the copy of rank 0."""
        targets = dict(self._copy.named_parameters()) if self._copy else {}
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
            if weight is not None and targets:
                targets[name.removeprefix(PREFIX)].data.copy_(weight)

    def _generate(self) -> list[dict[str, Any]]:
        model, self._copy = self._copy, None
        assert model is not None, "rank 0 has allocated it"
        sampling = Sampling(self._validation.max_new_tokens)
        try:
            prompts = self._validation.prompts
            samples = continue_prompts(model, self._tokenizer, prompts, sampling)
        except (NumericError, torch.OutOfMemoryError) as error:
            logger.warning(f"no samples: {error}")
            return []
        return [asdict(sample) for sample in samples]
