"""What OpenBMB's own code says of a CPM-Bee with 48 layers: the figures that tests/models/test_cpm.py compares with.

usage: original_bee.py CHECKOUT [FILE]

CHECKOUT: of github.com/OpenBMB/CPM-Bee; FILE: default tests/fixtures/original_bee.json

The original is imported from the checkout and run as it is, on a CPU, in float32. Of bmtrain, which it imports and does
not need here, a stand-in is enough; the table of angles, which it makes on a GPU, is made on the CPU. Weights are not
stored: `weights` draws the same ones again, name by name.
"""
import io, json, sys, types, unittest.mock
from pathlib import Path

import numpy as np
import torch

from originals import ROOT, commit, drawn, few, written

REPOSITORY = "https://github.com/OpenBMB/CPM-Bee"
FILES = ["src/cpm_live/models/bee_torch.py", "src/cpm_live/native_layers", "src/cpm_live/generation/bee.py"]
SIZES = dict(vocab_size=96, dim_model=64, num_heads=4, dim_head=16, dim_ff=160, num_layers=48, eps=1e-6, half=False,
             position_bias_num_buckets=32, position_bias_num_segment_buckets=32, position_bias_max_distance=24)
SPREAD = dict(input_embedding=4, project_q=.7, project_k=.7, attention_out=.2, w_out=.3)   # so that places differ
TABLE = 4                                                                    # numbered tokens behind the vocabulary


def weights(
    shapes,  # {the original's name: shape}
):           # → {name: Tensor, float32}
    "Normal numbers, each matrix with its `SPREAD` or 1; norms between a half and one and a half."
    def one(name, shape):
        draw, spread = drawn(name), next((s for word, s in SPREAD.items() if word in name), 1)
        if "layernorm" in name: return draw.uniform(.5, 1.5, shape)
        return draw.standard_normal(shape) * spread
    return {name: torch.from_numpy(one(name, tuple(shape)).astype(np.float32)) for name, shape in shapes.items()}


def task(draw, span, sample, n, S, answered):
    "n tokens of S segments, the last ones `answered`: (what each token is given, the relations of the segments)"
    relations = draw.randint(2, SIZES["position_bias_num_segment_buckets"] + 1, (S, S)) * (1 - np.eye(S, dtype=int))
    tokens = dict(
        input=draw.randint(1, SIZES["vocab_size"], n), input_sub=draw.randint(0, 5, n) * (draw.rand(n) < .3),
        context=np.arange(n) < n - answered, segment=np.sort(draw.randint(0, S, n)), num_segments=np.full(n, S),
        sample_ids=np.full(n, sample), span=np.full(n, span))
    return tokens, relations.flatten()


def rows(
    name,    # of the draw
    parts,   # a row each: [(span, sample, tokens, segments, answered tokens at the end)]
    length,  # of a row; what is left is padding
):           # → {name of an argument: lists}, as the original takes them
    "Rows of tasks, packed and beside examples, with numbered tokens and relations between segments."
    draw, out = drawn(name), []
    for row in parts:
        tasks = [task(draw, *part) for part in row]
        begins = np.cumsum([0, *(len(r) for _, r in tasks)])
        for (tokens, _), at in zip(tasks, begins): tokens["segment_rel_offset"] = np.full(len(tokens["input"]), at)
        got = {k: np.concatenate([t[k] for t, _ in tasks]).astype(int) for k in tasks[0][0]}
        n = len(got["input"])
        got = {k: np.pad(v, (0, length - n)).tolist() for k, v in got.items()}
        out.append(got | dict(segment_rel=np.concatenate([r for _, r in tasks]).tolist(), length=n))
    most = max(len(r["segment_rel"]) for r in out)
    for r in out: r["segment_rel"] += [0] * (most - len(r["segment_rel"]))
    table = dict(ext_table_ids=drawn("table").randint(1, SIZES["vocab_size"], TABLE).tolist(),
                 ext_table_sub=list(range(1, TABLE + 1)))
    return {k: [r[k] for r in out] for k in out[0]} | table


