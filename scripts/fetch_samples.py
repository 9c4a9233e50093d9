"""Fetch the sample models and texts into the cache, once; says nothing when all is there.

usage: fetch_samples.py
"""
import logging
import sys

from bmlab.data import sample_texts
from bmlab.models import sample_dir


def main():
    logging.basicConfig(level=logging.INFO, format="· %(message)s")
    try:
        for name in ("smollm2-135m", "minilm-l6"): sample_dir(name)
        for name in ("movies", "reviews", "shakespeare"): sample_texts(name)
    except (OSError, RuntimeError) as e: sys.exit(f"FAILED: fetching the samples. {e}")


if __name__ == "__main__": main()
