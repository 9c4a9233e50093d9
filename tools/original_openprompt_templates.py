"""The ids that OpenPrompt's own code makes of template texts: figures for tests/prompt/test_openprompt_templates.py,
and every template text of its repository beside ours.

usage: original_openprompt_templates.py CHECKOUT

CHECKOUT: of github.com/thunlp/OpenPrompt. Its prompt_base.py, prompts/{manual,mixed}_template.py,
prompts/{manual,knowledgeable}_verbalizer.py, data_utils/utils.py and plms/{utils,mlm,lm,seq2seq}.py are imported and
run as they are, with stand-ins for what they import beside torch and numpy. A tokenizer of today is given the methods
of the slow ones of its day, from which it takes the ends of a text.

Of the repository's texts the fixture holds where each stands, a hash of it and of the ids of each form; of patterns of
our own a hash of each case's ids, and those of the first case. What differs from ours must have a reason among KNOWN.
"""
import ast, contextlib, copy, importlib.util, io, math, re, sys, types
from pathlib import Path

import torch

from originals import ROOT, commit, keep, stand_in

sys.path.insert(0, str(ROOT / "tests/prompt"))
from openprompt_forms import (  # noqa: E402
    ANSWERS, CUTS, EXAMPLES, FORMS, KNOWLEDGE, PATTERNS, WORDS, digest, habit, ours, ours_written, tokenizer,
)

PACKAGE = "openprompt"
FILES = (
    "prompt_base prompts/manual_template prompts/mixed_template plms/utils plms/mlm plms/lm plms/seq2seq "
    "prompts/manual_verbalizer prompts/knowledgeable_verbalizer"
).split()
TEXT = re.compile(r"""\{ *["']mask["']""")
WORDLESS = re.compile(r"\{ *[\"']soft([\"'] *: *None|[\"'] *[,}]|_id[\"'])")
PAGE = re.compile(r""" {4}(a |A )?\{""")
KNOWN = {
    "no words, no token": "plms/lm.py skips parts without text, and soft tokens without words have none: in a causal "
                          "model they are lost there, or the text is refused. Here they are trained.",
    "answer cut away": "plms/lm.py marks the last token before the mask, then cuts: if that token goes, the example "
                       "has no place to answer there. Here the answer is read behind the last token that stays.",
    "empty part": "plms/utils.py's balanced cut fails there where a part is empty. Here it cuts.",
    "string": "prompt_base.py does not import string, which a page's text uses: refused there. Here it works.",
    "nothing before": "plms/seq2seq.py's wrapper for T5-LM fails there where the mask stands first. Here the encoder "
                      "reads the tokenizer's own end.",
    "padding asked for": "plms/seq2seq.py's wrapper for CPM-2 marks one place too many: behind the end, the decoder is "
                         "to say padding. Here nothing is asked for behind the end.",
    "space of its own": "plms/seq2seq.py puts a space before every answer, an empty one too. Here the template says "
                        "where one stands.",
}
ENDS = {
    "wordpiece": (["[CLS]"], ["[SEP]"]), "bytes": (["<s>"], ["</s>"]), "bpe": ([], []), "unigram": ([], ["</s>"]),
    "words": ([], []), "pieces": ([], ["</s>"]),
}


class Slow:
    "A tokenizer with the methods that slow ones had"
    def __init__(self, name):
        self.tok = tokenizer(name)
        self.before, self.behind = (self.tok.convert_tokens_to_ids(own) for own in ENDS[name])
        blanks = [t for t in self.tok.get_vocab() if re.match("<(extra_id|s)_", t)]
        self.additional_special_tokens = sorted(blanks, key=lambda t: int(re.search(r"\d+", t)[0]))
        self.sod_token_id = self.tok.bos_token_id
        self.additional_special_tokens_ids = self.tok.convert_tokens_to_ids(self.additional_special_tokens)
    def __getattr__(self, name): return getattr(self.tok, name)
    def __call__(self, text, **options): return self.tok(text, **options)
    def encode(self, text, add_special_tokens=False): return self.tok(text, add_special_tokens=False)["input_ids"]
    def num_special_tokens_to_add(self): return len(self.before) + len(self.behind)
    def build_inputs_with_special_tokens(self, ids): return self.before + ids + self.behind
    def get_special_tokens_mask(self, ids): return [1] * len(self.before) + [0] * len(ids) + [1] * len(self.behind)


def load(checkout, name):
    "One of its modules, under its own name"
    whole = f"{PACKAGE}.{name.replace('/', '.')}"
    spec = importlib.util.spec_from_file_location(whole, checkout / PACKAGE / f"{name}.py")
    sys.modules[whole] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def functions(path, names):
    "Functions of a file whose imports are not at hand"
    tree = ast.parse(path.read_text(encoding="utf-8"))
    own = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name in names]
    space = {"ceil": math.ceil, "List": list}
    exec(compile(ast.Module(own, []), path.name, "exec"), space)
    return {name: space[name] for name in names}


