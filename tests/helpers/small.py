"""Models of two small layers without dropout, drawn anew at each call: what the tests of deltas sit on"""
import transformers as tf

TINY = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=99)
KV = dict(num_key_value_heads=2)
QUIET = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)                     # BERT and its like


def llama(**more): return tf.LlamaForCausalLM(tf.LlamaConfig(**TINY | KV | more))
def gpt2(**more):
    quiet = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    return tf.GPT2LMHeadModel(tf.GPT2Config(**dict(n_embd=32, n_layer=2, n_head=4, vocab_size=99) | quiet | more))
def bert(kind=tf.BertForMaskedLM, **more): return kind(tf.BertConfig(**TINY | QUIET | more))
def t5(layers=2, **more):
    size = dict(d_model=32, d_kv=8, d_ff=64, num_layers=layers, num_heads=4, vocab_size=99, dropout_rate=0.0)
    return tf.T5ForConditionalGeneration(tf.T5Config(**size, decoder_start_token_id=0, **more))


def save_words(folder):
    "A LLaMA that knows six letters, with its tokenizer"
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    t = Tokenizer(models.WordLevel({w: i for i, w in enumerate("<unk> <eos> a b c d e f".split())}, unk_token="<unk>"))
    t.pre_tokenizer = pre_tokenizers.Whitespace()
    tf.PreTrainedTokenizerFast(tokenizer_object=t, unk_token="<unk>", eos_token="<eos>").save_pretrained(folder)
    torch.manual_seed(0)
    size = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=8)
    tf.LlamaForCausalLM(tf.LlamaConfig(**size, max_position_embeddings=64)).save_pretrained(folder)
