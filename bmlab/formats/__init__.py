"Files of weights as others write them: safetensors and GGUF."
from .gguf import GGUF, convert_gguf, gguf_config, gguf_tokenizer, gguf_weights
from .safetensors import TensorFiles, local_slices, read_weights
