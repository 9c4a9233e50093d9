"""What the original code of CPM-Ant, CPM-1, CPM-2, EVA and GLM says of models at their real depth and width 64.

usage: original_cpm.py FAMILY CHECKOUT          FAMILY: ant, cpm1, cpm2, eva or glm

CHECKOUT: of the repository that `FAMILIES` names; tests/fixtures/original_FAMILY.json is written, which
tests/models/test_originals.py compares with. The originals are imported and run as they are, on a CPU. What
they import for GPUs and for many processes (apex, deepspeed, bmtrain) has stand-ins; there is one process.
"""
import contextlib, sys, tempfile, types, unittest.mock
from pathlib import Path

import torch

from originals import commit, drawn, few, ids, keep, said, stand_in, weights

NO_FORK = types.SimpleNamespace(fork=contextlib.nullcontext)


# ---- what Megatron's relatives need

def megatron(folder):
    "`mpu` of a checkout can be imported after this: one process, and nothing of apex and deepspeed"
    sys.path.insert(0, str(folder))
    stand_in("apex.normalization.fused_layer_norm", FusedLayerNorm=torch.nn.LayerNorm)
    stand_in("torch._six", inf=float("inf"))
    checkpointing = stand_in("deepspeed.checkpointing", is_configured=lambda: True, checkpoint=None,
                             get_cuda_rng_tracker=lambda: NO_FORK)
    stand_in("deepspeed.runtime.activation_checkpointing.checkpointing", set_num_layers=None)
    sys.modules["deepspeed"].checkpointing = checkpointing
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    import mpu
    with contextlib.redirect_stdout(None): mpu.initialize_model_parallel(1)
    return mpu


def filled(model, spread):
    "The model with the weights of the recipe; tables that it holds twice are one"
    model.eval()
    model.load_state_dict(weights({k: v.shape for k, v in model.named_parameters()}, spread, summed=True), strict=False)
    return model.double()                                # so that a difference is one of the function, not of rounding


class Words: # a tokenizer for code that wants one; it notes what is decoded
    def __init__(self, **special): self.encoder, self.noted = special, []
    def encode(self, text): return list(map(int, text.split()))
    def decode(self, tokens):
        self.noted.append(list(tokens))
        return ""


# ---- CPM-Ant

ANT = dict(vocab_size=96, dim_model=64, num_heads=4, dim_head=16, dim_ff=160, num_layers=48, eps=1e-6, half=False,
           prompt_types=3, prompt_length=5, segment_types=4, position_bias_num_buckets=32,
           position_bias_max_distance=24)
ANT_SPREAD = {"_embedding": 3, "project_q": 1.2, "project_k": 1.2, "attention_out": .15, "w_out": .7}


def bmtrain():
    "What the layers of CPM-Live and of ModelCenter take from bmtrain, for one process and without recomputing"
    class Blocks(torch.nn.Module): # its names are those of bmtrain's: layers.0, layers.1, …
        def __init__(self, blocks):
            super().__init__()
            for i, block in enumerate(blocks): self.add_module(str(i), block)
        def __iter__(self): return iter(self.children())
        def forward(self, x, *others):
            for block in self.children(): x = block(x, *others)
            return x
    def parameter(data, requires_grad=True, init_method=None, **_): return torch.nn.Parameter(data, requires_grad)
    return stand_in(
        "bmtrain", DistributedModule=torch.nn.Module, DistributedParameter=parameter, TransformerBlockList=Blocks,
        CheckpointBlock=lambda block: block, ParameterInitializer=lambda *_, **__: None, rank=lambda: 0)


