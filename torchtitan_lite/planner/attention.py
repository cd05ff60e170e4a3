"""Bytes of a layer's attention on one rank: what its backward needs, what it works with, and what
context parallelism gathers.

Under context parallelism of degree c a rank's queries are two chunks of S / 2c, which attend to the
keys of their whole sequence (parallel/context_parallel.py).
"""

from torchtitan_lite.config.job import Job
from torchtitan_lite.models.llama3 import CPU_FLOAT32_HEAD_DIM

FLOAT32 = 4


class AttentionBytes:
    """Sizes of the attention of one layer, in bytes."""

    def __init__(self, job: Job, *, width: int, on_cpu: bool, float8: bool) -> None:
        """`width` is of an element of the compute type. `float8`: tensor parallelism gathers the
        output in float8."""
        model, self.tokens, self.cp = job.model_args, job.microbatch_tokens, job.degrees.cp
        self.width, self.float8 = width, float8

        # Elements of queries, and of the keys or values, of this rank's tokens.
        tp = job.degrees.tp
        self.heads = self.tokens * model.q_dim // tp
        self.kv_heads = self.tokens * model.kv_dim // tp
        self.sums = self.tokens * model.n_heads // tp

        # On CPU each chunk is padded to the length of its keys: (2c + 1) * S / 2c queries in all
        # instead of S / c. Small heads are copied to float32.
        self.masked = model.document_bos_id is not None
        self.in_chunks = self.cp > 1 and not self.masked
        self.pads, self.on_cpu = self.in_chunks and on_cpu, on_cpu
        self.in_float32 = on_cpu and model.head_dim <= CPU_FLOAT32_HEAD_DIM
        self.computed = FLOAT32 if self.in_float32 else width
        self.seq_len = model.max_seq_len

    def saved(self) -> dict[str, int]:
        """Bytes of each tensor that the backward needs: operands and output, and wo's input."""
        chunks = 2 * self.cp + 1  # in halves of this rank's tokens
        queries, keys = (chunks if self.pads else 2), 2 * self.cp
        if self.pads and self.in_float32:
            keys = chunks  # each chunk has copies of its own

        # wo saves a cast of the output, or the chunks put together.
        no_copy = self.computed == self.width and not self.in_chunks
        tensors = {
            "q": queries * self.heads // 2 * self.computed,
            "k": keys * self.kv_heads // 2 * self.computed,
            "v": keys * self.kv_heads // 2 * self.computed,
            "attention": queries * self.heads // 2 * self.computed,
            "attention cast": 0 if no_copy or self.float8 else self.heads * self.width,
            "log_sum_exp": queries * self.sums // 2 * FLOAT32,
            "attention in float8": self.heads if self.float8 else 0,
        }
        if self.masked and self.on_cpu:
            tensors["mask"] = self.tokens * self.seq_len * self.computed  # as numbers to add
        return tensors

    def backward(self) -> int:
        """Bytes of gradients in the backward of the longer chunk, in addition to what is saved."""
        queries = self.cp if self.pads else 1
        keys = 2 * self.cp * self.kv_heads
        if self.on_cpu:  # also a copy of the output's gradient
            return (3 * queries * self.heads + keys) * self.computed
        # FlashAttention computes gradients of keys and values for each query head, then sums them;
        # it sums the queries' in float32.
        each = 2 * self.cp * self.heads if self.in_chunks and self.heads > self.kv_heads else 0
        return (2 * self.heads + each + keys) * self.width + FLOAT32 * self.heads // 2

    @property
    def gathered(self) -> int:
        """Bytes of the keys and values of whole sequences."""
        return 2 * self.cp * self.kv_heads * self.width
