"Distillation over families of models, with compilation, recomputation, deltas, other methods and two ranks."
import copy
import gc
import warnings
import weakref

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers as tf
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from bmlab.cook.cook import Cook
from bmlab.core import count, set_seed
from bmlab.train.processes import run_ranks
from bmlab.cook.distill import Distill, chunked_kl
from bmlab.delta.lora import Lora
from bmlab.train.loop import evaluate, fit, model_loss

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
LLAMA = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
             vocab_size=64, tie_word_embeddings=False)


def llama(seed=0, **k):
    set_seed(seed)
    return tf.LlamaForCausalLM(tf.LlamaConfig(**LLAMA | k))


def gpt2(seed=0, layers=2, width=32):
    set_seed(seed)
    return tf.GPT2LMHeadModel(tf.GPT2Config(n_embd=width, n_layer=layers, n_head=4, vocab_size=64, n_positions=32,
                                            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))


def bert(kind="ForMaskedLM", seed=0, layers=2, width=32):
    set_seed(seed)
    shape = dict(hidden_size=width, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=4,
                 vocab_size=64)
    return getattr(tf, "Bert" + kind)(tf.BertConfig(**shape, hidden_dropout_prob=0., attention_probs_dropout_prob=0.))


def t5(seed=0, layers=2, width=32):
    set_seed(seed)
    return tf.T5ForConditionalGeneration(tf.T5Config(d_model=width, d_ff=48, num_layers=layers, num_heads=4, d_kv=8,
                                                     vocab_size=64, dropout_rate=0.0, decoder_start_token_id=0))


def batch(shape=(3, 8), seed=0, length=5):
    ids = torch.randint(1, 64, shape, generator=torch.Generator().manual_seed(seed))
    mask, labels = torch.ones_like(ids), ids.clone()
    mask[1:, length:] = 0
    labels[1:, length:] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def kl(z, t, T=2.): return F.kl_div((z / T).log_softmax(-1), (t / T).softmax(-1), reduction="batchmean") * T * T


FAMILIES = {"llama": (lambda s, n, w: llama(s, num_hidden_layers=n, hidden_size=w),
                      "layers.*", lambda b: b["labels"][:, 1:] != -100, lambda z: z[:, :-1]),
            "gpt2": (gpt2, "h.*", lambda b: b["labels"][:, 1:] != -100, lambda z: z[:, :-1]),
            "bert": (lambda s, n, w: bert(seed=s, layers=n, width=w),
                     "layer.*", lambda b: b["labels"] != -100, lambda z: z),
            "t5": (t5, ["encoder.block.*", "decoder.block.*"], lambda b: b["labels"] != -100, lambda z: z)}


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family):
    make, hidden, kept, shift = FAMILIES[family]
    teacher, student, b = make(1, 4, 32), make(0, 2, 16), batch()
    d = Distill(teacher, hidden=hidden)
    cook = Cook(student, [d])
    z = student(**b).logits
    (model_loss(student, b) + cook.loss()).backward()                       # two forwards: the terms of both
    with torch.no_grad(): t = teacher(**b).logits
    keep = kept(b)
    torch.testing.assert_close(cook.losses["logits"], 2 * kl(shift(z)[keep], shift(t)[keep]).detach(), rtol=1e-4,
                               atol=1e-6)
    assert len(d.pairs) == len(d.parameters()) == (4 if family == "t5" else 2)
    assert all(p.grad.abs().sum() > 0 for p in d.parameters())
    assert all(p.grad is None for p in teacher.parameters())
    state = student.state_dict()
    cook.detach()
    student.load_state_dict({k: v for k, v in state.items() if "projectors" not in k})


@pytest.mark.parametrize("family", FAMILIES)
def test_a_twin_learns_nothing(family):
    teacher = FAMILIES[family][0](0, 2, 32)
    student = copy.deepcopy(teacher)
    cook = Cook(student, [Distill(teacher, hidden=FAMILIES[family][1])])
    student(**batch())
    total = cook.loss()
    total.backward()
    # attention kernels with and without gradients may differ in the last bit
    assert abs(total.item()) < 1e-6 and all(p.grad is None or p.grad.abs().max() < 1e-7 for p in student.parameters())