def made(checkout, **more): # → the original's model with the weights of the recipe
    stand_in = types.ModuleType("bmtrain")
    stand_in.DistributedModule, stand_in.rank = torch.nn.Module, lambda: 0
    stand_in.DistributedParameter = torch.nn.Parameter
    stand_in.__getattr__ = lambda name: unittest.mock.MagicMock()                # of what is imported and not called
    sys.modules["bmtrain"] = stand_in
    vocabulary = types.SimpleNamespace(resource_stream=lambda *_: io.BytesIO("\n".join(WORDS).encode()))
    sys.modules["pkg_resources"] = vocabulary
    sys.path.insert(0, str(Path(checkout) / "src"))
    from cpm_live.models.bee import CPMBeeConfig
    from cpm_live.models.bee_torch import CPMBeeTorch
    arange = torch.arange
    def on_cpu(*args, device=None, **kwargs): return arange(*args, **kwargs)
    with unittest.mock.patch("torch.arange", on_cpu): model = CPMBeeTorch(CPMBeeConfig(**SIZES | more)).eval()
    model.load_state_dict(weights({k: v.shape for k, v in model.state_dict().items()}))
    return model


def tensors(given): # lists → tensors, as the original takes them
    return {k: torch.tensor(v, dtype=torch.bool if k == "context" else torch.int32) for k, v in given.items()}


def whole(model):
    "Two rows: two tasks, the first beside an example; and a shorter one, padded"
    given = rows("whole", [[(0, 0, 14, 4, 4), (0, 1, 9, 3, 0), (1, 0, 13, 5, 5)], [(0, 0, 29, 6, 7)]], 36)
    draw, targets = drawn("targets"), []
    for row, n in zip(given["context"], given["length"]):
        words = draw.randint(0, SIZES["vocab_size"] + TABLE, len(row)).tolist()
        targets.append([-100 if c or at >= n else w for at, (c, w) in enumerate(zip(row, words))])
    logits, _ = model(**tensors(given))
    loss = torch.nn.CrossEntropyLoss(ignore_index=-100)(logits.flatten(0, 1), torch.tensor(targets).flatten())
    return dict(
        inputs=given, targets=targets, loss=loss.item(),             # src/finetune_cpm_bee.py:201 and 280
        logits=few(logits, [(0, 3), (0, 13), (0, 18), (0, 35), (1, 0), (1, 28)]),
        said=[logits[row, :n].argmax(-1).tolist() for row, n in enumerate(given["length"])])


def cached(model):
    "Two rows of 20 tokens read at once, then 8 more, one at a time, over what is kept of those before"
    given = rows("cached", [[(0, 1, 9, 3, 0), (0, 0, 19, 4, 8)], [(0, 0, 28, 6, 8)]], 28)
    once = ("segment_rel", "ext_table_ids", "ext_table_sub")
    told = {k: v for k, v in tensors(given).items() if k not in ("span", "length")}
    told["position"], past, logits = torch.arange(28, dtype=torch.int32).expand(2, -1), None, []
    for begin, end in [(0, 20), *((i, i + 1) for i in range(20, 28))]:
        new = {k: v if k in once else v[:, begin:end] for k, v in told.items()}
        out, _, past = model.inference(**new, past_key_values=past)
        logits.append(out)
    logits = torch.cat(logits, 1)
    return dict(
        inputs=given, logits=few(logits, [(0, 19), (0, 20), (0, 27), (1, 19), (1, 23), (1, 27)]),
        said=logits.argmax(-1).tolist())


WORDS = ["<pad>", "<unk>", "<mask>", "<sep>", "</n>", "</_>", "<s>", "</s>", "<root>", "<ans>", "<option>",
         *(chr(0x4e00 + i) for i in range(85))]          # a vocabulary: its specials, then single characters
ASKED = [ # (task, examples beside it)
    ({"一": "丁丂七丄丅丆", "丈": {"<option_0>": "三上", "<option_1>": "下", "<option_2>": "丌不"}, "<ans>": ""}, []),
    ({"万": "丏丐<mask_0>丑丒<mask_1>专<mask_2>且丕", "世": {"<option_0>": "丘丙"},
      "<ans>": {"<mask_0>": "", "<mask_1>": "", "<mask_2>": ""}}, []),
    ({"业": "丛东丝丞", "丢": {"<option_0>": "丣两", "<option_1>": "严並"}, "<ans>": {"丧": "", "丨": {"丩": ""}}},
     [{"业": "个丫丬中", "丢": {"<option_0>": "丮丯", "<option_1>": "丰丱"},
       "<ans>": {"丧": "<option_1>", "丨": {"丩": "串"}}},
      {"业": "丳临", "丢": {"<option_0>": "丵"}, "<ans>": {"丧": "<option_0>", "丨": {"丩": "丶丷"}}}]),
]
WIDE = dict(position_bias_num_segment_buckets=128)       # as many as there are ways between segments of a tree
MOST = 12                                                # tokens of an answer
BEAMS = (3, 6)                                        # of its search


