"""Float8 and the right MFU in a loop and with a model of your own: python own_loop.py"""

import time
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan_lite import compute_rates, convert_to_float8, count_flops, find_peaks

BATCH, SEQ_LEN, DIM, HEADS, LAYERS, VOCABULARY = 4, 128, 256, 4, 2, 512
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FLOAT8: Literal["fp8", "fp32"] = "fp8" if DEVICE.type == "cuda" else "fp32"  # emulated on a CPU


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:  # [B, S, D]
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        attention = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attention.transpose(1, 2).flatten(2))  # [B, S, D]
        return x + self.down(F.gelu(self.up(F.layer_norm(x, (DIM,)))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lm_head = nn.Embedding(VOCABULARY, DIM), nn.Linear(DIM, VOCABULARY)
        self.layers = nn.Sequential(*(Layer() for _ in range(LAYERS)))

    def forward(self, tokens: Tensor) -> Tensor:  # [B, S, V]
        return self.lm_head(self.layers(self.embedding(tokens)))


# What trains in float8, its FLOPs by precision, and the peak of each precision.
model = Model().to(DEVICE, torch.bfloat16)
matmuls = convert_to_float8(model, "rowwise", keep=("lm_head",), tokens=BATCH * SEQ_LEN)
ledger = count_flops(
    model, n_layers=LAYERS, q_dim=DIM, seq_len=SEQ_LEN, float8_matmuls=matmuls, fp8_runs_in=FLOAT8
)
peaks = find_peaks(DEVICE, precisions=("bf16", FLOAT8))

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(1, 6):
    began = time.perf_counter()
    ids = (torch.randint(VOCABULARY, (BATCH, 1)) + torch.arange(SEQ_LEN + 1)) % VOCABULARY
    tokens, labels = ids[:, :-1].to(DEVICE), ids[:, 1:].to(DEVICE)
    loss = F.cross_entropy(model(tokens).flatten(0, 1).float(), labels.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    shown, tps = loss.item(), tokens.numel() / (time.perf_counter() - began)
    mfu = compute_rates(tps, ledger=ledger, peaks=peaks)["mfu"]
    print(f"step {step} loss {shown:.3f} tps {tps:,.0f} mfu {mfu:.2f} %")