def ant(checkout):
    bmtrain()
    sys.path.insert(0, str(checkout / "cpm-live"))
    for name in ("dataset", "tokenizers", "arguments"): sys.modules[f"cpm_live.{name}"] = unittest.mock.MagicMock()
    from cpm_live.models.ant import CPMAnt, CPMAntConfig
    from cpm_live.models.ant_torch import CPMAntTorch
    from cpm_live.generation.ant import CPMAntBeamSearch
    from cpm_live.utils.data_utils import cat_prompt
    config, P = CPMAntConfig(**ANT), ANT["prompt_length"]
    trained, served = CPMAnt(config).eval(), CPMAntTorch(config).eval()
    for model in (trained, served):
        model.load_state_dict(weights({k: v.shape for k, v in model.state_dict().items()}, ANT_SPREAD))
    texts, draw = torch.tensor(ids("ant", 2, 40, 96, 8), dtype=torch.int32), drawn("ant context")
    told = dict(input=texts, length=torch.tensor([40, 31]), position=torch.arange(40).expand(2, -1),
                context=torch.from_numpy(draw.rand(2, 40) < .6), segment=torch.full((2, 40), 2),
                span=torch.zeros(2, 40, dtype=torch.int64))
    given = cat_prompt(dict(told), P, 1)
    given["length"], given["context"] = told["length"] + P, given["context"].bool()
    logits = trained(**given)[0][:, P:]
    targets = torch.full((2, 40), -100)
    for row, n in enumerate([40, 31]): # training_tasks/ant/pretrain.py:88-92
        new = ~told["context"][row, 1:n]
        targets[row, :n - 1][new] = texts[row, 1:n].long()[new]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    words = types.SimpleNamespace(bos_id=6, eos_id=7, unk_id=1, pad_id=0, newline_id=3, decode=list,
                                  encode=lambda text: list(map(int, text.split())))
    asked = [ids("ant a", 1, 9, 96, 8)[0], ids("ant b", 1, 14, 96, 8)[0]]
    search = CPMAntBeamSearch(served, words, prompt_length=P)
    wrote = {f"beams_{n}": search.generate([" ".join(map(str, t)) for t in asked], beam_size=n, max_length=8)
             for n in (1, 4)}
    return dict(
        files=["cpm-live/cpm_live/models/ant.py", "cpm-live/cpm_live/models/ant_torch.py", "cpm-live/cpm_live/layers",
               "cpm-live/cpm_live/native_layers", "cpm-live/cpm_live/generation/ant.py"],
        sizes=ANT, spread=ANT_SPREAD, prompt_type=1, input=texts.tolist(), length=[40, 31],
        context=told["context"].int().tolist(), targets=targets.tolist(), loss=loss.item(),
        logits=few(logits, [(0, 0), (0, 20), (0, 39), (1, 0), (1, 30)]),
        said=[said(row[:n]) for row, n in zip(logits, [40, 31])], prompts=asked, **wrote)


# ---- CPM-1

CPM1 = dict(num_layers=32, vocab_size=96, hidden_size=64, num_attention_heads=4, max_sequence_length=48)
CPM1_SPREAD = {"word_embeddings": 10, "position_embeddings": 16, "query_key_value": 3, "4h_to_h": .1, "dense": .5}


def cpm1(checkout):
    megatron(checkout)
    # text files, and the repository's other model: nothing here asks for them
    for name in ("nltk", "jieba", "sentencepiece", "data_utils", "data_utils.tokenization_gpt2", "configure_data",
                 "model.model"): sys.modules[name] = unittest.mock.MagicMock()
    from model import GPT2Model
    model = GPT2Model(**CPM1, embedding_dropout_prob=0, attention_dropout_prob=0, output_dropout_prob=0,
                      checkpoint_activations=False, parallel_output=False)
    filled(model, CPM1_SPREAD)
    import generate_samples as script
    given = torch.tensor(ids("cpm1", 2, 40, CPM1["vocab_size"], 8))
    mask, _, places = script.get_masks_and_position_ids(given, 7, False, False)
    logits, _ = model(given, places, mask)
    import mpu
    loss = mpu.vocab_parallel_cross_entropy(logits[:, :-1].clone(), given[:, 1:]).mean()
    prompt, args = ids("cpm1 prompt", 1, 9, CPM1["vocab_size"], 8)[0], types.SimpleNamespace(
        seq_length=32, out_seq_length=10, reset_position_ids=False, reset_attention_mask=False, batch_size=1,
        fp16=False, top_k=1, top_p=0.0, temperature=1.0)
    tokens = Words(**{"<pad>": 5, "<eod>": 7})
    with tempfile.NamedTemporaryFile("w") as file, unittest.mock.patch("os.system"), contextlib.redirect_stdout(None):
        file.write(" ".join(map(str, prompt)))
        file.flush()
        args.input_text = file.name
        with unittest.mock.patch("torch.cuda.LongTensor", torch.LongTensor):
            script.generate_samples(model, tokens, args, "cpu")
    return dict(
        files=["model/gpt2_modeling.py", "mpu/transformer.py", "generate_samples.py"],
        sizes=CPM1, spread=CPM1_SPREAD, input=given.tolist(), loss=loss.item(),
        logits=few(logits, [(0, 0), (0, 20), (0, 39), (1, 7), (1, 39)]), said=said(logits),
        prompt=prompt, written=tokens.noted[-1][9:19])


# ---- CPM-2 and EVA

T5 = dict(d_model=64, d_kv=16, d_ff=96, num_layers=24, num_decoder_layers=24, num_heads=4, dropout_rate=0.0)
T5_SPREAD = {"word_embeds": 4, "lm_head": 4, "attention_bias": 1, "project": .7, "dense.weight": .7}
BETWEEN = 150                                            # tokens: beyond the 128 of the last bucket


