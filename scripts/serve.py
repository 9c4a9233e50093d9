"""Serve a model over HTTP: OpenAI's interface at /v1, and a page to talk to it at /.

on this machine:    serve.py --model smollm2-135m --bits 8
inside 6 GiB:       serve.py --model … --memory-limit 6GiB --bits 4 --batch 8
for other machines: serve.py --model … --host 0.0.0.0 --token      (makes a token and prints it; or --token-file FILE)

SIGTERM drains the server: new requests get 503, answers that run may end (--drain-s), then it ends with exit code 0.
"""
import argparse
import dataclasses
import inspect
import logging
import re
import sys
from pathlib import Path

from bmlab.infer.engine import wrap
from bmlab.app.limits import Limits
from bmlab.app.serve import serve


def add_limits(parser):
    "Each field of `Limits` as an option; its comment is the help"
    said = dict(re.findall(r"^    (\w+):\S+ *# (.+)$", inspect.getsource(Limits), re.M))
    group = parser.add_argument_group("limits", "what clients may take")
    group.add_argument("--max-waiting", type=int, default=256, help="texts at once, those that wait included")
    group.add_argument("--max-body", default="1MiB", help="of a request")
    for f in dataclasses.fields(Limits):
        kind = float if f.name.endswith("_s") else int
        if f.name == "max_header": kind = str
        text = f"{said[f.name]} (default: {f.default})".replace("%", "%%")
        group.add_argument(f"--{f.name.replace('_', '-')}", type=kind, default=f.default, help=text)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", default="smollm2-135m", help="sample, folder or hub name")
    p.add_argument("--adapters", help="a folder of adapters' folders, which requests name as their model")
    p.add_argument("--name", help="what clients call it (default: its own name)")
    p.add_argument("--memory-limit", help="of the device, such as 6GiB (default: none)")
    p.add_argument("--bits", type=int, choices=(4, 8), help="pack the weights (default: keep them)")
    p.add_argument("--kv-bits", type=int, choices=(8, 16), default=16, help="of keys and values (default: 16)")
    p.add_argument("--cores", action="store_true", help="of experts that wait on the host some are computed there")
    p.add_argument("--ahead", action="store_true", help="such experts are guessed, and copied ahead")
    p.add_argument("--batch", type=int, default=4, help="texts at once; others wait (default: 4)")
    p.add_argument("--context", type=int, default=2048, help="tokens of a text, prompt and answer (default: 2048)")
    p.add_argument("--host", default="127.0.0.1", help="elsewhere than here only with a token (default: 127.0.0.1)")
    p.add_argument("--port", type=int, default=8000, help="0: any that is free (default: 8000)")
    p.add_argument("--token", action="store_true", help="make a token")
    p.add_argument("--token-file", help="a file with the token: it is in no list of processes")
    add_limits(p)
    args = p.parse_args()
    limits = {f.name: getattr(args, f.name) for f in dataclasses.fields(Limits)}
    limits |= dict(max_waiting=args.max_waiting, max_body=args.max_body)
    logging.basicConfig(level=logging.WARNING, format="· %(message)s")
    try:
        token = Path(args.token_file).read_text().strip() if args.token_file else args.token or None
        engine = wrap(
            args.model,
            memory_limit=args.memory_limit,
            bits=args.bits,
            kv_bits=args.kv_bits,
            max_batch=args.batch,
            max_ctx=args.context,
            cores=args.cores,
            ahead=args.ahead,
        )
        own = dict(name=args.name, adapters=args.adapters)
        server = serve(engine, args.host, args.port, token, background=True, **own, **limits)
    except (OSError, RuntimeError, TypeError, ValueError) as e: sys.exit(f"FAILED: {e}")
    print(
        f"{server}\nthe page: {server.page}\nOpenAI clients: base_url={server.url}/v1"
        + (f", api_key={server.token}" if server.token else ""),
        flush=True,
    )
    server.wait()                                                         # until SIGTERM or an interrupt


if __name__ == "__main__": main()
