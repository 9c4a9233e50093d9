"""Make tests/fixtures/json_schema_suite.json, cases of the JSON-Schema project's own tests for test_grammar.py

usage: schema_suite.py REPOSITORY       a clone of github.com/json-schema-org/JSON-Schema-Test-Suite (MIT), bare or not

Of tests/draft2020-12 the keywords that schemas for models use. Kept are the cases whose schema llguidance can hold to;
a test is marked `narrower` where the schema allows more than is written: other spellings of a number (1.0), another
order of an object's keys, strings that a format only describes.
"""
import json
import subprocess
import sys
from pathlib import Path

from bmlab.infer.grammar import Grammar
from bmlab.models.load import load

KEYWORDS = (
    "additionalProperties allOf anyOf const enum exclusiveMaximum exclusiveMinimum items maxItems maxLength "
    "maxProperties maximum minItems minLength minProperties minimum multipleOf oneOf pattern patternProperties "
    "prefixItems properties ref required type"
).split()
OUT = Path(__file__).resolve().parents[1] / "tests/fixtures/json_schema_suite.json"


def git(repo, *args):
    return subprocess.run(["git", "-C", repo, *args], check=True, capture_output=True, text=True).stdout


def accepts(grammar, tok, data):
    "Is this written out what the grammar allows, as a whole?"
    matcher, ids = grammar.start(tok, len(tok), (2,)), tok(json.dumps(data, ensure_ascii=False))["input_ids"]
    return matcher.take(ids) == len(ids) and matcher.error is None and matcher.machine.is_accepting()


def main():
    repo = sys.argv[1]
    _, tok = load("smollm2-135m", device="cpu")
    cases, refused = [], []
    for word in KEYWORDS:
        for case in json.loads(git(repo, "show", f"HEAD:tests/draft2020-12/{word}.json")):
            schema, named = case["schema"], f"{word}: {case['description']}"
            if isinstance(schema, bool): continue
            try:
                grammar = Grammar.schema(schema)
                grammar.start(tok, len(tok), (2,))
            except ValueError:
                refused.append({"case": named, "schema": schema})
                continue
            tests = [{"data": t["data"], "valid": t["valid"]} for t in case["tests"]]
            for t in tests:
                if t["valid"] and not accepts(grammar, tok, t["data"]): t["narrower"] = True
            cases.append({"case": named, "schema": schema, "tests": tests})
    made = {
        "source": "github.com/json-schema-org/JSON-Schema-Test-Suite, tests/draft2020-12",
        "licence": "MIT, Copyright (c) 2012 Julian Berman",
        "commit": git(repo, "rev-parse", "HEAD").strip(), "cases": cases, "refused": refused,
    }
    OUT.write_text(json.dumps(made, ensure_ascii=False, separators=(",", ":")) + "\n", encoding="utf-8")
    print(len(cases), "cases,", len(refused), "refused,", OUT.stat().st_size, "bytes")


if __name__ == "__main__": main()
