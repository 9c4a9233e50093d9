"""Fetch the sample models and texts into the cache, once; says nothing when all is there.

usage: fetch_samples.py [NAME ...]     all of them, or those named: smollm2-135m, movies, poems …
       fetch_samples.py gemma-3-270m   a larger model under terms of its own (253 MB), fetched by its name only

The texts of Debian's packages need apt (Debian, Ubuntu). On another machine each is passed over with the command that
fetches it elsewhere;
only some tutorials need them.
"""
import logging
import sys

from bmlab.data.samples import sample_gguf, sample_texts
from bmlab.models.load import sample_dir

MODELS = ("smollm2-135m", "minilm-l6")
TEXTS = ("movies", "reviews", "shakespeare", "news-199801")
BY_NAME = ("gemma-3-270m",)
DEBIAN = ("help-en", "help-zh", "poems", "fortunes", "manpages-zh")


def main():
    logging.basicConfig(level=logging.INFO, format="· %(message)s")
    wanted = sys.argv[1:] or [*MODELS, *TEXTS, *DEBIAN]
    for name in wanted:
        fetch = sample_dir if name in MODELS else sample_gguf if name in BY_NAME else sample_texts
        try: fetch(name)
        except (LookupError, OSError, RuntimeError) as e:
            if name not in DEBIAN: sys.exit(f"FAILED: fetching the samples. {e}")
            logging.warning("%s is passed over: %s", name, e)


if __name__ == "__main__": main()
