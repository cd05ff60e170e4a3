"""Where a rank's memory goes: what it holds at each moment of a training step, and when that is the most.

Counted are the tensors that the step needs, from the shapes alone. Not counted is what comes with the device: the CUDA
context, cuBLAS's and NCCL's buffers, blocks that the allocator cannot fill.

Shapes: B local_batch_size, S seq_len, D dim, H heads, K key-value heads, Q head_dim, F ffn_dim, V vocab_size.
"""
