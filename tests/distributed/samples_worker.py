"""Trains a tiny model as torchtitan_lite.train does, and notes in samples-RANK.jsonl of the run
folder what this rank trained on: a line for each microbatch, with the numbers of its samples, a
hash of each one's tokens and labels, and the indices of each one's BOS ids."""

import itertools
import json
import os
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchtitan_lite import train
from torchtitan_lite.models.flavors import FLAVORS, ModelArgs

loss = train.Trainer.loss
microbatches = itertools.count()


def noted_loss(trainer: train.Trainer, tokens: Tensor, labels: Tensor, **options: Any) -> Tensor:
    """The loss, after its microbatch was noted, if it is one to train on."""
    if not torch.is_grad_enabled():
        return loss(trainer, tokens, labels, **options)
    samples = trainer.batches.sample_ids(
        trainer.step + 1, next(microbatches) % trainer.job.batch.grad_accum_steps
    )
    bos_id = trainer.job.tokenizer.bos_id
    hashes = [
        sha256(pair.numpy().tobytes()).hexdigest() for pair in torch.stack([tokens, labels], dim=1)
    ]
    with Path(trainer.job.folder, f"samples-{os.environ['RANK']}.jsonl").open("a") as file:
        file.write(
            json.dumps(
                {
                    "step": trainer.step + 1,
                    "samples": dict(zip(samples.tolist(), hashes, strict=True)),
                    "bos": [(row == bos_id).nonzero().flatten().tolist() for row in tokens],
                }
            )
        )
        file.write("\n")
    return loss(trainer, tokens, labels, **options)


if __name__ == "__main__":
    FLAVORS["debugmodel_gqa"] = ModelArgs(
        dim=32, n_layers=1, n_heads=2, n_kv_heads=1, ffn_dim=64, vocab_size=0
    )
    train.Trainer.loss = noted_loss  # type: ignore[method-assign]
    sys.exit(train.main())
