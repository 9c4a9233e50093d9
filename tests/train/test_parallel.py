"Tensor parallelism, a pipeline and ZeRO together, on four processes, against the model in one piece."
import copy

import pytest
import torch
import transformers as tf
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from bmlab.core import set_seed
from bmlab.train.processes import run_ranks
from bmlab.train.losses import lm_loss
from bmlab.train.parallel import tensor_parallel
from bmlab.train.pipeline import Pipeline

pytestmark = pytest.mark.long

LLAMA = dict(
    hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=96,
)
MODELS = {
    "llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**LLAMA)),
    "qwen3, tied": lambda: tf.Qwen3ForCausalLM(tf.Qwen3Config(**LLAMA, head_dim=8, tie_word_embeddings=True)),
    "gpt2": lambda: tf.GPT2LMHeadModel(
        tf.GPT2Config(
            n_embd=32, n_layer=4, n_head=4, vocab_size=96, n_positions=16, bos_token_id=0, eos_token_id=1,
            resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
        )
    ),
}


def batch():
    ids = torch.arange(8 * 12).view(8, 12) * 5 % 90 + 1
    return {"input_ids": ids, "labels": ids}


def whole(t):
    return t.full_tensor() if hasattr(t, "full_tensor") else t


def train(model, step, steps=3):
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(steps):
        opt.zero_grad()
        losses.append(step())
        opt.step()
    return losses


def reference(name):
    set_seed(0)
    plain = MODELS[name]()
    start = copy.deepcopy(plain)
    b = batch()

    def step():
        loss = plain(**b).loss
        loss.backward()
        return loss.item()
    return start, train(plain, step), {n: p.detach().clone() for n, p in plain.named_parameters(remove_duplicate=False)}


def compare(losses, expected, model, weights):
    assert max(abs(a - b) for a, b in zip(losses, expected)) < 1e-5, (losses, expected)
    far = {n: (whole(p.detach()) - weights[n]).abs().max().item() for n, p in model.named_parameters()}
    assert max(far.values()) < 1e-5, far
    return max(far.values())


def mean(x):
    torch.distributed.all_reduce(x)
    return x.item() / torch.distributed.get_world_size()


def tensor_times_zero():
    mesh, far = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), {}
    for name in MODELS:
        for reshard in (True, False):
            model, expected, weights = reference(name)
            tensor_parallel(model, mesh["tp"])
            zero(model, range(4), name, mesh["dp"], reshard)
            mine = {k: v.chunk(2)[mesh.get_local_rank("dp")] for k, v in batch().items()}

            def step():
                loss = lm_loss(model, mine, chunk=5)
                loss.backward()
                return mean(loss.detach())
            far[name, reshard] = compare(train(model, step), expected, model, weights)
    return far


def zero(model, blocks, name, mesh, reshard=True):
    stack = model.transformer.h if name == "gpt2" else model.model.layers
    for i in blocks: fully_shard(stack[i], mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)


@pytest.mark.slow                              # (test_sharding has one, on four ranks too)
def test_tensor_parallel_times_zero():
    "tp=2 × ZeRO-3 and ZeRO-2 over two, on four ranks"
    for far in run_ranks(tensor_times_zero, world_size=4, timeout_s=600): assert max(far.values()) < 1e-5


def pipelines():
    far = {}
    for dp, stages in ((1, 4), (2, 2)):
        mesh = init_device_mesh("cpu", (dp, stages), mesh_dim_names=("dp", "pp"))
        for name in MODELS:
            model, expected, weights = reference(name)
            pipe = Pipeline(model, mesh["pp"], microbatches=4, schedule="gpipe" if name == "gpt2" else "1f1b")
            if dp > 1: zero(model, pipe.blocks, name, mesh["dp"])
            mine = {k: v.chunk(dp)[mesh.get_local_rank("dp")] for k, v in batch().items()}
            far[name, dp, stages] = compare(train(model, lambda: mean(pipe.step(mine))), expected, model, weights)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    model, expected, weights = reference("llama")
    pipe = Pipeline(model, mesh["pp"], microbatches=2)
    tensor_parallel(model, mesh["tp"])
    far["llama, pp × tp"] = compare(train(model, lambda: mean(pipe.step(batch()))), expected, model, weights)
    return far