def talkative(table): # the embedding, in which </s> and <option> are louder and no other special is ever said
    return torch.cat([table[:7] * .02, table[7:8] * 2.2, table[8:10] * .02, table[10:11] * 1.6, table[11:]])


def answers(model):
    """What it says to tasks of several answers, to options, and beside examples: the likeliest token each time.

    Tasks become tensors by the original's own code (src/cpm_live/generation/bee.py:18-131), and each step is its
    `inference` with what its beam search gives to it (:374-435): <s> begins an answer, in the answer's segment, its
    places count from 0. What the beam search strikes out (:441-454) is struck out here. Examples are no part of its
    `generate`; beside them a new token keeps the count and the offset of its own task.
    """
    from cpm_live.generation.bee import CPMBeeGeneration
    from cpm_live.tokenizers.bee import CPMBeeTokenizer
    tok, out = CPMBeeTokenizer(), []
    asker = CPMBeeGeneration(model, tok)
    for task, beside in json.loads(json.dumps(ASKED)):
        ids, subs, places, context, segments, offsets, relations, samples, counts, wanted, _, table, numbers = (
            asker._convert_to_tensors(task, beside))
        number = {(tok.encoder[t], n): e for t, own in numbers.items() if t != "<ans>" for e, n in own.items()}
        ext = [k for k in number if k[1] > 0]
        ids_of = dict(ext_table_ids=[i for i, _ in ext], ext_table_sub=[n for _, n in ext])
        once = dict(segment_rel=torch.as_tensor(relations)[None], **tensors(ids_of))
        told = dict(input=ids, input_sub=subs, position=places, context=context, sample_ids=samples,
                    num_segments=counts, segment=segments, segment_rel_offset=offsets)
        told = {k: torch.as_tensor(v)[None] for k, v in told.items()}
        told["context"] = told["context"].bool()
        past, said = model.inference(**told, **once, past_key_values=None)[2], []
        for segment, _ in wanted:
            token, sub, wrote = tok.bos_id, 0, []
            while len(wrote) < MOST:
                new = dict(input=[token], input_sub=[sub], position=[len(wrote)], context=[True], sample_ids=[0],
                           num_segments=[counts[0]], segment=[segment], segment_rel_offset=[offsets[0]])
                logits, _, past = model.inference(**tensors({k: [v] for k, v in new.items()}), **once,
                                                  past_key_values=past)
                logits = logits[0, -1]
                if (tok.unk_id, 0) not in number: logits[tok.unk_id] = -10000
                best = logits.argmax().item()
                if best == tok.eos_id: break
                wrote.append(best)
                token, sub = (best, 0) if best < len(tok) else ext[best - len(tok)]
            said.append(tok.decode(wrote, {
                (len(tok) + ext.index(k) if k in ext else k[0]): table[e] for k, e in number.items()}))
        out.append(said)
    return out


def searched(model):
    "What its beam search answers to the tasks without examples, with the mean log-probability of a token"
    from cpm_live.generation import bee
    kept, out = [], []
    class Kept(bee.BeamHypotheses): # notes every one that is made
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            kept.append(self)
    with unittest.mock.patch.object(bee, "BeamHypotheses", Kept):
        search = bee.CPMBeeBeamSearch(model, bee.CPMBeeTokenizer())
        for beams in BEAMS:
            for task, beside in json.loads(json.dumps(ASKED)):
                if beside: continue
                [task] = search.generate([task], beam_size=beams, max_length=40)
                score, best = max(kept[-1].hyp)          # it ends with </s>
                out.append(dict(task=task, beams=beams, score=score, tokens=len(best)))
    return out


def main(args):
    checkout, file = args[0], Path(args[1] if args[1:] else ROOT / "tests/fixtures/original_bee.json")
    model = made(checkout)
    with torch.no_grad():
        figures = dict(whole=whole(model), cached=cached(model))
        model = made(checkout, **WIDE)
        model.input_embedding.weight.copy_(talkative(model.input_embedding.weight))
        figures |= dict(answers=answers(model), searched=searched(model))
    where = dict(repository=REPOSITORY, commit=commit(checkout), files=FILES)
    where |= dict(recipe="tools/original_bee.py", sizes=SIZES)
    file.write_text(written(where | figures) + "\n")


if __name__ == "__main__": sys.exit(main(sys.argv[1:]))
