"""What the training benchmarks share: a GPT of any size, a fair clock, children in processes of their own, one table.

Each benchmark is a list of runs, bmlab's and the peer's, that follow one another in fresh processes (`torchrun` for
several GPUs). A run prints one JSON line.
Data are random tokens; weights start from N(0, 0.02). Times are of whole steps: work of the optimizer that a step
leaves for later is inside, because the clock
starts and stops with everything finished.
"""
import json, os, subprocess, sys, tempfile, time
from pathlib import Path

import pandas as pd
import torch
import torch.nn as nn
import torch.nn.functional as F

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))


class Layer(nn.Module):
    "Pre-norm transformer layer with fused q, k, v"
    def __init__(self, D, H, **to):
        super().__init__()
        self.heads = H
        self.norm1, self.norm2 = nn.LayerNorm(D, **to), nn.LayerNorm(D, **to)
        self.qkv, self.proj = nn.Linear(D, 3 * D, **to), nn.Linear(D, D, **to)
        self.up, self.down = nn.Linear(D, 4 * D, **to), nn.Linear(4 * D, D, **to)

    def forward(self, x):                                               # (B, L, D)
        B, L, D = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(B, L, 3, self.heads, -1).permute(2, 0, 3, 1, 4)   # (B, H, L, D/H) each
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(B, L, D))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    "Decoder with learned positions and a head of its own"
    def __init__(self, layers, D, H, vocab, length, **to):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, D, **to), nn.Embedding(length, D, **to)
        self.layers = nn.ModuleList([Layer(D, H, **to) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(D, **to), nn.Linear(D, vocab, bias=False, **to)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers: x = layer(x)
        return self.head(self.norm(x))


def lm_loss(model, ids):
    "Mean next-token loss, logits in fp32"
    logits = model(ids)
    return F.cross_entropy(logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten())


@torch.no_grad()
def fill(model):
    "Weights as they start: N(0, 0.02), norms 1 and 0"
    for m in model.modules():
        for n, p in m.named_parameters(recurse=False):
            if isinstance(m, nn.LayerNorm): p.fill_(float(n == "weight"))
            elif n == "bias": p.zero_()
            else: p.normal_(0, 0.02)


def clock(step, batch, device, warm=3, steps=8, finish=lambda: None):
    "Seconds a step, the last loss, peak bytes of the allocator and of the driver"
    gpu = device.type == "cuda"
    sync = (lambda: (finish(), torch.cuda.synchronize())) if gpu else finish
    draw = torch.Generator(device).manual_seed(int(os.environ.get("RANK", 0)))
    for i in range(warm + steps):
        if i == warm:
            sync()
            start = time.perf_counter()
        loss = step(batch(draw))
    sync()
    seconds = (time.perf_counter() - start) / steps
    free, total = torch.cuda.mem_get_info() if gpu else (0, 0)
    return {
        "step_s": round(seconds, 4),
        "loss": round(float(loss.detach()), 3),
        "peak_GiB": round((torch.cuda.max_memory_allocated() if gpu else 0) / 2**30, 2),
        "reserved_GiB": round((torch.cuda.max_memory_reserved() if gpu else 0) / 2**30, 2),
    }


def random_ids(vocab, rows, length, device):
    "The batches of `clock`: (rows, length) random tokens, drawn anew for each step"
    return lambda draw: torch.randint(0, vocab, (rows, length), device=device, generator=draw)


def plain_step(model, opt, loss_of):
    "A whole step of any optimizer, whose loss is `loss_of(model, ids)`"
    def step(ids):
        loss = loss_of(model, ids)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss
    return step


def own_loss(model, ids):
    "The loss that a model of transformers computes itself"
    return model(input_ids=ids, labels=ids).loss


def llama_8b(tiny, vocab):
    "An 8B LLaMA shape, or one of three small layers and `vocab` tokens for a CPU"
    import transformers as tf
    size = dict(
        hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, intermediate_size=14336,
        vocab_size=128256, max_position_embeddings=4096)
    if tiny: size = dict(
        hidden_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, intermediate_size=128,
        vocab_size=vocab)
    return tf.LlamaConfig(**size)


def word_tokenizer(words):
    "A tokenizer whose tokens are numbers, written apart; 0 pads"
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    names = ["<pad>", *map(str, range(1, words))]                   # (a token "0" would cut the numbers that hold one)
    made = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>")


def with_peft(model, r, modules):
    "PEFT's LoRA as its users write it: every layer recomputed, fused AdamW; (step, tunable parameters)"
    import peft
    recompute(model).enable_input_require_grads()
    model = peft.get_peft_model(model, peft.LoraConfig(r=r, target_modules=modules))
    tuned = [p for p in model.parameters() if p.requires_grad]
    step = plain_step(model, torch.optim.AdamW(tuned, lr=1e-4, fused=True), own_loss)
    return step, sum(p.numel() for p in tuned)


def recompute(model):
    "Every layer of a model of transformers recomputes"
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(use_reentrant=False))
    return model


def with_delta(model, delta, rows, length, name, tiny, **how):
    "bmlab's step for a frozen model with a delta, as planned; (step, what the result says of it)"
    from bmlab.all import lm_loss, plan_training, shard
    gpu, ids = torch.cuda.is_available(), torch.zeros(rows, length, dtype=torch.long)
    alike = dict(offload=None, master=None, compile=gpu, loss="chunked")
    plan = plan_training(model, rows, length, inputs={"input_ids": ids, "labels": ids}, **alike, **how)
    print(plan, file=sys.stderr)
    keep(plan, name.replace(", ", "_").replace(" ", "-"), tiny)
    shard(model, checkpoint=plan.recompute, budget=plan.budget, compile=gpu)
    opt = torch.optim.AdamW(delta.trainable(), lr=1e-4, fused=True)
    step = plain_step(model, opt, lambda model, ids: lm_loss(model, {"input_ids": ids, "labels": ids}))
    predicted = dict(predicted_s=round(plan.step_s, 3), predicted_GiB=round(plan.peak_bytes / 2**30, 2))
    return step, dict(tunable=delta.count().delta, recomputed=plan.recompute, **predicted)


def result(**row):
    if int(os.environ.get("RANK", 0)) == 0: print("RESULT " + json.dumps(row), flush=True)


def keep(plan, name, tiny=False):
    "Write a plan to a file, before the run that it predicts; one of --tiny to a folder that does not last"
    usual = Path(tempfile.gettempdir()) / "bmlab-plans" if tiny else Path(__file__).resolve().parents[1] / "plans"
    folder = Path(os.environ.get("OUT", usual))
    folder.mkdir(exist_ok=True)
    if int(os.environ.get("RANK", 0)) == 0: plan.save(folder / f"{name}.json")


def leave():
    "End this process at once: tens of gigabytes of page-locked memory take long to unmap one by one"
    sys.stdout.flush()
    os._exit(0)


def here():
    "The machine at hand, its network measured by all ranks; without a GPU the preset that plans are made for"
    from bmlab.plan.machine import machine, measure, measure_network
    if not torch.cuda.is_available(): return machine("h200")
    if not (torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1): return measure()
    return measure(network=measure_network().gather)


def child(script, *args, gpus=1, timeout_s=420, quiet=True):
    "One run in processes of its own; its result row, or what it said last"
    launch = ["bash", ROOT / "scripts/launch/torchrun.sh"] if gpus > 1 else [sys.executable]
    env = dict(
        os.environ,
        OMP_NUM_THREADS=os.environ.get("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // gpus))),
        PYTHONPATH=os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        TOKENIZERS_PARALLELISM="false",
        HOSTS="1",                      # (the rest is for the launcher)
        HEAD="127.0.0.1",
        PORT="0",
        GPUS=str(gpus),
        PYTHON=sys.executable,
    )
    start = time.time()
    try:
        out = subprocess.run(
            [*launch, str(script), *map(str, args)], env=env, capture_output=True, text=True, timeout=timeout_s
        )
    except subprocess.TimeoutExpired: return {"error": f"not done after {timeout_s} s"}
    rows = [json.loads(line[7:]) for line in out.stdout.splitlines() if line.startswith("RESULT ")]
    row = (
        rows[-1]
        if rows
        else {"error": (out.stderr.strip().splitlines() or out.stdout.strip().splitlines() or ["nothing"])[-1][:200]}
    )
    if not rows: print(out.stderr[-3000:], flush=True)
    return row | {"run_s": round(time.time() - start)}


def show(rows, title):
    frame = pd.DataFrame(rows)
    print(f"\n{title}\n{frame.to_string(index=False)}", flush=True)
    if out := os.environ.get("OUT"):
        frame.to_json(Path(out) / f"{title.split(':')[0].replace(' ', '_')}.json", orient="records", indent=1)
    return frame
