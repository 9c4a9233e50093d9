"""Decoding with and without a grammar: tokens per second of SmolLM2 on a CPU, in turn

usage: OMP_NUM_THREADS=1 python benchmarks/infer/grammar.py [ROUNDS]

`free` is a grammar that allows every text, so that it costs its bits and saves nothing; `schema` an object with long
names of fields, most of which is forced. Each round runs all kinds, forwards and then backwards; a ratio is the median
of the rounds' own, by the clock and by the processor's time, which other programs on the machine do not stretch.
"""
import statistics
import sys
import time

from bmlab.infer.engine import wrap
from bmlab.infer.grammar import Grammar


def main():
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 6
    fields = {f"a_rather_long_name_{i}": {"type": "integer", "minimum": 0, "maximum": 99} for i in range(6)}
    schema = {"type": "object", "additionalProperties": False, "required": list(fields), "properties": fields}
    kinds = {"none": None, "free": Grammar.regex("(?s:.)*"), "schema": Grammar.schema(schema)}
    ask, stats = [{"role": "user", "content": "Write one long sentence about rain."}], {}
    clock, work, said = {k: [] for k in kinds}, {k: [] for k in kinds}, {}
    with wrap("smollm2-135m", device="cpu", max_batch=1, max_ctx=512) as e:
        def once(name):
            "Seconds a token behind the first, by the clock and of the processor"
            pieces = e.stream(ask, 100, temperature=1.0, seed=1, grammar=kinds[name], stats=stats)
            next(pieces)
            begin = time.process_time()
            for _ in pieces: pass
            said[name] = f"{stats['new_tokens']} tokens in {stats['passes']} passes"
            return 1 / stats["decode_tok_s"], (time.process_time() - begin) / (stats["new_tokens"] - 1)
        # (the first round warms up)
        for turn in range(rounds + 1):
            took = {k: (0.0, 0.0) for k in kinds}
            for name in [*kinds, *reversed(kinds)]: took[name] = tuple(a + b for a, b in zip(took[name], once(name)))
            if not turn: continue
            for name, (wall, cpu) in took.items():
                clock[name].append(2 / wall)
                work[name].append(2 / cpu)
    for name in kinds: print(f"{name}: {statistics.median(clock[name]):.1f} tokens/s, {said[name]}")
    for name in ("free", "schema"):
        ratios = [statistics.median(f / n for f, n in zip(of[name], of["none"])) for of in (clock, work)]
        print(f"{name} ÷ none, median of {rounds} rounds: {ratios[0]:.3f} by the clock, {ratios[1]:.3f} by its work")


if __name__ == "__main__": main()
