"Packed weights: numbers of 8 and 4 bits, and the layers and kernels that compute with them."
from .exchange import dequantize
from .layers import Int4Linear, Int8Embedding, Int8Linear, arrange_int4, pack_linears
