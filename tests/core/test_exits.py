"""A process may end while an editor asks, a panel writes, a server answers, a batcher serves or a stream runs

A thread in the midst of a model must not abort it."""
import json

import pytest

from fresh import fresh_python

pytestmark = pytest.mark.long

SCRIPT = """
import json, os, sys, threading, time, urllib.request
import torch, transformers as tf
torch.set_num_threads(1)
torch.manual_seed(0)                                   # (others may say nothing but [UNK], which is no text)
from tokenizers import Tokenizer, models, pre_tokenizers
from bmlab.infer.batcher import Batcher
from bmlab.infer.decode import Decoder
from bmlab.app.editor import edit
from bmlab.models.stream import stream
from bmlab.infer.engine import wrap
from bmlab.app.panels import chat, story
from bmlab.prompt.template import Template
from bmlab.app.serve import serve
words = {w: i for i, w in enumerate("[PAD] [UNK] a dull fun film it was . bad good".split())}
k = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
k.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
tok = tf.PreTrainedTokenizerFast(tokenizer_object=k, pad_token="[PAD]", unk_token="[UNK]")
tok.chat_template = "{% for m in messages %}{{ m.content }} {% endfor %}"
# (no token ends a text: the first one drawn might be that)
sizes = dict(vocab_size=11, hidden_size=64, num_attention_heads=2, intermediate_size=64, eos_token_id=None)
def model(layers): return tf.LlamaForCausalLM(tf.LlamaConfig(**sizes, num_hidden_layers=layers)).eval()

def editor():
    template = Template('{"placeholder":"text_a"} it was {"mask"}', tok)
    edit(template, net, example={"text_a": "a fun film"}, wait_s=0)
def chatting(): chat(wrap(net, tok)).ask("a fun film")
def writing():
    global p
    p = story(wrap(net, tok), max_new_tokens=400)
    p.ask("a fun film")
def serving():
    s = serve(wrap(net, tok), port=0, background=True)
    body = json.dumps({"prompt": "a fun film", "max_tokens": 400, "stream": True}).encode()
    asked = urllib.request.Request(s.url + "/v1/completions", body, {"Content-Type": "application/json"})
    threading.Thread(target=lambda: list(urllib.request.urlopen(asked)), daemon=True).start()
    time.sleep(.2)
def batching():
    global b
    b = Batcher(Decoder(net, max_batch=2, max_ctx=512), tok)
    b.submit("a fun film", max_new_tokens=400)
def streaming():
    torch.kept = stream(net, tok, "a fun film", max_new_tokens=400)
    next(torch.kept)

for what, layers in json.loads(sys.argv[1]).items():
    net = model(layers)
    for i in range(2):                                 # forked: imports take longer than all of this
        if (pid := os.fork()) == 0: break
        print("ended", what, os.waitpid(pid, 0)[1], flush=True)
    if pid == 0: break
if pid == 0:
    globals()[what]()
    time.sleep(.01 * i)
"""
LAYERS = dict(editor=80, chatting=8, writing=8, serving=8, batching=8, streaming=8)


@pytest.fixture(scope="module")
def run(): return fresh_python(SCRIPT, json.dumps(LAYERS), timeout=600)


@pytest.mark.parametrize("what", LAYERS)
def test_a_process_that_ends_meanwhile(run, what):
    assert "terminate called" not in run.stderr, run.stderr[-2000:]
    assert run.returncode == 0 and run.stdout.count(f"ended {what} 0") == 2, run.stdout + run.stderr[-2000:]