def test_pipelines():
    "pp=4, pp=2 × ZeRO-3 over two and pp=2 × tp=2, on four ranks"
    for far in run_ranks(pipelines, world_size=4, timeout_s=600): assert max(far.values()) < 1e-5


def on_gpus():
    "tp=2 and pp=2 over nccl against the model on one GPU; largest differences of losses and gradients"
    rank, out = torch.distributed.get_rank(), {}
    torch.backends.cuda.matmul.allow_tf32 = False
    b = {k: v.cuda() for k, v in batch().items()}
    for name in MODELS:
        set_seed(0)
        plain = MODELS[name]().cuda()
        (loss := lm_loss(plain, b)).backward()
        grads = {n: p.grad for n, p in plain.named_parameters(remove_duplicate=False)}
        split, cut = copy.deepcopy(plain), copy.deepcopy(plain)
        split.zero_grad(), cut.zero_grad()
        tensor_parallel(split)
        (loss_tp := lm_loss(split, b, chunk=5)).backward()
        loss_pp = (pipe := Pipeline(cut, microbatches=4)).step(b)
        assert next(pipe.parameters()).device.index == rank
        out[name] = [abs(loss_tp.item() - loss.item()), abs(loss_pp.item() - loss.item())]
        out[name] += [
            max((whole(p.grad) - grads[n]).abs().max().item() for n, p in m.named_parameters()) for m in (split, cut)
        ]
    return out


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_on_gpus():
    for out in run_ranks(on_gpus, backend="nccl", timeout_s=300): assert max(map(max, out.values())) < 1e-5, out


def weighed():
    "Of mean losses that count labels in their own ways: (|pipeline's gradients − the whole model's|, norms of both)"
    import torch.nn.functional as F
    import transformers as tf
    from torch import nn

    from bmlab.train.optim import gradient_norm
    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.e, self.head = nn.Embedding(64, 16), nn.Linear(16, 5)
            self.layers = nn.ModuleList([nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)])
        def forward(self, words):
            x = self.e(words)
            for layer in self.layers: x = layer(x)
            return self.head(x)
    def tied():
        torch.manual_seed(0)
        sizes = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=4, num_attention_heads=2, vocab_size=64)
        return tf.LlamaForCausalLM(tf.LlamaConfig(**sizes, tie_word_embeddings=True))
    def in_place(model, b): return F.cross_entropy(model(b["words"]).flatten(0, 1), b["labels"].flatten())
    def shifted(model, b):
        z, y = model(input_ids=b["input_ids"]).logits[:, :-1], b["labels"][:, 1:]
        return F.cross_entropy(z.flatten(0, 1), y.flatten(), reduction="sum") / (y != -100).sum().clamp(min=1)
    words = torch.randint(0, 64, (4, 8), generator=torch.Generator().manual_seed(1))
    tags = words % 5
    for t in (told := words.clone(), tags): t[0, 2:], t[1, 4:] = -100, -100
    out = {}
    for name, make, loss, b in (
        ("in place", Tagger, in_place, dict(words=words, labels=tags)),
        ("shifted, with a guard", tied, shifted, dict(input_ids=words, labels=told)),
    ):
        pipe = Pipeline(make(), microbatches=4, loss=loss)
        value = pipe.step(b)
        norm = gradient_norm(pipe.model.parameters(), group=pipe.mesh.get_group())
        whole = make()
        want = loss(whole, b)
        want.backward()
        grads = {n: p.grad for n, p in whole.named_parameters()}
        far = [(p.grad - grads[n]).abs().max().item() for n, p in pipe.model.named_parameters() if n in grads]
        total = torch.nn.utils.get_total_norm(list(grads.values())).item()
        out[name] = max(*far, abs(value.item() - want.item())), abs(norm.item() / total - 1)
    return out


def test_pipelines_weigh_and_clip_as_one_model():
    for out in run_ranks(weighed, world_size=2, timeout_s=300):
        for name, off in out.items(): assert max(off) < 1e-5, name
