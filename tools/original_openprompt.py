"""What OpenPrompt's own code says of labels that are paths: figures that tests/prompt/test_experiment.py compares with.

usage: original_openprompt.py CHECKOUT [FILE [COMMIT]]

CHECKOUT: of github.com/thunlp/OpenPrompt; FILE: default tests/fixtures/original_openprompt.json; COMMIT: of a checkout
that is no repository

openprompt/utils/metrics.py is imported from the checkout and run as it is; of scikit-learn and the package's logging,
which its loose scores do not use, stand-ins are enough.
"""
import importlib.util, json, random, subprocess, sys, types
from pathlib import Path

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
    path = Path(args[1]) if len(args) > 1 else ROOT / "tests/fixtures/original_openprompt.json"
    path.write_text(json.dumps(out, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__": main(sys.argv[1:])
