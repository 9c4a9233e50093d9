"Models by name, their cards and trees, and the Chinese models that transformers lacks."
from .card import ModelCard, license_check, read_card, write_card
from .convert import to_original, to_safetensors
from .cpm import CpmAntTied
from .cpm2 import Cpm1Tokenizer, Cpm2Tokenizer, EvaTokenizer
from .cpmbee import CpmBeeConfig, CpmBeeForCausalLM, CpmBeeTokenizer
from .glm import BlankGlmTokenizer
from .load import load, sample_dir
from .stream import decode_speed, stream
from .tree import tree
from .zoo import anatomy, build, license_of, sizes, zoo
