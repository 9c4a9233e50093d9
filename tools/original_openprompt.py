"""What OpenPrompt's own code says of labels that are paths, and which examples its processors make of rows: figures
that tests/prompt/test_experiment.py compares with.

usage: original_openprompt.py CHECKOUT [FILE [COMMIT]]

CHECKOUT: of github.com/thunlp/OpenPrompt; FILE: default tests/fixtures/original_openprompt.json; COMMIT: of a checkout
that is no repository

openprompt/utils/metrics.py is imported from the checkout and run as it is; of scikit-learn and the package's logging,
which its loose scores do not use, stand-ins are enough. So are openprompt/data_utils' processors whose rows lie deeper
than a column, on files of a few rows; which names its list holds is read from its source.
"""
import ast, csv, importlib.util, json, random, subprocess, sys, tempfile, types
from pathlib import Path

from originals import stand_in

ROOT = Path(__file__).resolve().parents[1]
LABELS = ["person-actor", "person-artist/author", "art-film", "art-film-short", "other", "location-GPE"]
FILE = "openprompt/utils/metrics.py"


def original(checkout):
    "The module, with stand-ins for what it imports"
    names = "f1_score precision_score recall_score accuracy_score".split()
    stubs = {"sklearn": {}, "sklearn.metrics": dict.fromkeys(names), "openprompt": {}, "openprompt.utils": {},
             "openprompt.utils.logging": {"logger": None}}
    for name, has in stubs.items(): sys.modules[name] = types.SimpleNamespace(__name__=name, **has)
    spec = importlib.util.spec_from_file_location("metrics", checkout / FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


ROWS = {
    "ultrachat": [{"id": "0", "data": ["Is it raining?", "It is.", "Still?", "No."]},
                  {"id": "1", "data": ["So?", "So."]}],
    "csqa": [{"answerKey": "B", "question": {"stem": "What is wet?", "choices": [{"label": "A", "text": "sand"},
                                                                                {"label": "B", "text": "rain"}]}}],
    "webnlg": [
        {"1": {"modifiedtripleset": [{"subject": "Oslo", "property": "country", "object": "Norway"},
                                     {"subject": "Oslo", "property": "river", "object": "Akerselva"}],
               "lexicalisations": [{"comment": "good", "lex": "Oslo is in Norway."}, {"comment": "bad", "lex": "Oslo."},
                                   {"comment": "good", "lex": "Oslo lies by a river."}]}},
    ],
    "tacred": [{"id": "7", "relation": "per:title", "token": "Anna Lind , the mayor , left .".split(), "subj_start": 0,
                "subj_end": 1, "obj_start": 4, "obj_end": 4}],
    "super_glue.record": [
        {"passage": "Anna\nleft Oslo.", "query": "@placeholder left", "entities": ["Anna", "Oslo"], "idx": 1,
         "answers": ["Anna", "Anna Lind"]},
        {"passage": "Rain.", "query": "@placeholder", "entities": ["Rain"], "answers": [], "idx": 2},
    ],
    "record": [
        {"idx": 0, "passage": {"text": "Anna left Oslo.\n@highlight\nRain", "entities": [{"start": 0, "end": 3},
                                                                                       {"start": 10, "end": 13}]},
         "qas": [{"idx": 0, "query": "@placeholder left", "answers": [{"text": "Anna"}]}]},
    ],
    "lama": [{"sub_label": "Anna", "obj_label": "Oslo"}],
    "super_glue.wsc": [
        {"text": "Mark told Pete lies about himself , which Pete put in his book .", "span1_text": "Mark", "label": 0,
         "span1_index": 0, "span2_text": "his", "span2_index": 11, "idx": 0},
        {"text": "The trophy is too big, so  it stays.", "span1_text": "it", "span1_index": 6, "span2_text": "trophy",
         "span2_index": 1, "label": 1, "idx": 1},
    ],
    "wsc": [
        {"text": "Pete lost his book.", "label": True, "idx": 0, "target": {
            "span1_text": "Pete", "span1_index": 0, "span2_text": "his", "span2_index": 2}},
        {"text": "Anna met Eva. She waved  to her, too.", "label": False, "idx": 1, "target": {
            "span1_text": "eva.", "span1_index": 1, "span2_text": "her", "span2_index": 6}},
        {"text": "He said it  was it.", "label": True, "idx": 2, "target": {
            "span1_text": "he", "span1_index": 0, "span2_text": "it", "span2_index": 3}},
    ],
    "multirc": [{"idx": 0, "passage": {"text": "Rain fell.", "questions": [
        {"question": "What fell?", "idx": 0, "answers": [{"text": "Rain", "idx": 0, "label": 1},
                                                         {"text": "Snow", "idx": 1, "label": 0}]},
        {"question": "When?", "idx": 1, "answers": [{"text": "Once", "idx": 2, "label": 0}]}]}}],
    "agnews": [{"label": 3, "title": "Oil\\prices rise", "description": "A\\$3 rise.\\nMore"}],
    "mnli": [{"label": 2, "premise": "It\\rains.", "hypothesis": "It is\\\\wet."}],
    "yahoo": [{"topic": 4, "question_title": "Why?\\nWhy", "question_content": "a\\b", "best_answer": "So\\n\\c"}],
    "dbpedia": [{"title": "Oslo School", "description": "It is old. It is big.", "label": 1}],
}
FILES = {"ultrachat": "train.json", "csqa": "train_rand_split.jsonl", "webnlg": "train.json", "tacred": "train.json",
         "record": "train.jsonl", "lama": "fact-retrieval/original/P1001/train.jsonl", "wsc": "val.jsonl",
         "multirc": "val.jsonl", "dbpedia": "train.txt",
         **dict.fromkeys(("agnews", "mnli", "yahoo"), "train.csv")}
MODULES = {"ultrachat": "conditional_generation", "csqa": "conditional_generation", "webnlg": "conditional_generation",
           "tacred": "relation_classification", "super_glue.record": "huggingface", "record": "fewglue", "lama": "lama",
           "super_glue.wsc": "huggingface", "wsc": "fewglue", "multirc": "fewglue",
           **dict.fromkeys(("agnews", "mnli", "yahoo", "dbpedia"), "text_classification")}
STUBS = {
    "openprompt.utils": {"signature": None}, "openprompt.config": {"convert_cfg_to_dict": None},
    "transformers.data.processors.utils": {"InputFeatures": object}, "datasets.arrow_dataset": {"Dataset": None},
    "datasets": dict.fromkeys(["load_dataset", "load_from_disk"]),
    "transformers.tokenization_utils": {"PreTrainedTokenizer": None},
    "transformers.file_utils": {"ModelOutput": dict},
    "openprompt.utils.logging": {"logger": types.SimpleNamespace(info=lambda text: None)},
}


def listed(checkout): # → [names], and how many classes for Chinese data sets stand beside the list
    names, folder = [], checkout / "openprompt/data_utils"
    for path in sorted(folder.glob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "PROCESSORS":
                names += [k.value for k in node.value.keys if k is not None]
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("ZH/*.py"))]
    classes = [node.name for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)]
    chinese = [name for name in classes if name != "CLSProcessor"]
    return sorted(names), len(chinese)


