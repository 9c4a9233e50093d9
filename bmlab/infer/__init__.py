"Text out of any model inside a memory limit."
from .batcher import Batcher
from .beams import beam_search
from .decode import Decoder
from .engine import Engine, wrap
from . import answers, fields, stats                                 # the engine's methods
from .links import GpuLink, SimulatedLink
from .placement import InferencePlan, plan_inference
from .sampling import Sampler
from .speculate import DraftModel, PromptLookup, Tree
from .streaming import Streamer
from .text import decode_tokens, stream_text
