"Quantize, prune, distil, split into experts, in any mixture."
from .cook import (
    Cook, Method, bytes_on_disk, divergence, lattice, load_cooked, pareto, perplexity, plot_experts, plot_gates,
    plot_mask, plot_weights, report, save_cooked,
)
from .distill import Distill
from .fakequant import FakeQuant
from .moefy import MoEMLP, MoEfy
from .neurons import NeuronSparse, relufy
from .prune import StructPrune, staircase
from .quantize import quantize
from .sparse24 import Sparse24
from .structure import slice_model
