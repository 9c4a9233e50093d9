"The same GPT-2 and training in plain torch modules and bmlab's own lines."
import math
import torch
from torch import nn
from bmlab.inspection import inspect_model
from bmlab.offload import AdamW
from bmlab.optim import Noam, OptimManager
from bmlab.processes import init_distributed, local_device, print_rank, rank, sum_loss, world_size
from bmlab.sharding import shard


class Layer(nn.Module):
    def __init__(self, D, dim_head, heads, F):
        super().__init__()
        self.ln_attn, self.q, self.k, self.v, self.out = nn.LayerNorm(D), *(nn.Linear(D, dim_head * heads) for _ in range(3)), nn.Linear(dim_head * heads, D)
        self.ln_ff, self.w_in, self.w_out = nn.LayerNorm(D), nn.Linear(D, F), nn.Linear(F, D)
        self.heads, self.dim_head = heads, dim_head

    def forward(self, hidden, mask):
        x, (B, L, _) = self.ln_attn(hidden), hidden.shape
        q, k, v = (p(x).view(B, L, self.heads, self.dim_head).transpose(1, 2) for p in (self.q, self.k, self.v))
        score = (q @ k.transpose(-1, -2) / math.sqrt(self.dim_head)).masked_fill(~mask[:, None], float("-inf"))
        score = score.softmax(-1).masked_fill(~mask[:, None], 0)
        hidden = hidden + self.out((score @ v).transpose(1, 2).reshape(B, L, -1))
        return hidden + self.w_out(self.w_in(self.ln_ff(hidden)).relu())


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.word_emb, self.pos_emb = nn.Embedding(64, 32), nn.Embedding(16, 32)
        self.transformers, self.layernorm = nn.ModuleList(Layer(32, 8, 4, 64) for _ in range(8)), nn.LayerNorm(32)

    def forward(self, ids, pos, mask):
        mask = mask[:, None, :] & mask[:, :, None] & (pos[:, None, :] <= pos[:, :, None])
        out = self.pos_emb(pos) + self.word_emb(ids)
        for layer in self.transformers: out = layer(out, mask)
        return self.layernorm(out) @ self.word_emb.weight.T


init_distributed(seed=0)
device = local_device()
with torch.device("meta"): model = GPT().half()
model.to_empty(device=device)
with torch.no_grad():
    for name, p in model.named_parameters():
        if "_emb" in name: nn.init.normal_(p, std=0.3)
        elif name.endswith("bias"): nn.init.zeros_(p)
        elif "ln_" in name or "layernorm" in name: nn.init.ones_(p)
        else: nn.init.xavier_normal_(p)
shard(model, zero=3, checkpoint=True, dtype=None)

torch.manual_seed(2333)
for i in range(world_size()):
    sent, lengths = torch.randint(0, 64, (2, 13)), torch.randint(8, 12, (2,))
    if i == rank(): break
ids, mask = sent[:, :-1].to(device), (torch.arange(12) < lengths[:, None]).to(device)
targets, pos = sent[:, 1:].to(device).masked_fill(~mask, -100), torch.arange(12, device=device).repeat(2, 1)

opt = AdamW(model, offload=1.0, weight_decay=1e-2)
schedule = Noam(opt, start_lr=1e-1, warmup_iter=4, end_iter=1000)
om = OptimManager(loss_scale=1024.); om.add_optimizer(opt, schedule)
for i in range(6):
    loss = nn.functional.cross_entropy(model(ids, pos, mask).flatten(0, 1), targets.flatten())
    om.zero_grad(); om.backward(loss); norm = om.clip_grad_norm(1.0); om.step()
    print_rank(f"| Iter: {i} | loss: {sum_loss(loss).item()!r} | grad_norm: {norm.item()!r} | lr: {schedule.current_lr:.4e} | scale: {om.loss_scale:.1f}")
opt.flush()
stats = inspect_model(model, ["transformers[7].w_in", "transformers[7].w_out"])
