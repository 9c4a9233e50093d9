"Processes, shards, optimizers on the host, checkpoints, and a look inside."
from .checkpoint import export_hf, latest, load_weights, save
from .inspection import inspect_model, inspect_tensor, record_tensor
from .loop import evaluate, fit, plot_log
from .losses import chunked_cross_entropy, lm_loss
from .offload import AdamW
from .optim import Cosine, Exponential, Linear, NoDecay, Noam, OptimManager
from .parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding, tensor_parallel
from .pipeline import Pipeline
from .processes import (
    all_gather, all_reduce, broadcast, init_distributed, local_device, print_rank, rank, reduce_scatter,
    run_ranks, shutdown, sum_loss, synchronize, world_size,
)
from .sharding import shard
from .timeline import timeline