def between(name, pad):
    "Arguments of a forward and of its loss: two texts, the second shorter, with the masks that both repositories make"
    source = torch.tensor(ids(f"{name} source", 2, BETWEEN, 96, 12))
    target = torch.tensor(ids(f"{name} target", 2, 21, 96, 12))
    source[1, -30:] = pad
    seen = (source != pad).float()
    batch = dict(
        enc_input_ids=source, enc_attention_mask=seen[:, None, :, None] * seen[:, None, None],
        dec_input_ids=target[:, :-1], dec_attention_mask=torch.ones(2, 1, 20, 20).tril(),
        cross_attention_mask=seen[:, None, None].expand(-1, -1, 20, -1))
    weigh = torch.from_numpy((drawn(f"{name} mask").rand(2, 20) < .6).astype("float32"))
    return batch, dict(labels=target[:, 1:], loss_mask=weigh, idx=torch.arange(2))


def between_figures(batch, other, forward):
    "What is kept of a forward: inputs, labels, the loss of each row, logits"
    labels = torch.where(other["loss_mask"] > 0, other["labels"], -100)
    return dict(
        source=batch["enc_input_ids"].tolist(), target=batch["dec_input_ids"].tolist(), labels=labels.tolist(),
        losses=forward["loss_batch"].tolist(),
        logits=few(forward["logits"], [(0, 0), (0, 10), (0, 19), (1, 0), (1, 19)]), said=said(forward["logits"]))


def functions(file, names):
    "Some functions of a script that cannot be imported as it lies there: line 198 has no indentation"
    import mpu
    texts = {text.split("(")[0]: "def " + text for text in file.read_text().split("\ndef ")[1:]}
    room = dict(torch=torch, mpu=mpu, F=torch.nn.functional, EncDecTokenizer=object, CPM2Dataset=object)
    for name in names: exec(compile(texts[name], str(file), "exec"), room)
    return types.SimpleNamespace(**{name: room[name] for name in names})


def cpm2(checkout):
    megatron(checkout)
    from model import EncDecConfig, EncDecModel
    script = functions(Path(checkout) / "finetune_cpm2.py", ["forward_step", "evaluate_gen"])
    config = EncDecConfig(**T5)
    config.vocab_size = 96
    model = filled(EncDecModel(config, parallel_output=True), T5_SPREAD)
    batch, other = between("cpm2", 5)
    figures = between_figures(batch, other, script.forward_step(None, batch, other, model, "cpu", keep_enc_hidden=True))
    tokens = types.SimpleNamespace(pad_id=5, get_sentinel_id=lambda i: -1)
    args = types.SimpleNamespace(out_seq_length=12, temperature=1.0, top_k=None, top_p=None, data_name="it")
    wrote = []
    judge = {"it": dict(eval_metric=lambda tokenizer, predictions, labels: wrote.extend(predictions))}
    script.evaluate_gen(args, tokens, judge, None, [(batch, other)], model, "cpu")
    return dict(
        files=["model/enc_dec_modeling.py", "mpu/transformer_enc_dec.py", "finetune_cpm2.py"],
        sizes=T5 | dict(vocab_size=96), spread=T5_SPREAD, **figures, written=wrote)


def eva(checkout):
    megatron(Path(checkout) / "src")
    stand_in("apex.optimizers", FusedAdam=None)
    for name in ("tokenization_eva", "eva_datasets", "generation_metrics", "samplers", "utils", "signal_"):
        sys.modules[name] = unittest.mock.MagicMock()
    from model import EVAConfig, EVAModel
    import eva_finetune as script, generation_utils
    found, parts = {}, dict(eva1=False, eva2=True)
    for name, scale in parts.items():
        config = EVAConfig(**T5, attn_scale=scale)
        config.vocab_size = 96
        model = filled(EVAModel(config, parallel_output=True), T5_SPREAD)
        batch, other = between(name, 5)
        forward = script.forward_step(None, batch, other, model, "cpu", keep_enc_hidden=True)
        tokens = types.SimpleNamespace(sep_id=4, pad_id=5, vocab_size=96, decode=str)
        args = types.SimpleNamespace(
            max_generation_length=12, min_generation_length=0, temperature=1.0, rule_path=None, top_k=1, top_p=0.0,
            no_repeat_ngram_size=0, repetition_penalty=1.0, length_penalty=1.0, early_stopping=False, num_beams=3)
        context = batch["enc_input_ids"]
        _, greedy = generation_utils.generate_no_beam(dict(batch), context, model, tokens, args, "cpu")
        found[name] = dict(attn_scale=scale) | between_figures(batch, other, forward) | dict(written=greedy)
    return dict(
        files=["src/model/eva_modeling.py", "src/mpu/transformer.py", "src/eva_finetune.py",
               "src/generation_utils.py"],
        sizes=T5 | dict(vocab_size=96), spread=T5_SPREAD, **found)


# ---- GLM