def test_maps_of_t5():
    teacher, student, b = t5(1), t5(0), batch()
    for m in (teacher, student): m.set_attn_implementation("eager")
    cook = Cook(student, [Distill(teacher, logits=0, attention="SelfAttention")])
    out = student(**b, output_attentions=True)
    cook.loss()
    with torch.no_grad(): told = teacher(**b, output_attentions=True)
    kept = {"encoder_attentions": b["attention_mask"].bool(), "decoder_attentions": b["labels"] != -100}
    each = [(x - y).square().mean((1, 3))[keep].mean() for kind, keep in kept.items()
            for x, y in zip(out[kind], told[kind])]
    torch.testing.assert_close(cook.losses["attention"], sum(each).detach() / 4, rtol=1e-3, atol=1e-9)


def test_maps_of_bert_with_other_heads():
    set_seed(0)
    models = [tf.BertModel(tf.BertConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                                         num_attention_heads=h, vocab_size=64, attention_probs_dropout_prob=0.0))
              for h in (2, 4)]
    for m in models: m.set_attn_implementation("eager")
    cook, b = Cook(models[0], [Distill(models[1], logits=0, attention="attention.self")]), batch()
    del b["labels"]
    out = models[0](**b, output_attentions=True).attentions
    cook.loss()
    models[1].eval()
    with torch.no_grad(): told = models[1](**b, output_attentions=True).attentions
    keep = b["attention_mask"].bool()
    wanted = sum(F.mse_loss(x.mean(1)[keep], y.mean(1)[keep]) for x, y in zip(out, told)) / 2
    torch.testing.assert_close(cook.losses["attention"], wanted.detach(), rtol=1e-4, atol=1e-9)


def test_classifier():
    teacher, student, b = bert("ForSequenceClassification", 1), bert("ForSequenceClassification", 0), batch()
    b["labels"] = torch.tensor([0, 1, 1])
    cook = Cook(student, [Distill(teacher, T=1.)])
    z = student(**b).logits
    cook.loss()
    teacher.eval()
    torch.testing.assert_close(cook.losses["logits"], kl(z, teacher(**b).logits, 1.).detach())


class Plain(nn.Module):
    "No class of transformers: a tuple comes out, tensors go in by place"
    def __init__(self, width, seed):
        super().__init__()
        set_seed(seed)
        self.embed, self.mlp, self.head = nn.Embedding(64, width), nn.Linear(width, width), nn.Linear(width, 64)
    def forward(self, ids, labels=None):
        h = self.mlp(self.embed(ids))
        z = self.head(h)
        return (z.sum(), z, h) if labels is not None else (z, h)


def test_plain_modules_and_tuples():
    teacher, student, ids = Plain(24, 1), Plain(16, 0), batch()["input_ids"]
    with pytest.raises(ValueError, match="calib= is needed"): Cook(student, [Distill(teacher, hidden="mlp")])
    cook = Cook(student, [Distill(teacher, hidden="mlp")], calib=[{"ids": ids}])
    z = student(ids, labels=ids[:, :1].expand(-1, 8))[1]
    cook.loss()
    torch.testing.assert_close(cook.losses["logits"], chunked_kl(z[:, :-1], teacher(ids)[0][:, :-1], 2.).detach())
    assert tuple(cook.parameters()[0].shape) == (24, 16)


def test_teacher_runs_once_and_stays_as_it_was():
    teacher, student, calls = llama(1).train(), llama(0), []
    teacher.register_forward_hook(lambda m, a, o: calls.append((m.training, torch.is_grad_enabled(),
                                                                o.past_key_values)))
    cook, b = Cook(student, [Distill(teacher)]), batch()
    for _ in range(3): student(**b)
    assert calls == []
    cook.loss()
    assert calls == [(False, False, None)] * 3 and teacher.training
    assert all(p.requires_grad for p in teacher.parameters())
    evaluate(student, [b], loss=lambda m, b: model_loss(m, b) + cook.loss())
    student.generate(b["input_ids"][:1], max_new_tokens=2, do_sample=False)
    assert cook.loss().item() == 0 and len(calls) == 3


class Sizes(TorchDispatchMode):
    "The largest float32 tensor that any operation makes"
    largest = 0
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        for t in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(t, torch.Tensor) and t.dtype == torch.float32: self.largest = max(self.largest, t.numel())
        return out


