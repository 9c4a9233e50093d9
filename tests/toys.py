"What tests of several modules share"
import torch


def moved(d, std=0.1, seed=1):
    "The delta, its parameters away from where they start"
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in d.parameters(): p += std * torch.randn(p.shape, generator=g).to(p)
    return d