GLM = dict(num_layers=48, vocab_size=96, hidden_size=64, num_attention_heads=4, max_sequence_length=64)
GLM_SPREAD = {"word_embeddings": 12, "position_embeddings": 24, "query_key_value": 4, "4h_to_h": .05, "dense": .5}
COMMANDS = dict(MASK=91, sop=92, eop=93, pad=94, eos=95, sMASK=89, gMASK=90)


def glm(checkout):
    megatron(checkout)
    stand_in("apex.optimizers", FusedAdam=None)
    for name in ("pretrain_glm", "utils", "configure_data", "train_utils", "scipy", "scipy.stats", "arguments"):
        sys.modules[name] = unittest.mock.MagicMock()
    from model.modeling_glm import GLMModel
    import generate_samples as script, blocklm_utils, mpu, numpy
    model = GLMModel(**GLM, max_memory_length=200, embedding_dropout_prob=0, attention_dropout_prob=0,
                     output_dropout_prob=0, checkpoint_activations=False, parallel_output=False,
                     block_position_encoding=True)
    filled(model, GLM_SPREAD)
    tokenizer = types.SimpleNamespace(get_command=lambda name: types.SimpleNamespace(Id=COMMANDS[name]))
    numpy.long = numpy.int64                             # as NumPy had it
    of = types.SimpleNamespace(eod_token=95)
    strategy = blocklm_utils.ConstructBlockStrategy(of, tokenizer, 64)
    text, spans = ids("glm", 1, 26, 89, 1)[0], [(3, 5), (9, 15), (20, 21)]
    order = unittest.mock.Mock(shuffle=lambda spans: spans.reverse())
    whole = torch.tensor(text).numpy()
    made = strategy.make_block_data(whole, numpy.ones(26, dtype=int), None, list(spans), order)
    told, targets, weigh, places = (torch.as_tensor(numpy.asarray(m))[None] for m in made[:4])
    logits, *_ = model(told, places, torch.tensor([made[4] if len(made) > 4 else 26 - 9 + 3]))
    losses = mpu.vocab_parallel_cross_entropy(logits.clone(), targets)
    loss = (losses * weigh).sum() / weigh.sum()
    whole, row = torch.tensor([text]), torch.arange(26)[None]       # no blank: all is read, none is written
    read, *_ = model(whole, torch.stack([row, 0 * row], 1), torch.tensor([26]))
    prompt = torch.tensor(text[:6] + [91] + text[7:12] + [91] + text[12:16])
    args = types.SimpleNamespace(
        block_lm=True, no_block_position=False, batch_size=1, num_beams=1, out_seq_length=9, top_k=1, top_p=0.0,
        temperature=1.0, mem_length=200, eod_token=95)
    def wrote(end): # the prompt, and a piece for each blank; a piece ends before `end`
        tokens, mask, positions = script.get_batch(prompt, "cpu", args)
        _, *mems = model(tokens, positions, mask)
        for at in (prompt == 91).nonzero()[:, 0].tolist():
            tokens, mems = script.sample_sequence(model, tokenizer, tokens, at, args, "cpu", mems=mems, end_tokens=end)
        return tokens[0].tolist()[len(prompt):]
    free = wrote([95])
    end = next(token for i, token in enumerate(free) if i > 2 and token not in free[:i])      # a piece is a few tokens
    return dict(
        files=["model/modeling_glm.py", "mpu/transformer.py", "blocklm_utils.py", "generate_samples.py"],
        sizes=GLM, spread=GLM_SPREAD, commands=COMMANDS, text=text, spans=spans[::-1],
        input=told[0].tolist(), positions=places[0].tolist(), targets=targets[0].tolist(), counts=weigh[0].tolist(),
        loss=loss.item(), logits=few(logits, [(0, 0), (0, 12), (0, 19), (0, 20), (0, 25), (0, 31)]), said=said(logits),
        read=dict(logits=few(read, [(0, 0), (0, 12), (0, 25)]), said=said(read)),
        prompt=prompt.tolist(), end=end, written=wrote([end, 95]))


FAMILIES = {
    "ant": (ant, "https://github.com/OpenBMB/CPM-Live"),
    "cpm1": (cpm1, "https://github.com/TsinghuaAI/CPM-1-Generate"),
    "cpm2": (cpm2, "https://github.com/TsinghuaAI/CPM-2-Finetune"),
    "eva": (eva, "https://github.com/thu-coai/EVA"),
    "glm": (glm, "https://github.com/THUDM/GLM"),
}


def main(args):
    name, checkout = args[0], Path(args[1]).resolve()
    function, repository = FAMILIES[name]
    with torch.no_grad(): found = function(checkout)
    head = dict(repository=repository, commit=commit(checkout), files=found.pop("files"))
    keep(name, head | dict(recipe="tools/original_cpm.py") | found)


if __name__ == "__main__": sys.exit(main(sys.argv[1:]))