def test_no_second_float32_logits():
    z, t = torch.randn(64, 999, dtype=torch.bfloat16, requires_grad=True), torch.randn(64, 999, dtype=torch.bfloat16)
    with Sizes() as sizes: chunked_kl(z, t, 2., chunk=8).backward()
    assert sizes.largest == 8 * 999 and z.grad.dtype == torch.bfloat16
    exact = z.detach().float().requires_grad_()
    kl(exact, t.float()).backward()
    torch.testing.assert_close(z.grad.float(), exact.grad, rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize("n, V, noise", [(64, 5000, 0.01), (2, 100, 1.0)])
@pytest.mark.parametrize("dtype, off", [(torch.float16, 1e-3), (torch.bfloat16, 5e-3)])
def test_a_loss_scale_finds_the_gradient_of_a_student_that_is_near(n, V, noise, dtype, off):
    draw, scale = torch.Generator().manual_seed(0), 65536.0
    z = torch.randn(n, V, generator=draw).to(dtype)
    t = (z.float() + noise * torch.randn(n, V, generator=draw)).to(dtype)
    mine, exact = z.clone().requires_grad_(), z.double().requires_grad_()
    (chunked_kl(mine, t, 2.0) * scale).backward()
    p, q = (t.double() / 2).softmax(-1), (exact / 2).log_softmax(-1)
    (torch.nn.functional.kl_div(q, p, reduction="batchmean") * 4 * scale).backward()
    assert mine.grad.dtype == dtype and (mine.grad.double() - exact.grad).norm() < off * exact.grad.norm()


def test_backward_twice_and_autocast():
    z, t = torch.randn(6, 9, requires_grad=True), torch.randn(6, 9)
    loss = chunked_kl(z, t)
    loss.backward(retain_graph=True)
    first = z.grad.clone()
    loss.backward()
    torch.testing.assert_close(z.grad, 2 * first)
    teacher, student, b = llama(1), llama(0, hidden_size=16), batch()
    cook = Cook(student, [Distill(teacher, hidden="layers.*")])
    with torch.autocast("cpu", torch.bfloat16): total = model_loss(student, b) + cook.loss()
    total.backward()
    assert total.dtype == torch.float32 and all(p.grad.isfinite().all() for p in student.parameters())


def test_recomputation_sees_each_forward_once():
    teacher, b, grads = llama(1), batch(), []
    for recompute in (False, True):
        student = llama(0, hidden_size=16)
        if recompute: student.gradient_checkpointing_enable({"use_reentrant": False})
        cook = Cook(student.train(), [Distill(teacher, hidden="layers.*")])
        (model_loss(student, b) + cook.loss()).backward()
        assert cook.loss().item() == 0
        grads.append([p.grad for p in student.parameters()])
    for x, y in zip(*grads): torch.testing.assert_close(x, y)
    student = llama(0, hidden_size=16).train()
    student.gradient_checkpointing_enable({"use_reentrant": True})
    student.enable_input_require_grads()
    cook = Cook(student, [Distill(teacher, hidden="mlp")])
    student(**b)
    with pytest.raises(ValueError, match="use_reentrant=False"): cook.loss()


@pytest.mark.long
def test_compiled_student():
    teacher, b, terms = llama(1), batch(), []
    for compiled in (False, True):
        student = llama(0, hidden_size=16)
        cook = Cook(student, [Distill(teacher, hidden="layers.*")])
        call = torch.compile(student, backend="aot_eager") if compiled else student
        for _ in range(2):
            (call(**b).loss + cook.loss()).backward()
            terms.append(cook.losses)
    for other in terms[1:]:
        for k, v in other.items(): torch.testing.assert_close(v, terms[0][k], rtol=1e-4, atol=1e-6)


def test_copies_and_two_teachers():
    student, b = llama(0, hidden_size=16), batch()
    cook = Cook(student,
                [Distill(llama(1), hidden="layers.*"),
                 Distill(llama(2, num_hidden_layers=4), hidden="layers.*", logits=0.5, seed=3)])
    assert count(student).delta == 4 * 16 * 32
    twin = copy.deepcopy(student)
    twin(**b)
    assert cook.loss().item() == 0                                           # the copy's hooks write nowhere
    (model_loss(student, b) + cook.loss()).backward()
    assert len(cook.losses) == 4 and len(cook.parameters()) == 4
    assert all(p.grad.abs().sum() > 0 for p in cook.parameters())
    small = cook.export()
    assert small.state_dict().keys() == llama(0, hidden_size=16).state_dict().keys()
    assert not any(m._forward_pre_hooks for m in small.modules())
    again = Cook(small, [Distill(llama(1))])
    small(**b)  # what was exported learns on
    assert again.loss().item() > 0
    cook.detach()
    assert student.state_dict().keys() == small.state_dict().keys()


def test_resumes_from_a_state_dict():
    teacher, b = llama(1), batch()
    def steps(student, cook, opt, n):
        for _ in range(n):
            (model_loss(student, b) + cook.loss()).backward()
            opt.step()
            opt.zero_grad()
            cook.step()
    def made():
        student = llama(0, hidden_size=16)
        cook = Cook(student, [Distill(teacher, hidden="layers.*")])
        return student, cook, torch.optim.AdamW(student.parameters(), lr=1e-2)
    one, two = made(), made()
    steps(*one, 2)
    kept = copy.deepcopy((one[0].state_dict(), one[2].state_dict()))
    steps(*one, 2)
    two[0].load_state_dict(kept[0])
    two[2].load_state_dict(kept[1])
    steps(*two, 2)
    assert all(torch.equal(x, y) for x, y in zip(one[0].state_dict().values(), two[0].state_dict().values()))


def test_with_a_delta():
    teacher, student, b = llama(1), llama(0), batch()
    lora = Lora(student, r=2)
    lora.freeze()
    cook = Cook(student, [Distill(teacher, hidden="layers[1:]")])
    fit(student, [b], torch.optim.AdamW(lora.trainable(), lr=1e-2), steps=3,
        loss=lambda m, b: model_loss(m, b) + cook.loss(), plot=False)
    cook.detach()
    lora.detach()
    assert all(torch.equal(x, y) for x, y in zip(student.state_dict().values(), llama(0).state_dict().values()))


def _sharded(rank, world_size, teacher_too):
    from bmlab.train.sharding import shard
    teacher, student, b = llama(1), llama(0, hidden_size=16), batch((4, 8))
    cook = Cook(student, [Distill(teacher, hidden="layers.*")])
    if world_size > 1:
        shard(student, zero=3, dtype=torch.float32)
        if teacher_too: shard(teacher, zero=3, dtype=torch.float32)
    mine = {k: v.chunk(world_size)[rank] for k, v in b.items()}
    opt = torch.optim.SGD(student.parameters(), lr=.5)
    terms = []
    for _ in range(3):
        (student(input_ids=mine["input_ids"]).logits.logsumexp(-1).mean() + cook.loss()).backward()
        opt.step()
        opt.zero_grad()
        terms.append({k: v.item() for k, v in cook.losses.items()})
    return {k: (v.full_tensor() if hasattr(v, "full_tensor") else v).detach()
            for k, v in student.named_parameters()}, terms


def _both(): return [_sharded(dist.get_rank(), 2, teacher_too) for teacher_too in (False, True)]


@pytest.mark.long
def test_two_ranks_are_one():
    alone, _ = _sharded(0, 1, False)
    for of_rank in run_ranks(_both):
        for weights, _ in of_rank:
            weights = {k.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", ""): v
                       for k, v in weights.items()}
            assert weights.keys() == alone.keys()
            for k, v in alone.items(): torch.testing.assert_close(weights[k], v, rtol=1e-4, atol=1e-6, msg=k)


def test_padding_of_a_model_that_calls_its_only_stack_decoder():
    "OPT: attention_mask says which tokens count, however many pads stand behind"
    torch.manual_seed(0)
    make = lambda: tf.OPTForCausalLM(tf.OPTConfig(hidden_size=32, ffn_dim=48, num_hidden_layers=2,
                                                  num_attention_heads=4, vocab_size=60, word_embed_proj_dim=32,
                                                  max_position_embeddings=64, dropout=0.0)).train()
    student, teacher = make(), make()
    ids, terms = torch.randint(4, 60, (2, 8)), []
    for pads in (0, 20):
        cook = Cook(student, [Distill(teacher, logits=0., hidden="decoder.layers.*")])
        student(input_ids=F.pad(ids, (0, pads), value=1), attention_mask=F.pad(torch.ones_like(ids), (0, pads)))
        terms.append(cook.loss().item())
        cook.detach()
    assert terms[0] > 0 and abs(terms[0] - terms[1]) < 1e-5 * terms[0], terms


def test_answers_within_a_text_teach_where_they_start_and_end():
    "Two logits over the tokens, without padding: the mean of both terms"
    teacher, student, b = bert("ForQuestionAnswering", 1, width=48), bert("ForQuestionAnswering", 0), batch()
    b = {k: b[k] for k in ("input_ids", "attention_mask")} | {"start_positions": torch.tensor([0, 1, 2]),
                                                              "end_positions": torch.tensor([1, 3, 4])}
    cook = Cook(student, [Distill(teacher, hidden="layer.*")])
    z = student(**b)
    total = cook.loss()
    teacher.eval()
    with torch.no_grad(): t = teacher(**b)
    n = b["attention_mask"].sum(1).tolist()
    each = [kl(x[i : i + 1, : n[i]], y[i : i + 1, : n[i]])
            for x, y in ((z.start_logits, t.start_logits), (z.end_logits, t.end_logits)) for i in range(3)]
    torch.testing.assert_close(cook.losses["logits"], sum(each).detach() / 6, rtol=1e-4, atol=1e-7)
    total.backward()
    assert all(g.abs().sum() > 0 for g in student.qa_outputs.weight.grad)
    assert all(p.grad.isfinite().all() for p in student.parameters() if p.grad is not None)
    for wrong in (bert("ForTokenClassification", 1), bert("Model", 1)):
        cook = Cook(other := bert("ForQuestionAnswering", 0), [Distill(wrong)])
        other(input_ids=b["input_ids"])
        with pytest.raises((ValueError, TypeError), match="same task|no logits"): cook.loss()


class Watched(nn.Module):
    "A student that tells whether the graph of each of its forwards is still there"
    def __init__(self):
        super().__init__()
        set_seed(0)
        self.body, self.graphs = nn.Linear(16, 64), []
    def forward(self, x):
        h = self.body(x) * 1
        if not torch.is_grad_enabled(): return h
        self.graphs.append(weakref.ref(mark := Mark()))
        h.grad_fn.metadata["mark"] = mark                                    # lives as long as this node of the graph
        return h + 0
    def alive(self): return sum(g() is not None for g in self.graphs)


class Mark: pass


def test_graphs_go_when_nobody_asks_for_the_loss():
    "After backward, after eight later forwards, or with loss(); without the collector of cycles"
    teacher, x = nn.Linear(16, 64), torch.randn(4, 16)
    gc.disable()
    try:
        student = Watched()
        cook = Cook(student, [Distill(teacher)])
        for _ in range(5): student(x).square().mean().backward()
        assert student.alive() == 0
        with pytest.warns(UserWarning, match="call cook.loss\\(\\) before it"): assert cook.loss().item() == 0
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert cook.loss().item() == 0                                   # said once
            for _ in range(8): student(x)
            assert student.alive() == 8
        with pytest.warns(UserWarning, match="more than 8 forward passes"):
            for _ in range(12): student(x)
        assert student.alive() == 8
        (student(x).sum() + student(x).sum() + cook.loss()).backward()       # of the last eight
        assert student.alive() == 0
        with torch.no_grad(): student(x)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(3): (student(x).mean() + cook.loss()).backward()
        assert student.alive() == 0
        student(x)
        assert student.alive() == 1
        cook.detach()
        del cook
        assert student.alive() == 0
    finally: gc.enable()


def test_accumulated_forwards_count_all():
    "One loss() for two forwards is the sum of two loss()es"
    teacher, totals = llama(1), []
    for together in (False, True):
        student = llama(0)
        cook = Cook(student, [Distill(teacher)])
        total = 0
        for seed in (0, 1):
            student(**batch(seed=seed))
            if not together: total = total + cook.loss()
        if together: total = cook.loss()
        total.backward()
        totals.append((total.detach(), student.lm_head.weight.grad))
    for a, b in zip(*totals): torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_what_hidden_states_are_tried_on():
    "A tensor, or an encoder-decoder's batch with its labels"
    ids = batch()["input_ids"]
    cook = Cook(Plain(16, 0), [Distill(Plain(24, 1), hidden="mlp")], calib=[ids])
    assert tuple(cook.parameters()[0].shape) == (24, 16)
    for calib in ([batch()], [{k: v for k, v in batch().items() if k != "labels"}]):
        cook = Cook(t5(0, width=16), [Distill(t5(1), hidden="decoder.block.*")], calib=calib)
        assert [tuple(p.shape) for p in cook.parameters()] == [(32, 16)] * 2
