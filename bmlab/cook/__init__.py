"Quantize, prune, distil, split into experts, in any mixture."
from . import export                                                     # Cook.export and Cook.report
from .cook import Cook, Method
from .distill import Distill
from .fakequant import FakeQuant
from .lattice import lattice
from .moefy import MoEMLP, MoEfy
from .neurons import NeuronSparse, relufy
from .plots import pareto, plot_experts, plot_gates, plot_mask, plot_weights
from .prune import StructPrune, staircase
from .quantize import quantize
from .report import bytes_on_disk, divergence, load_cooked, perplexity, report, save_cooked
from .sparse24 import Sparse24
from .structure import slice_model
