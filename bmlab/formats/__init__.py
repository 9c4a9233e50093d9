"Files of weights as others write them: safetensors and GGUF."
