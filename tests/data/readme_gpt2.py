"GPT-2 as BMTrain's README and example train it, scaled down; written for BMTrain, with its import line."
import math
import torch
import bmtrain as bmt


class Linear(bmt.DistributedModule):
    def __init__(self, in_features, out_features, bias=True, dtype=None):
        super().__init__()
        self.weight = bmt.DistributedParameter(torch.empty(out_features, in_features, dtype=dtype, device="cuda"), init_method=torch.nn.init.xavier_normal_)
        self.bias = bmt.DistributedParameter(torch.empty(out_features, dtype=dtype, device="cuda"), init_method=torch.nn.init.zeros_) if bias else None

    def forward(self, x):
        return torch.nn.functional.linear(x, self.weight, self.bias)


class Embedding(bmt.DistributedModule):
    def __init__(self, num, dim, dtype=None):
        super().__init__()
        self.weight = bmt.DistributedParameter(torch.empty(num, dim, dtype=dtype, device="cuda"), init_method=bmt.ParameterInitializer(torch.nn.init.normal_, mean=0.0, std=0.3))

    def forward(self, x, projection=False):
        return torch.nn.functional.linear(x, self.weight) if projection else torch.nn.functional.embedding(x, self.weight)


class LayerNorm(bmt.DistributedModule):
    def __init__(self, dim, dtype=None):
        super().__init__()
        self.weight = bmt.DistributedParameter(torch.empty(dim, dtype=dtype, device="cuda"), init_method=torch.nn.init.ones_)
        self.bias = bmt.DistributedParameter(torch.empty(dim, dtype=dtype, device="cuda"), init_method=torch.nn.init.zeros_)

    def forward(self, x):
        return torch.nn.functional.layer_norm(x, self.weight.shape, self.weight, self.bias)


class Attention(bmt.DistributedModule):
    def __init__(self, dim_model, dim_head, num_heads, bias, dtype):
        super().__init__()
        self.q, self.k, self.v = (Linear(dim_model, dim_head * num_heads, bias, dtype) for _ in range(3))
        self.out = Linear(dim_head * num_heads, dim_model, bias, dtype)
        self.num_heads, self.dim_head = num_heads, dim_head

    def forward(self, x, mask):
        batch, length, _ = x.size()
        q, k, v = (p(x).view(batch, length, self.num_heads, self.dim_head).transpose(1, 2) for p in (self.q, self.k, self.v))
        score = q @ k.transpose(-1, -2) / math.sqrt(self.dim_head)
        score = torch.where(mask[:, None], score, torch.scalar_tensor(float("-inf"), device=score.device, dtype=score.dtype))
        score = torch.where(mask[:, None], score.softmax(-1), torch.scalar_tensor(0, device=score.device, dtype=score.dtype))
        return self.out((score @ v).transpose(1, 2).reshape(batch, length, -1))


class TransformerEncoder(bmt.DistributedModule):
    def __init__(self, dim_model, dim_head, num_heads, dim_ff, bias, dtype):
        super().__init__()
        self.ln_attn, self.attn = LayerNorm(dim_model, dtype), Attention(dim_model, dim_head, num_heads, bias, dtype)
        self.ln_ff, self.w_in, self.w_out = LayerNorm(dim_model, dtype), Linear(dim_model, dim_ff, bias, dtype), Linear(dim_ff, dim_model, bias, dtype)

    def forward(self, hidden, mask, position_bias=None):
        hidden = hidden + self.attn(self.ln_attn(hidden), mask)
        return hidden + self.w_out(self.w_in(self.ln_ff(hidden)).relu())


class GPT(bmt.DistributedModule):
    def __init__(self, num_layers, vocab_size, dim_model, dim_head, num_heads, dim_ff, max_distance, bias=True, dtype=None):
        super().__init__()
        self.word_emb, self.pos_emb = Embedding(vocab_size, dim_model, dtype=dtype), Embedding(max_distance, dim_model, dtype=dtype)
        self.transformers = bmt.TransformerBlockList([
            bmt.CheckpointBlock(TransformerEncoder(dim_model, dim_head, num_heads, dim_ff, bias, dtype))
            for _ in range(num_layers)
        ])
        self.layernorm = LayerNorm(dim_model, dtype=dtype)

    def forward(self, input, pos, mask):
        mask_2d = mask[:, None, :] & mask[:, :, None]
        mask_2d = mask_2d & (pos[:, None, :] <= pos[:, :, None])
        out = self.pos_emb(pos) + self.word_emb(input)
        out = self.transformers(out, mask_2d, None)
        logits = self.word_emb(self.layernorm(out), projection=True)
        bmt.inspect.record_tensor(logits, "logits")
        return logits


def main():
    bmt.init_distributed(seed=0)
    model = GPT(num_layers=8, vocab_size=64, dim_model=32, dim_head=8, num_heads=4, dim_ff=64, max_distance=16, bias=True, dtype=torch.half)
    bmt.init_parameters(model)
    bmt.synchronize()

    torch.manual_seed(2333)
    for i in range(bmt.world_size()):                # generate dummy data for each rank
        sent = torch.randint(0, 64, (2, 13))
        enc_length = torch.randint(8, 12, (2,)).long().cuda()
        enc_input, targets = sent[:, :-1].long().cuda(), sent[:, 1:].long().cuda()
        mask = torch.arange(12).long().cuda()[None, :] < enc_length[:, None]
        targets = torch.where(mask, targets, torch.full_like(targets, -100, dtype=torch.long, device="cuda"))
        if i == bmt.rank(): break

    loss_func = torch.nn.CrossEntropyLoss(ignore_index=-100)
    optimizer = bmt.optim.AdamOffloadOptimizer(model.parameters(), weight_decay=1e-2)
    lr_scheduler = bmt.lr_scheduler.Noam(optimizer, start_lr=1e-1, warmup_iter=4, end_iter=1000, num_iter=0)
    optim_manager = bmt.optim.OptimManager(loss_scale=1024)
    optim_manager.add_optimizer(optimizer, lr_scheduler)

    for iteration in range(6):
        pos = torch.arange(enc_input.size(1)).long().cuda().repeat(enc_input.size(0), 1)
        logits = model(enc_input, pos, pos < enc_length[:, None])
        batch, seq_len, vocab_out_size = logits.size()
        loss = loss_func(logits.view(batch * seq_len, vocab_out_size), targets.view(batch * seq_len))
        global_loss = bmt.sum_loss(loss).item()
        optim_manager.zero_grad()
        optim_manager.backward(loss)
        grad_norm = optim_manager.clip_grad_norm(optimizer.param_groups, max_norm=1.0)
        optim_manager.step()
        bmt.print_rank(f"| Iter: {iteration} | loss: {global_loss!r} | grad_norm: {grad_norm.item()!r} | lr: {lr_scheduler.current_lr:.4e} | scale: {optim_manager.loss_scale:.1f}")

    bmt.print_rank(bmt.inspect.format_summary(bmt.inspect.inspect_model(model, "transformers.7.w_*.weight")))
    bmt.save(model, "checkpoint.pt")


if __name__ == "__main__":
    main()
