"""Trains a tiny model as torchtitan_lite.train does, and notes in samples-RANK.jsonl of the run
folder what this rank trained on: a line for each microbatch, with the numbers of its samples, a
hash of each one's tokens and labels, and the indices of each one's BOS ids."""

import json
import os
import sys
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import torch

from torchtitan_lite import train
from torchtitan_lite.catalog.flavors import FLAVORS, ModelArgs
from torchtitan_lite.data.dataloader import Batch

next_batches = train.Trainer.next_batches


def noted_batches(trainer: train.Trainer, batches: Iterator[Batch]) -> list[Batch]:
    """The batches, once they were noted, if they are to train on."""
    taken = next_batches(trainer, batches)
    if batches is not trainer.prefetched:
        return taken
    bos_id = trainer.job.tokenizer.bos_id
    with Path(trainer.job.folder, f"samples-{os.environ['RANK']}.jsonl").open("a") as file:
        for number, (tokens, labels) in enumerate(taken):
            samples = trainer.batches.sample_ids(trainer.step + 1, number)
            pairs = torch.stack([tokens, labels], dim=1)
            hashes = [sha256(pair.numpy().tobytes()).hexdigest() for pair in pairs]
            line = {
                "step": trainer.step + 1,
                "samples": dict(zip(samples.tolist(), hashes, strict=True)),
                "bos": [(row == bos_id).nonzero().flatten().tolist() for row in tokens],
            }
            file.write(json.dumps(line) + "\n")
    return taken


if __name__ == "__main__":
    sizes = {"dim": 32, "n_layers": 1, "n_heads": 2, "n_kv_heads": 1, "ffn_dim": 64}
    FLAVORS["debugmodel_gqa"] = ModelArgs(**sizes, vocab_size=0)
    train.Trainer.next_batches = noted_batches  # type: ignore[method-assign]
    sys.exit(train.main())
