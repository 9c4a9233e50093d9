"""Serve a model over HTTP: OpenAI's interface at /v1, and a page to talk to it at /.

on this machine:    serve.py --model smollm2-135m --bits 8
inside 6 GiB:       serve.py --model … --memory-limit 6GiB --bits 4 --batch 8
for other machines: serve.py --model … --host 0.0.0.0 --token      (makes a token and prints it; or --token-file FILE)
"""
import argparse
import logging
import signal
import sys
from pathlib import Path

from bmlab.infer.engine import wrap
from bmlab.app.serve import serve


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", default="smollm2-135m", help="sample, folder or hub name")
    p.add_argument("--name", help="what clients call it (default: its own name)")
    p.add_argument("--memory-limit", help="of the device, such as 6GiB (default: none)")
    p.add_argument("--bits", type=int, choices=(4, 8), help="pack the weights (default: keep them)")
    p.add_argument("--kv-bits", type=int, choices=(8, 16), default=16, help="of keys and values (default: 16)")
    p.add_argument("--batch", type=int, default=4, help="texts at once; others wait (default: 4)")
    p.add_argument("--context", type=int, default=2048, help="tokens of a text, prompt and answer (default: 2048)")
    p.add_argument("--host", default="127.0.0.1", help="elsewhere than here only with a token (default: 127.0.0.1)")
    p.add_argument("--port", type=int, default=8000, help="0: any that is free (default: 8000)")
    p.add_argument("--token", action="store_true", help="make a token")
    p.add_argument("--token-file", help="a file with the token: it is in no list of processes")
    args = p.parse_args()
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
        )
        server = serve(engine, args.host, args.port, token, background=True, name=args.name)
    except (OSError, RuntimeError, TypeError, ValueError) as e: sys.exit(f"FAILED: {e}")
    print(
        f"{server}\nthe page: {server.page}\nOpenAI clients: base_url={server.url}/v1"
        + (f", api_key={server.token}" if server.token else ""),
        flush=True,
    )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))                 # the interpreter's end closes the server
    server.wait()


if __name__ == "__main__": main()