def original(checkout):
    "{name of a class: the class}"
    nothing = type("Nothing", (), {})
    round_list = functions(checkout / PACKAGE / "utils/utils.py", ["round_list"])
    stand_in(f"{PACKAGE}.utils", **round_list)
    stand_in(f"{PACKAGE}.utils.utils", **round_list, signature=None)
    stand_in(f"{PACKAGE}.utils.logging", logger=types.SimpleNamespace(info=print, warning=print))
    stand_in(f"{PACKAGE}.config", convert_cfg_to_dict=dict)
    stand_in("yacs.config", CfgNode=dict)
    for name, has in (("file_utils", ["ModelOutput"]), ("utils.dummy_pt_objects", ["PreTrainedModel"]),
                      ("tokenization_utils", ["PreTrainedTokenizer"]),
                      ("data.processors.utils", ["InputExample", "InputFeatures"])):
        stand_in(f"transformers.{name}", **dict.fromkeys(has, nothing))
    for name in ("plms", "prompts"): stand_in(f"{PACKAGE}.{name}")
    stand_in(f"{PACKAGE}.data_utils")
    found = vars(load(checkout, "data_utils/utils"))
    stand_in(f"{PACKAGE}.data_utils", **{k: found[k] for k in ("InputExample", "InputFeatures")})
    for name in FILES:
        module = load(checkout, name)
        if name == "prompt_base": stand_in(PACKAGE, Template=module.Template, Verbalizer=module.Verbalizer)
        found = found | {k: v for k, v in vars(module).items() if getattr(v, "__module__", "") == module.__name__}
    return found


def theirs(its, text, form):
    "What `ours` gives, by its code; where it raises, None"
    kind, wrapper, _ = FORMS[form]
    tok, out = Slow(kind), []
    model = types.SimpleNamespace(get_input_embeddings=lambda: torch.nn.Embedding(len(tok.tok), 2))
    soft = "soft" in re.sub(r"lambda.*", "", text.replace("shortenable", ""))
    def made():
        return its["MixedTemplate"](model, tok, text) if soft else its["ManualTemplate"](tok, text)
    for length, truncate, _ in CUTS:
        for one in EXAMPLES:
            try:
                with contextlib.redirect_stdout(io.StringIO()):
                    wrapped = made().wrap_one_example(its["InputExample"](**one))
                    tool = its[wrapper](max_seq_length=length, tokenizer=tok, truncate_method=truncate)
                    got = tool.tokenize_one_example(wrapped, teacher_forcing=False)
            except (Exception, SystemExit) as e:
                out.append(f"{type(e).__name__}: {e}"[:90])
                continue
            n = sum(got["attention_mask"])
            numbers = got.get("soft_token_ids", [0] * n)
            ids = [-s if s > 0 else i for i, s in zip(got["input_ids"][:n], numbers)]
            row = [ids, [i for i, x in enumerate(got["loss_ids"]) if x == 1]]
            if "decoder_input_ids" in got: row.append(got["decoder_input_ids"][:max(row[1]) + 1])
            out.append(row)
    return out


def theirs_written(its, form):
    "What `ours_written` gives, by its code: what is to be said stands one place earlier"
    kind, wrapper, _ = FORMS[form]
    tok, out = Slow(kind), []
    tool = its[wrapper](max_seq_length=512, tokenizer=tok, decoder_max_length=64, predict_eos_token=True)
    model = types.SimpleNamespace(get_input_embeddings=lambda: torch.nn.Embedding(len(tok.tok), 2))
    for text, answers in ANSWERS:
        if form == "t5-lm" and len(answers) > 1: continue
        for one in EXAMPLES:
            example = its["InputExample"](**one, tgt_text=answers)
            with contextlib.redirect_stdout(io.StringIO()):
                wrapped = its["MixedTemplate"](model, tok, text).wrap_one_example(example)
                got = tool.tokenize_one_example(wrapped, teacher_forcing=True)
            ids, asked = got["decoder_input_ids"], got["loss_ids"]
            n = max(i for i, x in enumerate(asked) if x == 1)
            out.append([ids[:n], [i if x == 1 else -100 for i, x in zip(ids[1:n + 1], asked[1:n + 1])]])
    return out


def unlisted(its):
    "What its wrapper says of a tokenizer such as mT5's, which has <extra_id_0> and does not list it"
    tok = Slow("pieces")
    tok.additional_special_tokens = tok.additional_special_tokens_ids = []
    wrapped = its["ManualTemplate"](tok, PATTERNS[0]).wrap_one_example(its["InputExample"](**EXAMPLES[0]))
    try: its["T5TokenizerWrapper"](max_seq_length=512, tokenizer=tok).tokenize_one_example(wrapped, False)
    except IndexError as e: return type(e).__name__


def why_written(form, there, here):
    "Why what is to be written differs; None: nobody knows"
    (ids, said), tok = there, tokenizer(FORMS[form][0])
    spaces = {tok.convert_tokens_to_ids(word) for word in ("\u2582", "▁")}
    plain = lambda ids, said: [[i for i in row if i not in spaces] for row in (ids, said)]
    if plain(*there) == plain(*here): return "space of its own"
    if form == "cpm-2" and said[-1] == tok.pad_token_id and plain(ids[:-1], said[:-1]) == plain(*here):
        return "padding asked for"
    return None


