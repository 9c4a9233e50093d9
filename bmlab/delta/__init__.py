"A frozen model and a few new parameters, for one user or for many."
from .site import Site
from .delta import Delta, deltas
from . import merge, store, switch, tune  # the rest of Delta's methods
from .adapter import Adapter, Compacter, LowRankAdapter, ParallelAdapter
from .bank import DeltaBank
from .bbt import Bbt, PromptScore
from .continual import Continual, transfer
from .hub import DeltaCard, Hub, publish
from .lora import Lora
from .peft_plugin import PeftDelta
from .prefix import Prefix
from .soft import PTuning, SoftPrompt
from .vectors import BitFit, IA3, LayerNormTuning
