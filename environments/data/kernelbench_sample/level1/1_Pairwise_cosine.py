"""Pairwise cosine."""

import torch
from torch import nn


class Model(nn.Module):
    """Cosine similarity of all pairs of rows."""

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        products = (a.unsqueeze(1) * b.unsqueeze(0)).sum(dim=2)
        lengths = a.norm(dim=1).unsqueeze(1) * b.norm(dim=1).unsqueeze(0)
        return products / lengths


def get_inputs():
    """Return random inputs of `forward`."""
    return [torch.randn(320, 192), torch.randn(320, 192)]


def get_init_inputs():
    """Return the arguments of the constructor."""
    return []