def kept(its, name, most, share):
    "Its knowledgeable verbalizer's words as they are made, and after calibration; None: it fails"
    tok = Slow(name)
    plain = lambda v: [[w.strip() for w in own] for own in v.label_words]
    v, out = its["KnowledgeableVerbalizer"](tok, classes=[0, 1, 2], max_token_split=most, candidate_frac=share), []
    with contextlib.redirect_stdout(io.StringIO()):
        v.label_words = copy.deepcopy(WORDS)
        out.append(plain(v))
        try: v.register_calibrate_logits(torch.from_numpy(habit(len(tok.tok))))
        except ValueError: return [*out, None]
    return [*out, plain(v)]


def texts(checkout):
    "[(file, line, text)] of every template: lines of scripts/, then what its tutorials, pages and code add"
    found = []
    for path in sorted(checkout.glob("scripts/**/*.txt")):
        lines = path.read_text(encoding="utf-8").splitlines()
        found += [(path, i, line.rstrip()) for i, line in enumerate(lines, 1) if TEXT.search(line)]
    seen = {text for _, _, text in found}
    more = ("tutorial/**/*.py", "README.md", "docs/**/*.rst", "openprompt/**/*.py")
    for path in (path for form in more for path in sorted(checkout.glob(form))):
        for i, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            quoted = re.search(r"""(?:(?:text\w*|template) *= *|`)("{3}|'|")(.*)\1""", line)
            text = quoted[2] if quoted else line.strip() if path.suffix == ".rst" and PAGE.match(line) else ""
            if TEXT.search(text) and text not in seen: found.append((path, i, text))
            seen.add(text)
    return [(str(p.relative_to(checkout)), i, text) for p, i, text in found]


def reason(text, form, k, there, here):
    "Why a case differs: a key of KNOWN; None: nobody knows"
    if FORMS[form][1] == "LMTokenizerWrapper" and WORDLESS.search(text):
        whole = k < len(EXAMPLES) and here is not None and not isinstance(there, str)
        if not whole or [i for i in here[0] if i >= 0] == there[0]: return "no words, no token"
    if isinstance(there, str):
        if there.startswith("NameError: name 'string'"): return "string"
        if form == "t5-lm" and there.startswith("KeyError: 'shortenable_ids'"): return "nothing before"
        return "empty part" if CUTS[k // len(EXAMPLES)][1] == "balanced" and there.startswith("IndexError") else None
    lost = here is not None and there[0] == here[0] and not there[1]
    if lost and FORMS[form][1] == "LMTokenizerWrapper": return "answer cut away"


def main(args):
    checkout = Path(args[0])
    its, known = original(checkout), {}
    def compare(name, text, form):
        there, here = theirs(its, text, form), ours(text, form)
        for k, (x, y) in enumerate(zip(there, here)):
            if y == (None if isinstance(x, str) else x): continue
            why = reason(text, form, k, x, y)
            if why is None: sys.exit(f"{name}, {form}, case {k}: {text}\n  there {x}\n  here  {y}")
            known.setdefault(why, {}).setdefault(f"{name} {form}", []).append(k)
        return [None if isinstance(x, str) else x for x in there]
    told = {"mt5": unlisted(its)}
    for form in ("unigram", "t5-lm", "cpm-2"):
        told[form] = theirs_written(its, form)
        for k, (x, y) in enumerate(zip(told[form], ours_written(form), strict=True)):
            if x == y: continue
            why = why_written(form, x, y)
            if why is None: sys.exit(f"what is to be written, {form}, case {k}:\n  there {x}\n  here  {y}")
            known.setdefault(why, {}).setdefault(f"written {form}", []).append(k)
    rows, own = {}, []
    for file, line, text in texts(checkout):
        rows[f"{file}:{line}"] = [digest(text), *(digest(compare(f"{file}:{line}", text, form)) for form in FORMS)]
    for i, text in enumerate(PATTERNS):
        got = {form: compare(f"pattern {i}", text, form) for form in FORMS}
        own.append({form: [x[0], *map(digest, x)] for form, x in got.items()})
    tried = [len(rows) + len(PATTERNS), len(FORMS), len(CUTS), len(EXAMPLES)]
    print(len(rows), "texts and", len(PATTERNS), "patterns,", *tried[1:], "forms, cuts, examples;", "differ:",
          {why: sum(map(len, where.values())) for why, where in known.items()})
    keep("openprompt_templates", {
        "repository": "https://github.com/thunlp/OpenPrompt", "commit": commit(checkout), "files": FILES,
        "known": {why: {"why": KNOWN[why], "cases": where} for why, where in known.items()},
        "forms": list(FORMS), "texts": rows, "patterns": {str(i): x for i, x in enumerate(own)},
        "written": told,
        "knowledge": {f"{name} {most} {share}": kept(its, name, most, share) for name, most, share in KNOWLEDGE},
    })


if __name__ == "__main__": main(sys.argv[1:])