def processor(checkout, name):
    "A class of its list"
    for stub, has in STUBS.items(): stand_in(stub, **has)
    folder = checkout / "openprompt/data_utils"
    for module in ("utils", "data_processor", f"{MODULES[name]}_dataset"):
        whole = f"openprompt.data_utils.{module}"
        stand_in("openprompt.data_utils")
        spec = importlib.util.spec_from_file_location(whole, folder / f"{module}.py")
        sys.modules[whole] = made = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(made)
        if module == "utils":                    # FewGLUE's processors give examples an idx, which these do not take
            made.InputExample = lambda *args, idx=None, plain=made.InputExample, **kw: plain(*args, **kw)
    return next(v for k, v in made.PROCESSORS.items() if k.lower() == name)


def examples(checkout, name): # → [{what an example of its has}], or the name of an error
    kind, rows = processor(checkout, name), ROWS[name]
    if name.startswith("super_glue."): return [said(kind.transform(None, row)) for row in rows]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / FILES[name]
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = {"entries": rows} if name == "webnlg" else rows
        lines = "\n".join(map(json.dumps, rows))
        if path.suffix == ".csv":
            with path.open("w", newline="") as file: csv.writer(file).writerows(row.values() for row in rows)
            return [said(e) for e in kind().get_examples(folder, "train")]
        if name == "dbpedia":
            (path.parent / "train_labels.txt").write_text("\n".join(str(row["label"]) for row in rows))
            lines = "\n".join(f"{row['title']}. {row['description']}" for row in rows)
        path.write_text(json.dumps(whole) if name in ("webnlg", "tacred") else lines, encoding="utf-8")
        if name == "ultrachat": return [said(e) for e in kind().get_examples(str(path))]
        if name == "lama":
            made = Path(folder) / "single_relations/P1001.jsonl"
            made.parent.mkdir()
            made.write_text(json.dumps({"template": "[X] lives in [Y] ."}))
            tok = type("Tok", (), {"get_vocab": lambda self: {"Oslo": 5},
                                   "__call__": lambda self, text, **_: {"input_ids": [5]}})()
            kind.labels = ["Oslo"]
            made = kind(folder, "bert", tok, "original")
            return [said(e) for e in made.get_examples(folder, "train")] + [made.get_manual_template()]
        try: return [said(e) for e in kind().get_examples(folder, "val" if path.stem == "val" else "train")]
        except NameError as e: return type(e).__name__


def said(example): return {k: getattr(example, k) for k in ("text_a", "text_b", "label", "meta", "tgt_text")}


def main(args):
    checkout = Path(args[0])
    metrics, rng, cases = original(checkout), random.Random(0), []
    ids = dict(enumerate(LABELS))
    for _ in range(8):
        right, said = ([rng.randrange(len(LABELS)) for _ in range(7)] for _ in range(2))
        scores = {f"loose-{kind}-{part}": metrics.classification_metrics(said, right, f"loose-{kind}-{part}", ids)
                  for kind in ("micro", "macro") for part in ("f1", "precision", "recall")}
        cases.append({"right": [ids[i] for i in right], "said": [ids[i] for i in said], "scores": scores})
    asked = ["git", "-C", str(checkout), "rev-parse", "HEAD"]
    try: commit = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError): commit = args[2] if len(args) > 2 else "unknown"
    out = {"repository": "https://github.com/thunlp/OpenPrompt", "commit": commit.strip(), "file": FILE, "loose": cases}
    out["listed"], out["chinese"] = listed(checkout)
    out["rows"] = {name: {"rows": rows, "examples": examples(checkout, name)} for name, rows in ROWS.items()}
    path = Path(args[1]) if len(args) > 1 else ROOT / "tests/fixtures/original_openprompt.json"
    path.write_text(json.dumps(out, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__": main(sys.argv[1:])
