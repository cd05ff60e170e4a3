"""The schedules of torch.distributed.pipelining that can be chosen.

The zero-bubble ones cannot: with them PyTorch computes wrong gradients, without an error, under
compile, resharding or activation checkpointing (pytorch/pytorch#161904).
"""

DEFAULT_SCHEDULE = "1F1B"
INTERLEAVED = "Interleaved1F1B"
"""Of p ranks, rank r has the stages r, r + p, r + 2p and so on; with the others only stage r."""
SCHEDULES = (DEFAULT_SCHEDULE, "GPipe", INTERLEAVED)
