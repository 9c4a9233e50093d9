"""Decoding with and without a grammar: tokens per second of SmolLM2 on a CPU, in turn

usage: grammar.py [ROUNDS]

`free` is a grammar that allows every text, so that it costs its bits and saves nothing; `schema` an object with long
names of fields, most of which is forced.
"""
import statistics
import sys

from bmlab.infer.engine import wrap
from bmlab.infer.grammar import Grammar


def main():
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 6
    fields = {f"a_rather_long_name_{i}": {"type": "integer", "minimum": 0, "maximum": 99} for i in range(6)}
    schema = {"type": "object", "additionalProperties": False, "required": list(fields), "properties": fields}
    kinds = {"none": None, "free": Grammar.regex("(?s:.)*"), "schema": Grammar.schema(schema)}
    ask, stats, rates = [{"role": "user", "content": "Write one long sentence about rain."}], {}, {k: [] for k in kinds}
    with wrap("smollm2-135m", device="cpu", max_batch=1, max_ctx=512) as e:
        for turn in range(rounds + 1):
            for name, grammar in kinds.items():
                for _ in e.stream(ask, 100, temperature=1.0, seed=1, grammar=grammar, stats=stats): pass
                # (the first turn warms up)
                if turn: rates[name].append(stats["decode_tok_s"])
                passes = f"{stats['new_tokens']} tokens in {stats['passes']} passes"
                if turn == rounds: print(f"{name}: {statistics.median(rates[name]):.1f} tokens/s, {passes}")
    ratio = statistics.median(f / n for f, n in zip(rates["free"], rates["none"]))
    print(f"free ÷ none, median of {rounds} pairs: {ratio:.3f}")


if __name__ == "__main__": main()
