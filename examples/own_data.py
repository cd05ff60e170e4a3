"""Train on batches of your own.

torchtitan-lite train --job.config_file debug_model --training.dataset own_data:counting
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from torchtitan_lite import Job


def counting(
    job: Job, tokenizer: object, *, dp_rank: int, dp_degree: int, first_sample: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the tokens and labels, int64 [B, S] each, that data-parallel rank `dp_rank` of
    `dp_degree` trains on: sequences that count up from a random id.

    The ranks of a pipeline, and those that share a sequence or a matrix, have the same `dp_rank`,
    and must get the same batches. All ranks together have trained on `first_sample` samples: a
    resumed run goes on where it ended."""
    size, seq_len = job.batch.local_batch_size, job.config.training.seq_len
    first = first_sample + dp_rank * size
    while True:
        generator = torch.Generator().manual_seed(first)  # a sample depends on its number alone
        start = torch.randint(job.model_args.vocab_size, (size, 1), generator=generator)
        ids = (start + torch.arange(seq_len + 1)) % job.model_args.vocab_size
        yield ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
        first += dp_degree * size
